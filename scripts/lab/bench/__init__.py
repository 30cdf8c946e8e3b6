"""`flockstep bench`: measurements beside other systems.

    allreduce  `flockstep bench allreduce`: speed, cost and error of an average, beside hivemind.
    gpu        `flockstep bench gpu`, as `scripts/test-gpu` calls it: what runs on one CUDA GPU, in at most ten minutes.
    group      The bench's workers as processes: start, command, measure from outside, and always end.
    hivemind   Bench baseline: hivemind's `DecentralizedAverager`, a DHT and a daemon for each peer.
    join       `flockstep bench join`: a newcomer's time to its first inner step.
    measure    One measurement of the bench: some rounds of one system.
    outer      `flockstep bench outer`: the loss of each mode, codec and outer setting, beside data parallel.
    peer       The bench's own system: a flockstep peer with a libp2p host, averaging a seeded vector in place.
    robust     `flockstep bench robust`: the loss under each attack and rule, beside that of the honest alone.
    worker     A bench's worker of any system: commands as JSON lines, seeded vectors with a known exact mean.
"""
