"""Light-client validation of the heads that members state, by their certificates.

A member states the head of its chain. I fetch the certificates from our last common one up to that head, page by page, and
check of each that the electorate which the one before determines has signed it. I follow it if the first of them continues
my chain; if that parts from mine, voters with more than a third of the votes have signed both (`Conduct.alarm`). The
furthest one is remembered (`ChainWalk`): who was away for long goes on from there when the run has moved on. A newcomer
has no certificate in common with anybody: it fetches those from the first round on, or the last `MAX_TRAIL` if there are
more. A member that could not prove its head is ignored until it states another one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from ...dht.members.table import Member
from ...peer import wire
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ...peer.wire.signed import verify_signed
from ..accountability.conduct import Conduct
from ..chain.certificate import value_of
from ..chain.chain import NOTHING, ChainLink, ChainPosition, Head, position_after
from ..chain.fork_choice import Chains, HeadProof, Relation, alike, head_of, training
from ..chain.ledger import Ledger
from ..chain.packed import checked
from ..chain.replay import MAX_TRAIL, ask_certificates, ask_range, fetch_trail, in_my_order
from ..spec import Spec

MAX_WALK = 16 * MAX_TRAIL
"""Certificates that are fetched for one head at a time; the next search goes on from there. Each page is checked before the
next is asked for, so they cost whoever serves them a signature of the voters each."""
MAX_REPORTED = 1024
"""Partings of which an event has been emitted already."""
AT_ONCE = 16
"""Heads validated at a time, those that most members state first: honest members are on one or two."""
ASKED = 2
"""Members asked for one head's certificate; the next attempt asks others."""


@dataclass(frozen=True, slots=True)
class HeldChain:
    """The chain that I hold: that of my state, and what my ledger has beyond it."""

    place: ChainPosition
    head: Head
    first: int
    ledger: Ledger

    @classmethod
    def of(cls, place: ChainPosition, ledger: Ledger, anchor: Head | None, *, resumes: bool) -> "HeldChain":
        """Return the chain of a state at `place`. One at the run's start begins with the ledger, if it `resumes`.

        A newcomer's chain is the `anchor` that its join link names.
        """
        head = ledger.head
        if place.certificate is None and not (resumes and head != NOTHING):
            head = anchor or NOTHING
            return cls(place, head, head.round, ledger)
        if place.certificate is not None and ledger.at(place.round) != place.head:
            return cls(place, place.head, place.round, ledger)
        return cls(place, head, ledger.first, ledger)

    def at(self, round_: int) -> Head | None:
        """Return the head after a round; None if I do not know it."""
        if round_ == self.head.round:
            return self.head
        return self.ledger.at(round_) if self.first <= round_ < self.head.round else None

    def certificate(self, round_: int) -> wire.Certificate | None:
        """Return the certificate of a round that I hold; None if it is not here or cannot be read."""
        if round_ == self.place.round and self.place.certificate is not None:
            return self.place.certificate
        found = self.ledger.certificate(round_)
        known = self.at(round_)
        return (
            found if found is not None and known is not None and ChainLink.of(found).head.hash == known.hash else None
        )


