"""Log replay: fetch certificates and outputs of missed rounds, repeat the outer steps.

Theory of operation. A round is its certificate and the encoded outputs that the certificate names: a peer that holds
the state before it and both of these makes the same outer step, and verifies it by the state root. So every peer keeps
the outputs of its last rounds (`kept_outputs`) and serves the certificates of its ledger (`serve_ledger`). A peer that
missed a few rounds fetches these instead of a state: at int4 a round has a sixteenth of the state's bytes. All is
content-addressed under a quorum's signatures, so any peer may provide it, and requests are spread over all members that
should have it. Missing data is no fault: the peer then takes the state (`state.transfer`).
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import trio

from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.wire.framing import MAX_FRAME_BYTES
from ..vector.codec import EMPTY, Codec
from ..vector.partition import check_bounds, num_parts
from .ledger import Ledger
from .losses import Losses, known_losses
from .packed import unpack_certificate

MAX_REPLAYED = 256
"""Rounds that are replayed onto a state."""
PAGE_BYTES = MAX_FRAME_BYTES - 8_192
"""The size of one answer: a frame, less what is around the certificates, and their losses of 9 bytes each."""
FETCHES_AT_ONCE = 16
"""A quarter of a full round's outputs: where parts are small a fetch takes as long as the way there and back."""
ASKED_AT_ONCE = 2
"""Holders of which one output is requested: where my own line is slow all are late, and each request more makes it slower."""
LATE_FACTOR = 3.0
"""The factor on the median time of the round's outputs after which one is late, as for leaves of a state."""
LEDGER_ANSWER_SECONDS = 10.0
"""The timeout of an answer, and of each `wire.MAX_PAGE` certificates, in however many answers they come."""
OUTPUT_STALL_SECONDS = 20.0
"""The timeout without a byte of an output, as in `state.transfer`."""
OUTPUT_RATE = 1 << 15
"""Bytes/s below which a fetch of an output ends although it progresses; `OUTPUT_STALL_SECONDS` are added."""


def serve_ledger(
    node: Node, run: str, ledger: Ledger, losses: Losses, earlier: Callable[[str], Ledger | None] = lambda run: None
) -> None:
    """Serve this node's certificates to any peer that asks, and the losses of their rounds.

    `earlier` returns the ledger of a run that this one goes on from; None for another run.
    """

    async def answer(peer: PeerId, question: wire.LedgerAsk) -> wire.LedgerPage:
        def read() -> wire.LedgerPage:
            found = ledger if question.run == run else earlier(question.run)
            if found is None:
                raise NetworkError("this peer takes part in another run")
            page = found.since(question.from_round, question.limit, max_bytes=PAGE_BYTES)
            return wire.LedgerPage(page, losses.since(question.from_round, len(page)) if found is ledger else ())

        return await node.compute(read)

    node.on_ask(wire.LedgerAsk, answer)


