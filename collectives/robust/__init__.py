"""Robust aggregation: the rules, their sketches, and the checks of outputs. Pure.

    checks          The arithmetic of a judged round: sketches of parts, the verdict over them, and the check of what
                    owners made of them.
    coordinatewise  Rules that look at each element alone: the median, the trimmed mean, and the latter among nearest
                    neighbours.
    flag            `flag`: the mean, seen in the subspace that explains most of most contributions (arXiv:2302.05865,
                    without regularizer).
    gramguard       `gramguard`, the default rule: who agrees with the others, and says something of its own, counts
                    like everybody else.
    rule            What an aggregation rule is asked and answers, and the arithmetic in which all peers get the same
                    bits.
    rules           The defence that a run's manifest names: rules from the literature beside `gramguard`, all from
                    the Gram matrix.
    sketch          CountSketch: 384 numbers from which inner products of long vectors can be told, and lies about
                    sums of them.
"""
