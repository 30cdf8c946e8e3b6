"""Swarms trained in one process, for the benches: production arithmetic, no network.

    attacked  A swarm in one process for `bench robust`: a round's production arithmetic, no network.
    learner   One peer of a swarm in one process: its model, inner optimizer and batches, and the held-out loss.
    outer     A swarm in one process for `bench outer`: blocking or streaming rounds, or data parallel, no network.
    pool      Several trainings at a time, a process each.
    stack     The models of all peers of a training as one stack: one pass, one step of the optimizers.
"""
