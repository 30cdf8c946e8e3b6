"""Light-client validation of the heads that members state, by their certificates.

A member states the head of its chain, and gives the certificates that lead there from the head of this peer's
(`chain.reader`). This peer follows it if they continue its own chain; if the member's chain parts from it, voters with more
than a third of the votes have signed both (`Conduct.alarm`). A newcomer has no certificate in common with anybody: it reads
from the first round on, unless there are more than `MAX_TRAIL` rounds. A member that could not prove its head is ignored
until it states another one.
"""

from collections import Counter
from collections.abc import Sequence

import trio

from ...dht.members.table import Member
from ...peer import wire
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..accountability.conduct import Conduct
from ..chain.certificate import certificate_hash
from ..chain.chain import NOTHING, ChainLink, ChainPosition, Head, HeldChain, position_after
from ..chain.fork_choice import Chains, HeadProof, Relation, alike, head_of, training
from ..chain.ledger import Ledger
from ..chain.reader import ChainReader
from ..chain.replay import MAX_TRAIL, ask_certificates, in_my_order
from ..spec import Spec

MAX_REPORTED = 1024
"""Partings of which an event has been emitted already."""
AT_ONCE = 16
"""Heads validated at a time, those that most members state first: honest members are on one or two."""
ASKED = 2
"""Members asked for one head's certificate; the next attempt asks others."""


def held_chain(place: ChainPosition, ledger: Ledger, anchor: Head | None, *, resumes: bool) -> HeldChain:
    """Return the chain of a state at `place`, and what the ledger has beyond it.

    One at the run's start begins with the ledger, if it `resumes`. A newcomer's chain is the `anchor` that its link names.
    """
    head, first = ledger.head, ledger.first
    if place.certificate is None and not (resumes and head != NOTHING):
        head = anchor or NOTHING
        first = head.round
    elif place.certificate is not None and ledger.at(place.round) != place.head:
        head, first = place.head, place.round

    def at(round_: int) -> Head | None:
        if round_ == head.round:
            return head
        return ledger.at(round_) if first <= round_ < head.round else None

    def certificate(round_: int) -> wire.Certificate | None:
        if round_ == place.round and place.certificate is not None:
            return place.certificate
        found, known = ledger.certificate(round_), at(round_)
        return found if found and known and ChainLink.of(found).head.hash == known.hash else None

    return HeldChain(head, first, at, certificate)


