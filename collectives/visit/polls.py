"""Polls: how the decision of a run's round stands, asked from its members by anybody, and appointments after a stall.

Theory of operation. Each member answers for itself (`VoteShown`): the round that it is in, its own signed Ready, and the
appointments that it holds. A Ready that others show proves nothing about the present, since a peer may have died after it;
so those count as ready that have answered and shown their own. Who asks holds no state: it follows the round in which
most of those that may vote are, and checks the certificate before it, which determines the voters.

The run's owner names voters of the next term among those that are ready, and shows
the appointment to every member that has answered; these show it to the others. What was signed for a term is on the disk
before (`accountability.appointing`), and is sent again rather than replaced.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, RequestRefused, UsageError
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ...peer.wire.schema import encode
from ...peer.wire.signed import open_signed, verify_signed
from ..accountability.appointing import AppointmentRecord
from ..agreement.electorate import NOBODY, Electorate
from ..chain.certificate import certificate_hash, check_certificate, genesis, signed_in, value_of
from ..chain.replay import ask_certificates
from ..chain.voters import (
    electorate_after,
    electorate_of,
    is_by_appointer,
    is_owner,
    open_appointment,
    term_reached,
    why_no_quorum,
)
from ..picture.votes import VotesHere
from ..spec import Spec

POLL_SECONDS = 5.0
"""Seconds for the answer of one member, which is dialled meanwhile; all are asked at once."""
ASKED_AT_A_TIME, MAX_ASKED = 4, 32
"""Members that are asked for the certificate before a round, those first that may vote: liars that never answer delay a poll
by their patience at most eight times, and most of the time not at all."""
MAX_POLLED_ROUNDS = 4
"""Rounds that are tried, those with most voters first: liars could name one each."""


def serve_votes(
    node: Node,
    spec: Spec,
    show: Callable[[], wire.VoteShown],
    take: Callable[[PeerId, wire.Signed, wire.Appointment], None],
) -> None:
    """Answer whoever asks how the decision of my round stands; `take` gets an appointment whose signature is checked."""

    async def answer(peer: PeerId, question: wire.VoteAsk) -> wire.VoteShown:
        if question.run != spec.run:
            raise NetworkError("this peer takes part in another run")
        if question.appointment:
            signed, message = open_appointment(question.appointment)
            if is_by_appointer(signed, spec.charter):
                check = partial(open_signed, signed)
                node.verify(peer, "appointment", 1, check, lambda _: take(peer, signed, message))
            else:
                node.refuse(peer, "appointment", f"{signed.sender} may not appoint voters of this run")
        return show()

    node.on_ask(wire.VoteAsk, answer)


@dataclass(frozen=True, slots=True)
class Poll:
    """How the decision of one round stands, as its members have shown; signatures are checked."""

    slot: wire.Slot
    """Attempt 0 of the term that more than a third of those that are ready have reached."""
    first: Electorate
    """The voters of term 0."""
    electorate: Electorate
    """The voters of the slot's term."""
    appointed_by: PeerId
    """Who has appointed them; empty if nobody did."""
    here: frozenset[PeerId]
    """The peers in this round that have answered."""
    answered: frozenset[PeerId]
    """These, and those that are in a later round: a run that goes on may do so while it is asked."""
    ready: Mapping[PeerId, int]
    """Those of them that may vote and have shown their Ready, with its term."""
    appointments: tuple[wire.Signed, ...] = ()
    """The appointments in this round that they hold, by its owner."""


@dataclass(frozen=True, slots=True)
class Appointed:
    """An appointment that was shown to the members of a run."""

    signed: wire.Signed
    appointment: wire.Appointment
    holders: tuple[PeerId, ...]
    """The members that hold it now."""
    is_again: bool
    """True if it had been signed before."""


@dataclass(slots=True)
class _Group:
    """The peers that are in one round of one chain."""

    shown: dict[PeerId, wire.VoteShown] = field(default_factory=dict)
    readys: dict[PeerId, wire.Ready] = field(default_factory=dict)


def _nowhere(peer: PeerId, answers: bool) -> None:
    """Note nothing."""


