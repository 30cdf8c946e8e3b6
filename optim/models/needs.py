"""What a run needs of a computer, from the size of its model, and what is wrong where there is less. Pure.

All figures are bytes and least ones: activations are not in them, since micro-batches adapt to what is left. For P trained
parameters, on each peer:

    the four shared vectors (θ, m, exchange, residual)            16 P      memory
    encoded contributions and results of a round, both ways        2 P      memory
    weights, gradients, and what the optimizer keeps of each       8 P + 4 P (Muon) or 8 P (AdamW), in float32: the device
    two checkpoints and the draft of a third                      24 P      disk
    the results of twice `checkpoint_every` rounds                20 x 0.53 P by default: disk
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...dht.run.manifest import Manifest
from ...peer.troubles import DISK_SHORT, MEMORY_SHORT, Trouble
from .gpt_config import gpt_config

BASE_MEMORY = 500_000_000
"""Python and torch in the trainer, NumPy in the network process: 620 MB with 1 M parameters and their batches."""
VECTOR_BYTES = 4 * 4
ROUND_BYTES = 2
CHECKPOINT_BYTES = 2 * 4
NUM_CHECKPOINTS = 3
ENCODED_BYTES = {"int4": 0.5 + 2 / 64, "int8": 1 + 2 / 256, "bf16": 2.0, "fp32": 4.0}
"""Bytes of an encoded parameter, with its share of the block's scale (`collectives.codec`)."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large a model is."""

    num_trained: int
    """Elements that are trained."""
    weight_bytes: int
    """Bytes of all its parameters."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one peer needs at least."""

    size: ModelSize
    memory: int
    """Of the computer, without what stands on a device with a memory of its own."""
    training: int
    """Of the device."""
    disk: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a computer's memory, or of a device's."""

    total: int
    free: int


def size_of_gpt(options: Mapping[str, Any]) -> ModelSize:
    """The size of a built-in model, whose weights are float32. Raises `UsageError` for an option that there is not."""
    count = gpt_config(options).num_parameters
    return ModelSize(count, 4 * count)


def needs_of(manifest: Manifest, size: ModelSize) -> Needs:
    """What a peer of this run needs."""
    kept = 1 if manifest.inner.optimizer == "muon" else 2
    training = (2 + kept) * size.weight_bytes
    memory = BASE_MEMORY + (VECTOR_BYTES + ROUND_BYTES) * size.num_trained
    rounds = 2 * manifest.outer.checkpoint_every
    disk = NUM_CHECKPOINTS * CHECKPOINT_BYTES + rounds * ENCODED_BYTES[manifest.codec.result]
    return Needs(size, memory, training, int(disk * size.num_trained))


def round_bytes(manifest: Manifest, size: ModelSize) -> int:
    """What a peer sends, and receives, in one round among many."""
    each = ENCODED_BYTES[manifest.codec.contribution] + ENCODED_BYTES[manifest.codec.result]
    return int(each * size.num_trained)


def memory_trouble(needs: Needs, memory: Memory, device: Memory | None) -> Trouble | None:
    """What is wrong with the memory of a computer and of its device, None where the device trains in the computer's."""
    where = "this computer"
    needed, there = needs.memory, memory
    if device is None:
        needed += needs.training
    elif needs.training > device.free:
        where, needed, there = "the device", needs.training, device
    if needed <= there.free:
        return None
    return MEMORY_SHORT.with_details(
        f"the run's model of {num(needs.size.num_trained)} parameters needs {gigabytes(needed)}, "
        f"{where} has {gigabytes(there.total)} of which {gigabytes(there.free)} are free"
    )


def cannot_fit(needs: Needs, memory: Memory, device: Memory | None) -> bool:
    """Whether the run would not fit even if nothing else were in memory."""
    if device is None:
        return needs.memory + needs.training > memory.total
    return needs.memory > memory.total or needs.training > device.total


def disk_trouble(needs: Needs, *, free: int, present: int, folder: str) -> Trouble | None:
    """What is wrong with the disk of the home folder, where `present` bytes are the run's already."""
    if needs.disk <= free + present:
        return None
    return DISK_SHORT.with_details(
        f"{folder} has {gigabytes(free)} free, the checkpoints and results of the run need {gigabytes(needs.disk)}"
    )


def gigabytes(count: int) -> str:
    """Bytes for people."""
    if count >= 1e15:
        return f"{count / 1e15:,.1f} PB"
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def num(count: int) -> str:
    """A number of parameters for people."""
    return f"{count / 1e9:,.1f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"
