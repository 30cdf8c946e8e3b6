"""Who votes on a round: a function of the certificate before it, so that nobody counts differently. Pure.

The voters of a round are those that judged the last certified round, may vote and do not leave, with one vote each, and
the voters that have missed no more than the last `MAX_MISSED` of them: so a proposer that closes early costs nobody its
vote, and liars do not become a third because honest voters were away for a moment. The founders, which the manifest names,
vote on the first round, and after a roster in which nobody may vote. After a stall a round is decided in a later term
(docs/agreement.md).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TypeAlias

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.errors import MalformedMessage, ProtocolViolation
from ...peer.base.transport import PeerId
from ...peer.wire.schema import decode, encode
from ..agreement.electorate import NOBODY, Electorate
from ..vector.partition import num_parts

MAX_SKIPPED_TERMS = 16
"""Terms that an appointment by anybody but the owner may skip: one for the last term of all would leave none after it."""
MAX_SHOWN_APPOINTMENTS = 4
"""Appointments by one author that are shown to all in one term: what is shown goes to each member, by each of them."""


def electorate_after(value: wire.Value | None, charter: Charter) -> Electorate:
    """Return the electorate of the round after this value (None: of the first round), in its first term.

    No liar chooses when the founders decide: each member shows itself whether it may vote, and a roster holds a quorum of
    the electorate before. It takes votes that the owner has withdrawn from all of them.
    """
    founders = dict.fromkeys(sorted(charter.founders)[: wire.MAX_PARTS], 1)  # More would have no place each.
    first = Electorate(founders) if founders else NOBODY
    if value is None:
        return first
    count = num_parts(value.members)
    seats = zip(value.members[:count], value.seats[:count], strict=True)
    leaving = {peer: seat.is_leaving for peer, seat in seats if charter.may_vote(peer, seat.invite, seat.voucher)}
    # Where all leave, they decide once some of them are back: nobody else could.
    staying = {peer for peer, leaves in leaving.items() if not leaves} or leaving.keys()
    kept = sorted(value.absent, key=lambda it: (it.missed, it.voter))[: wire.MAX_PARTS - len(staying)]
    missed = {it.voter: it.missed for it in kept if it.voter not in staying}
    if not staying and not missed:
        return first
    electorate = Electorate(dict.fromkeys((*staying, *missed), 1), missed)
    # Who leaves in order, while others are away, is not to leave a run behind that waits for these.
    return electorate if not staying or electorate.is_quorum(staying) else Electorate(dict.fromkeys(staying, 1))


def absent_after(electorate: Electorate, members: Collection[PeerId]) -> tuple[wire.Absence, ...]:
    """Return the voters of a round in its first term that its roster lacks, and that vote in the next one all the same.

    A later term's appointment says itself who decides.
    """
    missed = {voter: electorate.missed.get(voter, 0) + 1 for voter in electorate.voters if voter not in members}
    return tuple(wire.Absence(voter, rosters) for voter, rosters in missed.items() if rosters <= wire.MAX_MISSED)


def appointed(certificate: wire.Certificate | wire.Proof, first: Electorate, charter: Charter) -> Electorate:
    """Return the electorate of a certificate's term; `first` is that of term 0. Raises `ProtocolViolation`."""
    slot = certificate.slot
    if bool(certificate.appointment) != bool(slot.term):
        raise ProtocolViolation(f"the first term needs no appointment, and each later one does; this is term {slot.term}")
    if not slot.term:
        return first
    signed, appointment = open_appointment(certificate.appointment)
    if appointment.slot != slot.at(slot.term, 0):
        raise ProtocolViolation("an appointment for another term")
    return electorate_of(signed.sender, appointment, first, charter)


def why_no_quorum(electorate: Electorate, charter: Charter, here: Collection[PeerId]) -> str:
    """Return why these peers cannot decide with this electorate, nor after a stall; empty if they can."""
    may_go_on = charter.stall == "present" and electorate.votes_of(here)
    if may_go_on or electorate == NOBODY or electorate.is_quorum(here):
        return ""
    return electorate.awaits(here, charter.owner)


