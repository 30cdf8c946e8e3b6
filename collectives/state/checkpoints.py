"""A peer's checkpoints: written in the background, restored on restart, served to newcomers.

Theory of operation. At fixed rounds, the same on all peers, the state is written leaf by leaf while training goes on.
The trainer may change θ and m during the write, so each leaf is copied, and its hash compared with the certified one,
before it is written. If a round was applied in between, the draft is void, and the next round's state is written
instead. The newest two are kept, for newcomers to take: a checkpoint does not change while rounds pass, all members
have the same one, and two of them outlast any feasible transfer. A state has 64 bits a parameter; a peer that cannot
fetch it during 2 x 10 rounds of 4.25 bits each could not take part in these rounds either.

A failing disk costs a peer the checkpoint; an event gives the reason, and training goes on.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from ...peer import wire
from ...peer.arrays import Floats
from ...peer.digest import digest
from ...peer.errors import LocalError, NetworkError
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..chain.chain import ChainPosition, StatedPosition
from ..chain.ledger import Ledger
from ..chain.packed import pack_certificate
from ..codec import CELL
from ..spec import Spec
from . import merkle
from .checkpoint_file import Checkpoint, Draft, TensorAt, load_checkpoint

NUM_KEPT = 2


class Checkpoints:
    """One run's checkpoints in `folder`, served to any peer that asks this node."""

    def __init__(self, node: Node, spec: Spec, folder: Path, tensors: Sequence[TensorAt], every: int) -> None:
        self._node = node
        self._spec = spec
        self._folder = folder
        self._tensors = tuple(tensors)
        self._every = every
        self._size = spec.num_cells * CELL
        self._kept: tuple[Checkpoint, ...] = ()
        self._owed = True
        """True if the next state must be written at any round: the first one, or the one after a void draft."""
        self._writing = False
        node.on_ask(wire.StateAsk, self._offer)
        node.on_ask(wire.LeavesAsk, self._send_leaves)

    async def load(self) -> None:
        """Restore the checkpoints of an earlier process; damaged ones are events and are not used."""
        self._keep(await self._node.compute(self._load))
        self._owed = not self._kept

    @property
    def kept(self) -> int:
        """The round of the newest checkpoint; -1 if there is none."""
        return max((checkpoint.place.round for checkpoint in self._kept), default=-1)

    def newest(self, ledger: Ledger) -> Checkpoint | None:
        """Return the newest checkpoint on a ledger's chain, or of a later round; None if there is none."""
        for checkpoint in reversed(self._kept):
            head = checkpoint.place.head
            if head.round == 0 or ledger.at(head.round) == head or head.round > ledger.head.round:
                return checkpoint
        return None

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
        """Open a draft for a state; it may hold leaves of an earlier attempt. None if that state is kept already.

        Also None if the disk fails, which is an event. Thread-safe.
        """
        if any(kept.place.root == place.root for kept in self._kept):
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
        try:
            checkpoint = draft.finish(self._spec.run, place, self._tensors, leaves)
        except LocalError as error:
            self.failed(draft, place.round, error)
            return
        older = [kept for kept in self._kept if kept.place.round < place.round]
        self._keep([*older[1 - NUM_KEPT :], checkpoint])
        num_bytes = 8 * self._size
        self._node.telemetry.emit("checkpoint.written", round=place.round, root=place.root.hex(), bytes=num_bytes)
        self._prune()

    def failed(self, draft: Draft | None, round_: int, error: LocalError) -> None:
        """Give up a checkpoint that the disk failed to take."""
        self._owed = False  # Retry at the next due round, not at every one: the disk may stay full.
        self._node.telemetry.emit("checkpoint.unwritten", step="write", reason=str(error), round=round_)
        if draft is not None:
            draft.discard()

    def _load(self) -> list[Checkpoint]:
        found: list[Checkpoint] = []
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
                continue
            found.append(checkpoint)
            if len(found) == NUM_KEPT:
                break
        return sorted(found, key=lambda checkpoint: checkpoint.place.round)

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

    def _keep(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Serve these and no others."""
        before = {key for checkpoint in self._kept for key in checkpoint.leaves}
        self._kept = tuple(checkpoints)
        for checkpoint in checkpoints:
            for key, blob in checkpoint.blobs():
                self._node.blobs.put(key, blob)
                before.discard(key)
        self._node.blobs.drop(before)

    def _prune(self) -> None:
        """Delete everything in the folder but the kept checkpoints."""
        kept = {checkpoint.folder for checkpoint in self._kept}
        try:
            for path in self._folder.iterdir():
                if path not in kept:
                    shutil.rmtree(path)
        except OSError as error:
            self._node.telemetry.emit("checkpoint.not_removed", step="prune", reason=str(error))

    async def _offer(self, peer: PeerId, question: wire.StateAsk) -> wire.StateOffer:
        self._check_run(question.run)
        return wire.StateOffer(tuple(_stated(checkpoint.place) for checkpoint in self._kept))

    async def _send_leaves(self, peer: PeerId, question: wire.LeavesAsk) -> wire.Leaves:
        self._check_run(question.run)
        for checkpoint in self._kept:
            if checkpoint.place.root == question.root:
                return wire.Leaves(checkpoint.leaves)
        raise NetworkError("it keeps this checkpoint no longer")

    def _check_run(self, run: str) -> None:
        if run != self._spec.run:
            raise NetworkError("this peer takes part in another run")


def _shapes(tensors: Sequence[TensorAt]) -> list[tuple[str, tuple[int, ...], int]]:
    """Return what must be equal for a state to fit; not the dtype, since the state is always float32."""
    return [(tensor.name, tensor.shape, tensor.offset) for tensor in tensors]


def _stated(place: ChainPosition) -> StatedPosition:
    return place.round, place.root, b"" if place.certificate is None else pack_certificate(place.certificate)
