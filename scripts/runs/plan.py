"""What a run will take on given computers, computed from its `run.toml` before anybody trains. Pure.

Theory of operation. From the pace of its rounds (`optim.train.fit`) and the speed of the computers all else
follows: the share of time that trains, tokens a day, hours, energy. Each constant names its source.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...dht.run.manifest import Manifest
from ...optim.models.needs import ModelSize, encoded_bytes, gigabytes, needs_of, num, round_bytes
from ...optim.train.fit import MOST_STEPS, TRAINED_SHARE, Pace, pace_of, remedy
from ...peer.base.errors import UsageError, did_you_mean
from ..watch.words import span

PEAK_SHARE = 0.35
"""Share of a GPU's peak that a training reaches. Published: 0.46 and 0.50 for compiled models of 124M on an A100 and on
4090s (tylerromero.com/posts/nanogpt-speedrun-worklog), 0.31 for 1B on H100s (marin-community/marin#1826); `join` compiles
only with --compile. It is the least certain constant, so `--tokens-per-s` replaces it."""

LEAST_STEP = 0.02
"""Seconds of an inner step, however small the model: some 2,000 kernels, each launched in about 10 µs."""

LEAST_ROUNDS = 30
"""With fewer, H is called too long: 10.7 % above data parallel after 10 rounds, 4.7 after 20, 3.4 after 30 (docs/log.md)."""
DAY = 86_400.0
TERA = 1e12
MAX_PEERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A graphics card, by its data sheet."""

    name: str
    tflops: float
    """Dense peak of 16-bit matrix products that are summed in 32 bits, TFLOP/s."""
    memory: int
    """GB."""
    watts: int
    """Its power limit."""


GPUS = {
    "t4": Gpu("T4", 65, 16, 70),
    "v100": Gpu("V100", 112, 16, 250),
    "2080ti": Gpu("RTX 2080 Ti", 54, 11, 250),
    "3060": Gpu("RTX 3060", 25, 12, 170),
    "3090": Gpu("RTX 3090", 71, 24, 350),
    "4060": Gpu("RTX 4060", 30, 8, 115),
    "4070": Gpu("RTX 4070", 58, 12, 200),
    "4080": Gpu("RTX 4080", 97, 16, 320),
    "4090": Gpu("RTX 4090", 165, 24, 450),
    "5090": Gpu("RTX 5090", 209, 32, 575),
    "a10g": Gpu("A10G", 70, 24, 300),
    "l4": Gpu("L4", 121, 24, 72),
    "a100": Gpu("A100", 312, 80, 400),
    "h100": Gpu("H100", 989, 80, 700),
    "h200": Gpu("H200", 989, 141, 700),
}
"""By the name in the command line. Figures of NVIDIA's data sheets and architecture white papers (Turing to Blackwell)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The computers of a plan, all alike. Raises `UsageError`."""

    peers: int
    gpu: Gpu
    rate: float
    """Mbit/s of each peer's line, each way."""
    tokens_per_s: float = 0.0
    """As measured on one of them; 0: computed from the GPU's peak."""

    def __post_init__(self) -> None:
        if not 1 <= self.peers <= MAX_PEERS:
            raise UsageError(f"a plan is for 1 to {MAX_PEERS:,} peers, not {self.peers}", remedy="such as --peers 8")
        if not 0.1 <= self.rate <= 100_000:
            raise UsageError(f"a line has 0.1 to 100,000 Mbit/s, not {self.rate:g}", remedy="such as --rate 50")
        if not 0 <= self.tokens_per_s <= 1e9:
            raise UsageError(
                f"no computer trains {self.tokens_per_s:g} tokens/s", remedy="`flockstep join` says what it measures"
            )


def fleet_named(peers: int | None, gpu: str | None, rate: float | None, tokens_per_s: float = 0.0) -> Fleet:
    """Return the computers that the command line names. Raises `UsageError` where it does not name them whole."""
    if peers is None or gpu is None or rate is None:
        raise UsageError("a plan is for computers that you name", remedy="such as --peers 8 --gpu 4090 --rate 50")
    return Fleet(peers=peers, gpu=gpu_named(gpu), rate=rate, tokens_per_s=tokens_per_s)


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, in any spelling of `RTX 4090`. Raises `UsageError`."""
    key = re.sub(r"nvidia|geforce|rtx|[\s-]", "", name.lower())
    if key not in GPUS:
        known = ", ".join(GPUS)
        raise UsageError(
            f"there is no GPU {name!r} in the table{did_you_mean(key, GPUS)}", remedy=f"--gpu takes {known}"
        )
    return GPUS[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will take. Times are of one peer, tokens and energy of all."""

    tokens_per_s: float
    step_seconds: float
    pace: Pace
    bytes_per_round: int
    """That a peer sends, and receives."""
    memory: int
    """Bytes of the computer's memory."""
    training_memory: int
    """Bytes of the GPU's memory, without activations."""
    disk: int
    tokens: float
    tokens_per_day: float
    hours: float
    kilowatt_hours: float
    """Of the GPUs, at their power limits."""
    warnings: tuple[str, ...] = ()


def plan_of(manifest: Manifest, size: ModelSize, num_weights: int, fleet: Fleet) -> Plan:
    """Return the plan of a run whose model has `num_weights` parameters, frozen ones included."""
    plan = _figures(manifest, size, num_weights, fleet)
    return replace(plan, warnings=tuple(_warnings(manifest, size, num_weights, fleet, plan)))


def _figures(manifest: Manifest, size: ModelSize, num_weights: int, fleet: Fleet) -> Plan:
    # Two operations a weight in the forward pass, two for the gradient of its input, two for its own (arXiv:2001.08361).
    operations = 4 * num_weights + 2 * size.num_trained
    step_tokens = manifest.data.batch_size * manifest.data.sequence_length
    estimated = min(PEAK_SHARE * fleet.gpu.tflops * TERA / operations, step_tokens / LEAST_STEP)
    speed = fleet.tokens_per_s or estimated
    pace = pace_of(manifest, size.num_trained, fleet.peers, fleet.rate, step_tokens / speed)
    seconds = manifest.num_rounds * (pace.training + pace.waiting)
    hours = seconds / 3600
    needs = needs_of(manifest, size)
    return Plan(
        tokens_per_s=speed,
        step_seconds=step_tokens / speed,
        pace=pace,
        bytes_per_round=round(round_bytes(manifest, size) * (fleet.peers - 1) / fleet.peers),
        memory=needs.memory,
        training_memory=needs.training,
        disk=needs.disk,
        tokens=fleet.peers * speed * pace.share * seconds,
        tokens_per_day=fleet.peers * speed * pace.share * DAY,
        hours=hours,
        kilowatt_hours=fleet.peers * fleet.gpu.watts * hours / 1000,
    )


def _warnings(manifest: Manifest, size: ModelSize, num_weights: int, fleet: Fleet, plan: Plan) -> Iterator[str]:
    memory = int(fleet.gpu.memory * 1e9)
    if plan.training_memory > memory:
        yield (
            f"a {fleet.gpu.name} has {gigabytes(memory)}, weights, gradients and optimizer take "
            f"{gigabytes(plan.training_memory)}: train adapters ([model] lora_rank) or a smaller model"
        )
    if plan.pace.kept < TRAINED_SHARE:
        alone = _figures(manifest, size, num_weights, replace(fleet, peers=1))
        what = "the line is too thin" if alone.pace.kept >= TRAINED_SHARE else "a phase is too short"
        hint = remedy(manifest, lambda changed: _figures(changed, size, num_weights, fleet).pace)
        if manifest.outer.mode == "blocking":
            yield f"{what}: peers wait for {1 - plan.pace.share:.0%} of the time; write {hint}"
        else:
            longer = f"{1 / plan.pace.kept:.2g} times what it should be"
            yield f"{what}: a round takes {_time(plan.pace.round)}, so that H becomes {longer}; write {hint}"
    rounds, steps = manifest.outer.rounds, manifest.inner.steps
    if manifest.inner.seconds or plan.pace.kept < TRAINED_SHARE:
        return  # Where peers wait for rounds H must grow; advice on H by its loss would say the opposite.
    if rounds < LEAST_ROUNDS <= rounds * manifest.phase_steps:
        fewer = rounds * manifest.phase_steps // LEAST_ROUNDS * manifest.outer.fragments
        yield (
            f"H is too long: {rounds} rounds are too few to come near data parallel; for as many tokens in more rounds "
            f"write [inner] steps = {fewer} and [outer] rounds = {math.ceil(rounds * steps / fewer)}"
        )
    if steps > MOST_STEPS:
        yield f"H is too long: beyond {MOST_STEPS} steps no loss is known; lower [inner] steps and raise [outer] rounds"


def describe_plan(manifest: Manifest, size: ModelSize, fleet: Fleet, plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan for a person, its warnings last."""
    outer, inner, codec = manifest.outer, manifest.inner, manifest.codec
    peers = "1 peer" if fleet.peers == 1 else f"{fleet.peers} peers"
    speed = "as measured" if fleet.tokens_per_s else "estimated"
    bits = 8 * (max(map(encoded_bytes, codec.contributions)) + encoded_bytes(codec.result))
    rows = {
        "plan": f"{num(size.num_trained)} trained parameters, {peers}, {fleet.gpu.name}, {fleet.rate:g} Mbit/s each way",
        "speed": f"{plan.tokens_per_s:,.0f} tokens/s a peer ({speed}), a step takes {_time(plan.step_seconds)}",
        "H": f"{inner.seconds:g} s" if inner.seconds else f"{inner.steps} inner steps",
        "fragments": f"{outer.fragments}: a round every {_time(plan.pace.training + plan.pace.waiting)}",
        "delay": f"{plan.pace.round / plan.step_seconds:.1f} steps until a result is here"
        if outer.mode == "streaming"
        else "none: peers wait for each round",
        "codec": f"{codec.contribution}/{codec.result}, {bits:g} bits a parameter: "
        f"{gigabytes(plan.bytes_per_round)} each way a round",
        "round": f"takes {_time(plan.pace.round)}, peers wait {_time(plan.pace.waiting)} of it "
        f"and train {plan.pace.share:.1%} of the time",
        "memory": f"{gigabytes(plan.training_memory)} of the GPU and activations, {gigabytes(plan.memory)} of the computer, "
        f"{gigabytes(plan.disk)} of disk",
        "tokens": f"{num(round(plan.tokens_per_day))} a day of all peers, {num(round(plan.tokens))} in the run",
        "time": f"{span(3600 * plan.hours)} for {manifest.num_rounds:,} rounds",
        "energy": f"{plan.kilowatt_hours:,.1f} kWh at most, of the GPUs",
    }
    width = max(map(len, rows))
    yield from (f"{name:{width}}  {text}" for name, text in rows.items())
    yield from (f"{'warning':{width}}  {warning}" for warning in plan.warnings)


def _time(seconds: float) -> str:
    for least, unit, name in ((3600, 3600, "h"), (60, 60, "min"), (0.1, 1, "s")):
        if seconds >= least:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
