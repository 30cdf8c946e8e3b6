"""The state machine of one attempt of a round: from Ready to the value that the voters decide on. Pure.

Theory of operation (docs/trust.md). Inputs (`receive`, `lose`, and the driver's results) are logged and make `deadline` due
at once; `tick` then makes every transition that they allow, so that many which come together cost one. Nothing depends on
the order of messages, and a repeated one changes nothing. Work comes out as actions (`actions`); the driver does it and
reports back by `done`.

    GATHER   Ready from all active members; Heard from the proposer, a voter whose turn it is, and then from all voters; a
             Roster follows from these
    COLLECT  every member commits to a contribution; owners fetch their parts and say in a Have what they hold; the
             proposer names the words that count in a Cut, and who is in follows from these
    JUDGE    unless the rule is blind: contributors send a Sketch, holders say which are true, a second Cut names these
             words, and the rule weighs
    REDUCE   owners publish their Result; every member fetches all outputs
    CHECK    the proposer names the Outputs; contributors send a second Sketch, which verifies them
    CONFIRM  I hold a checked value; the voters decide on it, or on one of an earlier attempt (`vote`)
    ENDED    `outcome` holds the end and its reason

What I hold and have checked I report to the vote; nobody applies anything before a quorum of the voters has confirmed it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ...peer import wire
from ...peer.base.errors import ProtocolViolation
from ...peer.base.transport import PeerId
from ..agreement.actions import Note
from ..allreduce.actions import Action, FetchValue, Forward, Outcome, OutcomeKind, Phase, Send, Setup, Timing
from ..allreduce.asking import PASSED_ON, Asking
from ..allreduce.contributor import ContributorRound
from ..allreduce.exchange import RosterRound
from ..allreduce.facts import MessageLog
from ..allreduce.roster import RosterView, readies_of
from ..chain.certificate import value_hash, value_of
from ..chain.quorum import ranked
from . import gather
from .early import EarlyMessages
from .vote import Vote

CONTROL_STEPS = 3
"""Exchanges of small messages from a held value to its certificate: Propose, Prevote, Precommit."""
ASKS_AFTER = 8
"""After so small a part of the time to close the gathering, voters ask others for Readys that they lack."""
LEAST_CARRIERS = 2
"""Voters that pass the roster on to a member without a vote: one may be cut off from it."""
STALL_SECONDS = 15.0
"""Seconds after which a peer that is Ready says that too few voters are: restarted ones have mostly come back by then."""
RESTARTS = 3
"""Attempts of the first round that end at once where all are ready and too few of them start from my state."""


class Round:
    """One attempt of one round at one peer. Every method returns the resulting actions."""

    def __init__(self, setup: Setup, vote: Vote, now: float) -> None:
        self.setup, self.vote = setup, vote
        self.slot = vote.slot
        self.outcome: Outcome | None = None
        self._phase = Phase.GATHER
        self._active = set(setup.active)
        self._left: set[PeerId] = set()
        """Members without a vote that have left since the last look at them: they count as here until the next one."""
        self._has_news = False
        """True if something has come since the last `tick`."""
        self._gone_on: set[PeerId] = set()
        self._met: set[PeerId] = set()  # Whom I have shown my Ready: two that each do so at every Ready would not end.
        self._facts = MessageLog()
        self._later = EarlyMessages()
        self._exchange: RosterRound | None = None
        self._held: set[bytes] = set()
        """The hashes of the values that I hold."""
        self._closed_at: float | None = None
        """When I, the proposer, asked the voters of my slot whose Readys they hold; None before."""
        self._answers_due = math.inf
        """Until when I, the proposer, wait for the words of all that are here."""
        self._full_at: float | None = None
        """When all voters that are here were Ready in my slot; None before."""
        self._has_answered = False
        """True if I have told the proposer whose Readys I hold."""
        self._shown: dict[PeerId, dict[bytes, gather.SignedReady]] = {}
        """Readys that voters have shown me, by carrier and mark: a roster shows them whatever I think of their authors."""
        self._has_proposed = False
        """True if I, the proposer, have sent a roster of my slot."""
        self._no_roster = ""
        """Why I, the proposer, could make no roster so far."""
        self._is_fetching = False
        """True if the certified value is being fetched."""
        self._silent: set[PeerId] = set()
        self._asking = Asking(vote.me)
        self._idle: set[PeerId] = set()
        """Members without a vote that were not Ready when this peer took the roster, or left while all waited for them."""
        self._patience = now + setup.timing.patience
        self._stalls_at = now + STALL_SECONDS
        """When this peer says that too few voters are here to decide; infinite once it has."""
        self._due = self._ends = self._patience
        """The present deadline, and when I, without a vote, give up the attempt that the voters have not ended."""
        self._stepped = now
        """When my present step began."""
        self._asks_at: float | None = None
        """When I ask others for what I lack in it; None before I know, infinity once there is nobody left to ask."""
        self._has_most, self._looks_at = False, math.inf
        """True once most of the step is here; when the first look at members without a vote is, infinity before and after."""
        self._may_look = False
        """True from that time until a member that has left was looked at: the next look is at the deadline."""
        self._steps: dict[object, float] = {}
        """When each step began first."""
        self._is_overdue = self._has_asked = False
        """Its deadline is over; I have asked two others, early or since then."""
        self.lengths: dict[Phase, float] = {}
        """How long two thirds of a transfer took, and the last exchange of the vote, in seconds: for the next deadlines."""
        self._began: dict[Phase, float] = {}
        self._spoke: dict[tuple[type, bytes], dict[PeerId, float]] = {}
        """When each member's first message of each exchange came."""
        self._has_overrun = False
        """True if I have waited for the vote in vain: that teaches nobody how long it takes."""

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self._exchange is not None and self._phase is Phase.COLLECT:
            return self._exchange.phase
        return self._phase

    @property
    def _table(self) -> RosterView | None:
        return None if self._exchange is None else self._exchange.table

    @property
    def deadline(self) -> float:
        """When to call `tick`."""
        if self.outcome is not None:
            return math.inf
        if self._has_news:
            return -math.inf
        if self._is_fetching:
            return self._due
        return min(self._due, self._asks_at or math.inf, self._looks_at, self.vote.deadline)

    @property
    def has_roster(self) -> bool:
        """True if this attempt has come to a roster: before that nothing of mine was sent but my Ready."""
        return self._exchange is not None

    @property
    def is_bound(self) -> bool:
        """True if I have taken a cut, and the round goes on."""
        return self._phase is not Phase.ENDED and self._exchange is not None and self._exchange.is_cut

    @property
    def exchange(self) -> RosterRound:
        """The part of the machine that takes the results of the driver's work."""
        assert self._exchange is not None, "the driver reports work that was never requested"
        return self._exchange

    # The driver's calls.

    def start(self, now: float) -> list[Action]:
        """Send my Ready."""
        self._has_news = True
        # A member without a vote tells all while these are few: else who votes decides by its Ready, and the roster shows it.
        is_small = len(self._active) <= wire.MAX_PARTS or self.vote.me in self.vote.electorate.votes
        return self.vote.begin(self.setup.ready, self._active if is_small else (), now)

    def receive(self, signed: wire.Signed, message: wire.RoundMessage, now: float) -> list[Action]:
        """Receive a message whose signature is checked. Raises `ProtocolViolation` if it breaks a rule."""
        if self.outcome is not None or message.slot.run != self.slot.run:
            return []
        if isinstance(message, wire.VoteMessage):
            self._has_news = True
            return [*self.vote.receive(signed, message, now), *self._heard(signed, message, now)]
        if message.slot.decision != self.slot.decision or message.slot.attempt < self.slot.attempt:
            return []
        if message.slot.attempt > self.slot.attempt:
            self._later.add(signed, message)
            return []
        if self._table is not None and signed.sender not in self._table.places:
            if isinstance(message, wire.Commit | wire.Have | wire.Cut) and message.roster == self._table.hash:
                raise ProtocolViolation(f"{type(message).__name__} for a roster that does not include its sender")
            return []
        if self._table is not None and (why_not := self._table.why_not_say(signed.sender, message)):
            return [Note("round.refused", signed.sender, type(message).__name__, why_not)]
        is_named = self._exchange is not None and self._exchange.has_named(signed, message)
        news = self._facts.add(signed, message, is_named=is_named)
        self._has_news |= news != "known"
        if news == "conflict":
            return [Note("round.equivocation", signed.sender, type(message).__name__, "a second and different one")]
        if news == "new" and self._table is not None and (kind := _exchange_of(message)):
            self._spoke.setdefault(kind, {}).setdefault(signed.sender, now)
        if self._phase is Phase.GATHER and isinstance(message, wire.Commit | wire.Have):
            return self._ask_for_roster()
        return [*self._table.shown_to(signed.sender, message)] if self._table is not None and news == "new" else []

    def show(self, carrier: PeerId, signed: wire.Signed, ready: wire.Ready) -> None:
        """Take a Ready, its signature checked, that a voter passes on; of each a limited number."""
        shown = self._shown.setdefault(carrier, {}) if carrier in self.vote.electorate.votes else {}
        if ready.slot == self.slot:
            shown.pop(mark := gather.mark_of(signed), None)
            shown[mark] = signed, ready
            if len(shown) > wire.MAX_ROSTER:  # It may have relayed others before: those that its Heard names come last.
                del shown[next(iter(shown))]

    def learn(self, proof: wire.Proof, now: float) -> list[Action]:
        """Receive a proof whose signatures are checked."""
        self._has_news = True
        return self.vote.learn(proof, now)

    def certified(self, certificate: wire.Certificate) -> None:
        """Receive a certificate of my round that counts (`chain.certificate.check_votes`)."""
        self.vote.certified(certificate)
        self._has_news = True

    def statements_of(self, peer: PeerId) -> list[wire.Signed]:
        """Return the messages of a peer that this attempt has logged."""
        return self._facts.by(peer)

    def has_seat(self, peer: PeerId) -> bool:
        """Return True if a peer is an active member of this attempt, a voter, or in its roster."""
        seated = peer in self._active or (self._table is not None and peer in self._table.places)
        return seated or peer in self.vote.electorate.votes

    def add_member(self, peer: PeerId, now: float) -> list[Action]:
        """Add a member that has arrived: it is brought up to date once, and in GATHER waited for."""
        if self.outcome is not None or peer in self._active - self._left or peer in self._met:
            return []
        self._met.add(peer)
        self._left.discard(peer)
        if self._phase is Phase.GATHER:
            self._active.add(peer)
        mine = self.vote.ready.get(self.vote.me)
        shown = [Forward((peer,), mine[0])] if mine is not None else []
        return [*shown, *self.vote.meet(peer, now)]

    def peer_ahead(self, peer: PeerId) -> None:
        """Record a peer that is in a later round and will not get ready for this one."""
        self._gone_on.add(peer)

    def lose(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """Remove a lost peer from this attempt."""
        self._met.discard(peer)
        if self.outcome is not None or peer not in self._active:
            return []
        self._has_news = True
        if self._full_at is not None and self._exchange is None and peer in self._unready():
            self._idle.add(peer)
        return self._leave(peer, reason, now)

    def tick(self, now: float) -> list[Action]:
        """React to what has come, and to the passing of time; call it at `deadline`."""
        if self.outcome is not None:
            return []
        self._has_news = False
        actions = self.vote.tick(now) if now >= self.vote.deadline and not self._is_fetching else []
        actions += self._advance(now)
        if self._exchange is not None and self.outcome is None and now >= (self._asks_at or math.inf):
            actions += self._ask(self._exchange, now)
        if self.outcome is not None or now < self._due:
            return actions
        if self.vote.is_decided or self.vote.behind:
            return actions + self._end(OutcomeKind.BEHIND, "what the voters decided on did not arrive in time")
        if self._phase is Phase.GATHER:
            return actions + self._gather_late(now)
        if self._exchange is None:
            return actions + self._give_up(f"no decision on what {self.vote.proposer} proposed again", now)
        actions += self._look(now)
        if self.outcome is not None:
            return actions
        if isinstance(self._exchange, ContributorRound):
            if self._exchange.close(self._active):
                self._has_news, self._due = True, self._ends
                return actions + self._exchange.ask(self._active, early=False)
            return actions + self._give_up("the voters have not ended the attempt", now)
        self._is_overdue, self._has_asked, self._has_news = True, False, True
        phase, asked = self.phase, self._ask(self._exchange, now)
        self._has_overrun |= phase is Phase.CONFIRM
        if self._exchange.close(self._active) or asked:
            # What is late is left out; the proposer and the others need time for what follows from that.
            makes = self.setup.timing.transfer if phase in (Phase.REDUCE, Phase.CHECK) else 0.0
            self._due = now + self._control(2) + makes
            return [*actions, *self._exchange.show_words(), *asked]
        if silent := self._exchange.silent(self._active):
            return actions + self._go_on_without(silent, now)
        if now < self._patience and self._exchange.awaits_holders(self._active):
            # Others have longer deadlines than I: they close later, and are not silent yet.
            self._due = now + self._control() + self.setup.timing.transfer
            return actions
        if self._exchange.take_best():
            self._due = now + self._control()
            return actions
        living = self._active & set(self._exchange.members)
        return actions + self._give_up(f"{phase} took too long, missing: {self._exchange.missing(living)}", now, phase)

    def _ask(self, exchange: RosterRound, now: float) -> list[Action]:
        """Ask two others for what I lack, and after each exchange the next two: a liar may know whom I ask first."""
        asked = exchange.ask(self._active, early=not self._is_overdue, again=self._has_asked)
        answers = self._is_overdue and exchange.phase is Phase.CHECK  # With what has come since the last exchange.
        self._has_asked, self._asks_at = True, now + self.setup.timing.control if asked or answers else math.inf
        self._has_news |= answers
        return asked

    def _control(self, exchanges: int = 1) -> float:
        """Return the time of so many exchanges of small messages; of one more where I wait for the proposer.

        What is withheld from it alone it asks others for, and nobody is to give up before it.
        """
        is_proposer = self._table is not None and self._table.me == 0
        return (exchanges + (not is_proposer)) * self.setup.timing.control

    def done(self, report: Callable[[RosterRound], Sequence[Action] | None]) -> list[Action]:
        """Take the result of finished work: `report` passes it on; returns what follows."""
        if self.outcome is not None or self._exchange is None:
            return []
        self._has_news = True
        return [*(report(self._exchange) or ())]

    def value_held(self, value: bytes, now: float) -> list[Action]:
        """Report that I hold all outputs of an encoded value, and that its root follows from them."""
        if self.outcome is not None:
            return []
        self._has_news = True
        self._held.add(value_hash(value))
        return self.vote.hold(value, now)

    def give_up(self, reason: str, now: float) -> list[Action]:
        """Give the attempt up for a reason of my own, such as a statement that I cannot sign."""
        return [] if self.outcome is not None else self._give_up(reason, now)

    # Transitions: each happens once, as soon as the messages allow it.

    def _heard(self, signed: wire.Signed, message: wire.VoteMessage, now: float) -> list[Action]:
        """React to a statement that the vote has taken."""
        table, later = self._table, message.slot.attempt > self.slot.attempt
        if table is not None and signed.sender in table.places and message.slot.decision == self.slot.decision:
            if isinstance(message, wire.Ready) and later and signed.sender in self._active:
                return self._leave(signed.sender, f"it is in attempt {message.slot.attempt}", now)
            is_vote = isinstance(message, wire.Propose | wire.Prevote | wire.Precommit) and message.slot == self.slot
            if is_vote and signed.sender in self.vote.electorate.votes:  # Of others the vote has looked at nothing.
                self._facts.add(signed, message)
        return []

    def _advance(self, now: float) -> list[Action]:
        if self.outcome is not None:
            return []
        if self.vote.certificate is not None:
            return self._decided(self.vote.certificate, now)
        # Who only contributes is sent the certificate alone, which voters have before they are Ready again.
        if self.vote.behind and not isinstance(self._exchange, ContributorRound):
            return self._end(OutcomeKind.BEHIND, "voters with more than a third of the votes are in a later round")
        if self.vote.is_decided or self.vote.behind:  # Its proposal, or the certificate, is still on its way.
            self._due, self._looks_at = min(self._due, now + self.setup.timing.control), math.inf
            return []
        if self.vote.slot != self.slot and self._phase is not Phase.GATHER:
            reason = f"voters with a third of the votes or more are in attempt {self.vote.slot.attempt}"
            return self._end(OutcomeKind.VOID, reason)
        if self.vote.is_proven:  # Up to here some may have waited for others; who has the proof waits for nobody.
            self._began.setdefault(Phase.CONFIRM, now)
        if self._phase is Phase.GATHER:
            return self._gather(now)
        return [*self._let_go(now), *self._exchange_on(now)]

    def _gather(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.vote.slot != self.slot:
            actions += self._enter(now)
        vote, slot = self.vote, self.slot
        if self._full_at is None and self._active & vote.electorate.votes.keys() <= vote.reached | self._gone_on:
            self._full_at = now
        if vote.proposal is not None:
            # It has a proof: it is decided on without moving any data, or by those that hold it.
            timing = self.setup.timing
            self._phase, self._due = Phase.CONFIRM, now + CONTROL_STEPS * timing.control + timing.transfer
            return actions
        roster, basis = self._facts.of(wire.Roster).get(vote.proposer), self._facts.of(wire.Basis).get(vote.proposer)
        if roster is not None and (basis is not None or vote.me not in vote.electorate.votes):
            signed = self._facts.signed(wire.Roster, vote.proposer)
            return actions + self._take_roster(signed, roster, basis, now)
        if gather.starts_elsewhere(self.setup, vote):
            reason = "the voters start from another state than I"
            ended = self._end(OutcomeKind.BEHIND, reason)
            return [*actions, *vote.abandon(reason, now), *ended]
        if self.vote.me in self.setup.conduct.bans:
            return actions + self._give_up("this peer is banned from the run", now)
        if vote.since is not None:
            if not gather.is_training(self.setup, vote, self._active):
                # To the next attempt: my Ready in this one means nothing to those that are to come.
                return actions + self._give_up("no member that trains is ready", now)
            if vote.proposer not in self._active:
                return actions + self._next_attempt(f"{vote.proposer}, the proposer, is away", now)
            closes = vote.since + self.setup.timing.gather
            asks_at = vote.since + self.setup.timing.gather / ASKS_AFTER
            if now >= asks_at:
                actions += self._ask_for_readys()
            if now >= closes or not self._unready():
                actions += self._answer() if vote.proposer != vote.me else self._close(now)
                if self.slot != slot:
                    return actions
                closes = closes if self._closed_at is None else self._answers_due
            if now >= closes or self._has_proposed:
                closes = max(closes, self._all_closed_at(vote.since)) + CONTROL_STEPS * self.setup.timing.control
            self._due = min(self._patience, closes if now >= asks_at else min(closes, asks_at))
        elif now >= self._stalls_at:
            actions += self._stall()
        else:
            self._due = min(self._patience, self._stalls_at)
        return actions

    def _all_closed_at(self, since: float) -> float:
        """Return by when all voters that are here have closed the gathering; `since` a quorum of them was Ready to me.

        A liar that is Ready to some only makes a quorum earlier for these, and for others later that all are Ready. So mine
        says nothing of theirs: each began when the last voter became Ready, or else it had its time by mine. A proposer
        that is not Ready by then has no claim to more.
        """
        mine = since + self.setup.timing.gather
        if self.vote.proposer not in self.vote.reached:
            return mine
        began = mine if self._full_at is None else min(mine, max(since, self._full_at))
        return began + self.setup.timing.gather

    def _unready(self) -> set[PeerId]:
        """Return the members that I wait for until they are Ready: voters, and the others that were in the last rounds."""
        missing = self._active - self._gone_on - self.vote.reached
        return {peer for peer in missing if peer in self.vote.electorate.votes or self.setup.conduct.awaits_ready(peer)}

    def _ask_for_readys(self) -> list[Action]:
        """As a voter, ask others once for the Readys that I lack: who is Ready to some only makes the others wait."""
        missing = sorted(self._unready()) if self.vote.is_voter else []
        ready = self.vote.reached & self.vote.electorate.votes.keys() - {self.vote.me}
        others = sorted(ranked(self.slot, ready), key=lambda peer: peer != self.vote.proposer)
        return self._asking.ask(dict.fromkeys(missing[:PASSED_ON], others), Phase.GATHER, Phase.GATHER)

    def _ask_for_roster(self) -> list[Action]:
        """Ask others for the roster that the proposer has kept from me: once voters with a third of the votes, then a quorum,
        act on it.
        """
        electorate, slot = self.vote.electorate, self.slot
        ahead = {*self._facts.of(wire.Commit, slot), *(it.sender for it, _ in self._facts.every(wire.Have, slot))}
        ahead &= electorate.votes.keys() - {self.vote.me}
        if electorate.votes_of(ahead) < electorate.third:
            return []
        moment = "left behind", electorate.is_quorum(ahead)
        return self._asking.ask({self.vote.proposer: ranked(slot, ahead)}, moment, Phase.GATHER)

    def _enter(self, now: float) -> list[Action]:
        """Go on in the slot that my vote has gone to, with what has already arrived of it."""
        self.slot = self.vote.slot
        self._facts, self._closed_at, self._full_at, self._shown = MessageLog(), None, None, {}
        self._has_answered = self._has_proposed = False
        self._asking = Asking(self.vote.me)
        self._due = self._patience
        actions: list[Action] = []
        for signed, message in self._later.take(self.slot.round):
            actions += self.receive(signed, message, now)
        return actions

    def _answer(self) -> list[Action]:
        """Tell a proposer that has closed the gathering whose Readys I hold, after those that it lacks; once.

        Not before I would close it myself: a proposer could else choose the voters of the next round by closing early.
        """
        vote = self.vote
        asked = self._facts.of(wire.Heard).get(vote.proposer)
        if asked is None or asked.slot != self.slot or self._has_answered or not vote.is_voter:
            return []
        if (mine := gather.heard(self.setup, vote)) is None:
            return []
        self._has_answered = True
        known, readies = gather.marks_in(asked), gather.willing(self.setup, vote).values()
        lacking = [signed for signed, _ in readies if gather.mark_of(signed) not in known]
        return [*(Forward((vote.proposer,), signed) for signed in lacking), Send((vote.me, vote.proposer), mine)]

    def _close(self, now: float) -> list[Action]:
        """Close the gathering as its proposer, and make the roster once the voters that are here have said whom they hold.

        Where none can be made, more Readys may still come until the deadline.
        """
        vote, setup = self.vote, self.setup
        actions = [] if vote.making else vote.gathered(now)
        if not vote.making or self._has_proposed:
            return actions
        if self._closed_at is None:
            if why_not := gather.why_not_close(setup, vote):
                return [*actions, *self._no_roster_yet(why_not, now)]
            mine = gather.heard(setup, vote)
            assert mine is not None
            self._closed_at, self._answers_due = now, now + setup.timing.control
            # Kept, since one of these peers may go on to a later slot.
            self._shown[vote.me] = {
                gather.mark_of(it): (it, ready) for it, ready in gather.willing(setup, vote).values()
            }
            return [*actions, Send(tuple(sorted(set(vote.electorate.votes) - {""})), mine)]
        voters = vote.electorate.votes.keys() & (vote.reached | {vote.me})
        heards = {
            peer: (self._facts.signed(wire.Heard, peer), it)
            for peer, it in self._facts.of(wire.Heard).items()
            if it.slot == self.slot
        }
        held = gather.held(vote, (it for shown in self._shown.values() for it in shown.values()))
        answered = {peer for peer, (_, it) in heards.items() if held.keys() >= {*gather.marks_in(it)}}
        awaited = {peer for peer in voters & self._active if setup.conduct.is_prompt(peer)} - answered
        if awaited and now < self._answers_due:
            return actions
        made = gather.proposal(setup, vote, heards, held)
        if isinstance(made, str):
            self._no_roster = made
            if (
                awaited and vote.since is not None
            ):  # They may not have closed it: who is Ready to me may not be to them.
                self._answers_due = max(self._answers_due, self._all_closed_at(vote.since) + setup.timing.control)
            return actions
        self._silent.update(awaited)
        self._has_proposed = True
        # Voters pass it on to members that have no vote; who has no place is sent the certificate.
        roster, basis = made
        to = tuple(sorted(set(vote.electorate.votes) - {""}))
        return [*actions, Send(to, basis), Send(to, roster)]

    def _no_roster_yet(self, why: str, now: float) -> list[Action]:
        """Wait for more Readys; at the run's start go on, so that who starts from another state takes mine."""
        self._no_roster = why
        if self.slot.round == 1 and self.slot.attempt < RESTARTS and not self._unready():
            return self._next_attempt(why, now)
        return []

    def _take_roster(
        self, signed: wire.Signed, roster: wire.Roster, basis: wire.Basis | None, now: float
    ) -> list[Action]:
        vote, sender = self.vote, signed.sender
        is_voter = basis is not None and vote.me in vote.electorate.votes
        flaw = gather.misfit(self.setup, vote, sender, roster)
        if basis is not None and is_voter:
            flaw = flaw or gather.refusal(self.setup, vote, sender, roster, basis)
        if flaw:
            self._facts.drop(wire.Roster, signed.sender)
            note = Note("round.roster_refused", signed.sender, "gather", flaw)
            return [note, *self._next_attempt(f"the roster of {signed.sender}: {flaw}", now)]
        if self.vote.me not in roster.members:
            return self._end(OutcomeKind.MISSED, f"{signed.sender} closed the roster before I was ready")
        self._facts.restrict(roster.members)
        is_blind = self.setup.spec.rule.blind
        here = {peer: ready for peer, (_, ready) in vote.ready.items() if ready.slot == self.slot}
        readies = here if basis is None or not is_voter else readies_of(roster.members, basis.readys)
        table = RosterView(signed, roster, vote.me, vote.electorate, self._facts, readies, is_blind=is_blind)
        self._idle = (self._idle | self._unready()) - {*roster.members} - self.vote.electorate.votes.keys()
        self.setup = replace(self.setup, timing=self._agreed(table))
        self.vote.roster(signed, roster)
        self.vote.pause()  # My nonce is about to be revealed: another attempt takes a new Ready.
        exchange = (RosterRound if table.is_voter else ContributorRound)(self.setup, self._facts, table, self._asking)
        self._phase, self._exchange = Phase.COLLECT, exchange
        self._began[Phase.COLLECT], self._ends = now, now + self.setup.timing.patience
        self._due = now + self.setup.timing.control + self.setup.timing.transfer if exchange.is_timed else self._ends
        self._stepped = now
        self._has_news = True
        self.vote.tell(table.voters)
        return [*self._pass_on_roster(table), *exchange.collect_phase.begin()]

    def _pass_on_roster(self, table: RosterView) -> list[Action]:
        """Pass the roster on to members without a vote, each by more voters than may lie: the proposer has one line.

        They are others in each attempt.
        """
        voters, others = sorted(table.seating.voters), table.members[len(table.voters) :]
        if table.me not in voters:
            return []
        carriers = max(LEAST_CARRIERS, 1 + (len(table.electorate.votes) - 1) // 3)
        turn = voters.index(table.me) - carriers * self.slot.attempt
        mine = tuple(it for place, it in enumerate(others) if (place - turn) % len(voters) < carriers)
        return [Forward(mine, table.signed)] if mine else []

    def _agreed(self, table: RosterView) -> Timing:
        """Return how long all of this roster wait: what voters with more than a third of the votes would wait at least.

        With deadlines of its own a proposer that has seen slower rounds would be given up by those that have not.
        """
        mine, readies = self.setup.timing, table.readies.items()
        control = table.electorate.frontier({peer: int(1000 * ready.control) for peer, ready in readies})
        transfer = table.electorate.frontier({peer: int(1000 * ready.transfer) for peer, ready in readies})
        if not control or not transfer:
            return mine
        most = mine.patience
        return replace(mine, control=min(control / 1000, most), transfer=min(transfer / 1000, most))

    def _gather_late(self, now: float) -> list[Action]:
        """Handle the timeout of GATHER: the next attempt, or training on alone."""
        if self.vote.since is not None and now < self._patience:
            why = f": {self._no_roster}" if self._no_roster and not self._has_proposed else ""
            return self._next_attempt(f"{self.vote.proposer}, the proposer, proposed no roster{why}", now)
        return self._end(OutcomeKind.VOID, gather.why_not_ready(self.setup, self.vote, self._active))

    def _stall(self) -> list[Action]:
        """Say once that the voters that are here are no quorum: the round waits for the others."""
        self._due, self._stalls_at = self._patience, math.inf
        here = self._active - self._gone_on
        if self.vote.electorate.is_quorum(here):  # They are here and train.
            return []
        return [Note("agreement.stalled", self.vote.proposer, "gather", gather.why_not_ready(self.setup, self.vote, here))]

    def _next_attempt(self, reason: str, now: float) -> list[Action]:
        """Go to the next attempt without a new contribution: nothing was done in this one."""
        if not self.vote.is_voter:
            self._due = self._patience
            return []
        self._has_news = True
        return self.vote.abandon(reason, now)

    def _let_go(self, now: float) -> list[Action]:
        """Treat members that sent Void as lost: they take no part in this attempt any more."""
        actions: list[Action] = []
        for peer, void in self._facts.of(wire.Void, self.slot).items():
            if peer in self._active - self._left and self.outcome is None and peer != self.vote.me:
                actions.append(Note("round.given_up", peer, self.phase, void.reason))
                actions += self._leave(peer, f"it gave up: {void.reason}", now)
        return actions

    def _exchange_on(self, now: float) -> list[Action]:
        exchange = self._exchange
        if exchange is None or self.outcome is not None:
            return []
        before, actions = exchange.step, list[Action]()
        if now >= self._looks_at:
            exchange.hurry()
            # In CONFIRM this proposer alone has what it needs: it names for the others, now and after each exchange.
            self._looks_at = now + self._control() if exchange.phase is Phase.CONFIRM else math.inf
            self._may_look = True
        if self._may_look and self._left:
            actions += self._look(now)
            if self.outcome is not None:
                return actions
        actions += exchange.advance(self._active)
        phase = exchange.phase
        self._measure(exchange, now)
        if exchange.step != before:
            self._stepped, self._asks_at, self._has_asked = now, None, False
        if exchange.step != before and exchange.step not in self._steps:  # Outputs that are named anew lead back to one.
            self._is_overdue = False
            # A member that confirms early grants the others, which still fetch outputs, the time that it had.
            waits = self.setup.timing.transfer if before[0] is not phase else 0.0
            left = self._due if phase is Phase.CONFIRM else now + waits
            steps = self._control(CONTROL_STEPS) if phase is Phase.CONFIRM else self.setup.timing.control
            self._due = max(left, now) + steps
        self._due = self._due if exchange.is_timed else self._ends
        if exchange.step not in self._steps:  # Outputs that are named anew lead back to a step that had its looks.
            self._steps[exchange.step] = now
            self._has_most, self._looks_at, self._may_look = False, math.inf, False
        if not self._has_most and exchange.has_most(self._active - self._left):
            self._has_most, self._looks_at = True, 2 * now - self._steps[exchange.step]
            self._has_news |= self._looks_at <= now
        if self._asks_at is None and exchange.lacks_few(self._active):
            self._asks_at = 2 * now - self._stepped  # The others have as long again as most took.
        if exchange.silent(self._active):
            self._due = min(self._due, now + self._control())
        if exchange.failure:
            return actions + self._give_up(exchange.failure, now)
        if exchange.value is not None and value_hash(exchange.value) not in self._held:
            return actions + self._made(exchange.value, now)
        return actions

    def _measure(self, exchange: RosterRound, now: float) -> None:
        """Measure the transfers up to when most of each is here."""
        if exchange.is_weighed:
            self._began.setdefault(Phase.REDUCE, now)
        for phase in (Phase.COLLECT, Phase.REDUCE):
            if phase not in self.lengths and exchange.is_mostly_here(phase):
                self.lengths[phase] = now - self._began[phase]

    def _slow(self, of: Collection[PeerId], known: Collection[PeerId], *kinds: type) -> tuple[PeerId, ...]:
        """Return those of these members that spoke in time, and long after most that are known: they let all others wait."""
        found = set[PeerId]()
        for _, times in (it for it in self._spoke.items() if it[0][0] in kinds):
            first = min(times.values())
            spans = sorted(at - first for peer, at in times.items() if peer in known)
            most = spans[: -(-2 * len(known) // 3)][-1] if spans else math.inf
            late = max(2 * most, most + self.setup.timing.control / 2)
            found |= {peer for peer, at in times.items() if peer in of and at - first > late}
        return tuple(sorted(found - {self.vote.me}))

    def _made(self, value: bytes, now: float) -> list[Action]:
        """Hand the value that I made or checked to the vote."""
        self._has_news = True
        self._held.add(value_hash(value))
        if self.vote.proposer != self.vote.me:
            return self.vote.hold(value, now)
        assert self._table is not None
        shown = self.vote.roster(self._table.signed, self._table.roster)
        return self.vote.offer(value, shown, now)

    def _go_on_without(self, silent: Collection[PeerId], now: float) -> list[Action]:
        """Leave the parts of owners without a Have to their deputies: being Ready must not be enough to stop a round."""
        actions: list[Action] = []
        self._silent.update(silent)
        for peer in silent:
            if self.outcome is None:
                actions.append(Note("round.silent", peer, self.phase, "it sent no Have in time"))
                actions += self._without([peer], "it sent no Have in time", now)
        return actions

    def _leave(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """Go on without a member that has left: at once without a voter, without the others from the next look on."""
        if self._table is None or self._table.places.get(peer, 0) < len(self._table.voters):
            return self._without([peer], reason, now)
        self._left.add(peer)
        return []

    def _look(self, now: float) -> list[Action]:
        """Go on without all members that have left since the last look; there are two in a step.

        One after the other each would move the deadline, and use up words and namings of the outputs.
        """
        left, self._left, self._may_look = sorted(self._left & self._active), set(), False
        return self._without(left, "it left", now) if left else []

    def _without(self, lost: Sequence[PeerId], reason: str, now: float) -> list[Action]:
        """Go on without these members, or give the attempt up if it cannot succeed any more."""
        self._active.difference_update(lost)
        exchange = self._exchange
        if exchange is None:
            return []  # In GATHER `_advance` does what follows.
        table, why = exchange.table, f"{', '.join(lost)} was lost ({reason})"
        places = {table.places[peer] for peer in lost if peer in table.places}
        if not places or self.vote.proposal is not None or self._is_fetching:
            return []
        if 0 in places:
            return self._give_up(f"{lost[0]}, the proposer, was lost ({reason})", now)
        if not table.electorate.is_quorum(self._active & set(table.members)):
            return self._give_up(f"{why}, and the voters that are left are no quorum", now)
        if orphans := exchange.orphans(self._active):
            return self._give_up(f"{why}, the last who answered for part {orphans[0]}", now)
        exchange.look()
        holders = {index for part in table.owners for index in table.seating.three(part)}
        if places & holders:  # Others hold what they held: of keys that hold nothing there are many.
            self._due = max(self._due, now + self._control() + self.setup.timing.transfer)
        return []

    def _give_up(self, reason: str, now: float, overdue: Phase | None = None) -> list[Action]:
        """Say why this attempt cannot succeed, go to the next one, and end."""
        said: list[Action] = []
        if (table := self._table) is not None:
            to = table.members if table.is_voter else table.voters
            said = [Send(to, wire.Void(self.slot, reason[: wire.MAX_REASON]))]
        ended = self._end(OutcomeKind.VOID, reason, overdue=overdue)
        is_mine = self.vote.is_voter and self.vote.slot == self.slot  # Else I have followed the others into the next one.
        return [*said, *(self.vote.abandon(reason, now) if is_mine else []), *ended]

    def _decided(self, certificate: wire.Certificate, now: float) -> list[Action]:
        """End with the certified value; the outputs that I lack of it are fetched from those that confirmed it."""
        if Phase.CONFIRM in self._began and not self._has_overrun:
            self.lengths.setdefault(Phase.CONFIRM, now - self._began[Phase.CONFIRM])
        if value_hash(certificate.value) in self._held:
            return self._end(OutcomeKind.DONE, "certified", certificate)
        if self._is_fetching:
            return []
        if value_of(certificate).base_root != self.setup.ready.base_root:  # Its outputs lead nowhere from mine.
            return self._end(OutcomeKind.BEHIND, "the round was certified from another start state than mine")
        self._is_fetching, self._phase = True, Phase.CONFIRM
        waits = self.setup.timing.control + self.setup.timing.transfer
        # Nobody waits for who only contributes.
        self._due = now + (self.setup.timing.patience if isinstance(self._exchange, ContributorRound) else waits)
        voters = tuple(voter for voter in certificate.voters if voter != self.vote.me)
        return [FetchValue(certificate.value, voters, () if self._exchange is None else self._exchange.providers)]

    def _end(
        self, kind: OutcomeKind, reason: str, certificate: wire.Certificate | None = None, overdue: Phase | None = None
    ) -> list[Action]:
        self._phase = Phase.ENDED
        self.vote.pause()
        slot, members = (self.slot, ()) if certificate is None else (certificate.slot, value_of(certificate).members)
        outcome = Outcome(kind, slot, reason, members, certificate, overdue, silent=tuple(sorted(self._silent)))
        if (exchange := self._exchange) is not None:
            outcome = replace(outcome, members=members or exchange.members)
            here = self._active | {*exchange.members} - {*exchange.table.voters}  # A voter that was lost is no liar.
            # Whoever gave it up, its proposer mostly: I have waited to the deadline, too.
            is_late = kind is OutcomeKind.VOID and self._is_overdue and exchange.phase in (Phase.REDUCE, Phase.CHECK)
            withheld = exchange.withheld if is_late else ()
            outcome = replace(outcome, masked=tuple(pair for pair in exchange.masked if here.issuperset(pair)))
            outcome = replace(outcome, withheld=tuple(peer for peer in withheld if peer in here))
        if exchange is not None and certificate is not None:
            is_mine = exchange.cut == value_of(certificate).cut
            late = tuple(peer for peer in exchange.late if peer in here)
            counted, holders = (exchange.counted, exchange.holders) if is_mine else ({}, {})
            if is_mine:
                table = exchange.table
                trained = {table.members[index] for index in table.training}
                outcome = replace(outcome, idle=tuple(sorted(self._idle | trained - {*outcome.cut})))
            owners, known = exchange.owners, exchange.known
            slow = self._slow(owners, owners & known or owners, wire.Result)
            cut = {*outcome.cut}
            mute = {*exchange.unsketched, *self._slow(cut, cut & known or cut, wire.Sketch)}
            wordless = exchange.wordless & here - {self.vote.me}
            silent = {*outcome.silent, *(wordless if is_mine else ())}
            outcome = replace(outcome, late=late, slow=slow, unsketched=tuple(sorted(mute)), counted=counted)
            outcome = replace(outcome, silent=tuple(sorted(silent)), holders=holders)
        self.outcome = outcome
        reason = "its output did not come in time, and others had it or made it"
        return [Note("round.silent", peer, Phase.REDUCE, reason) for peer in outcome.late]


def _exchange_of(message: wire.RoundMessage) -> tuple[type, bytes] | None:
    """Return the exchange of small messages that a message belongs to, where most can send theirs at the same time."""
    match message:
        case wire.Result(cut=cut):
            return wire.Result, cut
        case wire.Sketch(outputs=(_, *_)):
            return wire.Sketch, b"".join(message.outputs)
    return None