class Proofs:
    """One peer's validated heads, and the members whose claims failed.

    `anchor` is the certificate that the join link names, `resumes` False if what an earlier process left does not bind me.
    """

    def __init__(
        self,
        node: Node,
        spec: Spec,
        ledger: Ledger,
        conduct: Conduct,
        *,
        anchor: Head | None = None,
        resumes: bool = True,
    ) -> None:
        self._node = node
        self._spec = spec
        self._ledger = ledger
        self._conduct = conduct
        self._anchor = anchor if resumes else None
        self._resumes = resumes
        self._proven: dict[Head, HeadProof] = {}
        self._disproved: dict[PeerId, tuple[bytes, bytes]] = {}
        self._backed_off: set[PeerId] = set()
        self.asked_for: set[Head] = set()
        self._reported: set[bytes] = set()
        self._reader = ChainReader(node, spec.run, spec.charter)
        self.news = 0
        """A counter of finished attempts to validate a head."""
        self.changed = trio.Event()
        """Set, and replaced, when an attempt has finished."""

    def credible(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that train my model, and have not failed to prove what they state."""
        return [
            member
            for member in alike(members, self._node.peer_id)
            if self._disproved.get(member.peer) != (member.body.head, member.body.root)
        ]

    def chains(self, place: ChainPosition) -> Chains:
        """Return my view of the run's chains, with my state at `place`."""
        mine = self._held(place)
        return Chains(place, mine.head, mine.at, mine.first, self._proven)

    def are_off_link(self, members: Sequence[Member], place: ChainPosition) -> bool:
        """Return True if my join link names a certificate, and all members that could have it are on other chains."""
        chains = self.chains(place)
        if place.certificate is not None or self._anchor is None or chains.head != self._anchor:
            return False
        proofs = [chains.proof(head_of(member)) for member in self._claims(members)]
        relations = {proof.relation for proof in proofs if proof is not None}
        return Relation.APART in relations and relations <= {Relation.APART, Relation.OLDER}

    def _held(self, place: ChainPosition) -> HeldChain:
        return held_chain(place, self._ledger, self._anchor, resumes=self._resumes)

    def have_failed(self, members: Sequence[Member], place: ChainPosition) -> bool:
        """Return True if nobody that states an unproven head showed it when I asked for it last."""
        unproven = set(self.unproven(members, place))
        return {claim.peer for claim in self._claims(members) if head_of(claim) in unproven} <= self._backed_off

    def unproven(self, members: Sequence[Member], place: ChainPosition) -> list[Head]:
        """Return the stated heads of other chains than mine that are not validated, the most frequent first."""
        chains = self.chains(place)
        stated = Counter(head_of(member) for member in self._claims(members))
        unproven = [head for head in stated if not chains.is_mine(head) and chains.proof(head) is None]
        return sorted(unproven, key=lambda head: (-stated[head], head.hash))

    def wanted(self, members: Sequence[Member], place: ChainPosition) -> list[Head]:
        """Return the unproven heads without a pending request."""
        return [head for head in self.unproven(members, place) if head not in self.asked_for]

    def ask(self, members: Sequence[Member], place: ChainPosition) -> None:
        """Fetch and validate the certificates of unproven heads in the background. A failure is an event."""
        claims = self._claims(members)
        stated = {head_of(member) for member in claims}
        self._proven = {head: proof for head, proof in self._proven.items() if head in stated}
        for head in self.wanted(members, place)[: AT_ONCE - len(self.asked_for)]:
            by_peer = {member.peer: member for member in claims if head_of(member) == head}
            order = sorted(in_my_order(self._node.peer_id, by_peer), key=self._backed_off.__contains__)
            self.asked_for.add(head)
            self._node.nursery.start_soon(self._examine, head, [by_peer[peer] for peer in order[:ASKED]], place)

    async def examine(self, members: Sequence[Member], place: ChainPosition) -> None:
        """Fetch and validate the certificates of unproven heads, however long that takes. A failure is an event."""
        self.ask(members, place)
        while self.asked_for:
            await self.changed.wait()

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

    async def _validate(self, claim: Member, head: Head, place: ChainPosition) -> HeadProof:
        if not 1 <= head.round <= wire.MAX_COUNT:
            raise ProtocolViolation(f"a stated head of round {head.round}, which no certificate can have")
        mine = self._held(place)
        at = mine.at(head.round)
        is_held = at is not None and at.hash == head.hash  # A join link names no tokens.
        known = await self._node.compute(mine.certificate, head.round) if is_held else None
        seen = self._proven.get(head)
        proven = seen.place if seen is not None else await self._fetch_position(claim, head, known)
        if mine.head == NOTHING:
            # One that is too long, or whose beginning its holder lacks, is not verified from the first round on.
            is_whole = head.round <= MAX_TRAIL and bool(await self._ask(claim, 1))
            if is_whole:
                await self._reader.reach(mine, head, claim.peer)
            return HeadProof(proven, None, NOTHING, is_whole)
        relation, base = await self._reader.reach(mine, head, claim.peer), mine.head
        if relation in (Relation.APART, Relation.TWICE):
            base = self._parted(claim, relation, mine)
        return HeadProof(proven, relation, base)

    def _parted(self, claim: Member, relation: Relation, mine: HeldChain) -> Head:
        """Report a chain that parts from mine, or the alarm; returns what of mine the proof of that depends on."""
        alarm = self._reader.alarm
        if relation is Relation.APART or alarm is None:
            self._report("chain.parted", claim, relation, claim.body.head, mine.head.round)
            return mine.at(mine.first) or mine.head
        for certificate in (alarm.mine, alarm.other):
            self._conduct.examine(certificate)
        self._conduct.alarm = self._conduct.alarm or str(alarm)
        self._report("chain.conflict", claim, relation, certificate_hash(alarm.other), alarm.other.slot.round)
        return ChainLink.of(alarm.mine).head

    async def _fetch_position(self, claim: Member, head: Head, known: wire.Certificate | None) -> ChainPosition:
        page = [known] if known else await self._ask(claim, head.round)
        if not page or ChainLink.of(page[0]).head != head:
            # Not necessarily a lie: it may have moved to a better chain, and its new record may be in flight.
            self._disproved[claim.peer] = (claim.body.head, claim.body.root)
            raise NetworkError(f"it states round {head.round}, but does not provide its certificate")
        return await self._node.compute(position_after, page[0], self._spec.run, self._spec.charter)

    def _report(self, event: str, claim: Member, found: Relation, mark: bytes, round_: int) -> None:
        if mark in self._reported:
            return
        if len(self._reported) >= MAX_REPORTED:
            self._reported.clear()
        self._reported.add(mark)
        self._node.telemetry.emit(event, peer=claim.peer, step="prove", reason=found.value, round=round_)

    async def _ask(self, claim: Member, round_: int) -> list[wire.Certificate]:
        return await ask_certificates(self._node, claim.peer, wire.LedgerAsk(self._spec.run, round_, 1))

    def _claims(self, members: Sequence[Member]) -> list[Member]:
        """Return the other members that may hold a state that I should have."""
        return [member for member in training(self.credible(members)) if member.peer != self._node.peer_id]

    async def _examine(self, head: Head, claims: Sequence[Member], place: ChainPosition) -> None:
        try:
            await self._ask_in_turn(claims, place)
        finally:
            self.asked_for.discard(head)
            self.news += 1
            self.changed.set()
            self.changed = trio.Event()

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
