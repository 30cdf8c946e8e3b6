"""py-libp2p put right: sockets, streams, dialling, fixes.

    dial       The ways to dial one address: from any port, from the listen port, as the accepting side, as a probe.
    fixes      Works around bugs of py-libp2p 0.8.1: one small function per bug, all applied by `apply_fixes`.
    gate       Admission control for a host's connections: limits per origin, bounded handshakes, eviction of strangers.
    ladder     Happy eyeballs over the rungs of a peer's addresses: staggered dials, best rung first.
    line_rate  The rate limits of this computer's line: every byte on every socket of the host, as its user allows them.
    listen     Listening sockets: the first free port, what is accepted there, and the addresses of this computer.
    liveness   Failure detection for one doubted connection: a ping, and a timeout in running time.
    packets    The secured channel: Noise with AES-GCM in packets of up to 256 KiB, of our own; and libp2p's `/noise`.
    settings   The settings of py-libp2p's host: Noise, Yamux, limits; no retries, no automatic dials.
    stream     A libp2p stream as a `transport.Stream`; translates the library's errors to ours.
    tcp        TCP for the libp2p host: sockets that detect a dead connection, count and limit bytes; causes of failed dials.
"""
