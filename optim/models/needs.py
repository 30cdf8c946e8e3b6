"""The memory and disk that a run needs, from the size of its model, and their checks. Pure.

All figures are lower bounds in bytes, without activations, since micro-batches adapt to the memory left. For P trained
parameters, on each peer:

    θ and m; Δ of a fragment and the residual, as bf16             8 P + 2 P/fragments + 2 P    memory
    encoded: mine, those of my part, results, those before        2.1 P/fragments with int4    memory
    weights, frozen ones included                                 4 P and more, in float32: the device
    gradients, and the optimizer's state                          4 P + 4 P (Muon) or 8 P (AdamW): the device
    the checkpoint, and a newer one beside it while it is written 16 P      disk
    the results of `checkpoint_every` rounds and one more         11 x 0.53 P by default: disk
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collectives.vector.codec import CELL, codec_named
from ...collectives.vector.mixed import codecs_named
from ...collectives.vector.partition import memory_for_parts
from ...dht.run.manifest import Manifest
from ...peer.base.errors import UsageError
from ...peer.base.troubles import DISK_SHORT, MEMORY_SHORT, Trouble
from .gpt_config import gpt_config

BASE_MEMORY = 500_000_000
"""Python and torch in the trainer, NumPy in the network process: 620 MB with 1 M parameters and their batches."""
STATE_BYTES = 2 * 4


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model."""

    num_trained: int
    """Number of trained parameters."""
    weight_bytes: int
    """Bytes of all parameters and buffers."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The least bytes that one peer needs."""

    size: ModelSize
    memory: int
    """Bytes of the computer's memory, without those on a device with its own."""
    training: int
    """Bytes of the device's memory."""
    disk: int
    parts: int
    """Bytes of memory for the contributions to the part that this peer reduces, at most: more of them lie in files."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a computer or a device, in bytes."""

    total: int
    free: int


def size_of_gpt(options: Mapping[str, Any]) -> ModelSize:
    """Return the size of a built-in model, whose weights are float32. Raises `UsageError` for an unknown option."""
    config = gpt_config(options)
    return ModelSize(config.num_parameters, 4 * (config.num_parameters + config.num_angles))


def encoded_bytes(codec: str) -> float:
    """Bytes of an encoded parameter, its share of the block's scale included."""
    return codec_named(codec).cell_bytes / CELL


def needs_of(manifest: Manifest, size: ModelSize) -> Needs:
    """Return the needs of a peer of this run."""
    moments = 1 if manifest.inner.optimizer == "muon" else 2
    trained = min(size.weight_bytes, STATE_BYTES // 2 * size.num_trained)
    training = size.weight_bytes + (1 + moments) * trained
    contributions = manifest.codec.contributions
    fragments, kept = manifest.outer.fragments, np.dtype(codecs_named(contributions).memory_dtype).itemsize
    encoded = 2 * (max(map(encoded_bytes, contributions)) + encoded_bytes(manifest.codec.result))
    vectors = STATE_BYTES + kept + (kept + encoded) / fragments
    memory = BASE_MEMORY + int(vectors * size.num_trained)
    rounds = (manifest.checkpoint_rounds + 1) / manifest.outer.fragments
    disk = 2 * STATE_BYTES + rounds * encoded_bytes(manifest.codec.result)
    own = int(max(map(encoded_bytes, contributions)) * size.num_trained / fragments)
    return Needs(size, memory, training, int(disk * size.num_trained), memory_for_parts(own))


def round_bytes(manifest: Manifest, size: ModelSize) -> int:
    """Return the bytes that a peer sends, and receives, in one round of a large roster."""
    each = max(map(encoded_bytes, manifest.codec.contributions)) + encoded_bytes(manifest.codec.result)
    return int(each * size.num_trained / manifest.outer.fragments)


def check_vocabulary(name: str, tokens: int | None, known: int | None) -> None:
    """Raise `UsageError` for data whose tokenizer has more tokens than a model: a GPU would only report a failed assertion.

    None stands for what nobody says.
    """
    if tokens is not None and known is not None and tokens > known:
        raise UsageError(
            f"the tokenizer of {name} has {tokens} tokens, the model knows {known}",
            remedy="give the model a larger vocab_size, or the data a tokenizer of the model's",
        )


def check_length(length: int, most: int | None) -> None:
    """Raise `UsageError` if sequences of `length` inputs, and their last target, do not fit a model; None fits all."""
    if most is not None and length > most:
        raise UsageError(
            f"[data] sequence_length {length} exceeds the model's {most} positions",
            remedy="lower it, or give the model more positions",
        )


def hours_of(manifest: Manifest, rounds: int, tokens_per_s: float) -> float:
    """Return the hours that so many rounds of inner steps take a device of this speed, without waits for others."""
    tokens = manifest.phase_steps * manifest.data.batch_size * manifest.data.sequence_length
    seconds = manifest.inner.seconds / manifest.outer.fragments or tokens / max(tokens_per_s, 1e-9)
    return rounds * seconds / 3600


def memory_trouble(needs: Needs, memory: Memory | None, device: Memory | None) -> Trouble | None:
    """Check the memory of a computer, None if unknown, and of its device; `device` is None if it uses the computer's."""
    where = "this computer"
    needed, available = needs.memory, memory
    if device is None:
        needed += needs.training
    elif needs.training > device.free:
        where, needed, available = "the device", needs.training, device
    if available is None or needed <= available.free:
        return None
    return MEMORY_SHORT.with_details(
        f"the run's model of {num(needs.size.num_trained)} parameters needs {gigabytes(needed)}, "
        f"{where} has {gigabytes(available.total)} of which {gigabytes(available.free)} are free"
    )


def cannot_fit(needs: Needs, memory: Memory | None, device: Memory | None) -> bool:
    """Return True if the run would not fit even into an empty memory, as far as that is known."""
    needed = needs.memory + (needs.training if device is None else 0)
    return (memory is not None and needed > memory.total) or (device is not None and needs.training > device.total)


def disk_trouble(needs: Needs, *, free: int, present: int, folder: str) -> Trouble | None:
    """Check the disk of the home folder, where the run already has `present` bytes."""
    if needs.disk <= free + present:
        return None
    return DISK_SHORT.with_details(
        f"{folder} has {gigabytes(free)} free, the checkpoint and results of the run need {gigabytes(needs.disk)}"
    )


def gigabytes(count: int) -> str:
    """Format bytes."""
    for least, unit, name in ((1e15, 1e15, "PB"), (1e12, 1e12, "TB"), (1e8, 1e9, "GB"), (1e5, 1e6, "MB")):
        if count >= least:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1e3:.1f} kB"


def num(count: int) -> str:
    """Format a number of parameters, or of tokens."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= unit:
            return f"{count / unit:,.1f}{name}"
    return str(count)
