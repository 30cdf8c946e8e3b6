"""`flockstep bench utilization`: the share of time in which peers train, on lines of a given rate, delay and loss.

    figures          Utilization, peak rates and round times from what was recorded. Pure.
    hivemind         Baseline: `hivemind.Optimizer` with local steps and parameters averaged in the background.
    lines            The bench's network: a bootstrap and peers in public, each on a line of its own, and its counters.
    measure          One measurement: real peers on shaped lines, from the published run to the figures.
    options          The options of `flockstep bench utilization`, the cases they name, and the run of each.
    peer             The bench's own system: a `Swarm` that trains a synthetic model, whose steps take a given time.
    utilization      `flockstep bench utilization`: measure all cases, and write table or JSON.
"""
