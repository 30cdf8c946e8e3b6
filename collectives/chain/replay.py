"""Catching up by certificates: the chain that others hold, and the outputs of the rounds that I missed, by their hashes.

Theory of operation. What a round did is in its certificate and in the encoded outputs that it names: whoever holds the
state before it and both of these can make the same outer step, and knows from the state root that it did. So every peer
keeps the outputs of its last rounds (`outputs`), whoever asks gets certificates from its ledger (`serve_ledger`), and a
peer that missed a few rounds fetches these instead of a state: at int4 a round has a sixteenth of the state's bytes.
Everything is named by hashes under a quorum's signatures, so anybody may be asked for it, and the asker spreads its
questions over all who should have it. What is missing is no fault: the asker then takes the state (`transfer`).
"""

from collections.abc import Iterable, Sequence

import trio

from ...peer import wire
from ...peer.digest import keyed
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ...peer.wire.framing import MAX_FRAME_BYTES
from ..codec import Codec
from ..partition import check_bounds
from ..round.actions import EMPTY
from .chain import Link
from .ledger import Ledger
from .packed import unpack

MAX_TRAIL = 256
"""Certificates fetched to join another chain to mine; beyond that mine begins anew with the state that I take."""
PAGE_BYTES = MAX_FRAME_BYTES - 4_096
"""Of one answer: a frame, less what is around the certificates."""
FETCHES_AT_ONCE = 4
ANSWER_SECONDS = 10.0
STALL_SECONDS = 20.0
"""Without a byte of an output: as in `transfer`."""


def serve_ledger(node: Node, run: str, ledger: Ledger) -> None:
    """Answer whoever asks this node for certificates."""

    async def answer(peer: PeerId, question: wire.LedgerAsk) -> wire.LedgerPage:
        if question.run != run:
            raise NetworkError("this peer takes part in another run")
        page = await node.compute(lambda: ledger.since(question.from_round, question.limit, max_bytes=PAGE_BYTES))
        return wire.LedgerPage(page)

    node.on_ask(wire.LedgerAsk, answer)


async def ask_certificates(node: Node, peer: PeerId, question: wire.LedgerAsk) -> list[wire.Certificate]:
    """Up to `limit` certificates, unchecked but for their rounds. Raises `NetworkError`, or `RemoteError` for nonsense."""
    answer = await node.ask(peer, question, timeout=ANSWER_SECONDS)
    if not isinstance(answer, wire.LedgerPage):
        raise ProtocolViolation(f"{type(answer).__name__} in answer to LedgerAsk")
    certificates = [unpack(data) for data in answer.certificates]
    rounds = [certificate.slot.round for certificate in certificates]
    if rounds != list(range(question.from_round, question.from_round + len(rounds))) or len(rounds) > question.limit:
        raise ProtocolViolation("a page of other certificates than those that were asked for")
    return certificates


async def ask_range(node: Node, peer: PeerId, run: str, rounds: range) -> list[wire.Certificate]:
    """The certificates of all of these rounds, unchecked but for their rounds, page by page. Raises as above."""
    found: list[wire.Certificate] = []
    while len(found) < len(rounds):
        left = rounds[len(found) :]
        page = await ask_certificates(node, peer, wire.LedgerAsk(run, left.start, min(wire.MAX_PAGE, len(left))))
        if not page:
            raise NetworkError(f"its ledger has {len(found)} of the {len(rounds)} rounds from {rounds.start} on")
        found += page
    return found


async def fetch_trail(
    node: Node, giver: PeerId, run: str, ledger: Ledger, certificate: wire.Certificate
) -> list[wire.Certificate]:
    """A certificate, which was checked, behind those before it, unchecked, as far back as it takes to join my ledger.

    Shorter where the giver has no more of them; alone where it would take more than `MAX_TRAIL`.
    """
    trail = [certificate]
    if certificate.slot.round - ledger.head.round > MAX_TRAIL:
        return trail
    while not await node.compute(ledger.joins, trail[0]) and len(trail) < min(MAX_TRAIL, certificate.slot.round):
        end = trail[0].slot.round
        begin = max(1, end - wire.MAX_PAGE)
        try:
            page = await ask_certificates(node, giver, wire.LedgerAsk(run, begin, end - begin))
            if len(page) != end - begin or Link.of(page[-1]).head.hash != Link.of(trail[0]).previous:
                raise NetworkError(f"its ledger has not all of rounds {begin} to {end - 1}")
        except (NetworkError, RemoteError) as error:
            if isinstance(error, RemoteError):
                node.charge(giver, "fetch certificates", error)
            node.telemetry.emit("ledger.trail_ends", peer=giver, step="fetch certificates", reason=str(error))
            break
        trail = page + trail
    return trail


def in_my_order(me: PeerId, holders: Iterable[PeerId]) -> list[PeerId]:
    """Whom I ask first, and whom next: another order for every peer, so that a thousand followers do not all ask one."""
    return sorted(holders, key=lambda peer: keyed("order of asking", me.encode(), peer.encode()))


async def fetch_outputs(
    node: Node, codec: Codec, num_cells: int, certified: tuple[wire.Roster, wire.ResultAck], holders: Sequence[PeerId]
) -> dict[bytes, Blob]:
    """All outputs of a certified round by hash, from whoever has them.

    Raises `NetworkError` where one cannot be had, `RemoteError` where the certificate names what cannot be outputs.
    """
    roster, result = certified
    check_bounds(roster.bounds, len(roster.members), num_cells)
    if len(result.outputs) != len(roster.members):
        raise ProtocolViolation(f"{len(result.outputs)} outputs of {len(roster.members)} members")
    outputs: dict[bytes, Blob] = {EMPTY: b""}
    slots = trio.CapacityLimiter(FETCHES_AT_ONCE)

    async def fetch(part: int, cells: int) -> None:
        key = result.outputs[part]
        turn = part % max(1, len(holders))
        async with slots:
            data = await _from_anyone(node, key, codec.num_bytes(cells), (*holders[turn:], *holders[:turn]))
        codec.check(data, cells)
        outputs[key] = data

    async with trio.open_nursery() as nursery:
        for part, (low, high) in enumerate(zip(roster.bounds, roster.bounds[1:], strict=False)):
            if low < high:
                nursery.start_soon(fetch, part, high - low)
            elif result.outputs[part] != EMPTY:
                raise ProtocolViolation("an output of a part without cells")
    return outputs


async def _from_anyone(node: Node, key: bytes, size: int, holders: Iterable[PeerId]) -> Blob:
    own: Blob | None = await node.compute(node.blobs.get, key, node.peer_id)
    if own is not None:
        return own
    reasons: list[str] = []
    for peer in holders:
        try:
            return await node.fetch(peer, key, size, patience=STALL_SECONDS)
        except (NetworkError, RemoteError) as error:  # `node.fetch` has charged whoever served something else.
            reasons.append(f"{peer}: {error}")
    raise NetworkError(f"nobody has an output of a round that I missed ({'; '.join(reasons)})")
