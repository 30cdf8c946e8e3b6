"""What an owner does with a run, and how others find it.

    listed    `flockstep runs` and `run list`: the runs that bootstraps list.
    owner     `flockstep run vouch | revoke | ban | pardon | revise`: the statements of an owner.
    pack      `flockstep data pack`: makes shards of tokens, which volunteers read by a run's link.
    plan      What a run will take on given computers, computed from its `run.toml` before anybody trains.
    run       `flockstep run create | invite | info`, and `flockstep plan`.
    succeed  `flockstep run succeed`: ends a run of mine, and has it go on as another one from its last certified state.
    start     `[model] from` of a `run.toml`: a run's first state from a checkpoint or an export.
"""
