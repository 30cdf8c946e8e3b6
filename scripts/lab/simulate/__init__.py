"""`flockstep simulate`: a swarm in virtual time.

    chaos    Faults of a simulation: strikes at moments of the protocol, churn, stalls and partitions.
    check    The invariants of a run, checked on everything that the peers of a simulation do.
    harm     Attackers of a simulation and their effect: false contributions, protocol violations.
    meter    CPU seconds by purpose: rounds, membership, and the rest.
    options  Options of a simulation: numbers with units, ranges, partitions and strikes.
    peer     One simulated peer: production code with a sleep in the place of training.
    report   The report of a simulation: a table of its rounds, and a summary of every invariant.
    state    The state and contributions of simulated peers: a small model, or vectors of no bytes.
    world    `flockstep simulate`: production peers on a network in memory, under a virtual clock.
"""
