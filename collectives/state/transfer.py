"""Taking a whole state from many members at once, leaf by leaf, every leaf verified against the certified root.

Theory of operation. Members answer `StateAsk` with the checkpoints that they keep, and `LeavesAsk` with the hashes of
one's leaves; the leaves themselves are bulk bytes under these hashes. A taker chooses the checkpoint that most members
hold, checks its certificate and that the hashes make its root, and fetches what differs from what it has. `Taking` says
whom to ask for what. A wrong leaf is charged to its giver, who is asked for nothing more; every other failure is told.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..chain.packed import unpack
from ..place import Place, Stated, place_after, start_of_run
from . import merkle
from .schedule import Taking

MAX_GIVERS = 8
"""Asked at once: with two leaves under way from each, 64 MiB are in memory; more would hardly fill a road better."""
LEAVES_AT_ONCE = 2
"""Asked of one giver: the second one travels while the first is checked and written."""
ANSWER_SECONDS = 10.0
STALL_SECONDS = 20.0
"""Without a byte; a giver may serve a few others at its own rate, and rounds of its own first."""
TOLD_SECONDS = 0.5
"""Between two words about the progress."""

Put = Callable[[bytes, bytearray], Awaitable[None]]
"""Where a leaf goes, by its hash."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A checkpoint, and who can give it."""

    place: Place
    givers: tuple[PeerId, ...]


async def ask_offers(
    node: Node, members: Sequence[PeerId], run: str, *, charter: Charter = OPEN
) -> tuple[Offer, ...]:
    """The checkpoints that members offer, those first that most of them hold, and of these the newest.

    Who does not answer is told as an event, and who offers what it cannot prove is charged. For `charter` see
    `check_certificate`.
    """
    stated: dict[PeerId, wire.StateOffer] = {}

    async def ask(peer: PeerId) -> None:
        try:
            offer = await node.ask(peer, wire.StateAsk(run), timeout=ANSWER_SECONDS)
            if not isinstance(offer, wire.StateOffer):
                raise ProtocolViolation(f"{type(offer).__name__} in answer to StateAsk")
            stated[peer] = offer
        except NetworkError as error:
            node.telemetry.emit("state.not_offered", peer=peer, step="ask for a state", reason=str(error))
        except RemoteError as error:
            node.charge(peer, "ask for a state", error)

    async with trio.open_nursery() as nursery:
        for peer in members[:MAX_GIVERS]:
            nursery.start_soon(ask, peer)
    proved: dict[Stated, Place] = {}
    givers: dict[bytes, list[PeerId]] = {}
    for peer in (peer for peer in members if peer in stated):
        for item in stated[peer].checkpoints:
            try:
                if item not in proved:
                    proved[item] = await node.compute(_proved, item, run, charter)
                givers.setdefault(proved[item].root, []).append(peer)
            except RemoteError as error:
                node.charge(peer, "offer a state", error)
    places = {place.root: place for place in proved.values()}
    offers = [Offer(places[root], tuple(peers)) for root, peers in givers.items()]
    return tuple(sorted(offers, key=lambda offer: (-len(offer.givers), -offer.place.round)))


async def ask_leaves(node: Node, offer: Offer, run: str) -> tuple[bytes, ...]:
    """The hashes of an offered state's leaves, from whichever giver tells them. Raises `NetworkError` if none does."""
    for peer in offer.givers:
        try:
            answer = await node.ask(peer, wire.LeavesAsk(run, offer.place.root), timeout=ANSWER_SECONDS)
            if not isinstance(answer, wire.Leaves) or merkle.root(answer.hashes) != offer.place.root:
                raise ProtocolViolation("leaves that do not make the root of the state that was offered")
            return answer.hashes
        except NetworkError as error:
            node.telemetry.emit("state.not_offered", peer=peer, step="ask for leaves", reason=str(error))
        except RemoteError as error:
            node.charge(peer, "ask for leaves", error)
    raise NetworkError(f"nobody tells the leaves of the state of round {offer.place.round} any more")


class Transfer:
    """The leaves that I lack on their way: `sizes` in bytes by hash, of a state of `total` bytes, from `givers`."""

    def __init__(self, node: Node, sizes: Mapping[bytes, int], total: int, givers: Sequence[PeerId], put: Put) -> None:
        self.num_bytes = 0
        """Fetched so far."""
        self._node = node
        self._sizes = sizes
        self._total = total
        self._put = put
        self._taking = Taking(sizes, givers)
        self._under_way: dict[bytes, list[trio.CancelScope]] = {}
        self._missing = sum(sizes.values())
        self._news = trio.Event()
        self._told_at = -TOLD_SECONDS

    async def run(self) -> None:
        """Fetch them all. Raises `NetworkError` where nobody gives the rest; what came is where it belongs by then."""
        self._tell()
        async with trio.open_nursery() as nursery:
            for giver in self._taking.givers:
                for _ in range(LEAVES_AT_ONCE):
                    nursery.start_soon(self._ask, giver)
        if not self._taking.done:
            raise NetworkError(f"nobody gives {self._taking.num_left} of {len(self._sizes)} leaves")

    async def _ask(self, giver: PeerId) -> None:
        """Ask one giver for one leaf after the other."""
        taking = self._taking
        while not taking.done and giver in taking.givers:
            key = taking.next(giver, trio.current_time())
            if key is not None:
                await self._fetch(giver, key)
                self._news.set()
                self._news = trio.Event()
            elif taking.busy:
                with trio.move_on_at(taking.look_again(giver)):
                    await self._news.wait()
            else:
                return  # What is left, this one has refused, and nobody is under way who could.

    async def _fetch(self, giver: PeerId, key: bytes) -> None:
        node, taking = self._node, self._taking
        with trio.CancelScope() as scope:
            scopes = self._under_way.setdefault(key, [])
            scopes.append(scope)
            try:
                data = await node.fetch(giver, key, self._sizes[key], patience=STALL_SECONDS)
            except NetworkError as error:
                taking.failed(giver, key)
                node.telemetry.emit("state.leaf_missed", peer=giver, step="fetch a leaf", reason=str(error))
                return
            except RemoteError as error:
                taking.exclude(giver)
                node.charge(giver, "give a leaf", error)
                return
            finally:
                scopes.remove(scope)
        if scope.cancelled_caught:
            node.telemetry.emit("state.leaf_late", peer=giver, step="fetch a leaf", reason="another one was faster")
        elif taking.came(giver, key, trio.current_time()):
            for slower in scopes:
                slower.cancel()
            await self._put(key, data)
            self.num_bytes += len(data)
            self._missing -= len(data)
            self._tell()

    def _tell(self) -> None:
        now = trio.current_time()
        if now >= self._told_at + TOLD_SECONDS or self._taking.done:
            self._told_at = now
            self._node.telemetry.emit(
                "state.taking",
                bytes=self._total - self._missing,
                total=self._total,
                givers=len(self._taking.givers),
            )


def _proved(stated: Stated, run: str, charter: Charter) -> Place:
    """Where an offered state stands. Raises `RemoteError` where its certificate does not prove it."""
    round_, root, certificate = stated
    if not round_:
        return start_of_run(root)
    place = place_after(unpack(certificate), run, charter)
    if (place.round, place.root) != (round_, root):
        raise ProtocolViolation("a state offer with the certificate of another state")
    return place
