"""A member that trains nothing, so that a run outlives those that train. Without torch.

    keeper       Holds the run's state, owns parts, checks, votes and serves newcomers.
    state_size   How long a run's state is, for a keeper, which builds no model: from my disk, from certificates, or as
                 members state it.
    trainers     What a keeper knows of those that train: how long their phases are, and who contributes nothing. Pure.
"""
