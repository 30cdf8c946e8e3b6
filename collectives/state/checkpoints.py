"""A peer's checkpoint: written in the background, restored on restart, served to newcomers.

Theory of operation. At fixed rounds, the same on all peers, the newest state is written as a draft beside the checkpoint,
while training goes on: each leaf is copied from memory, and its hash compared with the certified one, before it is written.
The complete draft is renamed (atomic commit), then the older checkpoint is deleted. So the disk holds the state twice while
one is written, and a kill at any moment leaves the one or the other. If a round is applied in between, the draft is void, and
the next round's state is written instead.

One checkpoint is kept, for newcomers to take: all members have the same one, and it does not change while so many rounds
pass. A newcomer that has not fetched all of it by then begins with the next one. A state has 64 bits a parameter; a peer that
cannot fetch it during ten rounds of 4.25 bits each way could not take part in these.

A failing disk costs a peer the checkpoint; an event gives the reason, and training goes on.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

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
from .checkpoint_file import DRAFT_SUFFIX, STATE, Checkpoint, Draft, TensorAt, load_checkpoint


class Checkpoints:
    """One run's checkpoint in `folder`, served to any peer that asks this node."""

    def __init__(
        self, node: Node, spec: Spec, folder: Path, tensors: Sequence[TensorAt], every: int, outputs: Outputs
    ) -> None:
        self._node = node
        self._spec = spec
        self._folder = folder
        self._tensors = tuple(tensors)
        self._every = every
        self._outputs = outputs
        self._size = spec.num_cells * CELL
        self._kept: Checkpoint | None = None
        self._lock = threading.Lock()
        """Held while a checkpoint takes the place of another one."""
        self._owed = True
        """True if the next state must be written at any round: the first one, or the one after a void draft."""
        self._writing = False
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

    def begin(self, place: ChainPosition) -> Draft | None:
        """Open a draft for a state; it may hold leaves of an earlier attempt, of which those at other states are deleted.

        None if that state is kept already, or if the disk fails, which is an event. Thread-safe.
        """
        if (kept := self._kept) is not None and kept.place.root == place.root:
            return None
        folder = self._folder / str(place.round)
        with self._lock:
            for path in self._folder.glob("*" + DRAFT_SUFFIX):
                if path != Draft.path(folder):
                    self._remove(path)
        try:
            draft = Draft(folder, self._size)
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
        """Make a draft of a damaged checkpoint: its good leaves need not be fetched."""
        draft = Draft.path(folder)
        if not draft.exists() and (folder / STATE).exists():
            try:
                rename(folder, draft)
            except LocalError as error:
                self._node.telemetry.emit("checkpoint.not_removed", step="load", reason=str(error))

    def _write(self, place: ChainPosition, state: tuple[Floats, Floats], leaves: Sequence[bytes]) -> None:
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

    def _written(self, place: ChainPosition) -> None:
        num_bytes = 8 * self._size
        self._node.telemetry.emit("checkpoint.written", round=place.round, root=place.root.hex(), bytes=num_bytes)

    def _keep(self, checkpoint: Checkpoint) -> None:
        """Serve this one and no other, and keep the outputs that lead on from it."""
        before = set(self._kept.leaves) if self._kept is not None else set()
        self._kept = checkpoint
        self._outputs.needed = checkpoint.place.round + 1
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
