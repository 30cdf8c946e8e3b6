"""The options of `flockstep bench utilization`, the cases they name, and the run of each."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from ....collectives.vector.codec import codec_named
from ....dht.run.manifest import Manifest, Outer
from ....dht.run.settings import OneOf
from ....optim.models.gpt_config import GPT_SIZES
from ....optim.train.fit import pace_of
from ....peer.base.errors import UsageError
from ..bench.allreduce import count, listed

REAL = "real"
"""As `--step-s`: a gpt trains on the CPU, and its steps take what they take."""
MAX_UTILIZATION_PEERS = 64
"""The size of a full roster."""
UTILIZATION_BASELINES = ("hivemind",)
MAX_STEP_SECONDS = 86_400.0
BLOCKING = "blocking"
UTILIZATION_RUN = "bench-utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationCase:
    """One measured case."""

    system: str
    """`flockstep`, or a baseline."""
    mode: str
    codec: str
    """Contribution/result, or one name for both; a baseline's own."""
    peers: int
    params: int
    rate: float
    """Mbit/s, both ways."""
    round_trip: float
    """Seconds between two peers."""
    loss: float
    """Share of packets lost between two peers, each way."""
    step_seconds: tuple[float, ...]
    """Of each peer; empty where the steps are real."""
    steps: int
    rounds: int
    """Rounds (of each fragment) that are measured; one before them is not."""
    fragments: int | None
    phase_seconds: float
    """Of [inner]: 0 where phases end by count."""
    python: str

    def run_toml(self) -> str:
        """Return the run of this case."""
        contribution, _, result = self.codec.partition("/")
        outer = {"rounds": str(self.rounds + 1), "mode": f'"{self.mode}"'}
        if self.mode != BLOCKING:
            outer |= {"fragments": str(self.fragments)} if self.fragments is not None else {}
        lines = [f"{key} = {value}" for key, value in outer.items()]
        # Members vote, since an owner that keeps the run would be one more process with the whole state. All of them take
        # part in each round: on a thin line the first one could else train alone before the others hold the start state.
        return "\n".join(
            [
                f'name = "{UTILIZATION_RUN}"',
                *('[data]', 'source = "own"'),
                *('[inner]', 'optimizer = "adamw"', f"steps = {self.steps}", "clip = 0.0", f"seconds = {self.phase_seconds}"),
                *('[outer]', *lines),
                *('[codec]', f'contribution = "{contribution}"', f'result = "{result or contribution}"'),
                *('[admission]', 'voters = "members"', f"min_peers = {self.peers}"),
                "",
            ]
        )  # fmt: skip

    @property
    def planned_share(self) -> float | None:
        """The share of training by the plan of the run; None for a baseline, and for steps of unknown or unequal times."""
        if self.system != "flockstep" or len(set(self.step_seconds)) != 1:
            return None
        return pace_of(self.manifest(), self.params, self.peers, self.rate, self.step_seconds[0]).share

    @property
    def cycle(self) -> int:
        """The rounds that average all parameters once: one for each fragment."""
        return self.manifest().outer.fragments if self.system == "flockstep" else 1

    def manifest(self) -> Manifest:
        """Return what the run pins. Raises `UsageError` if this version cannot make it."""
        return Manifest.from_toml(self.run_toml(), where="the run of the bench", owner="")

    def check(self) -> None:
        """Raise `UsageError` if this version cannot make the run."""
        if self.system == "flockstep":
            self.manifest()


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationOptions:
    """The options of the command line. Raises `UsageError`."""

    peers: int
    params: int
    rates: tuple[float, ...]
    round_trip_ms: float
    loss_percent: float
    step_seconds: tuple[float, ...]
    """Of each peer, or one for all; empty where the steps are real."""
    steps: int
    rounds: int
    modes: tuple[str, ...]
    codecs: tuple[str, ...]
    fragments: int | None
    phase_seconds: float
    baselines: tuple[str, ...]
    baseline_python: str
    as_json: bool

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= MAX_UTILIZATION_PEERS:
            raise UsageError(f"a swarm needs 2 to {MAX_UTILIZATION_PEERS} peers here", remedy="such as --peers 4")
        if not all(0.1 <= rate <= 100_000 for rate in self.rates) or not self.rates:
            raise UsageError("a rate is 0.1 to 100,000 Mbit/s", remedy="such as --rate 100")
        if not 0 <= self.round_trip_ms <= 10_000:
            raise UsageError("a round trip takes 0 to 10,000 ms", remedy="such as --delay 60")
        if not 0 <= self.loss_percent <= 50:
            raise UsageError("0 to 50 % of the packets may be lost", remedy="such as --loss 0.5")
        if len(self.step_seconds) not in (0, 1, self.peers):
            given = len(self.step_seconds)
            raise UsageError(f"{given} times of a step for {self.peers} peers", remedy="give one for all, or one each")
        if not all(0 < seconds <= MAX_STEP_SECONDS for seconds in self.step_seconds):
            raise UsageError("a step takes more than 0 s and at most a day", remedy="such as --step-s 1,1,1,75")
        if not self.step_seconds and self.params not in real_sizes():
            sizes = ", ".join(real_sizes().values())
            raise UsageError(f"no gpt has {self.params} parameters", remedy=f"with --step-s real, --params is one of {sizes}")
        for mode in self.modes:
            if mode not in known_modes():
                known = ", ".join(known_modes())
                raise UsageError(f"this version has no mode {mode!r}", remedy=f"--modes takes {known}")
        for codec in self.codecs:
            for name in codec.split("/", 1):
                codec_named(name)
        for baseline in self.baselines:
            if baseline not in UTILIZATION_BASELINES:
                known = ", ".join(UTILIZATION_BASELINES)
                raise UsageError(f"there is no baseline {baseline!r}", remedy=f"choose from {known}")
        if self.baselines and not self.step_seconds:
            raise UsageError("the baselines have no real steps", remedy="give the seconds of a step: --step-s 1.0")
        for case in self.cases():
            case.check()

    def cases(self) -> Iterator[UtilizationCase]:
        """Yield all cases: for each rate ours first."""
        for rate in self.rates:
            for mode in self.modes:
                for codec in self.codecs:
                    yield self._case("flockstep", mode, codec, rate, sys.executable)
            for baseline in self.baselines:
                yield self._case(baseline, "delayed", "fp16", rate, self.baseline_python)

    def _case(self, system: str, mode: str, codec: str, rate: float, python: str) -> UtilizationCase:
        streams = system == "flockstep" and mode != BLOCKING
        every = self.step_seconds * (self.peers if len(self.step_seconds) == 1 else 1)
        return UtilizationCase(
            system=system,
            mode=mode,
            codec=codec,
            peers=self.peers,
            params=self.params,
            rate=rate,
            round_trip=self.round_trip_ms / 1000,
            loss=self.loss_percent / 100,
            step_seconds=every,
            steps=self.steps,
            rounds=self.rounds,
            fragments=self.fragments if streams else None,
            phase_seconds=self.phase_seconds,
            python=python,
        )


