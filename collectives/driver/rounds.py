"""The driver of rounds, from certificate to certificate: receives round messages and executes the machines' actions.

Theory of operation. `average` runs one attempt and returns its outcome; it never raises because of the network. The vote
on a round lasts over all its attempts, and statements of voters count in it also while I train. While an attempt runs, its
machine receives all messages of the round, those of the vote too. The messages that move data belong to an attempt: of
those whose sender was ready before me, a few per peer are queued. `_do` executes all actions of the machine and of the
vote; those that take time are tasks of the attempt (`work`). Others may not know how the last round ended: they are sent
its certificate. Others may be ahead of me: `behind` is set.

A certificate ends my round if it continues my state and a quorum of the electorate has signed it, which the certificate
of my state determines. Any other one is a hint: it makes me look for the run's chain, once in a while and between
attempts. So do Readys for later rounds by more than a third of the votes.

A member whose session I lose still counts while others have one with it: they pass on what it signs (`relays`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import trio

from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.errors import ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.quota.origins import UNKNOWN, Rates
from ...peer.wire.signed import open_signed, verify_signed
from ..accountability.conduct import Conduct
from ..agreement.actions import AgreementTiming, Note
from ..agreement.electorate import LIAR_PROOF, Electorate
from ..allreduce.actions import Action, AskFor, Forward, Outcome, OutcomeKind, Send, Setup, VoteSetup
from ..chain.certificate import certificate_hash, check_certificate, check_proof, check_votes, genesis, value_of
from ..chain.kept_outputs import Outputs
from ..chain.packed import why_not_next
from ..chain.quorum import drawn_for, ranked_in_draw
from ..chain.voters import electorate_after, is_needed, why_no_quorum
from ..robust.checks import commitment
from ..round.deadlines import Deadlines
from ..round.early import EARLY_BYTES, EarlyMessages
from ..round.machine import Round
from ..round.vote import Vote
from ..spec import Spec
from ..vector.lines import UNMEASURED, CodecChoice, measured_in, stated
from ..vector.partition import num_parts
from ..visit.polls import serve_votes
from .contribution import Averaged, Contribution, NextRoot
from .hints import LateReadys, NewcomerReadys, senders
from .relays import Relays
from .work import Work

HINT_SECONDS = 60.0
"""Between two searches for the run's chain that hints have caused: each may hash the whole state."""
MAX_SENT = 4
"""Attempts of one round whose parts I keep: each holds a whole encoded contribution."""
READY = wire.code_of_kind(wire.Ready)
NAMED = (wire.Commit, wire.Have, wire.Sketch)
"""What a cut may name: also of a member that was banned since, if another one shows it."""