class Asker(Protocol):
    """Whatever asks peers: a node, or a light client that is none."""

    async def ask(self, peer: PeerId, message: object, *, timeout: float) -> Any:
        """Send a request to `peer` and return its answer. Raises `NetworkError` or `RemoteError`."""

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run long work beside the event loop."""


async def ask_certificates(
    node: Asker, peer: PeerId, question: wire.LedgerAsk, *, timeout: float = LEDGER_ANSWER_SECONDS
) -> list[wire.Certificate]:
    """Fetch up to `limit` certificates; only their rounds are checked. Raises `NetworkError` or `RemoteError`."""
    return (await ask_page(node, peer, question, timeout=timeout))[0]


async def ask_page(
    node: Asker, peer: PeerId, question: wire.LedgerAsk, *, timeout: float = LEDGER_ANSWER_SECONDS
) -> tuple[list[wire.Certificate], dict[int, float]]:
    """Fetch certificates as `ask_certificates` does, and by round the losses that `peer` claims. Raises the same."""
    answer = await node.ask(peer, question, timeout=timeout)
    if not isinstance(answer, wire.LedgerPage):
        raise ProtocolViolation(f"{type(answer).__name__} in answer to LedgerAsk")
    certificates = [unpack_certificate(data) for data in answer.certificates]
    rounds = [certificate.slot.round for certificate in certificates]
    if rounds != list(range(question.from_round, question.from_round + len(rounds))) or len(rounds) > question.limit:
        raise ProtocolViolation("a page of other certificates than requested")
    return certificates, known_losses(question.from_round, answer.losses)


def in_my_order(me: PeerId, holders: Iterable[PeerId]) -> list[PeerId]:
    """Sort holders in my order of requests: another order for every peer, so that a thousand followers spread the load."""
    return sorted(holders, key=lambda peer: keyed("order of asking", me.encode(), peer.encode()))


async def fetch_outputs(
    node: Node,
    codec: Codec,
    cells: range,
    value: wire.Value,
    voters: Collection[PeerId],
    holders: Sequence[PeerId],
    failed: set[PeerId],
    *,
    patience: float = math.inf,
) -> dict[bytes, Blob]:
    """Fetch all outputs of a value by these voters, which averages these cells, by hash, from any of the holders.

    One that is late beside the others, or before any has come after `patience` seconds, is requested from a second holder,
    too, and the first answer counts; after `patience` without a byte a request ends. Whoever does not provide one, or later
    than another, is added to `failed`, and asked last from then on, and of the others voters first. Raises `NetworkError` if
    one is not available, `RemoteError` if the value names what cannot be outputs.
    """
    check_bounds(value.bounds, num_parts(value.members), cells)
    outputs: dict[bytes, Blob] = {EMPTY: b""}
    slots = trio.CapacityLimiter(FETCHES_AT_ONCE)

    def rank(peer: PeerId) -> tuple[bool, bool]:
        # Requests are spread over all, until one fails: its keys may be any number, and those of voters are not.
        return peer in failed, bool(failed) and peer not in voters

    fetches = _Fetches(node, rank, failed, patience)

    async def fetch(part: int, num_cells: int) -> None:
        turn = part % max(1, len(holders))
        left = [*holders[turn:], *holders[:turn]]
        async with slots:
            data = await fetches.from_anyone(value.outputs[part], codec.num_bytes(num_cells), left)
        codec.check(data, num_cells)
        outputs[value.outputs[part]] = data

    async with trio.open_nursery() as nursery:
        for part, (low, high) in enumerate(zip(value.bounds, value.bounds[1:], strict=False)):
            if low < high:
                nursery.start_soon(fetch, part, high - low)
            elif value.outputs[part] != EMPTY:
                raise ProtocolViolation("an output of a part without cells")
    return outputs


class _Fetches:
    """The fetches of the outputs of one round, each of which tells the others how long one takes."""

    def __init__(
        self, node: Node, rank: Callable[[PeerId], tuple[bool, bool]], failed: set[PeerId], patience: float
    ) -> None:
        self._node = node
        self._rank = rank
        self._failed = failed
        self._patience, self._stall = patience, min(patience, OUTPUT_STALL_SECONDS)
        self._times: list[tuple[int, float]] = []
        """Of each output that came its bytes and its seconds."""
        self._news = trio.Event()
        """Set, and replaced, whenever a request ends."""

    async def from_anyone(self, key: bytes, size: int, left: list[PeerId]) -> Blob:
        """Return an output from my disk or from one of `left`. Raises `NetworkError` if none of them provides it."""
        own: Blob | None = await self._node.compute(self._node.blobs.get, key, self._node.peer_id)
        if own is not None:
            return own
        reasons: list[str] = []
        asked: list[PeerId] = []
        found: list[Blob] = []

        async def ask(peer: PeerId) -> None:
            began, why_not = trio.current_time(), ""
            try:
                with trio.fail_after(OUTPUT_STALL_SECONDS + size / OUTPUT_RATE):
                    found.append(await self._node.fetch(peer, key, size, patience=self._stall))
            except NetworkError as error:
                why_not = str(error)
            except RemoteError as error:
                self._node.charge(peer, "fetch", error)
                why_not = str(error)
            except trio.TooSlowError:
                why_not = f"{size} bytes did not come in time"
            if peer not in asked:  # Another one came in the same moment.
                return
            if why_not:
                reasons.append(f"{peer}: {why_not}")
                self._failed.add(peer)
                asked.remove(peer)
            else:
                self._times.append((size, trio.current_time() - began))
                self._failed.update(asked[: asked.index(peer)])
                asked.clear()
            event, self._news = self._news, trio.Event()
            event.set()

        async with trio.open_nursery() as nursery:
            while left and not found:
                left.remove(peer := min(left, key=self._rank))
                asked.append(peer)
                nursery.start_soon(ask, peer)
                await self._until_late(peer, asked, size)
                while len(asked) >= ASKED_AT_ONCE:
                    await self._news.wait()
            while asked and not found:
                await self._news.wait()
            nursery.cancel_scope.cancel()
        if not found:
            raise NetworkError(f"no peer has an output of the round ({'; '.join(reasons)})")
        return found[0]

    async def _until_late(self, peer: PeerId, asked: Collection[PeerId], size: int) -> None:
        """Wait until a peer is no more among those asked for so many bytes, or they are late."""
        began = trio.current_time()
        while peer in asked and trio.current_time() < (late_at := began + self._usual(size)):
            with trio.move_on_at(late_at):
                await self._news.wait()

    def _usual(self, size: int) -> float:
        """Return the seconds after which so many bytes are late beside the outputs of the round that came."""
        if not self._times:
            return self._patience
        return LATE_FACTOR * statistics.median(seconds * max(1.0, size / max(1, other)) for other, seconds in self._times)
