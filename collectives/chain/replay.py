"""Log replay: fetch certificates and outputs of missed rounds, repeat the outer steps.

Theory of operation. A round is its certificate and the encoded outputs that the certificate names: a peer that holds
the state before it and both of these makes the same outer step, and verifies it by the state root. So every peer keeps
the outputs of its last rounds (`kept_outputs`) and serves the certificates of its ledger (`serve_ledger`). A peer that
missed a few rounds fetches these instead of a state: at int4 a round has a sixteenth of the state's bytes. All is
content-addressed under a quorum's signatures, so any peer may provide it, and requests are spread over all members that
should have it, and made again to another one where the first is slow. Missing data is no fault: the peer then takes the
state (`state.transfer`).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import trio

from ...peer import wire
from ...peer.digest import keyed
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ...peer.wire.framing import MAX_FRAME_BYTES
from ..codec import EMPTY, Codec
from ..partition import check_bounds
from .chain import ChainLink
from .ledger import Ledger
from .packed import unpack_certificate

MAX_TRAIL = 256
"""Certificates fetched to join another chain to mine; if there are more between, my ledger begins anew with the last."""
PAGE_BYTES = MAX_FRAME_BYTES - 4_096
"""The size of one answer: a frame, less what is around the certificates."""
FETCHES_AT_ONCE = 4
LEDGER_ANSWER_SECONDS = 10.0
OUTPUT_STALL_SECONDS = 20.0
"""The timeout without a byte of an output, as in `state.transfer`."""
HEDGE_SECONDS = 20.0
"""Seconds after which an output is fetched from another holder, too; twice as many for each that is overdue already, so
that a slow line carries few copies at a time. Those that serve a byte now and then cost that, and not the round."""


def serve_ledger(node: Node, run: str, ledger: Ledger) -> None:
    """Serve this node's certificates to any peer that asks."""

    async def answer(peer: PeerId, question: wire.LedgerAsk) -> wire.LedgerPage:
        if question.run != run:
            raise NetworkError("this peer takes part in another run")
        page = await node.compute(lambda: ledger.since(question.from_round, question.limit, max_bytes=PAGE_BYTES))
        return wire.LedgerPage(page)

    node.on_ask(wire.LedgerAsk, answer)


class Asker(Protocol):
    """Whatever asks peers: a node, or a light client that is none."""

    async def ask(self, peer: PeerId, message: object, *, timeout: float) -> Any:
        """Send a request to `peer` and return its answer. Raises `NetworkError` or `RemoteError`."""


async def ask_certificates(node: Asker, peer: PeerId, question: wire.LedgerAsk) -> list[wire.Certificate]:
    """Fetch up to `limit` certificates; only their rounds are checked. Raises `NetworkError` or `RemoteError`."""
    answer = await node.ask(peer, question, timeout=LEDGER_ANSWER_SECONDS)
    if not isinstance(answer, wire.LedgerPage):
        raise ProtocolViolation(f"{type(answer).__name__} in answer to LedgerAsk")
    certificates = [unpack_certificate(data) for data in answer.certificates]
    rounds = [certificate.slot.round for certificate in certificates]
    if rounds != list(range(question.from_round, question.from_round + len(rounds))) or len(rounds) > question.limit:
        raise ProtocolViolation("a page of other certificates than requested")
    return certificates


async def ask_range(node: Node, peer: PeerId, run: str, rounds: range) -> list[wire.Certificate]:
    """Fetch the certificates of all these rounds, page by page, as `ask_certificates` does. Raises the same."""
    found: list[wire.Certificate] = []
    while len(found) < len(rounds):
        left = rounds[len(found) :]
        page = await ask_certificates(node, peer, wire.LedgerAsk(run, left.start, min(wire.MAX_PAGE, len(left))))
        if not page:
            raise NetworkError(f"its ledger has {len(found)} of the {len(rounds)} rounds from {rounds.start} on")
        found += page
    return found


