"""The cases of `flockstep bench utilization`, and the run of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....dht.run.manifest import Manifest
from ....optim.train.fit import pace_of
from ....peer.base.errors import UsageError
from ..words import count, listed, numbers

MAX_UTILIZATION_PEERS = 64
"""The size of a full roster."""
MAX_STEP_SECONDS = 86_400.0


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
    loss: float
    """Share of packets lost between two peers, each way."""
    step_seconds: tuple[float, ...]
    """Of each peer."""
    steps: int
    rounds: int
    """Rounds (of each fragment) that are measured; one before them is not."""
    fragments: int | None

    def run_toml(self) -> str:
        """Return the run of this case."""
        contribution, _, result = self.codec.partition("/")
        streams = self.mode != "blocking" and self.fragments is not None
        # Members vote, since an owner that keeps the run would be one more process with the whole state. All of them take
        # part in each round: on a thin line the first one could else train alone before the others hold the start state.
        return "\n".join(
            [
                'name = "bench-utilization"',
                *('[data]', 'source = "own"'),
                *('[inner]', 'optimizer = "adamw"', f"steps = {self.steps}", "clip = 0.0"),
                *('[outer]', f"rounds = {self.rounds + 1}", f'mode = "{self.mode}"'),
                *([f"fragments = {self.fragments}"] if streams else []),
                *('[codec]', f'contribution = "{contribution}"', f'result = "{result or contribution}"'),
                *('[admission]', 'voters = "members"', f"min_peers = {self.peers}"),
                "",
            ]
        )  # fmt: skip

    def manifest(self) -> Manifest:
        """Return what the run pins. Raises `UsageError` if this version cannot make it."""
        return Manifest.from_toml(self.run_toml(), where="the run of the bench", owner="")

    @property
    def planned_share(self) -> float | None:
        """The share of training by the plan of the run; None for steps of unequal times."""
        if len(set(self.step_seconds)) != 1:
            return None
        return pace_of(self.manifest(), self.params, self.peers, self.rate, self.step_seconds[0]).share

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
    loss_percent: float,
    step_s: str,
    steps: int,
    rounds: int,
    modes: Sequence[str],
    codecs: Sequence[str],
    fragments: int | None,
) -> list[UtilizationCase]:
    """Return all cases; lists are as they were typed. Raises `UsageError`."""
    (size,) = numbers([params], "--params", count, 1)
    seconds = numbers([step_s], "--step-s", float, 1e-3, MAX_STEP_SECONDS)
    if len(seconds) not in (1, peers):
        raise UsageError(f"{len(seconds)} times of a step for {peers} peers", remedy="give one for all, or one each")
    cases = [
        UtilizationCase(
            mode=mode,
            codec=codec,
            peers=peers,
            params=size,
            rate=each,
            round_trip=round_trip_ms / 1000,
            loss=loss_percent / 100,
            step_seconds=seconds * (peers if len(seconds) == 1 else 1),
            steps=steps,
            rounds=rounds,
            fragments=fragments,
        )
        for each, mode, codec in product(numbers(rate, "--rate", float, 0.1, 1e5), listed(modes), listed(codecs))
    ]
    for case in cases:
        case.manifest()
    return cases
