"""A checkpoint on disk: the state of a certified round, in a folder named by the round.

    state.safetensors   two flat float32 tensors of equal size, `theta` and `momentum`, for any reader of that format
    checkpoint.json     run, round, root (hex), tokens, certificate (hex; empty at the start of a run), and `tensors`:
                        name, shape, dtype and offset (in elements of the flat vector) of each parameter

Theory of operation. In the state file the leaves of θ and then of m (see `merkle`) follow each other, all at places that
its size alone tells, so that it can be written in any order. Until all leaves are there the folder is a *draft*. Files
are synced, the description is written last, and the folder then gets its name: what has the name was once whole. Whether
it still is, the leaves' hashes tell, which must make the root of which the certificate speaks. A draft is kept when its
writer dies: whoever needs the same state later finds in it, by their hashes, the leaves that are already right.

NumPy and no torch: the network process writes checkpoints.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...dht.run.admission import OPEN, Charter
from ...peer.digest import DIGEST_BYTES, digest
from ...peer.errors import LocalError, MalformedMessage, ProtocolViolation, RemoteError
from ...peer.node.file_blob import FileBlob
from ...peer.wire import MAX_COUNT, Certificate
from ...peer.wire.schema import decode, encode
from ..chain.packed import MAX_PLAIN_BYTES
from ..codec import Floats
from ..place import Place, place_after, start_of_run
from . import merkle

STATE, DESCRIPTION = "state.safetensors", "checkpoint.json"
DRAFT_SUFFIX = ".draft"
MAX_DESCRIPTION_BYTES = 16 << 20
"""A hundred thousand tensors; a certificate of 64 members has 215 kB in hex."""
MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorAt:
    """One parameter in the flat vector: its elements begin at `offset`, in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the model's parameter, as torch names it; in the state it is float32."""
    offset: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, whose leaves were right when it was loaded or written."""

    folder: Path
    run: str
    place: Place
    tensors: tuple[TensorAt, ...]
    leaves: tuple[bytes, ...]
    """The hashes of θ's leaves, then of m's."""
    size: int
    """Elements of θ, and of m."""

    @property
    def theta(self) -> Floats:
        """The shared parameters, mapped from the file: nothing is read before it is used."""
        return self._mapped(0)

    @property
    def momentum(self) -> Floats:
        """The outer momentum, mapped from the file."""
        return self._mapped(1)

    def copy_to(self, state: tuple[Floats, Floats]) -> None:
        """Make two vectors those of this checkpoint. Raises `LocalError` where the file has changed since it was loaded."""
        spans = [merkle.leaf_bytes(vector, *span) for vector in state for span in merkle.leaf_spans(vector.size)]
        for target, (key, blob) in zip(spans, self.blobs(), strict=True):
            data = blob.read(key)
            if data is None:
                raise LocalError(f"{self.folder} has changed while it was read", remedy="start again, or with --no-resume")
            target[:] = data

    def blobs(self) -> Iterator[tuple[bytes, FileBlob]]:
        """Every leaf: its hash, and where it lies."""
        path = self.folder / STATE
        for key, (start, stop) in zip(self.leaves, leaf_places(self.size), strict=True):
            yield key, FileBlob(path, start, stop - start)

    def _mapped(self, row: int) -> Floats:
        start = len(_header(self.size)) + row * self.size * 4
        mapped: Floats = np.memmap(self.folder / STATE, np.float32, "r", start, (self.size,))
        return mapped


class Draft:
    """A checkpoint that is not whole yet, of a state of `size` elements a vector. For any thread; raises `OSError`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = self.path(folder)
        self._name = folder
        self._size = size
        self._places = list(leaf_places(size))
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STATE
        # Never "w": what an earlier life has left here may be right.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            os.ftruncate(self._fd, self._places[-1][1])  # Sparse: it takes room as leaves come.
            self._write(0, _header(size))
        except OSError:
            self.close()
            raise

    @staticmethod
    def path(folder: Path) -> Path:
        """Where the draft of a checkpoint is that will be at `folder`."""
        return folder.with_name(folder.name + DRAFT_SUFFIX)

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Write a leaf."""
        self._write(self._places[index][0], data)

    def leaf(self, index: int) -> bytes:
        """The bytes that stand in the place of a leaf."""
        start, stop = self._places[index]
        data = bytearray()
        with self._lock:
            os.lseek(self._fd, start, os.SEEK_SET)
            while len(data) < stop - start and (piece := os.read(self._fd, stop - start - len(data))):
                data += piece
        return bytes(data)

    def finish(self, run: str, place: Place, tensors: Sequence[TensorAt], leaves: Sequence[bytes]) -> Checkpoint:
        """Give the folder its name, since all leaves are there; what had the name before is gone."""
        os.fsync(self._fd)
        self.close()
        with (self.folder / DESCRIPTION).open("wb") as file:
            file.write(describe(run, place, tensors))
            file.flush()
            os.fsync(file.fileno())
        if self._name.exists():
            shutil.rmtree(self._name)
        os.replace(self.folder, self._name)
        _sync_folder(self._name.parent)
        return Checkpoint(self._name, run, place, tuple(tensors), tuple(leaves), self._size)

    def close(self) -> None:
        """Write no more; what is here stays for who goes on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Take no room any more."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        with self._lock:
            os.lseek(self._fd, start, os.SEEK_SET)
            while rest:
                rest = rest[os.write(self._fd, rest) :]


