"""A checkpoint on disk: the state of a certified round, in a folder named by the round.

    state.safetensors   two flat float32 tensors of equal size, `theta` and `momentum`, for any reader of that format
    checkpoint.json     form (`dht.run.versions`), run, round, root (hex), tokens, certificate (hex; empty at the start of a
                        run), and `tensors`: name, shape, dtype and offset (in elements of the flat vector) of each parameter

Theory of operation. The state file holds the leaves of θ and then of m (see `merkle`), at offsets that follow from its
size alone, so it can be written in any order. Until all leaves are there the folder is a *draft*. Files are synced, the
description is written last, and the folder is then renamed (atomic commit): a folder with the final name was once
complete. The leaves' hashes, which must make the certified root, show whether it still is. A draft outlasts its
process: a later attempt at the same state finds in it, by their hashes, the leaves that are already right.

NumPy and no torch: the network process writes checkpoints.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...dht.run.admission import OPEN, Charter
from ...dht.run.protocol import PROTOCOL, check_protocol
from ...peer.base.digest import DIGEST_BYTES, digest
from ...peer.base.disk import disk_errors, rename, write_whole
from ...peer.base.errors import LocalError, MalformedMessage, OtherProtocol, ProtocolViolation, RemoteError
from ...peer.node.file_blob import FileBlob
from ...peer.wire import MAX_COUNT, Certificate
from ...peer.wire.schema import decode, encode
from ..chain.chain import ChainPosition, position_after, start_of_run
from ..chain.packed import MAX_PLAIN_BYTES
from ..vector.arrays import Floats
from . import merkle

STATE, DESCRIPTION = "state.safetensors", "checkpoint.json"
DRAFT_SUFFIX = ".draft"
MAX_DESCRIPTION_BYTES = 16 << 20
"""Enough for a hundred thousand tensors; a certificate of 64 members has 215 kB in hex."""
MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorAt:
    """One parameter in the flat vector: its elements begin at `offset`, in row-major order.

    Raises `MalformedMessage` for a shape that no parameter has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype of the model's parameter, as torch names it; in the state it is float32."""
    offset: int

    def __post_init__(self) -> None:
        lengths_fit = all(type(length) is int and 0 <= length <= MAX_COUNT for length in self.shape)
        if len(self.shape) > MAX_DIMENSIONS or not lengths_fit:
            raise MalformedMessage(f"tensor {self.name[:80]!r} has an impossible shape")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, whose leaves were verified when it was loaded or written."""

    folder: Path
    run: str
    place: ChainPosition
    tensors: tuple[TensorAt, ...]
    leaves: tuple[bytes, ...]
    """The hashes of θ's leaves, then of m's."""
    size: int
    """The number of elements of θ, and of m."""

    def read_theta(self) -> Floats:
        """Read θ, verified. Raises `LocalError` if the file has changed, or its peer has deleted it."""
        theta: Floats = np.empty(self.size, np.float32)
        self._copy_to((theta,))
        return theta

    def copy_to(self, state: tuple[Floats, Floats]) -> None:
        """Copy this checkpoint into (θ, m). Raises `LocalError` if the file has changed since it was loaded."""
        self._copy_to(state)

    def blobs(self) -> Iterator[tuple[bytes, FileBlob]]:
        """Yield every leaf: its hash, and its place in the file."""
        path = self.folder / STATE
        for key, (start, stop) in zip(self.leaves, leaf_places(self.size), strict=True):
            yield key, FileBlob(path, start, stop - start)

    def _copy_to(self, vectors: Sequence[Floats]) -> None:
        spans = [merkle.leaf_bytes(vector, *span) for vector in vectors for span in merkle.leaf_spans(vector.size)]
        for target, (key, blob) in zip(spans, self.blobs(), strict=False):
            target[:] = self.read_leaf(key, blob)

    def read_leaf(self, key: bytes, blob: FileBlob) -> bytes:
        """Read one of `blobs`, verified. Raises `LocalError` if it has changed since this checkpoint was loaded."""
        data = blob.read(key)
        if data is None:
            raise LocalError(f"{self.folder} has changed while it was read", remedy="start again, or with --no-resume")
        return data


class OpenFile:
    """A file that is read and written in any order, made if it is missing. Thread-safe; raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        # Never "w": what an earlier process left here may be right.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)

    def resize(self, size: int) -> None:
        """Make the file so long; new bytes are zeros, and take no space until they are written."""
        os.ftruncate(self._fd, size)

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes from `start` on."""
        rest = memoryview(data)
        with self._lock:
            os.lseek(self._fd, start, os.SEEK_SET)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def read(self, start: int, stop: int) -> bytearray:
        """Read bytes `start` to `stop`; fewer if the file ends before."""
        data = bytearray()
        with self._lock:
            os.lseek(self._fd, start, os.SEEK_SET)
            while len(data) < stop - start and (piece := os.read(self._fd, stop - start - len(data))):
                data += piece
        return data

    def sync(self) -> None:
        """Make what was written outlast a power failure."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Draft:
    """An incomplete checkpoint of a state of `size` elements per vector. Thread-safe; raises `LocalError`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = self.path(folder)
        self._name = folder
        self._size = size
        self._places = list(leaf_places(size))
        with self._disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = OpenFile(self.folder / STATE)
            try:
                self._file.resize(self._places[-1][1])
                self._file.write(0, _header(size))
            except BaseException:
                self.close()
                raise

    @staticmethod
    def path(folder: Path) -> Path:
        """Return the folder of the draft of a checkpoint whose final name is `folder`."""
        return folder.with_name(folder.name + DRAFT_SUFFIX)

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Write a leaf."""
        with self._disk_errors():
            self._file.write(self._places[index][0], data)

    def leaf(self, index: int) -> bytearray:
        """Read the bytes in the place of a leaf."""
        with self._disk_errors():
            return self._file.read(*self._places[index])

    def finish(self, run: str, place: ChainPosition, tensors: Sequence[TensorAt], leaves: Sequence[bytes]) -> Checkpoint:
        """Commit a complete draft: write the description, and rename the folder, which replaces one of that name."""
        with self._disk_errors():
            self._file.sync()
            self.close()
            write_whole(self.folder / DESCRIPTION, describe_checkpoint(run, place, tensors))
            if self._name.exists():
                shutil.rmtree(self._name)
        rename(self.folder, self._name)
        return Checkpoint(self._name, run, place, tuple(tensors), tuple(leaves), self._size)

    def close(self) -> None:
        """Close the file; the draft stays for a later attempt."""
        self._file.close()

    def discard(self) -> None:
        """Delete the draft."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(f"write {self.folder}")


def load_checkpoint(folder: Path, *, charter: Charter = OPEN) -> Checkpoint:
    """Load a checkpoint and verify every leaf's hash. Raises `LocalError` if it is incomplete or does not match its root.

    `charter`: the admission rules that its certificate is validated against.
    """
    try:
        with (folder / DESCRIPTION).open("rb") as file:
            run, place, tensors = read_description(file.read(MAX_DESCRIPTION_BYTES + 1), charter=charter)
        path = folder / STATE
        size = size_of_state(path)
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
        raise _unusable(folder, error) from error
    return Checkpoint(folder, run, place, tensors, tuple(leaves), size)


def begin_with(folder: Path, target: Path, run: str, root: bytes) -> None:
    """Make a checkpoint of another run that of the start of `run`, which has this root; it moves from `folder` to `target`.

    A kill in between leaves one that can be moved by a second call. Raises `LocalError` if it is of another state. Its leaves
    are compared with the root when it is loaded.
    """
    try:
        with (folder / DESCRIPTION).open("rb") as file:
            _, place, tensors = read_description(file.read(MAX_DESCRIPTION_BYTES + 1))
    except (OSError, RemoteError) as error:
        raise _unusable(folder, error) from error
    if place.root != root:
        raise LocalError(f"{folder} has the state {place.root.hex()[:8]}, and run {run} starts from {root.hex()[:8]}")
    write_whole(folder / DESCRIPTION, describe_checkpoint(run, start_of_run(root), tensors))
    with disk_errors(f"move {folder}"):
        target.parent.mkdir(parents=True, exist_ok=True)
    rename(folder, target)


def shape_of_checkpoint(folder: Path, *, charter: Charter = OPEN) -> tuple[int, tuple[TensorAt, ...]]:
    """Return the elements per vector and the tensors of a checkpoint, its state unverified. Raises `LocalError`."""
    try:
        with (folder / DESCRIPTION).open("rb") as file:
            _, _, tensors = read_description(file.read(MAX_DESCRIPTION_BYTES + 1), charter=charter)
        return size_of_state(folder / STATE), tensors
    except (OSError, RemoteError) as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError | RemoteError) -> LocalError:
    if isinstance(error, OtherProtocol):
        return LocalError(f"{folder}: {error}", remedy=error.remedy)
    reason = error.strerror if isinstance(error, OSError) else error
    remedy = "take another checkpoint of the run, or let `flockstep join` fetch the state from the others"
    return LocalError(f"{folder} is not a whole checkpoint: {reason}", remedy=remedy)


def describe_checkpoint(run: str, place: ChainPosition, tensors: Sequence[TensorAt]) -> bytes:
    """Serialize `checkpoint.json`."""
    certificate = encode(place.certificate).hex() if place.certificate is not None else ""
    description = {
        "protocol": PROTOCOL,
        "run": run,
        "round": place.round,
        "root": place.root.hex(),
        "tokens": place.tokens,
        "certificate": certificate,
        "tensors": [asdict(tensor) for tensor in tensors],
    }
    return json.dumps(description, indent=1).encode()


def read_description(data: bytes, *, charter: Charter = OPEN) -> tuple[str, ChainPosition, tuple[TensorAt, ...]]:
    """Parse `checkpoint.json`: run, position (proved by its certificate) and tensors.

    Raises `OtherProtocol`, and another `RemoteError` for one that is damaged.
    """
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise MalformedMessage(f"a description of more than {MAX_DESCRIPTION_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"its description is no JSON: {error}") from error
    number = raw.get("protocol") if isinstance(raw, dict) else None
    if type(number) is int:
        remedy = "`flockstep export` of the flockstep that wrote it makes files, with which `[model] from` begins a new run"
        check_protocol("a checkpoint", number, remedy)
    kinds = {"protocol": int, "run": str, "round": int, "root": str, "tokens": int, "certificate": str, "tensors": list}
    fields = _fields(raw, kinds)
    root = _from_hex(fields["root"], DIGEST_BYTES)
    if not fields["certificate"]:
        place = start_of_run(root)
    else:
        packed = _from_hex(fields["certificate"], MAX_PLAIN_BYTES)
        place = position_after(decode(Certificate, packed, max_bytes=MAX_PLAIN_BYTES), fields["run"], charter)
    if (place.round, place.root, place.tokens) != (fields["round"], root, fields["tokens"]):
        raise ProtocolViolation("its description and its certificate speak of different states")
    return fields["run"], place, read_tensors(fields["tensors"])


def read_tensors(raw: Any) -> tuple[TensorAt, ...]:
    """Validate the tensors of a description. Raises `MalformedMessage`."""
    tensors: list[TensorAt] = []
    for item in raw:
        fields = _fields(item, {"name": str, "shape": list, "dtype": str, "offset": int})
        tensors.append(TensorAt(fields["name"], tuple(fields["shape"]), fields["dtype"], fields["offset"]))
    return tuple(tensors)


def leaf_places(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each leaf in the state file, in bytes, for vectors of `size` elements."""
    for start in (len(_header(size)), len(_header(size)) + 4 * size):
        for first, last in merkle.leaf_spans(size):
            yield start + 4 * first, start + 4 * last


def _header(size: int) -> bytes:
    """Return the safetensors header of such a state: the length of a JSON text, and that text padded to 8 bytes."""
    vector = {"dtype": "F32", "shape": [size]}
    both = {
        "theta": {**vector, "data_offsets": [0, 4 * size]},
        "momentum": {**vector, "data_offsets": [4 * size, 8 * size]},
    }
    text = json.dumps(both, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def size_of_state(path: Path) -> int:
    """Return the elements of each vector in a state file. Raises `MalformedMessage` unless header and length agree."""
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