class Averager:
    """Runs the rounds of one peer over its node."""

    def __init__(
        self,
        node: Node,
        spec: Spec,
        active: Callable[[], frozenset[PeerId]],
        kept: Outputs | None = None,
        conduct: Conduct | None = None,
    ) -> None:
        self._node, self._now = node, node.running.now
        self._spec = spec
        self._active = active
        self._machine: Round | None = None
        """That of the running attempt; None once it is void: messages that come while its tasks end are for the next."""
        self._work: Work | None = None
        self._actions: deque[Action] = deque()
        self._is_acting = False
        self._alarm = trio.CancelScope()
        """The wait of the running attempt: until the machine's deadline."""
        self._foreign_bytes = 0
        """Bytes of messages that the running attempt keeps of members without a seat in it."""
        self._early, self._newcomers = EarlyMessages(), NewcomerReadys()
        self._deadlines, self._choice = Deadlines(spec.floor, spec.ceiling), CodecChoice(spec.contribution)
        self._vote: Vote | None = None
        self._earlier: frozenset[PeerId] = frozenset()  # The members that were here when my round began.
        self._came: set[PeerId] = set()  # Whose Ready for my round has arrived since my last attempt ended.
        self._num_revealed = 0
        """Attempts of this round in which my nonce may be known to others."""
        self._sent: dict[object, list[Blob]] = {}
        """The encoded parts of this peer in the last attempts of the round, which may still be decided on.

        By the hash of the attempt's first cut; where that did not arrive, by its members and bounds.
        """
        self.certificate: wire.Certificate | None = None
        """The certificate of my state; None at the run's start."""
        self._late_readys = LateReadys()
        self._searches = Rates(1 / HINT_SECONDS, HINT_SECONDS)
        self._kept = kept or Outputs(node)
        self._conduct = conduct or Conduct(node, spec.terms, spec.charter)
        self.round = 1
        self._is_hinted = False
        """True if a certificate has hinted at another chain, and nobody has looked for it since."""
        self.behind = False
        """True if so many members are in later rounds that no quorum is left in mine, or if a certificate hints at it."""
        self._relays = Relays(node, spec.run, self._statements_of, self._fail, lambda: self.electorate.votes)
        node.on_message(wire.Signed, self._receive)
        node.on_message(wire.Certificate, self._receive_certificate)
        node.on_message(wire.Proof, self._receive_proof)
        serve_votes(node, spec.run, lambda: self.round)
        node.on_lost(self._lose)

    def expect(self, round_: int, certificate: wire.Certificate | None) -> None:
        """Set my next round, since I hold the state that `certificate` proves (None: the run's start)."""
        before = self._slot
        self.round, self.certificate, self.behind, self._is_hinted = round_, certificate, False, False
        self._conduct.advance(round_, certificate)
        self._spec = self._spec.after(self._value)
        self._choice = self._choice.among(self._spec.contribution)
        if self._slot != before:
            self._vote, self._num_revealed = None, 0
            self._earlier = self._members()
            self._came.clear()
            self._sent.clear()
        for signed, message in self._early.take(round_):
            if message.slot.round == round_:
                self._give(signed, message)

    @property
    def decided(self) -> wire.Certificate | None:
        """The certificate of my round, where it was decided and I could not end it; None else."""
        return None if self._vote is None else self._vote.certificate

    def ready(self) -> frozenset[PeerId]:
        """Return the peers that train and have sent a Ready for my round."""
        readys = self._vote.ready.items() if self._vote is not None else ()
        return frozenset(peer for peer, (_, ready) in readys if ready.tokens)

    def waiting(self) -> frozenset[PeerId]:
        """Return the members that train and wait for a round: ready in my attempt, or since my last one ended."""
        return self.ready() & self._members() & (self._came | self._in_my_attempt())

    @property
    def is_called(self) -> bool:
        """True if voters with more than a third of the votes are ready in my attempt, or in a later one."""
        electorate = self.electorate
        return electorate.votes_of(self._in_my_attempt() & self._members()) >= electorate.third

    def _in_my_attempt(self) -> frozenset[PeerId]:
        return self._vote.reached if self._vote is not None else frozenset()

    @property
    def electorate(self) -> Electorate:
        """The voters of my round."""
        return self._vote.electorate if self._vote is not None else electorate_after(self._value, self._spec.charter)

    @property
    def is_needed(self) -> bool:
        """True if the members that are here may not decide without my vote: one more of them could be lost meanwhile.

        Who leaves then stays for one round, and says so in its Ready: the next electorate does not count it.
        """
        return is_needed(self._node.peer_id, self._active(), self.electorate, self._spec.charter)

    @property
    def why_no_quorum(self) -> str:
        """Why the members that are here cannot decide, so that who trains need not wait for it; empty if they can."""
        return why_no_quorum(self.electorate, self._spec.charter, self._members())

    @property
    def finishing(self) -> bool:
        """True if I have taken the cut of the running round: it still needs my part."""
        return self._machine is not None and self._machine.is_bound

    @property
    def busy(self) -> bool:
        """True while an attempt runs."""
        return self._work is not None

    def drawn(self) -> frozenset[PeerId]:
        """Return the members drawn for my next round, as far as I know them."""
        first = electorate_after(self._value, self._spec.charter).votes.keys()
        return drawn_for(self._slot, self._members(), first, self._earlier)

    def partners(self) -> frozenset[PeerId]:
        """Return whom of the drawn members I am to have a session with: all if I may own a part, else those that may."""
        drawn, voters = self.drawn(), electorate_after(self._value, self._spec.charter).votes.keys()
        first = [*(drawn & voters), *ranked_in_draw(self._slot, drawn - voters)][: wire.MAX_PARTS]
        return drawn if self._node.peer_id in first else frozenset(first)

    @property
    def _value(self) -> wire.Value | None:
        return None if self.certificate is None else value_of(self.certificate)

    @property
    def _slot(self) -> wire.Slot:
        """The first slot of my round."""
        run, last = self._spec.run, self.certificate
        return wire.Slot(run, self.round, genesis(run) if last is None else certificate_hash(last))

    def _members(self) -> frozenset[PeerId]:
        active, sought, me = self._active(), self._relays.sought, self._node.peer_id
        return active | sought | {me} if sought or me not in active else active

    def add_member(self, peer: PeerId) -> None:
        """Show a new member whom I have banned, and add it to the running attempt."""
        self._conduct.bans.greet(peer)
        self._wait_for(peer)
        if (hint := self._newcomers.take(peer)) is not None:
            try:
                self._receive(peer, hint)
            except RemoteError as error:
                self._node.charge(peer, "round", error)

    def _wait_for(self, peer: PeerId) -> None:
        if self._machine is not None and peer in (members := self._members()) and len(members) <= wire.MAX_ROSTER:
            self._act(self._machine.add_member(peer, self._now()))

    @property
    def why_not_average(self) -> str:
        """Why a round cannot succeed now, so that waiting for it would only stop the training; empty if it can."""
        spec, members = self._spec, self._members()
        if banned := self._conduct.bans.mine:
            return f"this peer is banned from the run: {banned}"
        if stopped := self._conduct.alarm or self._conduct.ended:
            return stopped
        if len(members) < spec.min_peers:
            return f"{len(members)} members are here, the run asks for {spec.min_peers}"
        return ""

    async def average(self, contribution: Contribution, next_root: NextRoot) -> Averaged:
        """Take part in one attempt of a round. `next_root` computes the state root that outputs lead to, without effect."""
        vote = self._vote_on()
        self._relays.enter(vote.slot.round, vote.slot.attempt, self._members())
        if why_not_average := self.why_not_average:
            return Averaged(Outcome(OutcomeKind.VOID, vote.slot, why_not_average))
        drawn = self.drawn()
        if self._node.peer_id not in drawn:
            reason = f"not drawn for this round: {len(drawn)} of {len(self._members())} members are"
            return Averaged(Outcome(OutcomeKind.MISSED, vote.slot, reason))
        machine = Round(self._setup(vote, drawn, contribution), vote, self._now())
        work = await self._drive(machine, contribution, next_root)
        outcome = machine.outcome
        assert outcome is not None
        self._learn(machine, outcome)
        if machine.has_roster:
            exchange = machine.exchange
            self._num_revealed += 1
            self._sent[exchange.cut or (exchange.members, exchange.bounds)] = work.mine
            self._sent = dict([*self._sent.items()][-MAX_SENT:])
        averaged = Averaged(outcome)
        if outcome.kind is OutcomeKind.DONE:
            phases = {peer: vote.ready[peer][1].seconds for peer in outcome.cut if peer in vote.ready}
            averaged = replace(self._done(outcome, work), phases=phases)
        self.behind = self.behind or averaged.outcome.kind is OutcomeKind.BEHIND
        self._node.blobs.drop([key for key in work.served if key not in self._kept])
        return averaged

    async def _drive(self, machine: Round, contribution: Contribution, next_root: NextRoot) -> Work:
        """Drive an attempt to its end, beginning with the messages that arrived before it; return its work."""
        node, blobs = self._node, self._node.blobs
        self._machine, self._foreign_bytes = machine, 0
        node.set_beat(node.config.beat_in_round)
        try:
            async with trio.open_nursery() as nursery:
                choice, kept, act = self._choice, self._kept, self._act
                work = self._work = Work(node, machine, contribution, choice, next_root, kept, act, nursery)
                blobs.obtain = work.pass_on
                try:
                    self._act(machine.start(self._now()))
                    for signed, message in self._early.take(self.round):
                        self._give(signed, message)
                    while machine.outcome is None:
                        with trio.CancelScope(deadline=node.running.at(machine.deadline)) as self._alarm:
                            await trio.sleep_forever()
                        self._act(machine.tick(self._now()))
                finally:
                    work.is_over, blobs.obtain = True, None
                    node.pace_round(0.0)
                nursery.cancel_scope.cancel()
        finally:
            self._machine = self._work = None
            self._came.clear()
            node.set_beat(node.config.beat_outside)
        return work

    def _learn(self, machine: Round, outcome: Outcome) -> None:
        """Learn from an attempt how long the next ones take, and which members were silent, late or false."""
        conduct, voters = self._conduct, len(self.electorate.votes)
        conduct.relieve(outcome.silent, outcome.late)
        if machine.has_roster:
            exchange, known = machine.exchange, machine.exchange.known
            owners, trainers = len(exchange.owners & known), len(exchange.trainers & known)
            conduct.missed(outcome.idle, outcome.masked, known, owners, trainers)
            conduct.lapsed(outcome.unsketched, outcome.slow, outcome.withheld, exchange.members[0], voters)
        if outcome.kind is OutcomeKind.DONE:
            self._deadlines.learn(machine.lengths)
        if outcome.overdue is not None and outcome.slot.attempt >= (voters - 1) // 3:
            self._deadlines.give_more_time(outcome.overdue)  # One proposer at least was honest: the deadlines are too short.

    def _vote_on(self) -> Vote:
        """Return the vote on my round; it begins with the first message, or when I am ready."""
        if self._vote is None:
            spec, node, conduct = self._spec, self._node, self._conduct
            first, electorate = self._slot, electorate_after(self._value, spec.charter)
            timing = self._deadlines.timing(grace=0.0, transfer=0.0)
            self._vote = Vote(
                VoteSetup(
                    me=node.peer_id,
                    slot=first.at(conduct.begin(first)),
                    electorate=electorate,
                    charter=spec.charter,
                    timing=AgreementTiming(control=timing.control, attempt=2 * spec.ceiling),
                    sign=conduct.guard.sign,
                    verify=verify_signed,
                    proof=conduct.guard.lock_in(first.decision),
                    is_observer=conduct.guard.is_lost and len(electorate.votes) >= LIAR_PROOF,
                )
            )
        return self._vote

    def _done(self, outcome: Outcome, work: Work) -> Averaged:
        mine, value = self._node.peer_id, outcome.value
        parts = self._sent.get(value.cut) or self._sent.get((value.members, value.bounds), [])
        if mine in outcome.cut and not parts:
            reason = "the round was certified with parts of mine that are no longer here"
            return Averaged(Outcome(OutcomeKind.BEHIND, outcome.slot, reason))
        is_hinted, told, drawn = self._is_hinted, self._vote_on().told, self.drawn()
        self.expect(outcome.slot.round + 1, outcome.certificate)
        self.behind = self._is_hinted = is_hinted  # My chain went on; whether there is another one is still to be seen.
        # Who was not drawn learns of the round from member records.
        if mine in senders(outcome.slot, outcome.members[: num_parts(outcome.members)], self.electorate.votes):
            self._node.send(sorted({*outcome.members, *drawn} - {*told, mine}), outcome.certificate)
        return Averaged(outcome, tuple(parts), tuple(work.outputs[key] for key in value.outputs))

    def _setup(self, vote: Vote, active: frozenset[PeerId], contribution: Contribution) -> Setup:
        node, spec, conduct = self._node, self._spec, self._conduct
        secret = node.identity.sign(repr((vote.slot.decision, self._num_revealed)).encode())
        nonce = keyed("nonce of a peer in an attempt", secret)
        upload, download = node.upload_rate or UNMEASURED, node.download_rate or UNMEASURED
        control, transfer = self._deadlines.stated()
        ready = wire.Ready(
            vote.slot,
            contribution.base_root,
            contribution.tokens,
            0.0 if node.is_relayed else upload,
            download,
            commitment(nonce),
            spec.invite,
            conduct.voucher if spec.charter.keepers is not None else b"",
            is_leaving=contribution.is_leaving,
            rates=stated(measured_in(self._value), node.rate_from),
            seconds=min(contribution.seconds, wire.MAX_PHASE_SECONDS) if contribution.tokens else 0.0,
            control=min(control, wire.MAX_PHASE_SECONDS),
            transfer=min(transfer, wire.MAX_PHASE_SECONDS),
        )
        cells = len(spec.cells_of(vote.slot.round))
        expected = max(it.num_bytes(cells) for it in (spec.contribution, spec.output)) / min(upload, download)
        return Setup(
            ready=ready,
            nonce=nonce,
            active=active,
            spec=spec,
            conduct=conduct,
            before=self._value,
            steps=contribution.steps,
            loss=contribution.loss,
            ramp=contribution.ramp,
            phase_seconds=contribution.seconds,
            timing=self._deadlines.timing(grace=contribution.grace, transfer=expected),
            verify=verify_signed,
        )

    def _receive(self, carrier: PeerId, signed: wire.Signed) -> None:
        # Signed messages may be forwarded by any member; a wrong signature is the carrier's fault.
        own, machine = carrier == signed.sender, self._machine
        if machine is not None and not own and signed.code == READY and carrier in self.electorate.votes:
            ready = open_signed(signed)  # Whoever its author is: the voter's word names it.
            assert isinstance(ready, wire.Ready)
            machine.show(carrier, signed, ready)
        if not (self._takes_part(carrier) and (own or self._takes_part(signed.sender))):
            if (dropped := self._newcomers.keep(carrier, signed)) is not None:
                self._node.refuse(dropped, "round", "it or the signer of its message is no member")
            return
        if own:
            self._relays.heard(carrier)
        message = open_signed(signed)
        if message.slot.run != self._spec.run:
            raise ProtocolViolation("a message of another run")
        if signed.sender in self._conduct.bans and (carrier == signed.sender or not isinstance(message, NAMED)):
            return
        self._conduct.receive(signed, message)
        last = self.certificate
        if isinstance(message, wire.Ready) and last is not None and last.slot.round >= message.slot.round:
            self._answer_late(carrier, message.slot, last)
        if message.slot.round < self.round:
            return
        self._relays.pass_on(message.slot.round, signed.sender, signed)
        self._give(signed, message)

    def _takes_part(self, peer: PeerId) -> bool:
        """Return True for a member of the run or of the running attempt: of others no message of a round is heard."""
        in_attempt = self._machine is not None and self._machine.has_seat(peer)
        return in_attempt or self._node.is_member(peer) or peer in self._members()

    def _give(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Give a message to the running attempt or the vote, or keep it: until my attempt, until the round that it is of."""
        node, machine, sender = self._node, self._machine, signed.sender
        is_ahead, is_vote = message.slot.round > self.round, isinstance(message, wire.VoteMessage)
        if isinstance(message, wire.Ready) and message.slot.decision == self._slot.decision:
            self._came.add(sender)
        is_early = is_ahead or (machine is None and not is_vote)
        if is_early and (loser := self._early.add(signed, message)) is not None:
            node.refuse(loser, "round", "more than is kept before an attempt")
        if machine is not None and is_ahead:
            machine.peer_ahead(sender)
        elif machine is not None and isinstance(message, wire.Ready):
            self._wait_for(sender)  # It may have started to train after I became ready.
        if machine is not None and not machine.has_seat(sender):  # As one that is not drawn.
            if self._foreign_bytes + len(signed.payload) > EARLY_BYTES:
                node.refuse(sender, "round", "more than an attempt keeps of peers outside of it")
                return
            self._foreign_bytes += len(signed.payload)
        try:
            if machine is not None:
                self._act(machine.receive(signed, message, self._now()))
            elif isinstance(message, wire.VoteMessage):
                self._act(self._vote_on().receive(signed, message, self._now()))
        except RemoteError as error:  # Not its carrier, which need not have seen that.
            node.charge(sender, type(message).__name__, error)
        self.behind = self.behind or (self._vote is not None and self._vote.behind)

    def _answer_late(self, peer: PeerId, slot: wire.Slot, certificate: wire.Certificate) -> None:
        """Send who may not know that its round has ended the certificate of the last one, if that is mine to do."""
        voters = self.electorate.votes
        if self._node.peer_id not in senders(slot, self._members() - {peer}, voters):
            return
        if self._late_readys.may_answer(peer, self._node.now(), votes=peer in voters):
            self._node.send(peer, certificate)
        else:
            self._node.refuse(peer, "round", "more Readys of decided rounds than are answered")

    def _act(self, actions: Sequence[Action]) -> None:
        """Execute actions of the machine or the vote, and those that follow from them, in order."""
        self._actions.extend(actions)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._actions:
                self._do(self._actions.popleft())
        finally:
            self._is_acting = False
        machine, work = self._machine, self._work
        if machine is None or work is None:
            self.behind = self.behind or (self._vote is not None and self._vote.is_decided)  # While I trained.
            return
        work.give_up_late()
        self._conduct.enter(machine.slot)
        if machine.outcome is None:
            self._alarm.deadline = self._node.running.at(machine.deadline)
            return
        self._alarm.cancel()
        if machine.outcome.kind is not OutcomeKind.DONE:
            self._machine = None

    def _do(self, action: Action) -> None:
        node, machine = self._node, self._machine
        match action:
            case Send(to, message):
                assert machine is not None, "a vote signs what it says itself"
                signed = self._conduct.guard.sign(message)
                if isinstance(signed, str):  # What else was to be done followed from a statement that I cannot make.
                    self._actions.clear()
                    self._actions.extend(machine.give_up(f"{type(message).__name__}: {signed}", self._now()))
                    return
                self._report(message)
                if node.peer_id in to:
                    self._actions.extend(machine.receive(signed, message, self._now()))
                node.send([peer for peer in to if peer != node.peer_id], signed)
            case Forward(to, mail):
                if isinstance(mail, wire.Signed) and mail.sender == node.peer_id:
                    self._report(wire.opened(mail))
                node.send([peer for peer in to if peer != node.peer_id], mail)
            case AskFor(to, peer):
                node.send(to, wire.Unheard(self._spec.run, self.round, peer, asks=True))
            case Note(event, peer, step, reason):
                slot = (machine or self._vote_on()).slot
                node.telemetry.emit(event, peer=peer, step=step, reason=reason, round=slot.round, attempt=slot.attempt)
            case _:  # Between attempts the vote requests values alone, and again when the next attempt begins.
                if self._work is not None:
                    self._work.start(action)

    def _report(self, message: wire.RoundMessage) -> None:
        slot = message.slot
        self._node.telemetry.emit("round.said", step=type(message).__name__, round=slot.round, attempt=slot.attempt)

    def _receive_certificate(self, carrier: PeerId, certificate: wire.Certificate) -> None:
        if not self._takes_part(carrier):
            self._node.refuse(carrier, "certificate", "a stranger's certificate is not checked")
            return
        if certificate.slot.run != self._spec.run:
            raise ProtocolViolation("a certificate of another run")
        if certificate_hash(certificate) == self._slot.previous:
            return  # That of my own state, whoever signed this copy.
        work = partial(check_certificate, certificate, verify_signed, charter=self._spec.charter)
        then = partial(self._take_certificate, carrier, certificate)
        self._node.verify(carrier, "certificate", wire.MAX_PARTS + 2, work, then)

    def _take_certificate(self, carrier: PeerId, certificate: wire.Certificate, value: wire.Value) -> None:
        """React to a certificate whose signatures are valid."""
        self._conduct.examine(certificate)
        if certificate.slot.round < self.round:
            return
        if why_not := why_not_next(certificate, self._slot.decision, self.certificate, self._spec.charter):
            self._hint(carrier, certificate.slot.round, why_not)
        else:
            (self._machine or self._vote_on()).certified(certificate)
            self._act([])

    def _hint(self, carrier: PeerId, round_: int, reason: str) -> None:
        """Take a certificate that does not end my round as its carrier's word that it is ahead of me."""
        self._node.telemetry.emit("certificate.hint", peer=carrier, step="certificate", reason=reason, round=round_)
        if carrier in self._members() and self._searches.take(UNKNOWN, self._node.now()):
            self.behind = self._is_hinted = True

    def _receive_proof(self, carrier: PeerId, proof: wire.Proof) -> None:
        if not self._takes_part(carrier):
            self._node.refuse(carrier, "proof", "a stranger's proof is not checked")
            return
        if proof.slot.decision != self._slot.decision:
            return
        charter, electorate = self._spec.charter, self.electorate

        def work() -> None:
            check_proof(proof, verify_signed, charter=charter)
            check_votes(proof, electorate)

        self._node.verify(carrier, "proof", wire.MAX_PARTS, work, lambda _: self._take_proof(carrier, proof))

    def _take_proof(self, carrier: PeerId, proof: wire.Proof) -> None:
        self._relays.pass_on(proof.slot.round, carrier, proof)
        self._act((self._machine or self._vote_on()).learn(proof, self._now()))

    def _lose(self, peer: PeerId, reason: str) -> None:
        self._early.forget(peer)
        self._newcomers.take(peer)
        self._relays.lost(peer, reason, self._members())

    def _statements_of(self, peer: PeerId) -> list[wire.Signed | wire.Proof]:
        """Return what a member has said in my round, as far as I keep it."""
        said = self._vote.statements_of(peer) if self._vote is not None else []
        return said if self._machine is None else [*said, *self._machine.statements_of(peer)]

    def _fail(self, peer: PeerId, reason: str) -> None:
        """React to the loss of a member that nobody here has a session with."""
        if self._machine is not None:
            self._act(self._machine.lose(peer, reason, self._now()))
