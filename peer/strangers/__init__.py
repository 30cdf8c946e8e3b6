"""What py-libp2p 0.8.1 takes from strangers, held to limits.

    frames    Yamux frames of strangers: turns for other tasks, a rate for each address, a bound of what waits unread.
    greeting  The first words of a stranger: its identity key, and the lines by which protocols are chosen.
    identify  Identify messages: their length, what is kept of them, and for how long.
    ping      libp2p's pings, which a bootstrap answers within a rate.
    streams   A few streams of each peer at a time, where nothing else limits them.
"""