async def ask_poll(
    node: Node, peers: Iterable[PeerId], charter: Charter, note: Callable[[PeerId, bool], None] = _nowhere
) -> Poll | None:
    """Ask these peers how the decision of their round stands; None if none of them can be followed.

    A peer that does not answer is an event; one that shows what is false is charged. `note` learns who has answered.
    """
    groups: dict[tuple[int, bytes], _Group] = {}
    for peer, shown in sorted((await _ask_all(node, peers, wire.VoteAsk(charter.run), note)).items()):
        try:
            ready = _own_ready(peer, shown, charter.run)
        except RemoteError as error:
            node.charge(peer, "show its vote", error)
            continue
        group = groups.setdefault((shown.round, shown.previous), _Group())
        group.shown[peer] = shown
        if ready is not None and charter.may_vote(peer, ready.invite, ready.voucher):
            group.readys[peer] = ready

    def order(decision: tuple[int, bytes]) -> tuple[int, int, bytes]:
        group = groups[decision]
        return -len(group.readys.keys() | {it for it in group.shown if charter.may_vote(it, b"", b"")}), *_latest(
            decision
        )

    for round_, previous in sorted(groups, key=order)[:MAX_POLLED_ROUNDS]:
        group = groups[round_, previous]
        first = await _electorate(node, group, round_, previous, charter)
        if first is not None:
            later = {peer for (other, _), its in groups.items() if other > round_ for peer in its.shown}
            return _poll_of(group, later, wire.Slot(charter.run, round_, previous), first, charter)
    return None


async def ask_votes(
    node: Node,
    peers: Collection[PeerId],
    charter: Charter,
    round_: int,
    electorate: Electorate,
    note: Callable[[PeerId, bool], None],
) -> VotesHere:
    """Ask these peers which voters of the round after `round_` are here; `electorate` has those of its first term.

    `note` learns who has answered.
    """
    poll = await ask_poll(node, peers, charter, note)
    if poll is None:  # They may be too busy: their records say that they are here.
        return VotesHere(
            round_, electorate, tuple(voter for voter in electorate.voters if voter in peers), owner=charter.owner
        )
    term, author = 0, ""
    if poll.slot.round == round_ + 1 and poll.slot.term and poll.electorate is not NOBODY:
        term, electorate, author = poll.slot.term, poll.electorate, poll.appointed_by
    # A record outlives its author by a minute: only an answer shows that a voter is here.
    here = tuple(voter for voter in electorate.voters if voter in poll.answered)
    return VotesHere(round_, electorate, here, term, author, charter.owner)


async def appoint(
    node: Node, poll: Poll, charter: Charter, record: AppointmentRecord, voters: Collection[PeerId] = ()
) -> Appointed:
    """Appoint these voters for the term after a stalled one, by default all that are ready and had a vote or a voucher.

    What `record` holds for a term that nobody has reached yet is shown again instead. Raises `UsageError` with the
    remedy where nothing can be appointed, `LocalError` if the disk fails.
    """
    if why_not := charter.why_not_appoint(record.author, voters or poll.first.voters):
        remedy = "name the owner's home folder by --home"
        raise UsageError(f"{record.author} appoints nobody in this run: {why_not}", remedy=remedy)
    for signed in poll.appointments:
        record.learn(signed)
    newest = record.newest
    is_open = (
        newest is not None and newest[1].slot.decision == poll.slot.decision and newest[1].slot.term > poll.slot.term
    )
    if newest is not None and is_open:
        signed, appointment = newest
        if voters and tuple(sorted(set(voters))) != appointment.voters:
            term = appointment.slot.term
            raise UsageError(
                f"term {term} of round {poll.slot.round} is appointed otherwise already: {', '.join(appointment.voters)}",
                remedy="without --voters it is sent again; once they have entered it, a later term may name others",
            )
    else:
        signed, appointment = record.sign(*_next_term(poll, charter, record, voters))
    answers = await _ask_all(node, poll.here, wire.VoteAsk(charter.run, encode(signed)))
    holders = tuple(sorted(peer for peer, shown in answers.items() if encode(signed) in shown.appointments))
    return Appointed(signed, appointment, holders, is_open)


def _next_term(
    poll: Poll, charter: Charter, record: AppointmentRecord, voters: Collection[PeerId]
) -> tuple[wire.Slot, tuple[PeerId, ...]]:
    """Return what to appoint. Raises `UsageError`."""
    slot, ready = poll.slot, set(poll.ready)
    if charter.stall == "present":
        remedy = "nothing is to be done: they go on by themselves"
        raise UsageError("in this run those decide that are here, after a stall too", remedy=remedy)
    if not why_no_quorum(poll.electorate, charter, poll.answered):
        here, electorate = poll.electorate.votes_of(poll.answered), poll.electorate
        raise UsageError(
            f"round {slot.round} has not stalled: {here} of {electorate.total} votes are here",
            remedy="wait: an appointment is for a run whose voters are away",
        )
    if missing := sorted(set(voters) - ready):
        raise UsageError(
            f"{missing[0]} is not ready for round {slot.round}, so it cannot be appointed",
            remedy="start it, or leave it out; `flockstep status` names who is ready",
        )
    chosen = set(voters) or {peer for peer in ready if charter.keepers is not None or peer in poll.first.votes}
    if not chosen:
        raise UsageError(
            f"nobody that may vote is ready for round {slot.round}",
            remedy="start a keeper of the run, or vouch for one that runs (`flockstep run vouch`), and wait a minute",
        )
    newest = record.newest
    signed = newest[1].slot.term if newest is not None and newest[1].slot.round == slot.round else 0
    return slot.at(1 + max(slot.term, signed), 0), tuple(sorted(chosen))


