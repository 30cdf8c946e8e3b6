"""Yamux of our own, in the place of py-libp2p's.

    machine  Yamux without input or output: bytes and calls go in, events and frames come out.
    muxer    A connection and its streams as py-libp2p wants them: the driver of `machine`.
"""
