"""Robust aggregation: the rules, their sketches, and the checks of outputs. Pure.

    checks          The checks of a judged round: sketches of parts, weights from them, verification of outputs. Pure.
    coordinatewise  Coordinate-wise rules: the median, the trimmed mean, and the latter after nearest-neighbour mixing.
    flag            `flag`: the mean in the subspace that explains most of most contributions (arXiv:2302.05865).
    gramguard       `gramguard`, the default rule: robust aggregation from the Gram matrix of the contributions.
    rule            The interface of an aggregation rule, and arithmetic that gives all peers the same bits.
    rules           The registry of aggregation rules, and those from the literature that need only the Gram matrix.
    sketch          CountSketch: inner products of long vectors from 384 numbers, and false sums of them detected.
"""