def is_needed(me: PeerId, members: Collection[PeerId], electorate: Electorate, charter: Charter) -> bool:
    """Return True if the members that are here may not decide a round without my vote, if one more of them is lost.

    Where no other voter is here I am needed if I can decide alone, and give members that may vote a vote by it: without
    me nobody would have one.
    """
    votes, here = electorate.votes, set(members) - {me}
    others = sorted((votes[peer] for peer in here if peer in votes), reverse=True)
    if me not in votes:
        return False
    if others:
        return sum(others[1:]) < electorate.quorum
    next_voters = here if charter.keepers is None else here & charter.keepers
    return bool(next_voters) and charter.authority is None and not why_no_quorum(electorate, charter, {me})


def electorate_of(author: PeerId, appointment: wire.Appointment, first: Electorate, charter: Charter) -> Electorate:
    """Return the electorate of an appointment. Raises `ProtocolViolation` where its author may not make it.

    Only the run's owner may give a vote to a peer without one in `first`, the electorate of term 0: keys are free.
    """
    voters = appointment.voters
    if list(voters) != sorted(set(voters)):
        raise ProtocolViolation("an appointment that does not list its voters once each, in order")
    if why_not := charter.why_not_appoint(author, voters):
        raise ProtocolViolation(f"an appointment by {author}: {why_not}")
    strangers = sorted(set(voters) - first.votes.keys())
    if strangers and not is_owner(author, charter):
        raise ProtocolViolation(f"an appointment of {strangers[0]}, which has no vote in this round")
    if charter.kind == "allow" and (unlisted := [peer for peer in strangers if not charter.admits(peer, b"")]):
        raise ProtocolViolation(f"an appointment of {unlisted[0]}, which the run's manifest does not list")
    return Electorate(dict.fromkeys(voters, 1))


def is_owner(author: PeerId, charter: Charter) -> bool:
    """Return True if a peer is the run's owner; a run in memory may have none."""
    return bool(charter.owner) and author == charter.owner


@lru_cache(maxsize=64)
def open_appointment(data: bytes) -> tuple[wire.Signed, wire.Appointment]:
    """Decode a signed appointment, its signature unchecked. Raises `MalformedMessage`."""
    signed = decode(wire.Signed, data, max_bytes=wire.MAX_SIGNED_BYTES)
    message = wire.opened(signed)
    if not isinstance(message, wire.Appointment):
        raise MalformedMessage(f"{type(message).__name__} in place of an appointment")
    return signed, message


def is_by_appointer(signed: wire.Signed, charter: Charter) -> bool:
    """Return True for an appointment by the run's owner, its signature unchecked: anybody may carry it."""
    return wire.CODES.get(signed.code) is wire.Appointment and is_owner(signed.sender, charter)


def term_reached(terms: Mapping[PeerId, int]) -> int:
    """Return the greatest term that more than a third of these peers are in or beyond; 0 without peers."""
    return (Electorate(dict.fromkeys(terms, 1)).frontier(terms) or 0) if terms else 0


FollowingTerm: TypeAlias = tuple[wire.Signed, wire.Appointment] | wire.Appointment | None
"""What follows a stalled term: an appointment, one that is mine to sign, or nothing yet."""


