"""The cases of `flockstep bench utilization`, and the run of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....dht.run.manifest import Manifest
from ....optim.train.fit import pace_of
from ..words import count, listed, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationCase:
    """One measured case."""

    mode: str
    codec: str
    """Contribution/result, or one name for both."""
    peers: int
    params: int
    rate: float
    """Mbit/s, both ways."""
    round_trip: float
    """Seconds between two peers."""
    step_seconds: float
    steps: int
    rounds: int
    """Rounds (of each fragment) that are measured; one before them is not."""

    def run_toml(self) -> str:
        """Return the run of this case."""
        contribution, _, result = self.codec.partition("/")
        # Members vote, since an owner that keeps the run would be one more process with the whole state. All of them take
        # part in each round: on a thin line the first one could else train alone before the others hold the start state.
        return "\n".join(
            [
                'name = "bench-utilization"',
                *('[data]', 'source = "own"'),
                *('[inner]', 'optimizer = "adamw"', f"steps = {self.steps}", "clip = 0.0"),
                *('[outer]', f"rounds = {self.rounds + 1}", f'mode = "{self.mode}"'),
                *('[codec]', f'contribution = "{contribution}"', f'result = "{result or contribution}"'),
                *('[admission]', 'voters = "members"', f"min_peers = {self.peers}"),
                "",
            ]
        )  # fmt: skip

    def manifest(self) -> Manifest:
        """Return what the run pins. Raises `UsageError` if this version cannot make it."""
        return Manifest.from_toml(self.run_toml(), where="the run of the bench", owner="")

    @property
    def planned_share(self) -> float:
        """The share of training by the plan of the run."""
        return pace_of(self.manifest(), self.params, self.peers, self.rate, self.step_seconds).share

    @property
    def cycle(self) -> int:
        """The rounds that average all parameters once: one for each fragment."""
        return self.manifest().outer.fragments


def utilization_cases(
    *,
    peers: int,
    params: str,
    rate: Sequence[str],
    round_trip_ms: float,
    step_s: float,
    steps: int,
    rounds: int,
    modes: Sequence[str],
    codecs: Sequence[str],
) -> list[UtilizationCase]:
    """Return all cases; lists are as they were typed. Raises `UsageError`."""
    (size,) = numbers([params], "--params", count, 1)
    cases = [
        UtilizationCase(
            mode=mode,
            codec=codec,
            peers=peers,
            params=size,
            rate=each,
            round_trip=round_trip_ms / 1000,
            step_seconds=step_s,
            steps=steps,
            rounds=rounds,
        )
        for each, mode, codec in product(numbers(rate, "--rate", float, 0.1, 1e5), listed(modes), listed(codecs))
    ]
    for case in cases:
        case.manifest()
    return cases
