"""The driver of rounds: runs attempt after attempt, and dispatches round messages between them.

Theory of operation. `average` runs one attempt and returns its outcome; it never raises because of the network. Round
messages also arrive between attempts. Others may be ready before me: their messages are queued, a few per peer. Others
may not know how the last round ended: they are sent its certificate. Others may be ahead of me: `behind` is set.

A certificate proves that a quorum of its own roster signed it, and anybody can make a roster. It ends my round only if it
continues my state (round, previous, base root) and my own quorum signed it: of the members drawn, or of the roster that I
acknowledged. Any other one is a hint: whoever brings it is ahead of me. More than a third of my members that are ahead end
my attempt; fewer make me look for the run's chain, once in a while and between attempts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from ..peer import wire
from ..peer.address import prefix_of
from ..peer.arrays import Floats
from ..peer.digest import keyed
from ..peer.errors import ProtocolViolation, RemoteError
from ..peer.node.bulk import Blob
from ..peer.node.node import Node
from ..peer.transport import PeerId
from ..peer.wire.signed import open_signed, verify_signed
from .accountability.conduct import Conduct, open_void
from .attempt import Attempt, AttemptBytes, NextRoot
from .chain.certificate import certificate_hash, check_certificate, genesis, result_of, signed_in
from .chain.kept_outputs import Outputs
from .chain.quorum import drawn_for, quorum
from .robust.checks import commitment
from .round.actions import Outcome, OutcomeKind, Setup
from .round.deadlines import Deadlines
from .round.early import EARLY_BYTES, EarlyMessages
from .round.machine import Round
from .spec import Spec

MAX_HINTS = 64
"""Readies of peers that are no members yet, one of each, unverified: a newcomer's may overtake its record."""
MAX_HINT_BYTES = 4096
"""A Ready has some 500."""
MAX_ATTEMPT = 1 << 20
"""The limit of `wire.Slot`; only liars can exhaust it, and this round then goes on without me."""
HINT_SECONDS = 60.0
"""Between two searches for the run's chain that hints have caused: each may hash the whole state."""
UNMEASURED = 1e6
"""Bytes/s assumed of a connection before the first measurement: a usual upload rate at home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One peer's pseudo-gradient with error feedback, x = Δ + e in whole cells, and its cost."""

    vector: Floats
    round: int
    base_root: bytes
    tokens: int
    steps: int
    loss: float
    grace: float
    """Seconds for slower members to become ready after a quorum is."""
    seconds: float = math.inf
    """The duration of the inner phase: the cost of waiting is measured against it."""
    ramp: float = 1.0
    """The factor on the weight of these tokens: less than 1 in a newcomer's first rounds."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The outcome of an attempt; if certified, also my encoded parts and all encoded outputs, both by part."""

    outcome: Outcome
    mine: tuple[Blob, ...]
    outputs: tuple[Blob, ...]


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
        self._node = node
        self._spec = spec
        self._active = active
        self._attempt: Attempt | None = None
        self._early = EarlyMessages()
        self._hints: dict[PeerId, wire.Signed] = {}
        self._foreign_bytes = 0
        """Bytes that the running attempt keeps of members that it does not know as its own."""
        self._deadlines = Deadlines(spec.floor, spec.ceiling)
        self._next_attempt = 0
        self._certificate: wire.Certificate | None = None
        self._kept = kept or Outputs(node)
        self._conduct = conduct or Conduct(node, spec.terms, spec.charter)
        self.round = 1
        self._gone_on: set[PeerId] = set()
        self._next_hint = -math.inf
        self.behind = False
        """True if so many members are in later rounds that no quorum is left in mine, or if a certificate hints at it."""
        node.on_message(wire.Signed, self._receive)
        node.on_message(wire.Certificate, self._receive_certificate)
        node.on_lost(self._lose)

    def expect(self, round_: int, certificate: wire.Certificate | None) -> None:
        """Set my next round, since I hold the state that `certificate` proves (None: the run's start)."""
        if round_ != self.round:
            self._next_attempt = 0
        self.round, self._certificate, self.behind = round_, certificate, False
        self._gone_on.clear()
        self._conduct.advance(round_, certificate)

    @property
    def certificate(self) -> wire.Certificate | None:
        """The certificate of my state; None at the run's start."""
        return self._certificate

    def ready(self) -> frozenset[PeerId]:
        """Return the peers that have sent a Ready for my round."""
        return self._early.ready(self.round)

    @property
    def finishing(self) -> bool:
        """True if I have acknowledged the cut of the running round: it still needs my part."""
        return self._attempt is not None and self._attempt.machine.is_bound

    @property
    def busy(self) -> bool:
        """True while an attempt runs."""
        return self._attempt is not None

    def drawn(self) -> frozenset[PeerId]:
        """Return the members drawn for my next round, as far as I know them."""
        slot = wire.Slot(self._spec.run, self.round, 0)
        return drawn_for(slot, self._members(), self._spec.charter.authority)

    def _members(self) -> frozenset[PeerId]:
        return self._active() | {self._node.peer_id}

    def add_member(self, peer: PeerId) -> None:
        """Show a new member whom I have banned, and add it to the running attempt."""
        self._conduct.bans.greet(peer)
        self._wait_for(peer)
        if (hint := self._hints.pop(peer, None)) is not None:
            try:
                self._receive(peer, hint)
            except RemoteError as error:
                self._node.charge(peer, "round", error)

    def _wait_for(self, peer: PeerId) -> None:
        if self._attempt is None or self._attempt.machine.has_member(peer):
            return
        members = self._active()
        if peer in members and len(members) <= wire.MAX_ROSTER:
            self._attempt.act(self._attempt.machine.add_member(peer))

    @property
    def why_not_average(self) -> str:
        """Why a round cannot succeed now, so that waiting for it would only stop the training; empty if it can."""
        spec, members = self._spec, self._members()
        if banned := self._conduct.bans.mine:
            return f"this peer is banned from the run: {banned}"
        if len(members) < spec.min_peers:
            return f"{len(members)} members are here, the run asks for {spec.min_peers}"
        if spec.charter.authority is not None and spec.charter.authority not in members:
            return "the run's owner, whose signature it requires, is away"
        return ""

    async def average(self, contribution: Contribution, next_root: NextRoot) -> Averaged:
        """Take part in one attempt of a round. `next_root` computes the state root that outputs lead to, without effect."""
        node, spec = self._node, self._spec
        slot = self._conduct.begin(contribution.round, self._next_attempt)
        if slot.attempt > MAX_ATTEMPT:
            return Averaged(Outcome(OutcomeKind.VOID, slot, "all attempts of this round have been used up"), (), ())
        if why_not_average := self.why_not_average:
            return Averaged(Outcome(OutcomeKind.VOID, slot, why_not_average), (), ())
        members = self._members()
        drawn = drawn_for(slot, members, spec.charter.authority)
        if node.peer_id not in drawn:
            reason = f"not drawn for this round: {len(drawn)} of {len(members)} members are"
            return Averaged(Outcome(OutcomeKind.MISSED, slot, reason), (), ())
        machine = Round(self._setup(slot, drawn, contribution), trio.current_time())
        work = AttemptBytes(contribution.vector)
        codecs = spec.contribution, spec.output
        attempt = self._attempt = Attempt(node, machine, codecs, work, next_root, self._conduct)
        self._foreign_bytes = 0
        early = self._early.take()
        node.set_beat(node.config.beat_in_round)
        try:
            outcome = await attempt.run(early)
        finally:
            self._attempt = None
            node.set_beat(node.config.beat_outside)
        self._next_attempt = outcome.slot.attempt + 1
        averaged = Averaged(outcome, (), ())
        if outcome.kind is OutcomeKind.DONE:
            self._deadlines.learn(attempt.durations)
            averaged = self._done(outcome, work)
            await self._kept.keep(outcome.slot.round, {key: work.outputs[key] for key in outcome.outputs})
        elif outcome.overdue is not None:
            self._deadlines.give_more_time(outcome.overdue)
        self.behind = self.behind or outcome.kind is OutcomeKind.BEHIND
        node.blobs.drop([key for key in work.served if key not in self._kept])
        return averaged

    def _done(self, outcome: Outcome, work: AttemptBytes) -> Averaged:
        mine = self._node.peer_id
        self.expect(outcome.slot.round + 1, outcome.certificate)
        self._conduct.distrust(outcome.lied)
        assert outcome.certificate is not None
        # In a run with many more members than were drawn, the others learn of the round from member records.
        members = self._active()
        here = members if len(members) <= wire.MAX_ROSTER else frozenset()
        outsiders = {*outcome.gave_up, *({*outcome.members, *here} - {*outcome.cut})} - {mine}
        self._node.send(sorted(outsiders), outcome.certificate)
        return Averaged(outcome, tuple(work.mine), tuple(work.outputs[key] for key in outcome.outputs))

    def _setup(self, slot: wire.Slot, active: frozenset[PeerId], contribution: Contribution) -> Setup:
        node, spec, last = self._node, self._spec, self._certificate
        nonce = keyed("nonce of a peer in a round", node.identity.sign(repr(slot).encode()))
        upload, download = node.upload_rate or UNMEASURED, node.download_rate or UNMEASURED
        ready = wire.Ready(
            slot,
            contribution.base_root,
            contribution.tokens,
            0.0 if node.is_relayed else upload,
            download,
            commitment(nonce),
            prefix_of(node.transport.addresses()),
            spec.invite,
        )
        largest = max(spec.contribution.num_bytes(spec.num_cells), spec.output.num_bytes(spec.num_cells))
        expected = largest / min(upload, download)
        return Setup(
            me=node.peer_id,
            ready=ready,
            rule=spec.rule,
            nonce=nonce,
            active=active,
            num_cells=spec.num_cells,
            part_bytes=spec.contribution.num_bytes,
            output_bytes=spec.output.num_bytes,
            previous=genesis(spec.run) if last is None else certificate_hash(last),
            tokens_before=0 if last is None else result_of(last).tokens,
            tokens=contribution.tokens,
            steps=contribution.steps,
            loss=contribution.loss,
            ramp=contribution.ramp,
            min_peers=spec.min_peers,
            phase_seconds=contribution.seconds,
            timing=self._deadlines.timing(grace=contribution.grace, transfer=expected),
            verify=verify_signed,
            charter=spec.charter,
            is_banned=self._conduct.bans.__contains__,
            trust_of=self._conduct.trust_of,
            may_own=self._conduct.may_own,
        )

    def _receive(self, carrier: PeerId, signed: wire.Signed) -> None:
        # Signed messages may be forwarded by any member; a wrong signature is the carrier's fault.
        if not (self._takes_part(carrier) and self._takes_part(signed.sender)):
            self._keep_hint(carrier, signed)
            return
        if wire.CODES.get(signed.code) is wire.Void:  # It carries acknowledgements of others, each with its signature.
            work = partial(open_void, signed)
            self._node.verify(carrier, "Void", wire.MAX_ROSTER + 1, work, partial(self._take, carrier, signed))
        else:
            self._take(carrier, signed, open_signed(signed))

    def _takes_part(self, peer: PeerId) -> bool:
        """Return True for a member of the run or of the running attempt: of others no message of a round is heard."""
        in_attempt = self._attempt is not None and self._attempt.machine.has_seat(peer)
        return in_attempt or self._node.is_member(peer) or peer in self._members()

    def _keep_hint(self, carrier: PeerId, signed: wire.Signed) -> None:
        """Keep the Ready of a newcomer until its record is here; whatever else a stranger sends is dropped unverified."""
        if (
            carrier == signed.sender
            and wire.CODES.get(signed.code) is wire.Ready
            and len(signed.payload) <= MAX_HINT_BYTES
        ):
            self._hints.pop(carrier, None)
            self._hints[carrier] = signed
            if len(self._hints) <= MAX_HINTS:
                return
            carrier = next(iter(self._hints))
            del self._hints[carrier]
        self._node.refuse(carrier, "round", "it or the signer of its message is no member")

    def _take(self, carrier: PeerId, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """React to a message whose signatures are checked."""
        if message.slot.run != self._spec.run:
            raise ProtocolViolation("a message of another run")
        if signed.sender in self._conduct.bans:
            return
        self._conduct.receive(signed, message)
        if message.slot.round > self.round:
            self._peer_ahead(signed.sender)
        if self._attempt is not None:
            if isinstance(message, wire.Ready) and message.slot.round == self.round:
                self._wait_for(signed.sender)  # It may have started to train after I became ready.
            self._pass_on(self._attempt, signed, message)
        last = self._certificate
        if isinstance(message, (wire.Void, wire.Ready)) and last is not None and last.slot.round >= message.slot.round:
            self._node.send(carrier, last)  # It may not know that this round has ended, and how.
        elif message.slot.round >= self.round and not self._in_attempt(message):
            loser = self._early.add(signed, message)
            if loser is not None:
                self._node.refuse(loser, "round", "more than is kept before an attempt")

    def _pass_on(self, attempt: Attempt, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Give a message to the running attempt, which keeps a budget of bytes of members that it does not know."""
        if not attempt.machine.has_seat(signed.sender):
            if self._foreign_bytes + len(signed.payload) > EARLY_BYTES:
                self._node.refuse(signed.sender, "round", "more than an attempt keeps of peers outside of it")
                return
            self._foreign_bytes += len(signed.payload)
        attempt.receive(signed, message)

    def _in_attempt(self, message: wire.RoundMessage) -> bool:
        """Return True if the running attempt has consumed a message; those of later attempts are queued for the next one."""
        if self._attempt is None:
            return False
        return message.slot.round == self.round and message.slot.attempt <= self._attempt.machine.slot.attempt

    def _peer_ahead(self, peer: PeerId) -> None:
        """Record a peer that is in a later round; of members more than a third are behind nobody."""
        members = self._members()
        if peer not in members:
            return
        self._gone_on = (self._gone_on | {peer}) & members
        self.behind = self.behind or len(self._gone_on) > len(members) - quorum(len(members))
        if self._attempt is not None:
            self._attempt.act(self._attempt.machine.peer_ahead(peer))

    def _receive_certificate(self, carrier: PeerId, certificate: wire.Certificate) -> None:
        if not self._takes_part(carrier):
            self._node.refuse(carrier, "certificate", "a stranger's certificate is not checked")
            return
        if certificate.slot.run != self._spec.run:
            raise ProtocolViolation("a certificate of another run")
        work = partial(check_certificate, certificate, verify_signed, charter=self._spec.charter)
        then = partial(self._take_certificate, carrier, certificate)
        self._node.verify(carrier, "certificate", wire.MAX_ROSTER + 2, work, then)

    def _take_certificate(
        self, carrier: PeerId, certificate: wire.Certificate, proved: tuple[wire.Roster, wire.Cut, wire.ResultAck]
    ) -> None:
        """React to a certificate that is valid."""
        roster, _, result = proved
        self._conduct.examine(certificate)
        if certificate.slot.round < self.round:
            return
        if why_not := self._why_not_count(certificate, roster, result):
            self._hint(carrier, certificate.slot.round, why_not)
        elif self._attempt is not None:
            self._attempt.act(self._attempt.machine.certified(certificate, result))
        else:
            self.behind = True

    def _why_not_count(self, certificate: wire.Certificate, roster: wire.Roster, result: wire.ResultAck) -> str:
        """Return why a valid certificate does not end my round; empty if it does."""
        last, attempt = self._certificate, self._attempt
        if certificate.slot.round != self.round:
            return f"my round is {self.round}"
        if result.previous != (genesis(self._spec.run) if last is None else certificate_hash(last)):
            return "it continues another chain than mine"
        base = attempt.machine.setup.ready.base_root if attempt is not None else b""
        if base and roster.base_root != base:
            return "it starts from another state than mine"
        if attempt is not None and attempt.machine.has_acknowledged(signed_in(certificate.roster)):
            return ""
        members = self.drawn()
        signers = members & {signed_in(ack).sender for ack in certificate.acks}
        if len(signers) < quorum(len(members)):
            return f"{len(signers)} of my {len(members)} members have signed it, {quorum(len(members))} are needed"
        return ""

    def _hint(self, carrier: PeerId, round_: int, reason: str) -> None:
        """Take a certificate that does not end my round as its carrier's word that it is ahead of me."""
        self._node.telemetry.emit("certificate.hint", peer=carrier, step="certificate", reason=reason, round=round_)
        self._peer_ahead(carrier)
        if carrier in self._members() and self._node.now() >= self._next_hint:
            self._next_hint = self._node.now() + HINT_SECONDS
            self.behind = True

    def _lose(self, peer: PeerId, reason: str) -> None:
        self._early.forget(peer)
        self._hints.pop(peer, None)
        if self._attempt is not None:
            self._attempt.act(self._attempt.machine.lose(peer, reason, trio.current_time()))
