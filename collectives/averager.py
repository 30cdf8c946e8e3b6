"""Averages with whoever is there, round after round: what a peer keeps between attempts, and the door for messages.

Theory of operation. `average` runs one attempt and returns its outcome; it never raises because of the network. Between
attempts this is where round messages arrive: others may be ready before me (their words wait here, a few per peer), may
still ask how the last round ended (they get its certificate), or may be ahead of me (`behind` tells the trainer).
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from ..dht.run.admission import OPEN, Charter
from ..peer import wire
from ..peer.address import prefix_of
from ..peer.digest import keyed
from ..peer.errors import ProtocolViolation
from ..peer.node.bulk import Blob
from ..peer.node.node import Node
from ..peer.transport import PeerId
from .accountability.conduct import Conduct
from .accountability.evidence import Terms
from .attempt import Attempt, NextRoot, Work
from .chain.certificate import certificate_hash, check_certificate, drawn_for, genesis, heard, quorum, result_of, verify
from .chain.kept_outputs import Outputs
from .codec import Codec, Floats
from .robust.checks import commitment
from .robust.rule import Rule
from .round.actions import MEAN, Outcome, OutcomeKind, Setup
from .round.deadlines import Deadlines
from .round.machine import Round

EARLY_PER_PEER = 16
"""A round has nine messages of a peer; more that come before I am ready are dropped, oldest first."""
MAX_ATTEMPT = 1 << 20
"""Of `wire.Slot`; only liars bring it about, and this round then goes on without me."""
UNMEASURED = 1e6
"""Bytes/s assumed of a road on which nothing has been measured yet: a usual upload at home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the manifest pins about averaging."""

    run: str
    num_cells: int
    contribution: Codec
    output: Codec
    min_peers: int
    floor: float
    """Seconds that every deadline has at least."""
    ceiling: float
    """Seconds that no deadline exceeds."""
    rule: Rule = MEAN
    """How contributions become one."""
    charter: Charter = OPEN
    """Who may take part, and whose signature is demanded."""
    invite: bytes = b""
    """My invitation, where the charter demands one."""

    @property
    def terms(self) -> Terms:
        """What decides whether bytes are well-formed."""
        return Terms(self.run, self.num_cells, self.contribution, self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What I bring: x = Δ + e in whole cells, and what it took."""

    vector: Floats
    round: int
    base_root: bytes
    tokens: int
    steps: int
    loss: float
    grace: float
    """Seconds that slower members get to become ready once a quorum is."""
    seconds: float = math.inf
    """How long the inner phase took: what it costs everybody to wait is measured against it."""
    ramp: float = 1.0
    """What the weight of these tokens is multiplied by: less than 1 in a newcomer's first rounds."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """How it ended; and where it was certified, my encoded parts and all encoded outputs, both by part."""

    outcome: Outcome
    mine: tuple[Blob, ...]
    outputs: tuple[Blob, ...]


class Averager:
    """The rounds of one peer over its node."""

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
        self._early: dict[PeerId, deque[tuple[wire.Signed, wire.RoundMessage]]] = defaultdict(
            lambda: deque(maxlen=EARLY_PER_PEER)
        )
        self._deadlines = Deadlines(spec.floor, spec.ceiling)
        self._next_attempt = 0
        self._certificate: wire.Certificate | None = None
        self._kept = kept or Outputs(node)
        self._conduct = conduct or Conduct(node, spec.terms, spec.charter)
        self.round = 1
        self._gone_on: set[PeerId] = set()
        self.behind = False
        """Too many members for a quorum without them have shown that they are further than I am."""
        node.on_tell(wire.Signed, self._receive)
        node.on_tell(wire.Certificate, self._receive_certificate)
        node.on_lost(self._lose)

    def expect(self, round_: int, certificate: wire.Certificate | None) -> None:
        """My next round is `round_`, since I hold the state that `certificate` proves (None: the run's start)."""
        if round_ != self.round:
            self._next_attempt = 0
        self.round, self._certificate, self.behind = round_, certificate, False
        self._gone_on.clear()
        self._conduct.advance(round_, certificate)

    @property
    def certificate(self) -> wire.Certificate | None:
        """Of the last round that I took part in to its end."""
        return self._certificate

    def ready(self) -> frozenset[PeerId]:
        """Who has said that it is ready for my round."""
        return frozenset(
            peer
            for peer, messages in self._early.items()
            if any(isinstance(message, wire.Ready) and message.slot.round == self.round for _, message in messages)
        )

    @property
    def finishing(self) -> bool:
        """Whether I have acknowledged the cut of a round that goes on: what I owe to it, nobody else has yet."""
        return self._attempt is not None and self._attempt.machine.is_bound

    @property
    def busy(self) -> bool:
        """Whether an attempt goes on."""
        return self._attempt is not None

    def drawn(self) -> frozenset[PeerId]:
        """Who takes part in my next round, as far as I know."""
        return drawn_for(wire.Slot(self._spec.run, self.round, 0), self._members())

    def _members(self) -> frozenset[PeerId]:
        return self._active() | {self._node.peer_id}

    def greet(self, peer: PeerId) -> None:
        """A member has come."""
        self._conduct.bans.greet(peer)
        self._wait_for(peer)

    def _wait_for(self, peer: PeerId) -> None:
        if self._attempt is None or self._attempt.machine.awaits(peer):
            return
        members = self._active()
        if peer in members and len(members) <= wire.MAX_ROSTER:
            self._attempt.act(self._attempt.machine.greet(peer))

    @property
    def hindrance(self) -> str:
        """Why there is no use in trying a round now; empty where there is. Waiting for it would only stop the training."""
        spec, members = self._spec, self._members()
        if banned := self._conduct.bans.mine:
            return f"this peer is banned from the run: {banned}"
        if len(members) < spec.min_peers:
            return f"{len(members)} members are here, the run asks for {spec.min_peers}"
        if spec.charter.authority is not None and spec.charter.authority not in members:
            return "the run's owner, whose signature it demands, is away"
        return ""

    async def average(self, contribution: Contribution, next_root: NextRoot) -> Averaged:
        """Take part in one attempt of a round. `next_root` gives the state root that outputs lead to, without effect."""
        node, spec = self._node, self._spec
        free = self._conduct.promises.first_free(contribution.round)
        slot = wire.Slot(spec.run, contribution.round, max(self._next_attempt, free))
        if slot.attempt > MAX_ATTEMPT:
            return Averaged(Outcome(OutcomeKind.VOID, slot, "all attempts of this round have been used up"), (), ())
        if hindrance := self.hindrance:
            return Averaged(Outcome(OutcomeKind.VOID, slot, hindrance), (), ())
        members = self._members()
        drawn = drawn_for(slot, members, spec.charter.authority)
        if node.peer_id not in drawn:
            reason = f"not drawn for this round: {len(drawn)} of {len(members)} members are"
            return Averaged(Outcome(OutcomeKind.MISSED, slot, reason), (), ())
        machine = Round(self._setup(slot, drawn, contribution), trio.current_time())
        work = Work(contribution.vector)
        codecs = spec.contribution, spec.output
        attempt = self._attempt = Attempt(node, machine, codecs, work, next_root, self._conduct)
        early = [item for peer in sorted(self._early) for item in self._early[peer]]
        self._early.clear()
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

    def _done(self, outcome: Outcome, work: Work) -> Averaged:
        mine = self._node.peer_id
        self.expect(outcome.slot.round + 1, outcome.certificate)
        self._conduct.distrust(outcome.lied)
        assert outcome.certificate is not None
        # In a run of many more members than were drawn, the others learn of it from member records.
        members = self._active()
        here = members if len(members) <= wire.MAX_ROSTER else frozenset()
        outsiders = {*outcome.gave_up, *({*outcome.members, *here} - {*outcome.cut})} - {mine}
        self._node.tell(sorted(outsiders), outcome.certificate)
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
            verify=verify,
            charter=spec.charter,
            is_banned=self._conduct.bans.__contains__,
            standing=self._conduct.standing,
            may_own=self._conduct.may_own,
        )

    def _receive(self, carrier: PeerId, signed: wire.Signed) -> None:
        # Whoever carries it: what is signed may be passed on, and a wrong signature is its carrier's fault.
        message = heard(signed)
        if message.slot.run != self._spec.run:
            raise ProtocolViolation("a message of another run")
        if signed.sender in self._conduct.bans:
            return
        self._conduct.hear(signed, message)
        if message.slot.round > self.round:
            self._gone_on.add(signed.sender)
            members = self._members()
            self.behind = self.behind or len(self._gone_on & members) > len(members) - quorum(len(members))
            if self._attempt is not None:
                self._attempt.act(self._attempt.machine.outrun(signed.sender))
        if self._attempt is not None:
            if isinstance(message, wire.Ready) and message.slot.round == self.round:
                self._wait_for(signed.sender)  # It may have begun to train after I became ready.
            self._attempt.hear(signed, message)
        last = self._certificate
        if isinstance(message, (wire.Void, wire.Ready)) and last is not None and last.slot.round >= message.slot.round:
            self._node.tell(carrier, last)  # It may be certain that this round has ended, and how.
        elif message.slot.round >= self.round and not self._in_attempt(message):
            self._early[signed.sender].append((signed, message))

    def _in_attempt(self, message: wire.RoundMessage) -> bool:
        """Whether the running attempt has taken a message for good; those of a later attempt are for the next one."""
        if self._attempt is None:
            return False
        return message.slot.round == self.round and message.slot.attempt <= self._attempt.machine.slot.attempt

    def _receive_certificate(self, carrier: PeerId, certificate: wire.Certificate) -> None:
        roster, _, result = check_certificate(certificate, verify, charter=self._spec.charter)
        if certificate.slot.run != self._spec.run:
            raise ProtocolViolation("a certificate of another run")
        self._conduct.examine(certificate)
        members = self.drawn()
        if len(members - set(roster.members)) >= quorum(len(members)):
            # Those who were not in it can make a round of their own. Where more members are on it nevertheless,
            # `standing` finds that out.
            reason = f"{len(roster.members)} members made it, and of {len(members)} enough for a quorum were left out"
            self._node.telemetry.emit(
                "certificate.unheeded", peer=carrier, step="certificate", reason=reason, round=certificate.slot.round
            )
        elif self._attempt is not None:
            self._attempt.act(self._attempt.machine.certified(certificate, result))
        elif certificate.slot.round >= self.round:
            self.behind = True

    def _lose(self, peer: PeerId, reason: str) -> None:
        self._early.pop(peer, None)
        if self._attempt is not None:
            self._attempt.act(self._attempt.machine.lose(peer, reason, trio.current_time()))
