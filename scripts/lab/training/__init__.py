"""Swarms trained in one process, for the benches: production arithmetic, no network.

    batches  What a swarm in one process trains: sizes by name, each peer's batches, and the held-out loss.
    rows     The trainings of a bench: one after the other, as JSON or as tables.
    stack    The models of all peers of a training as one stack: one pass, one step of the optimizers.
    swarm    A swarm in one process: blocking or streaming rounds, honest or under attack, or data parallel, no network.
"""
