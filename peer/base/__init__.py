"""The ground of all floors: settings, errors, the transport's interface, hashing, and files that are written whole.

    background  A nursery for tasks that run beside the body of a context manager.
    config      `PeerConfig`: the settings of one peer.
    digest      The one hash of the project: BLAKE3 with domain separation by a context.
    disk        Atomic file replacement: a file is written whole or not at all.
    errors      The tree of errors: the party at fault decides how an error is handled.
    home_lock   Locks between processes: on a home folder, and on a file that several append to.
    install     The command that installs flockstep: its one source.
    loading     Loads modules without garbage collections: what they make stays.
    plain       Plain text: what others wrote, made harmless before it becomes an event or is shown.
    transport   The interface between the protocols and the networks that carry them.
    troubles    Troubles that users meet, each with its remedy.
"""
