"""How a run fits its lines: the pace of its rounds, and the settings with which they would fit. Pure.

Theory of operation. A peer trains a phase of inner steps, then a round averages a fragment. A round takes a fixed time, for
the votes and the messages of the protocol, and a multiple of what its bytes take on the line alone. In blocking mode that
is a wait. In streaming mode training goes on meanwhile, and a round that outlasts the phase lengthens it: H becomes what the
line carries. Only what a round takes longer than H is a wait there.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...dht.run.manifest import DEFAULT_FRAGMENTS, LARGE_BATCH, Manifest
from ..models.needs import ModelSize, round_bytes

ROUND_SECONDS = 1.0
"""Of a round beyond its bytes: gathering, votes, the tails of transfers (docs/log.md, "The time of a round by its bytes")."""
LINE_FACTOR = 1.23
"""The transfers of a round take so many times what their payload takes at the line's rate (same place)."""
LEAST_SECONDS = 0.01
"""Of a round's transfers: faster ones are no matter of the line."""
TRAINED_SHARE = 0.9
"""With less of its phases in a run's time peers wait for a tenth, or H is a tenth longer: the line is called too thin, or a
phase too short for any line."""
FITS = 0.75
"""Of a phase, for a round that fits again after one that did not: at the edge it would else be news in every round."""
MOST_STEPS = 500
"""The longest H of which a loss is published: 9.4 % above data parallel, 2.8 at 25 (51M parameters, two replicas, AdamW)."""
LEAST_BITS = "lloyd2", "int4"
"""The codecs of the fewest bits, of contributions and of results; they cost 0.5 % of the loss (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time from one round to the next, in seconds."""

    phase: float
    """What is planned for the training."""
    training: float
    round: float
    """From the end of a phase to the result."""
    waiting: float

    @property
    def kept(self) -> float:
        """The share of a run's time that its phases would take alone."""
        return self.phase / (self.training + self.waiting)

    @property
    def share(self) -> float:
        """The share of time that trains."""
        return self.training / (self.training + self.waiting)


def pace_of(manifest: Manifest, num_trained: int, peers: int, rate: float, step_seconds: float) -> Pace:
    """Return the pace of a run of so many trained parameters on lines of `rate` Mbit/s."""
    taken = ROUND_SECONDS + LINE_FACTOR * _payload(manifest, num_trained, peers) * 8e-6 / rate
    phase = manifest.inner.seconds / manifest.outer.fragments or manifest.phase_steps * step_seconds
    hidden = 0.0 if manifest.outer.mode == "blocking" else min(taken, phase * manifest.outer.fragments)
    return Pace(phase, max(phase, hidden), taken, taken - hidden)


def rate_of(manifest: Manifest, num_trained: int, peers: int, taken: float) -> float:
    """Return the Mbit/s of the lines on which a round takes so many seconds; without limit if its votes take them all."""
    left = max(taken - ROUND_SECONDS, LEAST_SECONDS)
    return LINE_FACTOR * _payload(manifest, num_trained, peers) * 8e-6 / left


def outlasts(taken: float, phase: float, did: bool) -> bool:
    """Return True if a round of so many seconds outlasts the phase after which the next one is due; `did` the last one?"""
    return taken > phase * (FITS if did else 1 / TRAINED_SHARE)


def _payload(manifest: Manifest, num_trained: int, peers: int) -> float:
    return round_bytes(manifest, ModelSize(num_trained, 0)) * (peers - 1) / peers


_Asked = Callable[[Manifest], Pace]
"""Returns the pace of a changed run on the same computers."""
_Changed = tuple[str, Manifest] | None
"""What to write into the `run.toml`, and the run with it."""


def remedy(manifest: Manifest, ask: _Asked) -> str:
    """Return with which settings rounds fit: each one that does so alone, or else all of them together."""
    kinds = (_streamed, _merged, _lengthened, _enlarged, _compressed)
    singles = [changed for kind in kinds if (changed := kind(manifest, ask)) is not None]
    enough = [text for text, changed in singles if ask(changed).kept >= TRAINED_SHARE]
    if enough:
        return " or ".join(enough)
    texts = []
    pace = ask(manifest)
    least = pace.round if manifest.outer.mode == "streaming" else pace.waiting * TRAINED_SHARE / (1 - TRAINED_SHARE)
    seconds = math.ceil(least) * manifest.outer.fragments
    for kind in kinds:
        if ask(manifest).kept < TRAINED_SHARE and (changed := kind(manifest, ask)) is not None:
            text, manifest = changed
            texts.append(text)
    if ask(manifest).kept >= TRAINED_SHARE:
        return f"together {', '.join(texts)} hide them"
    return f"[inner] seconds = {seconds} and fewer rounds, or adapters ([model] lora_rank)"


def _streamed(manifest: Manifest, ask: _Asked) -> _Changed:
    if manifest.outer.mode == "streaming" or manifest.inner.steps == 1:
        return None
    other = _divided(manifest, DEFAULT_FRAGMENTS, ask)
    return f'[outer] mode = "streaming", fragments = {other.outer.fragments}', other


def _merged(manifest: Manifest, ask: _Asked) -> _Changed:
    if manifest.outer.fragments == 1:
        return None
    other = _divided(manifest, manifest.outer.fragments - 1, ask)
    return f"[outer] fragments = {other.outer.fragments}", other


def _divided(manifest: Manifest, most: int, ask: _Asked) -> Manifest:
    """Return the streaming run of the most fragments, up to so many, whose rounds do not outlast a phase; else of one."""
    other = manifest
    for fragments in range(most, 0, -1):
        if manifest.inner.steps % fragments == 0:
            other = replace(manifest, outer=replace(manifest.outer, mode="streaming", fragments=fragments))
            if ask(other).kept >= TRAINED_SHARE:
                break
    return other


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
    enough = bisect_left(values, True, key=lambda value: ask(changed(value)).kept >= TRAINED_SHARE)
    return values[min(enough, len(values) - 1)]


def _compressed(manifest: Manifest, ask: _Asked) -> _Changed:
    contribution, result = LEAST_BITS
    codec = replace(manifest.codec, contribution=contribution, result=result, choices="")
    if codec == manifest.codec:
        return None
    return f'[codec] contribution = "{contribution}", result = "{result}"', replace(manifest, codec=codec)
