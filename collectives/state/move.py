"""Moves a checkpoint on to a later round in its place: one copy of it is enough, and a kill loses nothing.

    move    the plan: the description and the leaf hashes of the new state, and the rounds that lead there
    redo    the new bytes of the leaves, θ's and m's, that are being overwritten

Theory of operation. The outer step works on each element alone, and every peer makes it to the same bits. So a leaf of the
new state follows from the same leaves of θ and m in the old one and from the rounds' outputs, which are on the disk. First
the plan is written, then leaf after leaf: into the redo file, and once it is synced, over the old one. A leaf on the disk
is thus always that of the old state, or of the new one, or it is in the redo file. Whoever finds a plan completes it: it
writes the redo file's leaves again, makes the outer steps on those that are still old, and compares all with the plan's
hashes, whose root is certified. That holds for a killed process, a power failure, and for a round that is applied during
the write. (Write-ahead logging, of one leaf at a time: Mohan et al., ARIES, TODS 1992. A second copy of the state would do
without it, at 8 bytes a parameter.)
"""

import contextlib
import mmap
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np

from ...dht.run.admission import OPEN, Charter
from ...dht.run.manifest import MOST_CHECKPOINT_ROUNDS
from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.disk import disk_errors, rename, sync_folder, write_whole
from ...peer.base.errors import LocalError, ProtocolViolation, RemoteError, UsageError
from ...peer.node.file_blob import FileBlob
from ...peer.wire.schema import Between, Size, decode, encode
from ..chain.certificate import value_of
from ..chain.chain import ChainPosition
from ..chain.kept_outputs import outputs_in
from ..chain.ledger import Ledger
from ..vector.arrays import Floats
from ..vector.codec import Encoded
from . import merkle
from .checkpoint_file import (
    DESCRIPTION,
    MAX_DESCRIPTION_BYTES,
    STATE,
    Checkpoint,
    OpenFile,
    describe_checkpoint,
    leaf_places,
    read_description,
    size_of_state,
)

PLAN, REDO = "move", "redo"
MAX_PLAN_BYTES = 2 * MAX_DESCRIPTION_BYTES
MAX_ROUNDS = 2 * (MOST_CHECKPOINT_ROUNDS + 1)
"""Outputs of no more rounds are on a disk (`kept_outputs`)."""

@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round on the way to the new state."""

    round: Annotated[int, Between(1, wire.MAX_COUNT)]
    bounds: Annotated[tuple[Annotated[int, Between(0, wire.MAX_COUNT)], ...], Size(wire.MAX_PARTS + 1)]
    """In cells, as in its certificate."""
    outputs: Annotated[tuple[wire.Hash, ...], Size(wire.MAX_PARTS)]
    revision: Annotated[bytes, Size(wire.MAX_REVISION_BYTES)]
    """The revision of the run's settings that holds in it: the one that the certificate before it names."""


