"""What a run will take on given computers, computed from its `run.toml` before anybody trains. Pure.

Theory of operation. A peer trains a phase of inner steps, then a round averages a fragment. A round
takes a fixed time, for the votes and the messages of the protocol, and a multiple of what its bytes
take on the line alone. In streaming mode training goes on meanwhile, for twice `delay` steps; what
the round takes longer is a wait. Everything else follows: the share of time that trains, tokens a
day, hours, energy. Each constant below names its source.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...dht.run.manifest import DEFAULT_FRAGMENTS, LARGE_BATCH, Manifest
from ...optim.models.needs import ModelSize, encoded_bytes, gigabytes, needs_of, num, round_bytes
from ...peer.errors import UsageError, did_you_mean

ROUND_SECONDS = 1.0
"""Of a round beyond its bytes: gathering, votes, the tails of transfers (docs/log.md, "The time of a round by its bytes")."""
LINE_FACTOR = 1.23
"""The transfers of a round take so many times what their payload takes at the line's rate (same place)."""
PEAK_SHARE = 0.35
"""Share of a GPU's peak that a training reaches. Published: 0.46 and 0.50 for compiled models of 124M on an A100 and on
4090s (tylerromero.com/posts/nanogpt-speedrun-worklog), 0.31 for 1B on H100s (marin-community/marin#1826); `join` compiles
only with --compile. It is the least certain constant, so `--tokens-per-s` replaces it."""

LEAST_STEP = 0.02
"""Seconds of an inner step, however small the model: some 2,000 kernels, each launched in about 10 µs."""

