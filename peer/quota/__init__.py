"""How much any stranger may take: limits, origins, refusals.

    limits         The limits of what a host gives to others: in total, per IP address and per network. Pure.
    origins        The origins of peers, an IP address and its network, and rates for each. Pure.
    packet_filter  A program for the kernel of Linux (classic BPF, socket(7)) that drops the packets of some networks. Pure.
    places         Places that can run out, in equal parts: the oldest of who has most gives way. Pure.
    refusals       The refusals of a host: counted for the metrics, and emitted as one event a period.
    shares         Fair shares of a limit among addresses and networks: whoever takes most loses first. Pure.
    turns          Turns for costly work: those of one address or network wait for each other, others not for them.
"""