Advance: TypeAlias = Callable[[Floats, Floats, int, PlannedRound, Sequence[Encoded]], None]
"""Makes the outer step of a round in place: θ and m of the elements from the given one on, the round, its outputs."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """A new state, and the rounds that lead to it."""

    description: Annotated[bytes, Size(MAX_DESCRIPTION_BYTES)]
    leaves: Annotated[tuple[wire.Hash, ...], Size(20_000)]
    """The hashes of θ's leaves, then of m's: as many as `wire.Leaves` may list."""
    rounds: Annotated[tuple[PlannedRound, ...], Size(MAX_ROUNDS, 1)]


def is_moving(folder: Path) -> bool:
    """Return True if a checkpoint is being moved on, or was when its process died."""
    return (folder / PLAN).exists()


def rounds_between(ledger: Ledger, start: ChainPosition, end: ChainPosition) -> tuple[PlannedRound, ...] | None:
    """Return the rounds that lead from one state to a later one; None if the ledger does not have them all."""
    rounds: list[PlannedRound] = []
    root, revision = start.root, b"" if start.certificate is None else value_of(start.certificate).revision
    for number in range(start.round + 1, min(end.round, start.round + MAX_ROUNDS) + 1):
        certificate = ledger.certificate(number)
        if certificate is None or (value := value_of(certificate)).base_root != root:
            return None
        root = value.next_root
        rounds.append(PlannedRound(number, value.bounds, value.outputs, revision))
        revision = value.revision
    return tuple(rounds) if rounds and (rounds[-1].round, root) == (end.round, end.root) else None


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves the checkpoints of a run on: by the outputs in a folder, and the arithmetic of its outer step."""

    outputs: Path
    advance: Advance
    charter: Charter = field(default=OPEN, kw_only=True)
    """The admission rules that certificates are validated against."""

    def begin(
        self, checkpoint: Checkpoint, place: ChainPosition, leaves: Sequence[bytes], rounds: Sequence[PlannedRound]
    ) -> bool:
        """Write the plan to move a checkpoint to `place`, a state with these leaves. Returns whether that can be completed.

        It cannot if an output is missing. Until here the checkpoint is as before, also if this raises `LocalError`.
        """
        with disk_errors(f"read {self.outputs}"):
            if not _Outputs(self.outputs, rounds).complete:
                return False
        description = describe_checkpoint(checkpoint.run, place, checkpoint.tensors)
        plan = MovePlan(description, tuple(leaves), tuple(rounds))
        longest = max(stop - start for start, stop in leaf_places(checkpoint.size))
        path = checkpoint.folder / REDO
        try:
            with disk_errors(f"write {path}"), contextlib.closing(OpenFile(path)) as redo:
                redo.write(0, bytes(2 * longest))  # A full disk is an error here, before anything has changed.
                redo.sync()
            write_whole(checkpoint.folder / PLAN, encode(plan))
        except LocalError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return True

    def complete(self, folder: Path, state: tuple[Floats, Floats] | None = None) -> Checkpoint:
        """Carry out the plan in a checkpoint's folder, or what is left of it. Returns the new checkpoint.

        The new leaves are copied from `state` where it has them, and computed otherwise. Raises `LocalError`; the plan then
        stays, for another attempt.
        """
        with _damage(folder), disk_errors(f"read {folder}"):
            with (folder / PLAN).open("rb") as file:
                plan = decode(MovePlan, file.read(MAX_PLAN_BYTES + 1), max_bytes=MAX_PLAN_BYTES)
            run, place, tensors = read_description(plan.description, charter=self.charter)
            size = size_of_state(folder / STATE)
            if 2 * len(list(merkle.leaf_spans(size))) != len(plan.leaves) or merkle.root(plan.leaves) != place.root:
                raise ProtocolViolation("its plan is for another state")
        self._overwrite(folder, size, plan, state)
        target = folder.with_name(str(place.round))
        write_whole(folder / DESCRIPTION, plan.description)
        with disk_errors(f"write {target}"):
            if target != folder:
                if target.exists():
                    shutil.rmtree(target)
                rename(folder, target)
            (target / REDO).unlink(missing_ok=True)
            (target / PLAN).unlink(missing_ok=True)
            sync_folder(target)
        return Checkpoint(target, run, place, tensors, plan.leaves, size)

    def theta_at(self, checkpoint: Checkpoint, place: ChainPosition, rounds: Sequence[PlannedRound]) -> Floats | None:
        """Return θ of the state at `place`, to which these rounds lead from a checkpoint, and change nothing.

        None if an output is missing, or if they lead elsewhere. Raises `LocalError` if the checkpoint is moved on meanwhile.
        """
        theta: Floats = np.empty(checkpoint.size, np.float32)
        spans, blobs = list(merkle.leaf_spans(checkpoint.size)), list(checkpoint.blobs())
        hashes: tuple[list[bytes], list[bytes]] = [], []
        with disk_errors(f"read {self.outputs}"):
            outputs = _Outputs(self.outputs, rounds)
            if not outputs.complete:
                return None
            for span, *leaves in zip(spans, blobs, blobs[len(spans) :], strict=False):
                pair = bytearray(checkpoint.read_leaf(*leaves[0])), bytearray(checkpoint.read_leaf(*leaves[1]))
                part, momentum = (np.frombuffer(leaf, np.float32) for leaf in pair)
                try:
                    for planned in rounds:
                        self.advance(part, momentum, span[0], planned, outputs.of(planned))
                except (RemoteError, UsageError):  # A damaged output, or settings that this version does not know.
                    return None
                theta[slice(*span)] = part
                for hashed, new in zip(hashes, _hashes(pair), strict=True):
                    hashed.append(new)
        return theta if merkle.root([*hashes[0], *hashes[1]]) == place.root else None

    def _overwrite(self, folder: Path, size: int, plan: MovePlan, state: tuple[Floats, Floats] | None) -> None:
        spans, places = list(merkle.leaf_spans(size)), list(leaf_places(size))
        with (
            disk_errors(f"write {folder / STATE}"),
            contextlib.closing(OpenFile(folder / STATE)) as file,
            contextlib.closing(OpenFile(folder / REDO)) as redo,
        ):
            sync_folder(folder)
            outputs = _Outputs(self.outputs, plan.rounds)
            pairs = list(enumerate(zip(places[: len(spans)], places[len(spans) :], strict=True)))
            if state is None:
                _write_again(file, redo, plan.leaves, pairs)
            for index, (of_theta, of_momentum) in pairs:
                keys = plan.leaves[index], plan.leaves[len(spans) + index]
                new: _Pair | None = _copied(state, spans[index], keys)
                if new is None:
                    new = file.read(*of_theta), file.read(*of_momentum)
                    if _hashes(new) == keys:
                        continue
                    theta, momentum = (np.frombuffer(leaf, np.float32) for leaf in new)
                    with _damage(folder):
                        for planned in plan.rounds:
                            self.advance(theta, momentum, spans[index][0], planned, outputs.of(planned))
                        if _hashes(new) != keys:
                            raise ProtocolViolation("what is on the disk does not lead to the state of its plan")
                redo.write(0, new[0])
                redo.write(len(new[0]), new[1])
                redo.sync()
                file.write(of_theta[0], new[0])
                file.write(of_momentum[0], new[1])
                file.sync()


