"""Light-client validation of the heads that members state, by their certificates.

A member states the head of its chain. The certificate proves that a quorum made it, and names the state that it leads
to. It comes from my own ledger, or from a member that states it. That member is also asked for its certificate after my
round: whether its chain extends mine decides whether I follow it (`chain.fork_choice`). A member that could not prove
its head is ignored until it states another one.
"""

from collections import Counter
from collections.abc import Sequence

import trio

from ...dht.members.table import Member
from ...peer import wire
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..chain.certificate import result_of
from ..chain.chain import ChainLink, ChainPosition, Head, position_after
from ..chain.fork_choice import Chains, Proof, alike, head_of, training
from ..chain.ledger import Ledger
from ..chain.replay import ask_certificates, in_my_order
from ..spec import Spec

AT_ONCE = 16
"""Heads validated at a time, those that most members state first: honest members are on one or two."""
ASKED = 2
"""Members asked for one head's certificate; the next attempt asks others."""


class Proofs:
    """One peer's validated heads, and the members whose claims failed."""

    def __init__(self, node: Node, spec: Spec, ledger: Ledger) -> None:
        self._node = node
        self._spec = spec
        self._ledger = ledger
        self._proven: dict[Head, Proof] = {}
        self._disproved: dict[PeerId, tuple[bytes, bytes]] = {}
        self._backed_off: set[PeerId] = set()
        self._asked_for: set[Head] = set()
        self.news = 0
        """A counter of finished attempts to validate a head."""

    def credible(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that train my model, and have not failed to prove what they state."""
        return [
            member
            for member in alike(members, self._node.peer_id)
            if self._disproved.get(member.peer) != (member.body.head, member.body.root)
        ]

    def chains(self, place: ChainPosition) -> Chains:
        """Return my view of the run's chains, with my state at `place`."""
        return Chains(place, self._ledger.at, self._ledger.first, self._proven)

    def unproven(self, members: Sequence[Member], place: ChainPosition) -> list[Head]:
        """Return the stated heads of other chains than mine that are not validated, the most frequent first."""
        chains = self.chains(place)
        stated = Counter(head_of(member) for member in self._claims(members))
        unproven = [head for head in stated if not chains.is_mine(head) and chains.proof(head) is None]
        return sorted(unproven, key=lambda head: (-stated[head], head.hash))

    def wanted(self, members: Sequence[Member], place: ChainPosition) -> list[Head]:
        """Return the unproven heads without a pending request."""
        return [head for head in self.unproven(members, place) if head not in self._asked_for]

    async def examine(self, members: Sequence[Member], place: ChainPosition) -> None:
        """Fetch and validate the certificates of unproven heads. A failure is an event."""
        claims = self._claims(members)
        stated = {head_of(member) for member in claims}
        self._proven = {head: proof for head, proof in self._proven.items() if head in stated}
        async with trio.open_nursery() as nursery:
            for head in self.wanted(members, place)[: AT_ONCE - len(self._asked_for)]:
                by_peer = {member.peer: member for member in claims if head_of(member) == head}
                order = sorted(in_my_order(self._node.peer_id, by_peer), key=self._backed_off.__contains__)
                self._asked_for.add(head)
                nursery.start_soon(self._examine, head, [by_peer[peer] for peer in order[:ASKED]], place)

    async def prove(self, claim: Member, place: ChainPosition) -> wire.Certificate:
        """Return the validated certificate of the head that a member states; a claim without one is ignored from then on.

        `place` is my state's position. Raises `NetworkError`, or `RemoteError` for a false certificate.
        """
        head = head_of(claim)
        if (proof := self.chains(place).proof(head)) is None:
            try:
                proof = self._proven[head] = await self._validate(claim, head, place)
            except RemoteError:
                self._disproved[claim.peer] = (claim.body.head, claim.body.root)
                raise
        assert proof.place.certificate is not None
        return proof.place.certificate

    async def _validate(self, claim: Member, head: Head, place: ChainPosition) -> Proof:
        if not 1 <= head.round <= wire.MAX_COUNT:
            raise ProtocolViolation(f"a stated head of round {head.round}, which no certificate can have")
        seen = self._proven.get(head)
        proven = seen.place if seen is not None else await self._fetch_position(claim, head)
        return Proof(proven, place.head.hash, await self._forks(claim, proven, place))

    async def _fetch_position(self, claim: Member, head: Head) -> ChainPosition:
        known = await self._node.compute(self._ledger.certificate, head.round) if self._knows(head) else None
        page = [known] if known else await self._ask(claim, head.round)
        if not page or ChainLink.of(page[0]).head != head:
            # Not necessarily a lie: it may have moved to a better chain, and its new record may be in flight.
            self._disproved[claim.peer] = (claim.body.head, claim.body.root)
            raise NetworkError(f"it states round {head.round}, but does not provide its certificate")
        return await self._node.compute(position_after, page[0], self._spec.run, self._spec.charter)

    async def _forks(self, claim: Member, proven: ChainPosition, place: ChainPosition) -> bool:
        """Return True if a proven chain is known to fork from mine; its provider may hold only the end of it."""
        if proven.round <= place.round:
            return True
        if place.certificate is None:
            return False
        page = [proven.certificate] if proven.round == place.round + 1 else await self._ask(claim, place.round + 1)
        return any(result_of(next_one).previous != place.head.hash for next_one in page if next_one is not None)

    async def _ask(self, claim: Member, round_: int) -> list[wire.Certificate]:
        return await ask_certificates(self._node, claim.peer, wire.LedgerAsk(self._spec.run, round_, 1))

    def _knows(self, head: Head) -> bool:
        """Return True if my ledger holds this head, though my state does not include it yet."""
        return self._ledger.at(head.round) == head

    def _claims(self, members: Sequence[Member]) -> list[Member]:
        """Return the other members that may hold a state that I should have."""
        return [member for member in training(self.credible(members)) if member.peer != self._node.peer_id]

    async def _examine(self, head: Head, claims: Sequence[Member], place: ChainPosition) -> None:
        try:
            await self._ask_in_turn(claims, place)
        finally:
            self._asked_for.discard(head)
            self.news += 1

    async def _ask_in_turn(self, claims: Sequence[Member], place: ChainPosition) -> None:
        for claim in claims:
            try:
                await self.prove(claim, place)
            except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
                error = sole_error(raised)
                if isinstance(error, RemoteError):
                    self._node.charge(claim.peer, "prove a head", error)
                elif not isinstance(error, NetworkError):
                    raise
                self._backed_off.add(claim.peer)
                self._node.telemetry.emit(
                    "head.unproven", peer=claim.peer, step="prove", reason=str(error), round=claim.body.round
                )
            else:
                self._backed_off.discard(claim.peer)
                return
