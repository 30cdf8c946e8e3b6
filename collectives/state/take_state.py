"""Install a state in (θ, m) and on disk; only leaves that are not here already are fetched."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ...peer.base.digest import digest
from ...peer.base.errors import LocalError, ProtocolViolation
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ..chain.chain import ChainPosition, start_of_run
from ..vector.arrays import Floats
from . import merkle
from .checkpoint_file import Draft, leaf_places
from .checkpoints import Checkpoints
from .transfer import Offer, Transfer, ask_leaves


async def take_state(
    node: Node, checkpoints: Checkpoints, offer: Offer, leaves: Sequence[bytes], state: tuple[Floats, Floats]
) -> int:
    """Overwrite (θ, m) with the offered state, which has these leaf hashes; returns the number of bytes fetched.

    A checkpoint of it is completed in the background. Raises `NetworkError` if nobody provides a missing leaf, and
    `RemoteError` for leaves of another model: the vectors may then hold a mixture, and must be taken again.
    """
    target = _Target(node, checkpoints, offer.place, leaves, state)
    try:
        missing = await node.compute(target.gather)
        transfer = Transfer(node, missing, 4 * sum(vector.size for vector in state), offer.providers, target.put)
        await transfer.run()
    except BaseException:
        target.close()
        raise
    node.nursery.start_soon(node.compute, target.finish)
    return transfer.num_bytes


async def fetch_start(node: Node, run: str, offer: Offer, size: int, following: str, folder: Path) -> None:
    """Write the state that members of a run offer, of `size` elements per vector, as the start of a `following` run.

    Leaves of an earlier attempt are not fetched again. Raises `NetworkError`, `ProtocolViolation`, `LocalError`.
    """
    leaves = await ask_leaves(node, offer, run)
    lengths = [stop - start for start, stop in islice(leaf_places(size), len(leaves) + 1)]
    if sum(lengths) != 8 * size or len(lengths) != len(leaves):
        raise ProtocolViolation(f"a state of {len(leaves)} leaves, which are not those of {size:,} elements")
    places = dict[bytes, list[int]]()
    for index, key in enumerate(leaves):
        places.setdefault(key, []).append(index)
    draft = Draft(folder, size)
    try:
        kept = await node.compute(lambda: {key for index, key in enumerate(leaves) if digest(draft.leaf(index)) == key})
        missing = {key: lengths[found[0]] for key, found in places.items() if key not in kept}

        async def put(key: bytes, data: bytearray) -> None:
            for index in places[key]:
                await node.compute(draft.put, index, data)

        await Transfer(node, missing, 8 * size, offer.providers, put).run()
        await node.compute(draft.finish, following, start_of_run(offer.place.root), (), leaves)
    finally:
        draft.close()


class _Target:
    """The destination of one state's leaves: the vectors, and a draft unless the disk fails."""

    def __init__(
        self,
        node: Node,
        checkpoints: Checkpoints,
        place: ChainPosition,
        leaves: Sequence[bytes],
        state: tuple[Floats, Floats],
    ) -> None:
        self._node = node
        self._checkpoints = checkpoints
        self._place = place
        self._leaves = leaves
        self._spans = [(vector, start, stop) for vector in state for start, stop in merkle.leaf_spans(vector.size)]
        if len(leaves) != len(self._spans):
            raise ProtocolViolation(f"a state of {len(leaves)} leaves where the model has {len(self._spans)}")
        self._sizes: dict[bytes, int] = {}
        """The bytes of each leaf, by its hash."""
        for key, span in zip(leaves, self._spans, strict=True):
            size = len(merkle.leaf_bytes(*span))
            if self._sizes.setdefault(key, size) != size:
                raise ProtocolViolation("a state with one hash for leaves of two lengths")
        self._wanted: dict[bytes, list[int]] = {}
        self._draft: Draft | None = None

    def gather(self) -> dict[bytes, int]:
        """Reuse the leaves that are here already; returns the missing ones, by hash, with their sizes in bytes."""
        self._draft = self._checkpoints.begin(self._place)
        for index, key in enumerate(self._leaves):
            own = merkle.leaf_bytes(*self._spans[index])
            if digest(own) == key:
                self._write_draft(index, own)
            elif (found := self._find(index, key)) is not None:
                own[:] = found
                self._write_draft(index, found)
            else:
                self._wanted.setdefault(key, []).append(index)
        return {key: self._sizes[key] for key in self._wanted}

    async def put(self, key: bytes, data: bytearray) -> None:
        """Install a leaf that has arrived."""
        for index in self._wanted[key]:
            merkle.leaf_bytes(*self._spans[index])[:] = data
            await self._node.compute(self._write_draft, index, data)

    def finish(self) -> None:
        """Commit the draft, now that all leaves are here."""
        if self._draft is not None:
            self._checkpoints.finish(self._draft, self._place, self._leaves)

    def close(self) -> None:
        """Close the draft; it stays for the next attempt."""
        if self._draft is not None:
            self._draft.close()

    def _find(self, index: int, key: bytes) -> Blob | None:
        """Find a leaf in the draft of an earlier attempt, or in a checkpoint of mine; None if neither has it.

        A start state has no certificate: its leaves may have the hashes of whatever else I serve.
        """
        try:
            drafted = self._draft.leaf(index) if self._draft is not None else b""
        except LocalError as error:
            self._lose_disk(error)
            drafted = b""
        found = drafted if digest(drafted) == key else self._node.blobs.get(key, self._node.peer_id)
        return found if found is not None and len(found) == self._sizes[key] else None

    def _write_draft(self, index: int, data: Blob) -> None:
        """Write a leaf into the draft, unless it is there."""
        try:
            if self._draft is not None and self._draft.leaf(index) != data:
                self._draft.put(index, data)
        except LocalError as error:
            self._lose_disk(error)

    def _lose_disk(self, error: LocalError) -> None:
        if self._draft is not None:
            self._checkpoints.failed(self._draft, self._place.round, error)
            self._draft = None
