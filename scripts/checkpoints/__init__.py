"""What becomes of a run's checkpoints: evaluated, exported, published.

    card      The card of a published checkpoint: what it is, its curve, and what certifies it. Pure.
    evaluate  `flockstep eval`: the held-out loss of a checkpoint, and what its model continues prompts with.
    export    `flockstep export`: writes the newest checkpoint of a run as a model for other programs.
    newest    The newest state in a home folder, also while its peer trains.
    publish   `flockstep keep --publish`: certified checkpoints on the hub or in a bucket.
    upload    Where a model may be put: a repository of the hub, or a prefix in a bucket.
"""