async def fetch_trail(
    node: Node, provider: PeerId, run: str, joins: Callable[[wire.Certificate], bool], certificate: wire.Certificate
) -> list[wire.Certificate]:
    """Fetch a trail: a validated certificate after its predecessors, not yet validated, back to one that `joins` mine.

    It has `MAX_TRAIL` certificates at most, and fewer if the provider has no more of them.
    """
    trail = [certificate]
    while not await node.compute(joins, trail[0]) and len(trail) < min(MAX_TRAIL, certificate.slot.round):
        end = trail[0].slot.round
        begin = max(1, end - wire.MAX_PAGE, certificate.slot.round + 1 - MAX_TRAIL)
        try:
            page = await ask_certificates(node, provider, wire.LedgerAsk(run, begin, end - begin))
            if len(page) != end - begin or ChainLink.of(page[-1]).head.hash != ChainLink.of(trail[0]).previous:
                raise NetworkError(f"its ledger lacks some of rounds {begin} to {end - 1}")
        except (NetworkError, RemoteError) as error:
            if isinstance(error, RemoteError):
                node.charge(provider, "fetch certificates", error)
            node.telemetry.emit("ledger.trail_ends", peer=provider, step="fetch certificates", reason=str(error))
            break
        trail = page + trail
    return trail


def in_my_order(me: PeerId, holders: Iterable[PeerId]) -> list[PeerId]:
    """Sort holders in my order of requests: another order for every peer, so that a thousand followers spread the load."""
    return sorted(holders, key=lambda peer: keyed("order of asking", me.encode(), peer.encode()))


async def fetch_outputs(
    node: Node,
    codec: Codec,
    cells: range,
    value: wire.Value,
    holders: Sequence[PeerId],
    voters: Collection[PeerId] = (),
) -> dict[bytes, Blob]:
    """Fetch all outputs of a certified round, which averaged these cells, by hash, from any of the holders.

    Holders among the `voters` of its certificate come first: they have confirmed that they hold it, and others are free keys.
    Raises `NetworkError` if one is not available, `RemoteError` if the certificate names what cannot be outputs.
    """
    check_bounds(value.bounds, len(value.members), cells)
    outputs: dict[bytes, Blob] = {EMPTY: b""}
    slots = trio.CapacityLimiter(FETCHES_AT_ONCE)

    async def fetch(part: int, num_cells: int) -> None:
        key = value.outputs[part]
        turn = part % max(1, len(holders))
        async with slots:
            order = sorted((*holders[turn:], *holders[:turn]), key=lambda peer: peer not in voters)
            data = await _from_anyone(node, key, codec.num_bytes(num_cells), order)
        codec.check(data, num_cells)
        outputs[key] = data

    async with trio.open_nursery() as nursery:
        for part, (low, high) in enumerate(zip(value.bounds, value.bounds[1:], strict=False)):
            if low < high:
                nursery.start_soon(fetch, part, high - low)
            elif value.outputs[part] != EMPTY:
                raise ProtocolViolation("an output of a part without cells")
    return outputs


async def _from_anyone(node: Node, key: bytes, size: int, holders: Iterable[PeerId]) -> Blob:
    own: Blob | None = await node.compute(node.blobs.get, key, node.peer_id)
    if own is not None:
        return own
    reasons: dict[PeerId, str] = {}
    found: list[Blob] = []
    began = trio.current_time()

    async def ask(peer: PeerId, ended: trio.Event) -> None:
        try:
            found.append(await node.fetch(peer, key, size, patience=OUTPUT_STALL_SECONDS))
            nursery.cancel_scope.cancel()
        except (NetworkError, RemoteError) as error:  # `node.fetch` has charged a peer that served other bytes.
            reasons[peer] = f"{peer}: {error}"
        ended.set()

    async with trio.open_nursery() as nursery:
        for turn, peer in enumerate(holders):
            nursery.start_soon(ask, peer, ended := trio.Event())
            with trio.move_on_after(HEDGE_SECONDS * (1 << (turn - len(reasons)))) as wait:
                await ended.wait()
            if wait.cancelled_caught:
                reason = f"an output has not come in {trio.current_time() - began:.0f} s; another holder is asked, too"
                node.telemetry.emit("fetch.retry", peer=peer, step="replay", reason=reason)
    if found:
        return found[0]
    raise NetworkError(f"no peer has an output of a round that I missed ({'; '.join(reasons.values())})")
