"""One member's chain of the run: its ledger, which is read on from any member that states a later head.

A member states the head of its chain, and gives the certificates that lead there from this peer's newest one
(`chain.reader`); what is verified goes into the ledger page by page. A newcomer begins with the certificate that its link or
its bootstraps name, else with the founders' first round. If a member's chain parts from this peer's, voters with more than a
third of the votes have signed both (`Conduct.alarm`). A member that did not show its head is ignored until it states another.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import trio

from ...dht.members.table import Member
from ...peer import wire
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..chain.certificate import certificate_hash
from ..chain.chain import NOTHING, ChainLink, ChainPosition, Head, HeldChain
from ..chain.fork_choice import OwnChain, Relation, alike, head_of, training
from ..chain.reader import ChainReader
from ..chain.replay import ask_certificates, in_my_order
from ..spec import Spec
from .archive import Archive

MAX_PARTED = 1024
"""Heads of other chains that are remembered, the oldest forgotten first."""
AT_ONCE = 16
"""Heads that are read on to at a time, those that most members state first: honest members are on one or two."""
ASKED = 2
"""Members asked for one head; the next attempt asks others."""


class RunChain:
    """One peer's chain, and the members whose claims failed. `anchor` is the certificate that a newcomer begins with."""

    def __init__(self, node: Node, spec: Spec, archive: Archive, anchor: Head | None = None) -> None:
        self._node = node
        self._spec = spec
        self._archive = archive
        self._anchor = anchor
        self._parted: dict[Head, Relation] = {}
        self._disproved: dict[PeerId, tuple[bytes, bytes]] = {}
        self._backed_off: set[PeerId] = set()
        self.asked_for: set[Head] = set()
        self._reader = ChainReader(node, spec.run, spec.charter)
        self.news = 0
        """A counter of finished attempts to read on to a head."""
        self.changed = trio.Event()
        """Set, and replaced, when an attempt has finished."""

    def held(self) -> HeldChain:
        """Return the chain: that of the ledger, for a newcomer no more than the anchor."""
        ledger = self._archive.ledger
        if self._anchor is not None and ledger.head == NOTHING:
            return HeldChain.of((), self._anchor)
        return HeldChain(ledger.head, ledger.first, ledger.at, ledger.certificate)

    def own(self, place: ChainPosition) -> OwnChain:
        """Return the chain with the state at `place`."""
        return OwnChain(place, self.held())

    def credible(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that train my model, and have not failed to show what they state."""
        return [
            member
            for member in alike(members, self._node.peer_id)
            if self._disproved.get(member.peer) != (member.body.head, member.body.root)
        ]

    def is_off_link(self, members: Sequence[Member]) -> bool:
        """Return True if my join link names a certificate, and all members that could have it are on other chains."""
        relations = {self._parted[head] for head in map(head_of, self._claims(members)) if head in self._parted}
        has_begun = self._archive.ledger.head != NOTHING
        return not has_begun and Relation.APART in relations and relations <= {Relation.APART, Relation.OLDER}

    def have_failed(self, members: Sequence[Member], place: ChainPosition) -> bool:
        """Return True if nobody that states an unproven head showed it when I asked for it last."""
        unproven = set(self.unproven(members, place))
        return {claim.peer for claim in self._claims(members) if head_of(claim) in unproven} <= self._backed_off

    def unproven(self, members: Sequence[Member], place: ChainPosition) -> list[Head]:
        """Return the stated heads whose certificates were not compared to this chain, the most frequent first."""
        mine, stated = self.own(place), Counter(head_of(member) for member in self._claims(members))
        unproven = [head for head in stated if not mine.holds(head) and head not in self._parted]
        return sorted(unproven, key=lambda head: (-stated[head], head.hash))

    def ask(self, members: Sequence[Member], place: ChainPosition) -> None:
        """Read on to unproven heads in the background. A failure is an event."""
        claims = self._claims(members)
        wanted = [head for head in self.unproven(members, place) if head not in self.asked_for]
        for head in wanted[: AT_ONCE - len(self.asked_for)]:
            by_peer = {member.peer: member for member in claims if head_of(member) == head}
            order = sorted(in_my_order(self._node.peer_id, by_peer), key=self._backed_off.__contains__)
            self.asked_for.add(head)
            self._node.nursery.start_soon(self._examine, head, [by_peer[peer] for peer in order[:ASKED]])

    async def fill(self, giver: PeerId, first: int) -> None:
        """Read the ledger's past from a peer, down to round `first`. Raises `NetworkError` or `RemoteError`."""
        ledger, before = self._archive.ledger, list[wire.Certificate]()

        async def take(page: list[wire.Certificate], losses: Mapping[int, float]) -> bool:
            before[:0] = page
            await self._node.compute(self._archive.losses.learn, losses)
            return True

        oldest = await self._node.compute(ledger.certificate, ledger.first)
        if oldest is None or (await self._reader.fill(oldest, first, giver, take)).slot.round > first:
            raise NetworkError(f"it lacks certificates between round {first} and round {ledger.first}")
        held = await self._node.compute(lambda: [ledger.certificate(it) for it in range(ledger.first, ledger.head.round + 1)])
        await self._node.compute(ledger.follow, [*before, *(it for it in held if it is not None)])

    async def _reach(self, claim: Member, head: Head) -> None:
        """Read on to the head that a member states. Raises `NetworkError`, or `RemoteError` for a false certificate."""
        if not 1 <= head.round <= wire.MAX_COUNT:
            raise ProtocolViolation(f"a stated head of round {head.round}, which no certificate can have")
        page = await self._ask(claim, head.round)
        if not page or ChainLink.of(page[0]).head != head:
            # Not necessarily a lie: its state may be another one by now, and its new record may be in flight.
            self._disproved[claim.peer] = (claim.body.head, claim.body.root)
            raise NetworkError(f"it states round {head.round}, but does not provide its certificate")
        await self._begin(claim)
        how = await self._reader.reach(self.held(), head, claim.peer, self._take)
        if how is not Relation.EXTENDS:
            self._part(claim, head, how)
        elif self._archive.ledger.at(head.round) != head:
            reached = self._archive.ledger.head.round
            raise NetworkError(f"its certificates, read up to round {reached}, do not lead to the head that it states")

    async def _begin(self, claim: Member) -> None:
        """Put the anchor's certificate into an empty ledger, if a member shows it."""
        ledger, anchor = self._archive.ledger, self._anchor
        if anchor is not None and ledger.head == NOTHING:
            page = await self._ask(claim, anchor.round)
            if page and certificate_hash(page[0]) == anchor.hash and ledger.head == NOTHING:
                await self._node.compute(ledger.follow, page)

    async def _take(self, page: list[wire.Certificate], losses: Mapping[int, float]) -> bool:
        await self._node.compute(self._archive.losses.learn, losses)
        is_next: bool = await self._node.compute(self._archive.ledger.extend, page)
        return is_next  # The ledger may have followed the state elsewhere meanwhile.

    def _part(self, claim: Member, head: Head, how: Relation) -> None:
        """Remember and report a chain that parts from mine, or the alarm."""
        conduct, alarm = self._archive.conduct, self._reader.alarm
        self._parted[head] = how
        while len(self._parted) > MAX_PARTED:
            del self._parted[next(iter(self._parted))]
        event, round_ = "chain.parted", head.round
        if how is Relation.TWICE and alarm is not None:
            for certificate in (alarm.mine, alarm.other):
                conduct.examine(certificate)
            conduct.alarm = conduct.alarm or str(alarm)
            event, round_ = "chain.conflict", alarm.mine.slot.round
        self._node.telemetry.emit(event, peer=claim.peer, step="prove", reason=how.value, round=round_)

    async def _ask(self, claim: Member, round_: int) -> list[wire.Certificate]:
        return await ask_certificates(self._node, claim.peer, wire.LedgerAsk(self._spec.run, round_, 1))

    def _claims(self, members: Sequence[Member]) -> list[Member]:
        """Return the other members that may hold a state that I should have."""
        return [member for member in training(self.credible(members)) if member.peer != self._node.peer_id]

    async def _examine(self, head: Head, claims: Sequence[Member]) -> None:
        try:
            await self._ask_in_turn(head, claims)
        finally:
            self.asked_for.discard(head)
            self.news += 1
            self.changed.set()
            self.changed = trio.Event()

    async def _ask_in_turn(self, head: Head, claims: Sequence[Member]) -> None:
        for claim in claims:
            try:
                await self._reach(claim, head)
            except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
                error = sole_error(raised)
                if isinstance(error, RemoteError):
                    self._disproved[claim.peer] = (claim.body.head, claim.body.root)
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
