"""The directory over a hivemind DHT (`flockstep[hivemind]`).

    directory  A directory over a hivemind DHT: a run that is published in one is found there, too.
    node       A node of a hivemind DHT in a process of its own: it stores and gets values, a JSON array a line.
"""
