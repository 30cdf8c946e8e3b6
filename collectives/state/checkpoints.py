"""A peer's checkpoint: written in the background, restored on restart, served to newcomers.

Theory of operation. At fixed rounds, the same on all peers, the checkpoint is moved on to the newest state, leaf by leaf in
its place, while training goes on (see `move`). A leaf that a later round has changed in memory meanwhile is computed from
the one on the disk. The first checkpoint, and one to which the rounds on the disk do not lead, is written as a draft, from
memory alone: each leaf is copied, and its hash compared with the certified one, before it is written. If a round was applied
in between, that draft is void, and the next round's state is written instead.

One checkpoint is kept, for newcomers to take: all members have the same one, and it does not change while so many rounds
pass. It is not offered while it moves. A newcomer that has not fetched all of it by then begins with the next one. A state
has 64 bits a parameter; a peer that cannot fetch it during ten rounds of 4.25 bits each way could not take part in these.

A failing disk costs a peer the checkpoint; an event gives the reason, and training goes on.
"""

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.disk import rename
from ...peer.base.errors import LocalError, NetworkError
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..chain.chain import ChainPosition, StatedPosition
from ..chain.kept_outputs import Outputs
from ..chain.ledger import Ledger
from ..chain.packed import pack_certificate
from ..spec import Spec
from ..vector.arrays import Floats
from ..vector.codec import CELL
from . import merkle
from .checkpoint_file import STATE, Checkpoint, Draft, TensorAt, load_checkpoint
from .move import Advance, Mover, is_moving, rounds_between

OFFER_PATIENCE = 5.0
"""Seconds that an answer waits for the end of a write: half of the time in which it must come (`transfer`)."""


@dataclass(frozen=True, slots=True)
class History:
    """The earlier rounds on a peer's disk, and the arithmetic that leads over them from state to state."""

    ledger: Ledger
    outputs: Outputs
    advance: Advance