async def _ask_all(
    node: Node, peers: Iterable[PeerId], question: wire.VoteAsk, note: Callable[[PeerId, bool], None] = _nowhere
) -> dict[PeerId, wire.VoteShown]:
    answers: dict[PeerId, wire.VoteShown] = {}

    async def ask(peer: PeerId) -> None:
        try:
            answer = await node.ask(peer, question, timeout=POLL_SECONDS)
            if not isinstance(answer, wire.VoteShown):
                raise ProtocolViolation(f"{type(answer).__name__} in answer to VoteAsk")
            answers[peer] = answer
            note(peer, True)
        except NetworkError as error:
            note(peer, isinstance(error, RequestRefused))
            node.telemetry.emit("vote.unheard", peer=peer, step="ask", reason=str(error))
        except RemoteError as error:
            node.charge(peer, "ask for its vote", error)

    async with trio.open_nursery() as nursery:
        for peer in set(peers):
            nursery.start_soon(ask, peer)
    return answers


def _latest(decision: tuple[int, bytes]) -> tuple[int, bytes]:
    round_, previous = decision
    return -round_, previous


def _own_ready(peer: PeerId, shown: wire.VoteShown, run: str) -> wire.Ready | None:
    """Return the Ready that a peer shows of itself; None if there is none. Raises `RemoteError`."""
    if not shown.ready:
        return None
    signed = signed_in(shown.ready)
    ready = open_signed(signed)
    if signed.sender != peer or not isinstance(ready, wire.Ready):
        raise ProtocolViolation("something else than its own Ready")
    if ready.slot.decision != (run, shown.round, shown.previous):
        raise ProtocolViolation("a Ready for another round than it is in")
    return ready


async def _electorate(
    node: Node, group: _Group, round_: int, previous: bytes, charter: Charter
) -> Electorate | None:
    """Return the voters of a round by the certificate before it; None if nobody that was asked shows a valid one."""
    if round_ <= 1:
        return electorate_after(None, charter) if previous == genesis(charter.run) else None
    found: list[Electorate] = []

    async def ask(peer: PeerId, others: trio.CancelScope) -> None:
        try:
            page = await ask_certificates(node, peer, wire.LedgerAsk(charter.run, round_ - 1, 1))
            if page and certificate_hash(page[0]) == previous:
                await node.compute(partial(check_certificate, page[0], verify_signed, charter=charter))
                found.append(electorate_after(value_of(page[0]), charter))
                others.cancel()
        except NetworkError as error:
            node.telemetry.emit("head.unproven", peer=peer, step="ask who votes", reason=str(error), round=round_ - 1)
        except RemoteError as error:
            node.charge(peer, "show a certificate", error)

    secret = secrets.token_bytes(16)  # Nobody grinds an id that comes first.
    asked = sorted(group.shown, key=lambda peer: (peer not in group.readys, keyed("poll", secret, peer.encode())))
    for start in range(0, min(len(asked), MAX_ASKED), ASKED_AT_A_TIME):
        async with trio.open_nursery() as nursery:
            for peer in asked[start : start + ASKED_AT_A_TIME]:
                nursery.start_soon(ask, peer, nursery.cancel_scope)
        if found:
            return found[0]
    return None


def _poll_of(group: _Group, later: set[PeerId], slot: wire.Slot, first: Electorate, charter: Charter) -> Poll:
    terms = {peer: ready.slot.term for peer, ready in group.readys.items()}
    slot = slot.at(term_reached(terms), 0)
    known: dict[bytes, tuple[wire.Signed, wire.Appointment, Electorate]] = {}
    for shown in group.shown.values():
        for data in shown.appointments:
            try:
                signed, message = open_appointment(data)
                open_signed(signed)
                voters = electorate_of(signed.sender, message, first, charter)
            except RemoteError:
                continue  # It decides nothing here, and whoever shows it may have been shown it.
            if message.slot.decision == slot.decision:
                known[data] = signed, message, voters
    electorate, author = first, ""
    if slot.term:
        of_term = [it for _, it in sorted(known.items()) if it[1].slot == slot]
        electorate, author = (of_term[0][2], of_term[0][0].sender) if of_term else (NOBODY, "")
    made = tuple(it[0] for _, it in sorted(known.items()) if is_owner(it[0].sender, charter))
    here = frozenset(group.shown)
    return Poll(slot, first, electorate, author, here, here | later, terms, made)
