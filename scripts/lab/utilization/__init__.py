"""`flockstep bench utilization`: the share of time in which peers train, on lines of a given rate and delay.

    cases        The cases of `flockstep bench utilization`, and the run of each.
    measure      One measurement: real peers on shaped lines, from the published run to the figures.
    peer         A peer of `bench utilization`: a `Swarm` that trains a synthetic model, whose steps take a given time.
    utilization  `flockstep bench utilization`: measure all cases, and write table or JSON.
"""