@dataclass(frozen=True, slots=True)
class ChainWalk:
    """How far I have followed a chain by its certificates, from the last one that it has in common with mine."""

    base: Head
    """As that of a `HeadProof`."""
    common: int
    """The round of that common certificate."""
    last: wire.Certificate

    @property
    def round(self) -> int:
        """The last round that was checked."""
        return self.last.slot.round


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
        self._walk: ChainWalk | None = None
        """The longest one along a chain that I may follow, as long as mine is the same."""
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
        return HeldChain.of(place, self._ledger, self._anchor, resumes=self._resumes)

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
            return HeadProof(proven, None, NOTHING, await self._from_first_round(claim, proven))
        if is_held:
            return HeadProof(proven, Relation.EXTENDS, mine.head)
        if head.round < mine.first:
            return HeadProof(proven, Relation.OLDER, mine.head)
        return await self._compare(claim, proven, mine)

    async def _fetch_position(self, claim: Member, head: Head, known: wire.Certificate | None) -> ChainPosition:
        page = [known] if known else await self._ask(claim, head.round)
        if not page or ChainLink.of(page[0]).head != head:
            # Not necessarily a lie: it may have moved to a better chain, and its new record may be in flight.
            self._disproved[claim.peer] = (claim.body.head, claim.body.root)
            raise NetworkError(f"it states round {head.round}, but does not provide its certificate")
        return await self._node.compute(position_after, page[0], self._spec.run, self._spec.charter)

    async def _from_first_round(self, claim: Member, proven: ChainPosition) -> bool:
        """Check what leads to a newcomer's first head. Returns whether it was all of it: there may be too much to fetch.

        Raises `NetworkError` where it does not arrive: such a head is asked for again. If it counted as one that is too
        long, newcomers that are more than the members on it would never follow it.
        """
        node, spec, last = self._node, self._spec, proven.certificate
        assert last is not None
        peer, run = claim.peer, spec.run
        trail = await fetch_trail(node, peer, run, lambda first: first.slot.round == 1, last, is_proof=True)
        await node.compute(checked, trail, spec.run, verify_signed, spec.charter)
        return trail[0].slot.round == 1

    async def _compare(self, claim: Member, proven: ChainPosition, mine: HeldChain) -> HeadProof:
        """Compare a chain to mine at their parting, then check it from there to its head."""
        common = await self._common(claim, proven.head, mine)
        if common is None:
            self._report(claim, Relation.APART, proven.head.hash, mine.head.round)
            beginning = mine.at(mine.first)
            return HeadProof(proven, Relation.APART, mine.head if beginning is None else beginning)
        before = await self._certificate(claim, mine, common)
        if common < mine.head.round:
            return await self._conflict(claim, proven, before, mine, common + 1)
        number = common + 1
        if (walk := await self._walked(claim, mine.head, common, proven.round)) is not None:
            before, number = walk.last, walk.round + 1
        end = number + MAX_WALK
        while number <= proven.round:
            if number > end:
                raise NetworkError(f"its chain has more than {MAX_WALK} rounds to check: round {number - 1} is reached")
            rounds = range(number, min(proven.round, number + wire.MAX_PAGE - 1) + 1)
            page = await ask_range(self._node, claim.peer, self._spec.run, rounds)
            await self._node.compute(self._check, page, before)
            before, number = page[-1], rounds.stop
            self._remember(ChainWalk(mine.head, common, page[-1]))
        if before is None or ChainLink.of(before).head != proven.head:
            raise NetworkError(f"its certificates do not lead to the head of round {proven.round} that it states")
        return HeadProof(proven, Relation.EXTENDS, mine.head)

    async def _conflict(
        self, claim: Member, proven: ChainPosition, before: wire.Certificate | None, mine: HeldChain, round_: int
    ) -> HeadProof:
        """Verify another certificate of a round that I hold one of: the alarm. Raises `NetworkError` or `RemoteError`."""
        my_own = await self._node.compute(mine.certificate, round_)
        if my_own is None:
            raise NetworkError(f"my certificate of round {round_} cannot be read")
        (other,) = await ask_range(self._node, claim.peer, self._spec.run, range(round_, round_ + 1))
        await self._node.compute(self._check, [other], before)
        head = ChainLink.of(my_own).head
        if ChainLink.of(other).head.hash == head.hash:
            raise NetworkError("its chain has changed while it was read")
        self._conduct.examine(my_own)
        self._conduct.examine(other)
        self._conduct.alarm = self._conduct.alarm or (
            f"there are two certificates of round {round_}: voters with more than a third of the votes have signed both, so "
            "neither counts"
        )
        self._report(claim, Relation.TWICE, ChainLink.of(other).head.hash, round_)
        return HeadProof(proven, Relation.TWICE, head)

    def _remember(self, walk: ChainWalk) -> None:
        kept = self._walk
        if kept is None or (kept.base, kept.common) != (walk.base, walk.common) or kept.round < walk.round:
            self._walk = walk

    async def _walked(self, claim: Member, base: Head, common: int, end: int) -> ChainWalk | None:
        """Return my walk along a member's chain, which has the round `end`; None if there is none, or along another one."""
        walk = self._walk
        if walk is None or (walk.base, walk.common) != (base, common) or walk.round > end:
            return None
        page = await self._ask(claim, walk.round)
        return walk if page and ChainLink.of(page[0]).head == ChainLink.of(walk.last).head else None

    async def _common(self, claim: Member, head: Head, mine: HeldChain) -> int | None:
        """Return the last round whose certificate both chains have, 0 if they part at the first; None if none is found."""
        if head.round > mine.head.round:
            page = await self._ask(claim, mine.head.round + 1)
            if page and value_of(page[0]).previous == mine.head.hash:
                return mine.head.round
        end = min(mine.head.round + 1, head.round)
        lowest = max(1, mine.first, end - MAX_TRAIL)
        while end > lowest:
            rounds = range(max(lowest, end - wire.MAX_PAGE), end)
            for certificate in reversed(await ask_range(self._node, claim.peer, self._spec.run, rounds)):
                known = mine.at(certificate.slot.round)
                if known is not None and ChainLink.of(certificate).head.hash == known.hash:
                    return certificate.slot.round
            end = rounds.start
        return 0 if lowest == mine.first == 1 else None

    async def _certificate(self, claim: Member, mine: HeldChain, round_: int) -> wire.Certificate | None:
        """Return the last common certificate; None before the first round. A join link names it by its hash alone."""
        if not round_:
            return None
        found = await self._node.compute(mine.certificate, round_)
        if found is None:
            page = await self._ask(claim, round_)
            known = mine.at(round_)
            if not page or known is None or ChainLink.of(page[0]).head.hash != known.hash:
                raise NetworkError(f"the certificate of round {round_}, which both chains have, is not here")
            found = page[0]
        return found

    def _check(self, page: Sequence[wire.Certificate], before: wire.Certificate | None) -> None:
        checked(page, self._spec.run, verify_signed, self._spec.charter, before=before)

    def _report(self, claim: Member, found: Relation, mark: bytes, round_: int) -> None:
        if mark in self._reported:
            return
        if len(self._reported) >= MAX_REPORTED:
            self._reported.clear()
        self._reported.add(mark)
        event = "chain.conflict" if found is Relation.TWICE else "chain.parted"
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
