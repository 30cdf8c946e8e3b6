"""Light clients: bootstraps follow the heads of runs by certificates alone, name them to newcomers, and list runs.

    anchor      Where a newcomer starts: what more than half of its bootstraps name.
    followed    The head of a run that a bootstrap follows: what it takes to move it. Pure.
    follower    Follows the heads of a bootstrap's runs, within its limits, and keeps them on disk.
    marks       The hashes by which a bootstrap names a chain, and what several bootstraps agree on. Pure.
    own_ledger  The certificates that this computer's own peer holds, read from its disk while it may be writing them.
    run_list    The list of runs that a bootstrap shows: those that their owners list, of its directory.
"""
