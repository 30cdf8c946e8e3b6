"""Giving and taking a whole state, leaf by leaf, every leaf verified against the certified root.

Theory of operation. A giver answers `StateAsk` with the hashes of its leaves and the certificate of the round that
made them; the leaves themselves are bulk bytes under these hashes. A taker checks the certificate, checks that the
hashes make its root, and fetches only the leaves that differ from its own. While a giver applies a round it withdraws
its leaves, so a transfer that spans a round fails on one of them and begins again with the new offer: what is already
right is not fetched again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from ..peer import wire
from ..peer.errors import NetworkError, ProtocolViolation
from ..peer.framing import MAX_FRAME_BYTES
from ..peer.node import Node
from ..peer.schema import decode, encode
from ..peer.transport import PeerId
from . import merkle
from .chain import NOTHING, Head, better
from .codec import Floats
from .quorum import certificate_hash, check_certificate, result_of, verify

FETCHES_AT_ONCE = 4
"""Leaves in flight: enough to fill the road, few enough that what a broken transfer loses is small."""
PATIENCE = 10.0
"""Seconds that a giver may take to finish its own round before it answers."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a state stands in its run: `round` rounds were applied, the last one as `certificate` proves."""

    round: int
    root: bytes
    tokens: int
    certificate: wire.Certificate | None

    @property
    def head(self) -> Head:
        """The end of the chain of certificates that leads to this state."""
        if self.certificate is None:
            return NOTHING
        return Head(self.round, certificate_hash(self.certificate), self.tokens)

    @property
    def certified(self) -> bytes | None:
        """The root that this state must have; None at the start of a run, where no round says so."""
        return None if self.certificate is None else result_of(self.certificate).next_root


class Giver:
    """Serves this peer's state while it is steady."""

    def __init__(self, node: Node, run: str) -> None:
        self._node = node
        self._run = run
        self._offer: wire.StateOffer | None = None
        self._steady = trio.Event()
        node.on_ask(wire.StateAsk, self._answer)

    def offer(
        self, place: Place, theta: Floats, momentum: Floats, leaves: tuple[Sequence[bytes], Sequence[bytes]]
    ) -> None:
        """Serve this state, whose leaves have these hashes, until it is withdrawn."""
        self.withdraw()
        for vector, hashes in zip((theta, momentum), leaves, strict=True):
            for (start, stop), key in zip(merkle.leaf_spans(vector.size), hashes, strict=True):
                self._node.blobs.put(key, merkle.leaf_bytes(vector, start, stop))
        certificate = encode(place.certificate) if place.certificate is not None else b""
        everything = (*leaves[0], *leaves[1])
        self._offer = wire.StateOffer(place.round, place.root, certificate, everything)
        self._steady.set()

    def withdraw(self) -> None:
        """Serve no state: it is about to change."""
        if self._offer is not None:
            self._node.blobs.drop(self._offer.leaves)
            self._offer = None
            self._steady = trio.Event()

    async def _answer(self, peer: PeerId, question: wire.StateAsk) -> wire.StateOffer:
        if question.run != self._run:
            raise NetworkError("this peer takes part in another run")
        with trio.move_on_after(PATIENCE):
            await self._steady.wait()
        if self._offer is None:
            raise NetworkError("its state is changing")
        return self._offer


async def ask_state(
    node: Node, giver: PeerId, run: str, *, mine: Head = NOTHING, owner: PeerId | None = None
) -> tuple[Place, tuple[bytes, ...]]:
    """Where the giver's state stands, which is proved, and the hashes of its leaves.

    Raises `NetworkError` where it gives none now, and `RemoteError` where the offer is not what it claims or comes from a
    chain that is worse than `mine`. For `owner` see `check_certificate`.
    """
    offer = await node.ask(giver, wire.StateAsk(run), timeout=2 * PATIENCE)
    if not isinstance(offer, wire.StateOffer):
        raise ProtocolViolation(f"{type(offer).__name__} in answer to StateAsk")
    place = check_offer(offer, run, owner)
    if better(mine, place.head):
        raise ProtocolViolation(f"a state of round {place.round} whose chain is worse than the taker's")
    return place, offer.leaves


async def take_leaves(node: Node, giver: PeerId, leaves: Sequence[bytes], theta: Floats, momentum: Floats) -> int:
    """Make (θ, m) those with these leaves, in place; returns how many bytes were fetched.

    Raises `NetworkError` where the road or the giver ends, and `RemoteError` where it serves something else: the vectors
    then hold a mixture, and must be taken from somebody before they are used.
    """
    own = await node.compute(lambda: merkle.leaves(theta) + merkle.leaves(momentum))
    if len(own) != len(leaves):
        raise ProtocolViolation(f"a state of {len(leaves)} leaves where the model has {len(own)}")
    spots = [(vector, start, stop) for vector in (theta, momentum) for start, stop in merkle.leaf_spans(vector.size)]
    wanted = [index for index, key in enumerate(leaves) if key != own[index]]
    slots = trio.CapacityLimiter(FETCHES_AT_ONCE)

    async def take(index: int) -> None:
        vector, start, stop = spots[index]
        target = merkle.leaf_bytes(vector, start, stop)
        async with slots:
            target[:] = await node.fetch(giver, leaves[index], len(target))

    async with trio.open_nursery() as nursery:
        for index in wanted:
            nursery.start_soon(take, index)
    return sum((spots[index][2] - spots[index][1]) * 4 for index in wanted)


def check_offer(offer: wire.StateOffer, run: str, owner: PeerId | None = None) -> Place:
    """Where an offered state stands. Raises `RemoteError` where its certificate or its leaves do not prove it."""
    if merkle.root(offer.leaves) != offer.root:
        raise ProtocolViolation("a state offer whose leaves do not make its root")
    if offer.round == 0:
        return Place(0, offer.root, 0, None)
    certificate = decode(wire.Certificate, offer.certificate, max_bytes=MAX_FRAME_BYTES)
    _, _, result = check_certificate(certificate, verify, owner=owner)
    if (certificate.slot.run, certificate.slot.round, result.next_root) != (run, offer.round, offer.root):
        raise ProtocolViolation("a state offer with the certificate of another state")
    return Place(offer.round, offer.root, result.tokens, certificate)