class Appointments:
    """The appointments of one round that one peer holds, and which later term follows a stalled one by them."""

    def __init__(self, first: Electorate, charter: Charter) -> None:
        self._first, self._charter = first, charter
        self._latest: dict[PeerId, tuple[wire.Signed, wire.Appointment]] = {}
        """The appointment of the latest term by each author."""
        self._entered: dict[int, wire.Signed] = {}
        """The appointment of each term that I have been in."""
        self._shown: Counter[tuple[PeerId, int]] = Counter()
        """By author and term of mine, the appointments that were shown to all."""

    def keep(self, signed: wire.Signed, message: wire.Appointment) -> bool:
        """Keep an appointment whose signature is checked; return True if it is new, and all others should see it now.

        Those by voters are shown when they are entered: each voter may make many. Raises `ProtocolViolation` where its
        author may not make it.
        """
        electorate_of(signed.sender, message, self._first, self._charter)
        if not message.slot.term:
            raise ProtocolViolation("an appointment for the first term, whose voters follow from the certificate before")
        known = self._latest.get(signed.sender)
        if message.slot.attempt or (known is not None and known[1].slot.term >= message.slot.term):
            return False
        self._latest[signed.sender] = signed, message
        return is_owner(signed.sender, self._charter)

    def may_show(self, author: PeerId, term: int) -> bool:
        """Return True if one more of an author's appointments may be shown to all in this term of mine; count it."""
        self._shown[author, term] += 1
        return self._shown[author, term] <= MAX_SHOWN_APPOINTMENTS

    def enter(self, signed: wire.Signed, message: wire.Appointment) -> Electorate:
        """Go to the term of an appointment; return its voters. Raises as `keep` does."""
        electorate = electorate_of(signed.sender, message, self._first, self._charter)
        self._entered[message.slot.term] = signed
        return electorate

    def of(self, term: int) -> bytes:
        """Return the signed appointment of a term that I have been in, encoded; empty if there is none."""
        return encode(self._entered[term]) if term in self._entered else b""

    def skipped(self, proof: wire.Proof) -> Electorate | None:
        """Return the voters of a checked proof's term, which I was not in; None where I cannot know them.

        What the owner has appointed is the same for all. A voter may appoint itself in a term that nobody else was in: a
        proof by such voters proves nothing.
        """
        if proof.appointment and not is_owner(open_appointment(proof.appointment)[0].sender, self._charter):
            return None
        return appointed(proof, self._first, self._charter)

    def may_enter(self, term: int) -> bool:
        """Return True if an appointment for this term or a later one is here."""
        return any(message.slot.term >= term for _, message in self._latest.values())

    def pending(self, term: int) -> list[wire.Signed]:
        """Return the latest appointments for terms after this one by the owner."""
        return [
            signed
            for author, (signed, message) in sorted(self._latest.items())
            if is_owner(author, self._charter) and message.slot.term > term
        ]

    def known(self, term: int) -> list[wire.Signed]:
        """Return the appointments that a newcomer needs: of the terms that I have been in, and the pending ones."""
        return [*self._entered.values(), *self.pending(term)]

    def following(
        self,
        me: PeerId,
        slot: wire.Slot,
        electorate: Electorate,
        terms: Mapping[PeerId, int],
        silent: Collection[PeerId],
    ) -> FollowingTerm:
        """Return what follows the stalled term of `slot`, which this electorate decides.

        `terms` are those of the peers that are here, Ready and may vote, `silent` the ones of them that should have
        appointed already. I appoint nobody again who was not Ready in the stalled term.
        """
        charter, first = self._charter, self._first
        terms = {peer: term for peer, term in terms.items() if peer in first.votes}
        ready, votes = terms.keys(), me in first.votes
        # Who was appointed and is not Ready in that term has let it stall: else one old Ready would stall them all.
        prompt = {peer for peer in ready if peer not in electorate.votes or terms[peer] >= slot.term}
        left = prompt - set(silent)  # Who has appointed is not silent, however late that arrives.
        if votes and me not in ready:
            return None
        # Of those that are in later terms less than a third may lie: else one Ready would use up all terms.
        reached = max(slot.term, term_reached(terms))
        for author, (signed, message) in sorted(self._latest.items()):
            if message.slot.term > reached + MAX_SKIPPED_TERMS and not is_owner(author, charter):
                continue
            most = author in ready and 2 * len(prompt & set(message.voters)) > len(prompt)
            # Without the second condition its author could add votes of its own: keys that nobody has met.
            most = most and set(message.voters) <= ready and (me in message.voters or not votes)
            later = message.slot.term - slot.term
            if (is_owner(author, charter) or most) and (later > 0 or (later == 0 and electorate == NOBODY)):
                return signed, message
        term = 1 + reached
        if me not in left or term > wire.MAX_TERM:
            return None
        if charter.stall != "present" or me != min(left) or charter.why_not_appoint(me, left):
            return None
        return wire.Appointment(slot.at(term, 0), tuple(sorted(left)))
