"""How long a run's state is, for a keeper, which builds no model: from my disk, from certificates, or as members state it.

A certificate names the bounds of its parts, so any certified round proves the size. Before the first one there is only
what the members say that train: most of them decide, as they do on the start state itself. Where the manifest pins a layout
no other length is taken, whoever states or proves it; nobody is charged for one.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from ...collectives.chain.certificate import check_right_to_vote, value_of
from ...collectives.chain.chain import NOTHING, ChainLink, Head, position_after
from ...collectives.chain.fork_choice import head_of, is_keeper, training
from ...collectives.chain.replay import ask_certificates
from ...collectives.state import merkle
from ...collectives.state.checkpoint_file import TensorAt, shape_of_checkpoint
from ...collectives.vector.codec import CELL
from ...dht.members.table import Member
from ...dht.run.admission import Charter
from ...dht.run.layout import LayoutPin
from ...peer import wire
from ...peer.base.errors import LocalError, NetworkError, RemoteError, UsageError
from ...peer.node.node import Node

MAX_STATE_CELLS = 10_000 * merkle.LEAF_ELEMENTS // CELL
"""A state of more has more leaves than one message can list (`wire.Leaves`)."""
OTHER_STATE = "keep the run from another --home, or with --no-resume"
HEADS_ASKED = 4
"""Heads whose certificate is asked for at a time, those that most members state first."""

ASKED_AT_ONCE = 16
"""Members that are asked for the certificate of one head: some 20 kB of each. A key without a vote may state any head."""


def kept_size(
    folder: Path, charter: Charter, pinned: LayoutPin | None = None
) -> tuple[int, tuple[TensorAt, ...]] | None:
    """Return the cells and the tensors of the newest checkpoint in a run's folder; None if there is none.

    A damaged one is passed over here; the event comes when the archive is opened. Raises `UsageError` for a checkpoint of
    another layout than the manifest pins, as a peer that trains does for such a model.
    """
    folders = [path for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
    for path in sorted(folders, key=lambda path: int(path.name), reverse=True):
        try:
            size, tensors = shape_of_checkpoint(path, charter=charter)
        except LocalError:
            continue
        if size and size % CELL == 0:
            if tensors:  # Else a keeper has written it, which knows its length alone.
                LayoutPin.of((tensor.name, tensor.shape) for tensor in tensors).check(pinned, f"the state in {path}")
            if why_not := charter.why_not_cells(size // CELL):
                raise UsageError(f"{path}: {why_not}", remedy=OTHER_STATE)
            return size // CELL, tensors
    return None


async def size_from_members(node: Node, run: str, members: Sequence[Member], charter: Charter) -> int:
    """Return the cells of the run's state, as a certificate proves it, else as most members state it; 0 if nobody does.

    A member that does not answer is an event; one that shows a false certificate is charged.
    """
    here = [member for member in training(members) if member.peer != node.peer_id]
    stated = Counter(head_of(member) for member in here)
    for head, _ in sorted(stated.items(), key=lambda item: (-item[1], item[0].hash))[:HEADS_ASKED]:
        if head == NOTHING:
            continue
        if cells := await _first_proven(node, run, [member for member in here if head_of(member) == head], head, charter):
            return cells
    sizes = Counter(it.body.num_cells for it in here if 0 < it.body.num_cells <= MAX_STATE_CELLS and not is_keeper(it))
    return min(sizes, key=lambda cells: (-sizes[cells], cells), default=0)


async def _first_proven(node: Node, run: str, members: Sequence[Member], head: Head, charter: Charter) -> int:
    """Return the cells that the first of these members proves, 0 if none does. Silent ones do not hold up the others."""
    proven, turns = 0, trio.CapacityLimiter(ASKED_AT_ONCE)

    async def ask(member: Member) -> None:
        nonlocal proven
        async with turns:
            cells = await _proven_size(node, run, member, head, charter)
        if 0 < cells <= MAX_STATE_CELLS:
            proven = cells
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(ask, member)
    return proven


async def _proven_size(node: Node, run: str, member: Member, head: Head, charter: Charter) -> int:
    try:
        page = await ask_certificates(node, member.peer, wire.LedgerAsk(run, max(1, head.round), 1))
        if not page or ChainLink.of(page[0]).head != head:
            raise NetworkError(f"it states round {head.round}, but does not provide its certificate")
        await node.compute(partial(position_after, page[0], run, charter))
        check_right_to_vote(page[0], charter)
        if why_not := charter.why_not_cells(cells := value_of(page[0]).bounds[-1]):
            raise NetworkError(why_not)
        return cells
    except NetworkError as error:
        node.telemetry.emit("head.unproven", peer=member.peer, step="size", reason=str(error), round=head.round)
    except RemoteError as error:
        node.charge(member.peer, "prove the size of the state", error)
    return 0
