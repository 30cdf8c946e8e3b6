"""Robust aggregation: the rules, their sketches, and the checks of outputs. Pure.

    checks     The checks of a judged round: sketches of parts, weights from them, verification of outputs. Pure.
    gramguard  `gramguard`, the default rule: robust aggregation from the Gram matrix of the contributions.
    residual   The residual test: an output is the weighted sum of contributions, up to those that nobody can vouch for.
    rule       The interface of an aggregation rule, and arithmetic that gives all peers the same bits.
    rules      The registry of aggregation rules, and those from the literature that need only the Gram matrix.
    sketch     CountSketch: inner products of long vectors from 384 numbers, and false sums of them detected.
"""
