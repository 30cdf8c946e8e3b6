"""A simulation without faults, to be varied by `dataclasses.replace`."""

from flockstep.scripts.lab.simulate.options import SimulateOptions, Span

CALM = SimulateOptions(
    peers=5,
    rounds=3,
    seed=1,
    bandwidth=None,
    latency=Span(0.02, 0.1),
    loss=0.0,
    churn=0.0,
    stall=0.0,
    stall_time=Span(5.0, 10.0),
    partitions=(),
    strikes=(),
    attacks=(),
    rule="gramguard",
    steps_time=Span(4.0, 5.0),
    out=None,
)
