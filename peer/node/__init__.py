"""One running peer: sessions, bulk bytes, bans and budgets.

    backlog       The streams that a node serves to each peer, and the bytes on them that nobody has read yet, within limits.
    bulk          Bulk bytes: kept and served by their hash, fetched by the peers that need them.
    file_blob     Bulk bytes in a file, read on demand, and verified by their hash before they are sent.
    guard         Bans, and budgets of what each peer may send: messages, bytes and signatures to verify.
    heard         When each peer was last heard, for as many peers as a table holds. Pure.
    node          One running peer: its sessions, heartbeats and bulk bytes; it owns the nursery of all their tasks.
    running       A clock that stands still while this process does: rounds are timed by it.
    session       A session over a long-lived control stream: send, ask with a timeout, answer.
    verification  Long verification of what peers sent, beside the event loop: one at a time, members first.
"""
