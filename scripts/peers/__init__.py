"""The processes that last: a peer that trains, one that keeps a run, and a bootstrap.

    agree       What `flockstep join` and `keep` show before the first time of a run, and the question whether to go on.
    bootstrap   `flockstep bootstrap`: a directory server and a relay under a lasting identity.
    join        `flockstep join`: trains with a run on this computer, and reports its progress.
    keep        `flockstep keep`: holds a run's state, checks, votes and serves newcomers, without training.
    terminal    The signals that end a process in order, and an output that may be lost before it ends.
"""