TRAINED_SHARE = 0.9
"""With less, peers wait for more than a tenth of the time: the line is called too thin, or a phase too short for any line."""
LEAST_ROUNDS = 30
"""With fewer, H is called too long: 10.7 % above data parallel after 10 rounds, 4.7 after 20, 3.4 after 30 (docs/log.md)."""
MOST_STEPS = 500
"""The longest H of which a loss is published: 9.4 % above data parallel, 2.8 at 25 (51M parameters, two replicas, AdamW)."""
LEAST_BITS = "lloyd2"
"""The codec of the fewest bits; it costs 0.3 to 0.7 % of the loss (docs/bench.md)."""
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
                f"no computer trains {self.tokens_per_s:g} tokens/s", remedy="`flockstep doctor LINK` measures it"
            )


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, in any spelling of `RTX 4090`. Raises `UsageError`."""
    key = re.sub(r"nvidia|geforce|rtx|[\s-]", "", name.lower())
    if key not in GPUS:
        known = ", ".join(GPUS)
        raise UsageError(
            f"there is no GPU {name!r} in the table{did_you_mean(key, GPUS)}", remedy=f"--gpu takes {known}"
        )
    return GPUS[key]


@dataclass(frozen=True, slots=True)
class Pace:
    """The time from one round to the next, in seconds."""

    training: float
    round: float
    """From the end of a phase to the result."""
    waiting: float

    @property
    def share(self) -> float:
        """The share of time that trains."""
        return self.training / (self.training + self.waiting)


def pace_of(manifest: Manifest, num_trained: int, peers: int, rate: float, step_seconds: float) -> Pace:
    """Return the pace of a run of so many trained parameters on lines of `rate` Mbit/s."""
    payload = round_bytes(manifest, ModelSize(num_trained, 0)) * (peers - 1) / peers
    taken = ROUND_SECONDS + LINE_FACTOR * payload * 8e-6 / rate
    phase = manifest.inner.seconds / manifest.outer.fragments or manifest.phase_steps * step_seconds
    hidden = min(taken, 2 * manifest.outer.delay * step_seconds)
    return Pace(max(phase, hidden), taken, taken - hidden)


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
    if plan.pace.share < TRAINED_SHARE:
        alone = _figures(manifest, size, num_weights, replace(fleet, peers=1))
        what = "the line is too thin" if alone.pace.share >= TRAINED_SHARE else "a phase is too short"
        remedy = _remedy(manifest, lambda changed: _figures(changed, size, num_weights, fleet))
        yield f"{what}: peers wait for {1 - plan.pace.share:.0%} of the time; {remedy}"
    rounds, steps = manifest.outer.rounds, manifest.inner.steps
    if manifest.inner.seconds:
        return
    if rounds < LEAST_ROUNDS <= rounds * manifest.phase_steps:
        fewer = rounds * manifest.phase_steps // LEAST_ROUNDS * manifest.outer.fragments
        yield (
            f"H is too long for {rounds} rounds, and it takes {LEAST_ROUNDS} to come near data parallel: "
            f"[inner] steps = {fewer}, [outer] rounds = {math.ceil(rounds * steps / fewer)} train as many tokens"
        )
    if steps > MOST_STEPS:
        yield f"H is too long: beyond {MOST_STEPS} steps no loss is known; lower [inner] steps and raise [outer] rounds"


_Asked = Callable[[Manifest], Plan]
"""Returns the plan of a changed run on the same computers."""
_Changed = tuple[str, Manifest] | None
"""What to write into the `run.toml`, and the run with it."""


def _remedy(manifest: Manifest, ask: _Asked) -> str:
    """Return which settings hide the rounds: each one that does so alone, or else all of them together."""
    kinds = (_streamed, _delayed, _lengthened, _enlarged, _compressed)
    singles = [changed for kind in kinds if (changed := kind(manifest, ask)) is not None]
    enough = [text for text, changed in singles if ask(changed).pace.share >= TRAINED_SHARE]
    if enough:
        return " or ".join(enough)
    texts = []
    seconds = math.ceil(ask(manifest).pace.waiting * TRAINED_SHARE / (1 - TRAINED_SHARE)) * manifest.outer.fragments
    for kind in kinds:
        if ask(manifest).pace.share < TRAINED_SHARE and (changed := kind(manifest, ask)) is not None:
            text, manifest = changed
            texts.append(text)
    if ask(manifest).pace.share >= TRAINED_SHARE:
        return f"together {', '.join(texts)} hide them"
    return f"[inner] seconds = {seconds} and fewer rounds, or adapters ([model] lora_rank)"


def _streamed(manifest: Manifest, ask: _Asked) -> _Changed:
    outer, steps = manifest.outer, manifest.inner.steps
    if outer.mode == "streaming" or steps == 1:
        return None
    fragments = max(count for count in range(1, DEFAULT_FRAGMENTS + 1) if steps % count == 0)
    other = replace(manifest, outer=replace(outer, mode="streaming", fragments=fragments))
    delay = min(_hiding_delay(ask(other)), other.phase_steps)
    text = f'[outer] mode = "streaming", fragments = {fragments}, delay = {delay}'
    return text, replace(other, outer=replace(other.outer, delay=delay))


def _delayed(manifest: Manifest, ask: _Asked) -> _Changed:
    delay = min(_hiding_delay(ask(manifest)), manifest.phase_steps)
    if manifest.outer.mode == "blocking" or delay <= manifest.outer.delay:
        return None
    return f"[outer] delay = {delay}", replace(manifest, outer=replace(manifest.outer, delay=delay))


def _hiding_delay(plan: Plan) -> int:
    return math.ceil(plan.pace.round / (2 * plan.step_seconds))


def _lengthened(manifest: Manifest, ask: _Asked) -> _Changed:
    """H in its multiples, which the fragments divide too, as far as losses are known."""
    if manifest.inner.seconds:
        return None

    def with_steps(steps: int) -> Manifest:
        return replace(manifest, inner=replace(manifest.inner, steps=steps))

    steps = _least(range(manifest.inner.steps, MOST_STEPS + 1, manifest.inner.steps), with_steps, ask)
    return (f"[inner] steps = {steps}", with_steps(steps)) if steps else None


def _enlarged(manifest: Manifest, ask: _Asked) -> _Changed:
    """Steps of so many more tokens, as far as the default momentum follows them."""

    def with_batch(size: int) -> Manifest:
        return replace(manifest, data=replace(manifest.data, batch_size=size))

    batch = manifest.data.batch_size
    most = LARGE_BATCH // manifest.data.sequence_length
    size = _least(range(batch, most + 1, batch), with_batch, ask)
    return (f"[data] batch_size = {size}", with_batch(size)) if size else None


def _least(values: range, changed: Callable[[int], Manifest], ask: _Asked) -> int:
    """Return the least of some rising values with which peers train enough, else the last; 0 for no other than the first."""
    if len(values) < 2:
        return 0
    enough = bisect_left(values, True, key=lambda value: ask(changed(value)).pace.share >= TRAINED_SHARE)
    return values[min(enough, len(values) - 1)]


def _compressed(manifest: Manifest, ask: _Asked) -> _Changed:
    codec = replace(manifest.codec, contribution=LEAST_BITS, result=LEAST_BITS, choices="")
    if codec == manifest.codec:
        return None
    return f'[codec] contribution and result = "{LEAST_BITS}"', replace(manifest, codec=codec)


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
        "delay": f"{outer.delay} steps" if outer.mode == "streaming" else "none: peers wait for each round",
        "codec": f"{codec.contribution}/{codec.result}, {bits:g} bits a parameter: "
        f"{gigabytes(plan.bytes_per_round)} each way a round",
        "round": f"takes {_time(plan.pace.round)}, peers wait {_time(plan.pace.waiting)} of it "
        f"and train {plan.pace.share:.1%} of the time",
        "memory": f"{gigabytes(plan.training_memory)} of the GPU and activations, {gigabytes(plan.memory)} of the computer, "
        f"{gigabytes(plan.disk)} of disk",
        "tokens": f"{_count(plan.tokens_per_day)} a day of all peers, {_count(plan.tokens)} in the run",
        "time": f"{plan.hours:,.1f} hours for {manifest.num_rounds:,} rounds",
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


def _count(number: float) -> str:
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if number >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number:,.0f}"
