"""State transfer from many providers at once, each leaf verified by the certified root.

Theory of operation. Members answer `StateAsk` with the checkpoints that they keep, and `LeavesAsk` with the leaf hashes
of one; the leaves themselves are bulk bytes under these hashes. The receiver chooses the checkpoint that most members
hold, validates its certificate, verifies that the hashes make its root, and fetches the leaves that differ from its
own. `LeafSchedule` assigns requests to providers. A wrong leaf is charged to its provider, which is then excluded;
every other failure is an event.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import trio

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..chain.chain import ChainPosition, Head, StatedPosition, position_after, start_of_run
from ..chain.packed import unpack_certificate
from . import merkle
from .schedule import LeafSchedule

MAX_PROVIDERS_ASKED = 8
"""Providers asked at once: with two leaves in flight from each, 64 MiB are in memory; more would gain little."""
LEAVES_AT_ONCE = 2
"""Requests in flight to one provider (pipelining): the second leaf travels while the first is verified and written."""
LEAVES_ANSWER_SECONDS = 10.0
LEAF_STALL_SECONDS = 20.0
"""The timeout without a byte; a provider may serve others at its own rate, and its own rounds first."""
PROGRESS_SECONDS = 0.5
"""The time between two events of progress."""

Put = Callable[[bytes, bytearray], Awaitable[None]]
"""Takes a verified leaf, with its hash."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A checkpoint, and its providers."""

    place: ChainPosition
    providers: tuple[PeerId, ...]


async def ask_offers(
    node: Node, members: Sequence[PeerId], run: str, *, charter: Charter = OPEN
) -> tuple[Offer, ...]:
    """Ask members for their checkpoints; returns the offers, sorted by their numbers of providers, then the newest first.

    A member that does not answer is an event; one that offers what it cannot prove is charged. For `charter` see
    `check_certificate`.
    """
    stated: dict[PeerId, wire.StateOffer] = {}

    async def ask(peer: PeerId) -> None:
        try:
            offer = await node.ask(peer, wire.StateAsk(run), timeout=LEAVES_ANSWER_SECONDS)
            if not isinstance(offer, wire.StateOffer):
                raise ProtocolViolation(f"{type(offer).__name__} in answer to StateAsk")
            stated[peer] = offer
        except NetworkError as error:
            node.telemetry.emit("state.not_offered", peer=peer, step="ask for a state", reason=str(error))
        except RemoteError as error:
            node.charge(peer, "ask for a state", error)

    async with trio.open_nursery() as nursery:
        for peer in members[:MAX_PROVIDERS_ASKED]:
            nursery.start_soon(ask, peer)
    proved: dict[StatedPosition, ChainPosition] = {}
    offers: dict[tuple[Head, bytes], Offer] = {}
    for peer in (peer for peer in members if peer in stated):
        for item in stated[peer].checkpoints:
            try:
                if item not in proved:
                    proved[item] = await node.compute(_proved, item, run, charter)
                # By its head, too: a certificate of another chain can state the same root, and would hide the honest one.
                place = proved[item]
                known = offers.get((place.head, place.root), Offer(place, ()))
                offers[place.head, place.root] = replace(known, providers=(*known.providers, peer))
            except RemoteError as error:
                node.charge(peer, "offer a state", error)
    return tuple(sorted(offers.values(), key=lambda offer: (-len(offer.providers), -offer.place.round)))


async def ask_leaves(node: Node, offer: Offer, run: str) -> tuple[bytes, ...]:
    """Fetch the leaf hashes of an offered state from any of its providers. Raises `NetworkError` if all fail."""
    for peer in offer.providers:
        try:
            answer = await node.ask(peer, wire.LeavesAsk(run, offer.place.root), timeout=LEAVES_ANSWER_SECONDS)
            if not isinstance(answer, wire.Leaves) or merkle.root(answer.hashes) != offer.place.root:
                raise ProtocolViolation("leaves that do not make the root of the offered state")
            return answer.hashes
        except NetworkError as error:
            node.telemetry.emit("state.not_offered", peer=peer, step="ask for leaves", reason=str(error))
        except RemoteError as error:
            node.charge(peer, "ask for leaves", error)
    raise NetworkError(f"no provider has the leaves of the state of round {offer.place.round} any more")


