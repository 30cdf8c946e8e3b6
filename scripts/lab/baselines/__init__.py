"""Aggregation rules of the literature that no run may name: what the rules of `collectives.robust` are compared with.

    flag     `flag`: the mean in the subspace that explains most of most contributions (arXiv:2302.05865).
    gram     Baselines that need only the Gram matrix: Krum, Multi-Krum, geometric median, centered clipping.
    median   `median`, element by element (Yin et al., arXiv:1803.01498).
    rules    Every rule by its name: those of a run, and the baselines.
    trimmed  The trimmed mean after nearest-neighbour mixing.
"""
