"""The conduct of peers in a run: signing guard, witness of equivocation, bans, trust."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ...dht.run.admission import Charter
from ...dht.run.statements import OwnerStatements
from ...dht.run.succession import ENDED, is_ending
from ...peer import wire
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ...peer.wire.schema import encode
from ..chain.certificate import certificate_hash, genesis, value_of
from ..chain.voters import electorate_after
from ..spec import Terms
from .bans import Bans
from .evidence import Witness
from .patience import Faults, Lapses, Patience
from .signing import SigningGuard
from .trust import MANY_OLD, TRUST_WINDOW, YOUNG_ROUNDS, Trust, TrustRecord

SILENT_ROUNDS = 10
"""Rounds for which an owner that sent no Have or output is given no part: its deputies made it, which cost a deadline."""


class Conduct:
    """One peer's record of conduct; it survives restarts if there is a `folder`.

    `is_known`: earlier processes took part in this run.
    """

    def __init__(
        self,
        node: Node,
        terms: Terms,
        charter: Charter,
        folder: Path | None = None,
        history: Callable[[int], wire.Certificate | None] = lambda round_: None,
        *,
        is_known: bool = False,
    ) -> None:
        path = folder / "spoken" if folder is not None else None
        self.guard = SigningGuard(node.identity, node.telemetry, path, is_known=is_known)
        self.bans = Bans(node, terms, folder / "evidence" if folder is not None else None, self._terms_in)
        self._node = node
        self._witness = Witness()
        self._terms = terms
        self._slot = wire.Slot(terms.run, 0, genesis(terms.run))
        self._certificate: wire.Certificate | None = None
        """That of my state."""
        self._voters = electorate_after(None, charter).votes.keys()
        self.charter = charter
        """The run's rules of admission, with what its owner has stated since: they hold for what is to come."""
        self.voucher = b""
        """The owner's statement that vouches for me; empty if there is none."""
        self.revision = b""
        """The owner's newest statement that revises the run's settings; empty if there is none."""
        self.alarm = ""
        """Why this peer takes part in no further round: two certificates of one round were found; empty if none were."""
        self.ended = ""
        """Why no further round begins: the run's owner has ended it (`dht.run.succession`); empty while it has not."""
        self._history = history
        self._trust = Trust(charter.earned, charter.carried)
        self._owns_from: dict[PeerId, int] = {}
        """The first round in which I would give a member a part again."""
        self._readys, self._parts, self._sketches = Patience(SILENT_ROUNDS), Patience(1), Patience(1)
        """Who is waited for as a voter that is not Ready, to contribute, and to sketch after the outputs."""
        self._faults, self._mute, self._slow, self._withheld = Faults(), Lapses(), Lapses(), Lapses()

    def follow(self, statements: OwnerStatements, invite: bytes = b"") -> None:
        """Carry out what the run's owner states; `invite` is my own invitation."""
        self.charter = self.charter.amended(statements)
        self.voucher = statements.voucher(self._node.peer_id)
        self.revision = statements.revision
        self.ended = ENDED if is_ending(statements) else self.ended  # No other statement begins it again.
        self.bans.follow(statements, withdrawn=self.charter.why_not_admit(self._node.peer_id, invite))

    def advance(self, round_: int, certificate: wire.Certificate | None) -> None:
        """Enter a round with the state that `certificate` proves (None: the run's start), and update trust by it."""
        run = self._slot.run
        self._certificate = certificate
        value = None if certificate is None else value_of(certificate)
        self._voters = electorate_after(value, self.charter).votes.keys()
        self._slot = wire.Slot(run, round_, genesis(run) if certificate is None else certificate_hash(certificate))
        self._witness.advance(round_)
        if certificate is None:
            self._trust = Trust(self.charter.earned, self.charter.carried)
        elif certificate_hash(certificate) != self._trust.head:
            if value_of(certificate).previous != self._trust.head:
                self._trust = self._traced(certificate)
            self._trust.take(certificate)
            self.guard.certified(certificate.slot.round, certificate.voters)
            if last := self._trust.last_round(self._node.peer_id):
                self.guard.named(last)
        self.bans.advance(round_)

    def _terms_in(self, slot: wire.Slot) -> Terms | None:
        """Return what held for the bytes of a round; None if I cannot know.

        The certificate before it says so. Where I lack that one, a later one that names no revision does: none held before.
        """
        mine, under = self._certificate, self._terms.under
        if under is None or slot.round <= 1:
            return self._terms
        before = mine if mine is not None and mine.slot.round == slot.round - 1 else self._history(slot.round - 1)
        if before is None:
            is_known = mine is not None and mine.slot.round >= slot.round and not value_of(mine).revision
            return self._terms if is_known else None
        return under(value_of(before).revision) if certificate_hash(before) == slot.previous else None

    def begin(self, slot: wire.Slot) -> int:
        """Begin the decision of `slot`: return its first attempt in which I have certainly signed nothing."""
        return self.guard.begin(slot)

    @property
    def certified(self) -> tuple[PeerId, ...] | None:
        """The members of the certificate that proves my state; None if there is none yet."""
        return None if self._certificate is None else value_of(self._certificate).members

    def enter(self, slot: wire.Slot) -> None:
        """Enter a slot: statements near it are remembered longest."""
        self._slot = slot

    def trust_of(self, peer: PeerId) -> TrustRecord | None:
        """Return a peer's trust record; None if the certificates that I hold do not show it."""
        return self._trust.of(peer)

    def needs(self, peer: PeerId) -> bool:
        """Return True if the run needs a peer beyond its vote: it has a seat in the last certificate, or tenure."""
        record = self._trust.of(peer)
        return peer in (self.certified or ()) or (record is not None and record.rounds >= YOUNG_ROUNDS)

    def pacing(self, trainers: Collection[PeerId]) -> tuple[frozenset[PeerId], ...]:
        """Return the groups of which most must be ready to end the phases of others: where weight must be earned, of tenure.

        Keys are free: by heads, those that are Ready at once would end everybody's phase, and keepers would go on without
        the others. Fewer than four of tenure could do the same, so beside them most of all that train must be ready too.
        """
        records = {peer: self._trust.of(peer) for peer in trainers}
        old = frozenset(peer for peer, it in records.items() if it is not None and it.rounds >= YOUNG_ROUNDS)
        if not old or not self.charter.earned:
            return (frozenset(trainers),)
        return (old,) if len(old) >= MANY_OLD else (old, frozenset(trainers))

    def relieve(self, silent: Collection[PeerId], late: Collection[PeerId] = ()) -> None:
        """Remember members that were silent about a part, or not ready, or late with an output: they own none for a while.

        Nor are the silent ones waited for. They lose nothing that they come for in time.
        """
        self._relieve((*silent, *late), SILENT_ROUNDS)
        self._readys.fail(silent, self._slot.round)

    def missed(
        self,
        idle: Iterable[PeerId],
        pairs: Iterable[tuple[PeerId, PeerId]],
        known: Collection[PeerId],
        owners: int,
        known_trainers: int,
    ) -> None:
        """Remember who trained and is not in the value, and between whom parts were missing.

        Of a pair of a contributor and me, its holder, I know that I am not at fault.
        """
        round_, me = self._slot.round, self._node.peer_id
        pairs = [(contributor, holder) for contributor, holder in pairs if self.awaits(contributor)]
        contributors, holders = self._faults.add(pairs, known, round_, owners)
        mine = {contributor for contributor, holder in pairs if holder == me}
        mine = mine if 3 * len(mine & {*known}) <= known_trainers else set()  # Else it is my line.
        failed = {*idle, *contributors, *mine}
        self._parts.fail({*failed, *map(self._author, failed)}, round_)
        self._relieve(holders, SILENT_ROUNDS)

    def lapsed(
        self,
        unsketched: Collection[PeerId],
        slow: Collection[PeerId],
        withheld: Collection[PeerId],
        proposer: PeerId,
        voters: int,
    ) -> None:
        """Remember who did not sketch after the outputs in time, and whose output came long after those of most, or never."""
        round_ = self._slot.round
        authors = {self._author(peer) for peer in unsketched}
        self._sketches.fail(self._mute.add(authors, proposer, round_, voters), round_)
        self._relieve(self._slow.add(slow, proposer, round_, voters), SILENT_ROUNDS)
        self._relieve(self._withheld.add(withheld, proposer, round_, voters), TRUST_WINDOW)

    def awaits(self, peer: PeerId) -> bool:
        """Return True if I wait to a deadline for what a member contributes."""
        return self._parts.awaits(self._author(peer), self._slot.round)

    def awaits_ready(self, peer: PeerId) -> bool:
        """Return True if I wait until a member without a vote is Ready: by its own memory, for who is not is not in."""
        return self._parts.awaits(peer, self._slot.round)

    def awaits_sketch(self, peer: PeerId) -> bool:
        """Return True if I wait for a contributor to sketch after the outputs; if not, others do it for it at once."""
        return self._sketches.awaits(self._author(peer), self._slot.round)

    def _author(self, peer: PeerId) -> str:
        """Return whose memory says how long a peer is waited for: the young share one, since keys are free.

        With one each, somebody with enough of them could let a run wait in every round.
        """
        record = self._trust.of(peer)
        is_young = record is None or record.rounds < YOUNG_ROUNDS
        return "the young" if self.charter.earned and is_young and peer not in self._voters else peer

    def is_prompt(self, peer: PeerId) -> bool:
        """Return True if I would wait for a voter that is not ready: it was not silent lately."""
        return self._readys.awaits(peer, self._slot.round)

    def _relieve(self, owners: Iterable[PeerId], rounds: int) -> None:
        now = self._slot.round
        again = {peer: max(now + rounds, self._owns_from.get(peer, 0)) for peer in owners}
        self._owns_from = {peer: round_ for peer, round_ in self._owns_from.items() if round_ > now} | again

    def may_own(self, peer: PeerId) -> bool:
        """Return True if I would give a peer a part: it has neither lied about one nor been silent lately."""
        return self._slot.round >= self._owns_from.get(peer, 0)

    def _traced(self, certificate: wire.Certificate) -> Trust:
        """Replay trust from the certificates before this one, as far back as I hold them and they count."""
        found: list[wire.Certificate] = []
        while len(found) < TRUST_WINDOW:
            before = self._history(certificate.slot.round - 1)
            if before is None or certificate_hash(before) != value_of(certificate).previous:
                break
            found.append(before)
            certificate = before
        trust = Trust(self.charter.earned, self.charter.carried)
        for earlier in reversed(found):
            trust.take(earlier)
        return trust

    def receive(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Witness a member's message whose signature is checked; if it contradicts an earlier one, its author is accused."""
        if not self._node.knows(signed.sender):
            return  # Keys are free: what one says that is in nobody's table matters to nobody.
        earlier = self._witness.see(signed, message, self._slot)
        if earlier is not None:
            self.bans.accuse((earlier, signed))

    def examine(self, certificate: wire.Certificate) -> None:
        """Witness the Precommits of a validated certificate: who signed two of one slot has signed twice."""
        code, confirm = wire.code_of_kind(wire.Precommit), wire.Precommit(certificate.slot, certificate_hash(certificate))
        payload = encode(confirm)
        for voter, signature in zip(certificate.voters, certificate.signatures, strict=True):
            self.receive(wire.Signed(voter, code, payload, signature), confirm)