class Checkpoints:
    """One run's checkpoint in `folder`, served to any peer that asks this node."""

    def __init__(
        self, node: Node, spec: Spec, folder: Path, tensors: Sequence[TensorAt], every: int, history: History
    ) -> None:
        self._node = node
        self._spec = spec
        self._folder = folder
        self._tensors = tuple(tensors)
        self._every = every
        self._history = history
        self._size = spec.num_cells * CELL
        self._kept: Checkpoint | None = None
        self._lock = threading.Lock()
        """Held while a checkpoint is moved on or takes the place of another one: each ends before the next begins."""
        self._owed = True
        """True if the next state must be written at any round: the first one, or the one after a void draft."""
        self._writing = False
        self._over = trio.Event()
        """Set at the end of the write that is going on."""
        node.on_ask(wire.StateAsk, self._offer)
        node.on_ask(wire.LeavesAsk, self._send_leaves)

    async def load(self) -> None:
        """Restore the checkpoint of an earlier process; a damaged one is an event and is not used."""
        await self._node.compute(self._load)
        self._owed = self._kept is None

    @property
    def kept(self) -> int:
        """The round of the checkpoint; -1 if there is none."""
        return -1 if (checkpoint := self._kept) is None else checkpoint.place.round

    def newest(self, ledger: Ledger) -> Checkpoint | None:
        """Return the checkpoint, if it is on a ledger's chain, or of a later round; None if there is none."""
        if (checkpoint := self._kept) is None:
            return None
        head = checkpoint.place.head
        follows = head.round == 0 or ledger.at(head.round) == head or head.round > ledger.head.round
        return checkpoint if follows else None

    async def write(
        self, place: ChainPosition, state: tuple[Floats, Floats], leaves: Sequence[bytes], last: bool = False
    ) -> None:
        """Write the state at `place`, with these leaf hashes, if a checkpoint is due, or if it is the run's `last`."""
        if place.round % self._every and not self._owed and not last:
            return
        if self._writing:
            self._owed = True
            return
        self._writing = True
        try:
            await self._node.compute(self._write, place, state, tuple(leaves))
        finally:
            self._writing = False
            self._over.set()
            self._over = trio.Event()

    def begin(self, place: ChainPosition) -> Draft | None:
        """Open a draft for a state; it may hold leaves of an earlier attempt. None if that state is kept already.

        Also None if the disk fails, which is an event. Thread-safe.
        """
        if (kept := self._kept) is not None and kept.place.root == place.root:
            return None
        try:
            draft = Draft(self._folder / str(place.round), self._size)
        except LocalError as error:
            self.failed(None, place.round, error)
            return None
        self._owed = False
        return draft

    def drafted(self, round_: int) -> bool:
        """Return True if a draft of that round's state is left from an earlier attempt."""
        return Draft.path(self._folder / str(round_)).exists()

    def finish(self, draft: Draft, place: ChainPosition, leaves: Sequence[bytes]) -> None:
        """Commit and keep a draft whose leaves are all right. Thread-safe."""
        with self._lock:
            if (kept := self._kept) is not None and kept.place.root == place.root:
                draft.close()  # Who took the state and who settled on it had the same draft open.
                return
            try:
                checkpoint = draft.finish(self._spec.run, place, self._tensors, leaves)
            except LocalError as error:
                self.failed(draft, place.round, error)
                return
            self._keep(checkpoint)
            self._written(place)
            self._prune()

    def failed(self, draft: Draft | None, round_: int, error: LocalError) -> None:
        """Give up a checkpoint that the disk failed to take."""
        self._owed = False  # Retry at the next due round, not at every one: the disk may stay full.
        self._node.telemetry.emit("checkpoint.unwritten", step="write", reason=str(error), round=round_)
        if draft is not None:
            draft.discard()

    def _load(self) -> None:
        folders = [path for path in self._folder.glob("*") if path.name.isdecimal()]
        for folder in sorted(folders, key=lambda path: int(path.name), reverse=True):
            try:
                if is_moving(folder):
                    folder = self._completed(folder).folder
                checkpoint = load_checkpoint(folder, charter=self._spec.charter)
                # A keeper writes the names of no tensors.
                same = not checkpoint.tensors or _shapes(checkpoint.tensors) == _shapes(self._tensors)
                if (checkpoint.run, checkpoint.size) != (self._spec.run, self._size) or not same:
                    raise LocalError(f"{folder} is a checkpoint of another run or another model")
            except LocalError as error:
                self._node.telemetry.emit("checkpoint.damaged", step="load", reason=str(error))
                self._set_aside(folder)
                continue
            self._keep(checkpoint)
            for older in folders:
                if older.exists() and int(older.name) < int(folder.name):  # A kill between two writes leaves both.
                    reason = f"that of round {checkpoint.place.round} is enough"
                    self._node.telemetry.emit("checkpoint.superseded", step="load", reason=reason, round=int(older.name))
                    self._remove(older)
            return

    def _set_aside(self, folder: Path) -> None:
        """Make a draft of a damaged checkpoint: its good leaves need not be fetched. A plan to complete it stays."""
        draft = Draft.path(folder)
        if not is_moving(folder) and not draft.exists() and (folder / STATE).exists():
            try:
                rename(folder, draft)
            except LocalError as error:
                self._node.telemetry.emit("checkpoint.not_removed", step="load", reason=str(error))

    def _write(self, place: ChainPosition, state: tuple[Floats, Floats], leaves: Sequence[bytes]) -> None:
        try:
            if self._move(place, state, leaves):
                return
        except LocalError as error:
            self.failed(None, place.round, error)
            return
        draft = self.begin(place)
        if draft is None:
            return
        spans = [(vector, start, stop) for vector in state for start, stop in merkle.leaf_spans(vector.size)]
        try:
            for index, (vector, start, stop) in enumerate(spans):
                data = bytes(merkle.leaf_bytes(vector, start, stop))
                if digest(data) != leaves[index]:
                    reason = "the state changed during the write: the next round's is written instead"
                    self._node.telemetry.emit("checkpoint.void", step="write", reason=reason, round=place.round)
                    draft.discard()
                    self._owed = True
                    return
                draft.put(index, data)
        except LocalError as error:
            self.failed(draft, place.round, error)
            return
        self.finish(draft, place, leaves)

    def _move(self, place: ChainPosition, state: tuple[Floats, Floats], leaves: Sequence[bytes]) -> bool:
        """Move the checkpoint on to a state. Returns False if nothing on the disk leads there. Raises `LocalError`."""
        with self._lock:
            if self._kept is None:
                self._take_up()
            kept, mover = self._kept, self._mover()
            rounds = rounds_between(self._history.ledger, kept.place, place) if kept is not None else None
            if kept is None or mover is None or rounds is None or not mover.begin(kept, place, leaves, rounds):
                return False
            self._keep(None)
            self._keep(mover.complete(kept.folder, state))
            self._written(place)
            self._prune()
        self._owed = False
        return True

    def _take_up(self) -> None:
        """Complete the checkpoint that the disk failed to move on before, if there is one."""
        for folder in self._folder.glob("*"):
            if folder.name.isdecimal() and is_moving(folder):
                try:
                    self._keep(self._completed(folder))
                except LocalError as error:
                    self._node.telemetry.emit("checkpoint.damaged", step="write", reason=str(error))

    def _mover(self) -> Mover | None:
        outputs = self._history.outputs.folder
        return None if outputs is None else Mover(outputs, self._history.advance, charter=self._spec.charter)

    def _completed(self, folder: Path) -> Checkpoint:
        """Complete a checkpoint that was left half moved on. Raises `LocalError`."""
        mover = self._mover()
        if mover is None:
            raise LocalError(f"{folder} was half moved on, and no outputs are kept here")
        checkpoint = mover.complete(folder)
        reason = "the process ended, or the disk failed, while it was moved on"
        self._node.telemetry.emit("checkpoint.completed", step="load", reason=reason, round=checkpoint.place.round)
        return checkpoint

    def _written(self, place: ChainPosition) -> None:
        num_bytes = 8 * self._size
        self._node.telemetry.emit("checkpoint.written", round=place.round, root=place.root.hex(), bytes=num_bytes)

    def _keep(self, checkpoint: Checkpoint | None) -> None:
        """Serve this one and no other, and keep the outputs that lead on from it."""
        before = set(self._kept.leaves) if self._kept is not None else set()
        self._kept = checkpoint
        if checkpoint is not None:
            self._history.outputs.needed = checkpoint.place.round + 1
            for key, blob in checkpoint.blobs():
                self._node.blobs.put(key, blob)
                before.discard(key)
        self._node.blobs.drop(before)

    def _prune(self) -> None:
        """Delete everything in the folder but the kept checkpoint."""
        kept = self._kept.folder if self._kept is not None else None
        for path in self._folder.iterdir():
            if path != kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except OSError as error:
            self._node.telemetry.emit("checkpoint.not_removed", step="prune", reason=str(error))

    async def _offer(self, peer: PeerId, question: wire.StateAsk) -> wire.StateOffer:
        self._check_run(question.run)
        with trio.move_on_after(OFFER_PATIENCE):
            while self._kept is None and self._writing:
                await self._over.wait()
        return wire.StateOffer(() if (kept := self._kept) is None else (_stated(kept.place),))

    async def _send_leaves(self, peer: PeerId, question: wire.LeavesAsk) -> wire.Leaves:
        self._check_run(question.run)
        if (kept := self._kept) is not None and kept.place.root == question.root:
            return wire.Leaves(kept.leaves)
        raise NetworkError("it keeps this checkpoint no longer")

    def _check_run(self, run: str) -> None:
        if run != self._spec.run:
            raise NetworkError("this peer takes part in another run")


def _shapes(tensors: Sequence[TensorAt]) -> list[tuple[str, tuple[int, ...], int]]:
    """Return what must be equal for a state to fit; not the dtype, since the state is always float32."""
    return [(tensor.name, tensor.shape, tensor.offset) for tensor in tensors]


def _stated(place: ChainPosition) -> StatedPosition:
    return place.round, place.root, b"" if place.certificate is None else pack_certificate(place.certificate)
