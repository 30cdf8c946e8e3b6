"""`flockstep bench`: measurements side by side with other systems.

    allreduce        `flockstep bench allreduce`: speed, cost and error of an average, beside other systems.
    gloo             Bench baseline: `torch.distributed` all-reduce over gloo, plaintext, not fault-tolerant.
    group            The bench's workers as processes: started, commanded, measured from outside, signalled, and never
                     left behind.
    hivemind         Bench baseline: hivemind's `DecentralizedAverager`, a DHT and a daemon for each peer.
    join             `flockstep bench join`: a newcomer's time to its first inner step, and the members' cost.
    measure          One measurement of the bench: some rounds of one system, with one of its peers killed or stopped
                     if so wished.
    peer             The bench's own system: one flockstep peer with a real libp2p host, averaging a seeded vector in
                     place.
    robust           `flockstep bench robust`: the loss under each attack and rule, beside the honest alone.
    robust_training  A swarm in one process for `bench robust`: a round's production arithmetic, no network.
    worker           A bench's worker, whatever system it runs: commands as JSON lines, and seeded vectors whose exact
                     mean is known.
"""