class Transfer:
    """A running transfer of missing leaves: `sizes` in bytes by hash, of a state of `total` bytes, from `providers`."""

    def __init__(self, node: Node, sizes: Mapping[bytes, int], total: int, providers: Sequence[PeerId], put: Put) -> None:
        self.num_bytes = 0
        """The bytes fetched so far."""
        self._node = node
        self._sizes = sizes
        self._total = total
        self._put = put
        self._schedule = LeafSchedule(sizes, providers)
        self._in_flight: dict[bytes, list[trio.CancelScope]] = {}
        self._missing = sum(sizes.values())
        self._news = trio.Event()
        self._emitted_at = -PROGRESS_SECONDS

    async def run(self) -> None:
        """Fetch all leaves. Raises `NetworkError` if no provider is left for the rest; arrived leaves stay installed."""
        self._emit_progress()
        async with trio.open_nursery() as nursery:
            for provider in self._schedule.providers:
                for _ in range(LEAVES_AT_ONCE):
                    nursery.start_soon(self._ask, provider)
        if not self._schedule.done:
            raise NetworkError(f"no provider is left for {self._schedule.num_left} of {len(self._sizes)} leaves")

    async def _ask(self, provider: PeerId) -> None:
        """Fetch one leaf after the other from one provider."""
        schedule = self._schedule
        while not schedule.done and provider in schedule.providers:
            key = schedule.next(provider, trio.current_time())
            if key is not None:
                await self._fetch(provider, key)
                self._news.set()
                self._news = trio.Event()
            elif schedule.busy:
                with trio.move_on_at(schedule.look_again(provider)):
                    await self._news.wait()
            else:
                return  # This provider has failed every missing leaf, and no request is pending.

    async def _fetch(self, provider: PeerId, key: bytes) -> None:
        node, schedule = self._node, self._schedule
        with trio.CancelScope() as scope:
            scopes = self._in_flight.setdefault(key, [])
            scopes.append(scope)
            try:
                data = await node.fetch(provider, key, self._sizes[key], patience=LEAF_STALL_SECONDS)
            except NetworkError as error:
                schedule.failed(provider, key)
                node.telemetry.emit("state.leaf_missed", peer=provider, step="fetch a leaf", reason=str(error))
                return
            except RemoteError as error:
                schedule.exclude(provider)
                node.charge(provider, "provide a leaf", error)
                return
            finally:
                scopes.remove(scope)
        if scope.cancelled_caught:
            node.telemetry.emit("state.leaf_late", peer=provider, step="fetch a leaf", reason="another one was faster")
        elif schedule.came(provider, key, trio.current_time()):
            for slower in scopes:
                slower.cancel()
            await self._put(key, data)
            self.num_bytes += len(data)
            self._missing -= len(data)
            self._emit_progress()

    def _emit_progress(self) -> None:
        now = trio.current_time()
        if now >= self._emitted_at + PROGRESS_SECONDS or self._schedule.done:
            self._emitted_at = now
            self._node.telemetry.emit(
                "state.taking",
                bytes=self._total - self._missing,
                total=self._total,
                providers=len(self._schedule.providers),
            )


def _proved(stated: StatedPosition, run: str, charter: Charter) -> ChainPosition:
    """Return the proven position of an offered state. Raises `RemoteError` if its certificate does not prove it."""
    round_, root, certificate = stated
    if not round_:
        return start_of_run(root)
    place = position_after(unpack_certificate(certificate), run, charter)
    if (place.round, place.root) != (round_, root):
        raise ProtocolViolation("a state offer with the certificate of another state")
    return place
