"""The state θ and m: on disk, and from other peers leaf by leaf.

    archive          A run's folder on disk: ledger, outputs, checkpoints, evidence and signing guard.
    checkpoint_file  A checkpoint on disk: the state of a certified round, in a folder named by the round.
    checkpoints      A peer's checkpoints: written in the background, restored on restart, served to newcomers.
    merkle           The state root: a Merkle tree over 4 MiB leaves of θ and then of m.
    run_chain        One member's chain of the run: its ledger, which is read on from members that state later heads.
    schedule         The schedule of a multi-source download: which leaf to request from which provider. Pure.
    take_state       Install a state in (θ, m) and on disk; only leaves that are not here already are fetched.
    transfer         State transfer from many providers at once, each leaf verified by the certified root.
"""