_EMPTY = digest(b"")
_Pair: TypeAlias = tuple[bytearray, bytearray]
"""A leaf of θ and the same one of m."""


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (RemoteError, UsageError) as error:
        reason = f"{folder} was half moved on to a later round, and cannot be completed: {error}"
        raise LocalError(reason, remedy="let `flockstep join` fetch the state from the others") from error


def _write_again(
    file: OpenFile, redo: OpenFile, leaves: Sequence[bytes], pairs: Sequence[tuple[int, tuple[tuple[int, int], ...]]]
) -> None:
    """Write the redo file's leaves over what they may have been half written to."""
    found: dict[int, _Pair] = {}
    hashes: dict[int, tuple[bytes, bytes]] = {}
    for index, (of_theta, of_momentum) in pairs:
        length = of_theta[1] - of_theta[0]
        if length not in found:
            found[length] = redo.read(0, length), redo.read(length, 2 * length)
            hashes[length] = _hashes(found[length])
        if hashes[length] == (leaves[index], leaves[len(pairs) + index]):
            file.write(of_theta[0], found[length][0])
            file.write(of_momentum[0], found[length][1])
    file.sync()


def _copied(state: tuple[Floats, Floats] | None, span: tuple[int, int], keys: tuple[bytes, bytes]) -> _Pair | None:
    """Copy a leaf of θ and of m; None if they are not those with these hashes (any more)."""
    if state is None:
        return None
    new = bytearray(merkle.leaf_bytes(state[0], *span)), bytearray(merkle.leaf_bytes(state[1], *span))
    return new if _hashes(new) == keys else None


def _hashes(leaves: _Pair) -> tuple[bytes, bytes]:
    return digest(leaves[0]), digest(leaves[1])


class _Outputs:
    """The outputs of planned rounds, memory-mapped: an outer step of one leaf needs a small part of each."""

    def __init__(self, folder: Path, rounds: Sequence[PlannedRound]) -> None:
        found = outputs_in(folder)
        self._rounds = rounds
        self._blobs = {_EMPTY: FileBlob(folder, 0, 0)}
        for planned in rounds:
            self._blobs |= found.get(planned.round, {})
        self._maps: dict[Path, memoryview] = {}

    @property
    def complete(self) -> bool:
        """Whether all are here, by their names and lengths. Raises `OSError`."""
        keys = {key for planned in self._rounds for key in planned.outputs}
        blobs = [self._blobs[key] for key in keys if key in self._blobs]
        return len(blobs) == len(keys) and all(
            not blob.size or blob.path.stat().st_size >= blob.start + blob.size for blob in blobs
        )

    def of(self, planned: PlannedRound) -> list[Encoded]:
        """Return the outputs of a round, by part. Raises `OSError`; a damaged one is found by what it leads to."""
        return [self._mapped(self._blobs[key]) if key in self._blobs else b"" for key in planned.outputs]

    def _mapped(self, blob: FileBlob) -> Encoded:
        if not blob.size:
            return b""
        if blob.path not in self._maps:
            with blob.path.open("rb") as file:
                self._maps[blob.path] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[blob.path][blob.start : blob.start + blob.size]
