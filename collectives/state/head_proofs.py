"""What the members' claims of their chains are worth: each head is proven once, by its certificate.

A member states the head of its chain; the certificate proves that a quorum made it, and says to which state it leads. It
comes from my own ledger, or from a member that states it, who is also asked what its chain has after the round that I
hold: whether it goes on from there decides whether I follow it (`standing`). A member that could not prove what it
stated is not believed again until it states something else.
"""

from collections import Counter
from collections.abc import Sequence

import trio

from ...dht.members.table import Member
from ...peer import wire
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..averager import Spec
from ..chain.certificate import result_of
from ..chain.chain import Head, Link
from ..chain.fork_choice import Chains, Proof, alike, head_of, training
from ..chain.ledger import Ledger
from ..chain.replay import ask_certificates, in_my_order
from ..place import Place, place_after

AT_ONCE = 16
"""Heads that are asked for at a time, those that most members state first: honest ones stand on one or two."""
ASKED = 2
"""Of the members that state a head; others are asked the next time."""


class Proofs:
    """One peer's knowledge of which claims hold."""

    def __init__(self, node: Node, spec: Spec, ledger: Ledger) -> None:
        self._node = node
        self._spec = spec
        self._ledger = ledger
        self._proven: dict[Head, Proof] = {}
        self._disproved: dict[PeerId, tuple[bytes, bytes]] = {}
        self._tired: set[PeerId] = set()
        self._asked_for: set[Head] = set()
        self.news = 0
        """How often I have tried to find out more."""

    def credible(self, members: Sequence[Member]) -> list[Member]:
        """Those of the members who train my model, and have not failed to prove what they state."""
        return [
            member
            for member in alike(members, self._node.peer_id)
            if self._disproved.get(member.peer) != (member.body.head, member.body.root)
        ]

    def chains(self, place: Place) -> Chains:
        """What I know of the chains while my state stands at `place`."""
        return Chains(place, self._ledger.at, self._ledger.first, self._proven)

    def unproven(self, members: Sequence[Member], place: Place) -> list[Head]:
        """The heads of other chains than mine that members state and nothing has proven."""
        chains = self.chains(place)
        stated = Counter(head_of(member) for member in self._claims(members))
        unproven = [head for head in stated if not chains.is_mine(head) and chains.proof(head) is None]
        return sorted(unproven, key=lambda head: (-stated[head], head.hash))

    def wanted(self, members: Sequence[Member], place: Place) -> list[Head]:
        """Those of them for which nobody is asked now."""
        return [head for head in self.unproven(members, place) if head not in self._asked_for]

    async def examine(self, members: Sequence[Member], place: Place) -> None:
        """Ask for the certificates of heads that are not proven. What fails is an event."""
        claims = self._claims(members)
        stated = {head_of(member) for member in claims}
        self._proven = {head: proof for head, proof in self._proven.items() if head in stated}
        async with trio.open_nursery() as nursery:
            for head in self.wanted(members, place)[: AT_ONCE - len(self._asked_for)]:
                by_peer = {member.peer: member for member in claims if head_of(member) == head}
                order = sorted(in_my_order(self._node.peer_id, by_peer), key=self._tired.__contains__)
                self._asked_for.add(head)
                nursery.start_soon(self._examine, head, [by_peer[peer] for peer in order[:ASKED]], place)

    async def prove(self, claim: Member, place: Place) -> wire.Certificate:
        """The certificate of the head that a member states; what it cannot show is not believed again.

        `place` is where my state stands. Raises `NetworkError`, or `RemoteError` for a false certificate.
        """
        head = head_of(claim)
        if (proof := self.chains(place).proof(head)) is None:
            try:
                proof = self._proven[head] = await self._look(claim, head, place)
            except RemoteError:
                self._disproved[claim.peer] = (claim.body.head, claim.body.root)
                raise
        assert proof.place.certificate is not None
        return proof.place.certificate

    async def _look(self, claim: Member, head: Head, place: Place) -> Proof:
        if not 1 <= head.round <= wire.MAX_COUNT:
            raise ProtocolViolation(f"a state of round {head.round} that comes from a certificate")
        seen = self._proven.get(head)
        proven = seen.place if seen is not None else await self._show(claim, head)
        return Proof(proven, place.head.hash, await self._parts(claim, proven, place))

    async def _show(self, claim: Member, head: Head) -> Place:
        known = await self._node.compute(self._ledger.certificate, head.round) if self._knows(head) else None
        page = [known] if known else await self._ask(claim, head.round)
        if not page or Link.of(page[0]).head != head:
            # That need not be a lie: it may have gone over to a better chain since, and the news of that be under way.
            self._disproved[claim.peer] = (claim.body.head, claim.body.root)
            raise NetworkError(f"it states round {head.round}, and cannot show its certificate")
        return await self._node.compute(place_after, page[0], self._spec.run, self._spec.charter)

    async def _parts(self, claim: Member, proven: Place, place: Place) -> bool:
        """Whether the chain to a proven place is known to part from mine; its holder may know only the end of it."""
        if proven.round <= place.round:
            return True
        if place.certificate is None:
            return False
        page = [proven.certificate] if proven.round == place.round + 1 else await self._ask(claim, place.round + 1)
        return any(result_of(next_one).previous != place.head.hash for next_one in page if next_one is not None)

    async def _ask(self, claim: Member, round_: int) -> list[wire.Certificate]:
        return await ask_certificates(self._node, claim.peer, wire.LedgerAsk(self._spec.run, round_, 1))

    def _knows(self, head: Head) -> bool:
        """Whether my ledger has it, though my state does not come from it yet."""
        return self._ledger.at(head.round) == head

    def _claims(self, members: Sequence[Member]) -> list[Member]:
        """The others who may hold a state that I should have."""
        return [member for member in training(self.credible(members)) if member.peer != self._node.peer_id]

    async def _examine(self, head: Head, claims: Sequence[Member], place: Place) -> None:
        try:
            await self._ask_in_turn(claims, place)
        finally:
            self._asked_for.discard(head)
            self.news += 1

    async def _ask_in_turn(self, claims: Sequence[Member], place: Place) -> None:
        for claim in claims:
            try:
                await self.prove(claim, place)
            except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
                error = sole_error(raised)
                if isinstance(error, RemoteError):
                    self._node.charge(claim.peer, "prove a head", error)
                elif not isinstance(error, NetworkError):
                    raise
                self._tired.add(claim.peer)
                self._node.telemetry.emit(
                    "head.unproven", peer=claim.peer, step="prove", reason=str(error), round=claim.body.round
                )
            else:
                self._tired.discard(claim.peer)
                return
