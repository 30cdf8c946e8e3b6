"""What becomes of a run's checkpoints: evaluated, exported, uploaded.

    evaluate  `flockstep eval`: the held-out loss of a checkpoint, and what its model continues prompts with.
    export    `flockstep export`: writes the newest checkpoint of a run as a model for other programs.
    newest    The newest state in a home folder, also while its peer trains.
    upload    Where a model may be put: a repository of the hub, or a prefix in a bucket.
"""
