"""The network in memory, under virtual time.

    network  A network in memory, under trio's virtual clock, for tests and simulations.
    peer     One peer's transport on the network in memory: connections, links, stream handlers.
    stream   One end of a stream on the network in memory: flow control, delivery, and how it ends.
"""