def load_checkpoint(folder: Path, *, charter: Charter = OPEN) -> Checkpoint:
    """A checkpoint whose every leaf has been hashed. Raises `LocalError` where it is not whole or not what it claims.

    `charter`: whose certificates count.
    """
    try:
        with (folder / DESCRIPTION).open("rb") as file:
            run, place, tensors = read_description(file.read(MAX_DESCRIPTION_BYTES + 1), charter=charter)
        path = folder / STATE
        size = _size_of(path)
        if any(tensor.offset + prod(tensor.shape) > size for tensor in tensors):
            raise MalformedMessage(f"its description names tensors beyond the {size} elements of its state")
        leaves: list[bytes] = []
        with path.open("rb") as state:
            for start, stop in leaf_places(size):
                state.seek(start)
                leaves.append(digest(state.read(stop - start)))
        if merkle.root(leaves) != place.root:
            raise ProtocolViolation("its state does not have the root that its certificate names")
    except (OSError, RemoteError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "take another checkpoint of the run, or let `flockstep join` fetch the state from the others"
        raise LocalError(f"{folder} is not a whole checkpoint: {reason}", remedy=remedy) from error
    return Checkpoint(folder, run, place, tensors, tuple(leaves), size)


def describe(run: str, place: Place, tensors: Sequence[TensorAt]) -> bytes:
    """The bytes of `checkpoint.json`."""
    certificate = encode(place.certificate).hex() if place.certificate is not None else ""
    description = {
        "run": run,
        "round": place.round,
        "root": place.root.hex(),
        "tokens": place.tokens,
        "certificate": certificate,
        "tensors": [asdict(tensor) for tensor in tensors],
    }
    return json.dumps(description, indent=1).encode()


def read_description(data: bytes, *, charter: Charter = OPEN) -> tuple[str, Place, tuple[TensorAt, ...]]:
    """What `describe` wrote: run, place (proved by its certificate) and tensors. Raises `RemoteError`."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise MalformedMessage(f"a description of more than {MAX_DESCRIPTION_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"its description is no JSON: {error}") from error
    fields = _fields(raw, {"run": str, "round": int, "root": str, "tokens": int, "certificate": str, "tensors": list})
    root = _from_hex(fields["root"], DIGEST_BYTES)
    if not fields["certificate"]:
        place = start_of_run(root)
    else:
        packed = _from_hex(fields["certificate"], MAX_PLAIN_BYTES)
        place = place_after(decode(Certificate, packed, max_bytes=MAX_PLAIN_BYTES), fields["run"], charter)
    if (place.round, place.root, place.tokens) != (fields["round"], root, fields["tokens"]):
        raise ProtocolViolation("its description and its certificate speak of different states")
    return fields["run"], place, read_tensors(fields["tensors"])


def read_tensors(raw: Any) -> tuple[TensorAt, ...]:
    """The tensors of a description, or of a trainer. Raises `MalformedMessage`."""
    tensors: list[TensorAt] = []
    for item in raw:
        fields = _fields(item, {"name": str, "shape": list, "dtype": str, "offset": int})
        shape = tuple(fields["shape"])
        if len(shape) > MAX_DIMENSIONS or not all(type(length) is int and 0 <= length <= MAX_COUNT for length in shape):
            raise MalformedMessage(f"tensor {fields['name'][:80]!r} has an impossible shape")
        tensors.append(TensorAt(fields["name"], shape, fields["dtype"], fields["offset"]))
    return tuple(tensors)


def leaf_places(size: int) -> Iterator[tuple[int, int]]:
    """Where each leaf starts and stops in the state file, in bytes, for vectors of `size` elements."""
    for start in (len(_header(size)), len(_header(size)) + 4 * size):
        for first, last in merkle.leaf_spans(size):
            yield start + 4 * first, start + 4 * last


def _header(size: int) -> bytes:
    """What a safetensors file of such a state begins with: the length of a JSON text, and that text, in whole words."""
    vector = {"dtype": "F32", "shape": [size]}
    both = {
        "theta": {**vector, "data_offsets": [0, 4 * size]},
        "momentum": {**vector, "data_offsets": [4 * size, 8 * size]},
    }
    text = json.dumps(both, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size_of(path: Path) -> int:
    """The elements of each vector in a state file, which its length and its header must agree on."""
    total = path.stat().st_size
    with path.open("rb") as file:
        beginning = file.read(8)
        length = int.from_bytes(beginning, "little")
        if len(beginning) == 8 and length <= len(_header(MAX_COUNT)) and total > 8 + length:
            size = (total - 8 - length) // 8
            if beginning + file.read(length) == _header(size) and total == 8 + length + 8 * size:
                return size
    raise MalformedMessage(f"{path.name} has been cut off, or is no state")


def _fields(raw: Any, kinds: dict[str, type]) -> dict[str, Any]:
    if not isinstance(raw, dict) or raw.keys() != kinds.keys():
        raise MalformedMessage(f"its description lacks one of {', '.join(kinds)}, or has another key")
    for name, kind in kinds.items():
        if type(raw[name]) is not kind or (kind is int and not 0 <= raw[name] <= MAX_COUNT):
            raise MalformedMessage(f"{name} in its description is no {kind.__name__} in its range")
    return raw


def _from_hex(text: str, most: int) -> bytes:
    with contextlib.suppress(ValueError):
        if len(text) <= 2 * most and (data := bytes.fromhex(text)).hex() == text:
            return data
    raise MalformedMessage("its description has something else where hex digits belong")


def _sync_folder(folder: Path) -> None:
    """Let a new name outlast a power failure, on systems where a folder can be synced."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