def utilization_options(
    *,
    params: str,
    rate: Sequence[str],
    step_s: str,
    modes: Sequence[str],
    codecs: Sequence[str],
    baseline: Sequence[str],
    baseline_python: str,
    **plain: object,
) -> UtilizationOptions:
    """Parse the options of the command line; `plain` are those that need no parsing. Raises `UsageError`."""
    return UtilizationOptions(
        params=count(params),
        rates=tuple(positive(text, "--rate") for text in listed(rate)),
        step_seconds=() if step_s == REAL else tuple(positive(text, "--step-s") for text in listed([step_s])),
        modes=tuple(listed(modes)) or known_modes(),
        codecs=tuple(listed(codecs)),
        baselines=tuple(listed(baseline)),
        baseline_python=baseline_python or sys.executable,
        **plain,  # type: ignore[arg-type]
    )


def positive(text: str, option: str) -> float:
    """Parse a number above 0. Raises `UsageError`."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise UsageError(f"{option} {text!r} is no number above 0", remedy=f"such as {option} 1.0")
    return number


def known_modes() -> tuple[str, ...]:
    """Return the modes of a run in this version."""
    marks = get_type_hints(Outer, include_extras=True)["mode"].__metadata__
    return next(mark.choices for mark in marks if isinstance(mark, OneOf))


def real_sizes() -> dict[int, str]:
    """Return what `--params` may be with real steps: parameters, and the name of the gpt that has so many."""
    return {count(name): name for name in GPT_SIZES}
