"""How much any stranger may take: limits, origins, refusals.

    limits    What a host gives to others, to all together and to each: every limit of it in one place. Pure.
    origins   How much a server gives to one IP address in a period of time: so many dials, so many bytes. Pure.
    refusals  What a host refused, and why: counted for the metrics, and told as one event now and then.
"""
