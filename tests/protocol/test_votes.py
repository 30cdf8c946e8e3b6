"""Votes of one round with real signatures and disks, under loss, repetition, restarts, pauses, and one liar.

Data is a model: the proposer makes a value, and some of the voters hold its bytes. Every voter keeps its record of slots
and its lock in files, and starts again from them.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from flockstep.collectives.accountability.signing import SigningGuard
from flockstep.collectives.agreement.actions import AgreementTiming
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.allreduce.actions import Action, FetchValue, Forward, VoteSetup
from flockstep.collectives.chain.certificate import check_certificate, check_proof, check_votes, value_hash
from flockstep.collectives.round.gather import heard, held, proposal
from flockstep.collectives.round.vote import Vote
from flockstep.collectives.vector.codec import EMPTY
from flockstep.dht.run.admission import OPEN
from flockstep.peer import wire
from flockstep.peer.base.errors import RemoteError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign, verify_signed
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounds import RUN, a_ready, a_setup

FIRST = wire.Slot(RUN, 1, bytes(32))
TIMING = AgreementTiming(control=1.0, attempt=4.0)
IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(7)]
Mail = wire.Signed | wire.Proof | wire.Certificate


@dataclass
class Voter:
    """A voter with its disk."""

    identity: Identity
    folder: Path
    stored: set[bytes] = field(default_factory=set)
    """The values whose bytes are on its disk."""
    certificate: wire.Certificate | None = None
    wanted: list[FetchValue] = field(default_factory=list)
    made: wire.Slot | None = None
    """The last slot that it made a value in."""
    is_up: bool = True

    def begin(self, electorate: Electorate, *, is_known: bool) -> None:
        """Begin the round, or begin it again from the disk."""
        guard = SigningGuard(self.identity, Telemetry(), self.folder / "spoken", is_known=is_known)
        self.vote = Vote(
            VoteSetup(
                me=self.identity.peer_id,
                slot=FIRST.at(guard.begin(FIRST)),
                electorate=electorate,
                charter=OPEN,
                timing=TIMING,
                sign=guard.sign,
                verify=verify_signed,
                proof=guard.lock_in(FIRST.decision),
                is_observer=guard.is_lost,
            )
        )
        self.wanted.clear()


class Schedule:
    """One schedule. Everything follows from the seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = chance = Random(seed)
        self.now = 0.0
        self.is_calm = False
        identities = IDENTITIES[: chance.choice((4, 4, 4, 5, 6, 7))]
        self.liar = identities[0] if chance.random() < 0.7 else None
        self.electorate = Electorate({identity.peer_id: 1 for identity in identities})
        self.voters = {it.peer_id: Voter(it, folder / it.peer_id) for it in identities if it is not self.liar}
        self.loss = chance.choice((0.0, 0.1, 0.4))
        self.mail: list[tuple[str, Mail]] = []
        self.signed: dict[tuple[str, wire.Slot, int], bytes] = {}
        self.heard: list[wire.Signed] = []
        self.values: list[bytes] = []
        self.certified: set[bytes] = set()
        for voter in self.voters.values():
            voter.folder.mkdir()
            voter.begin(self.electorate, is_known=False)
            self.resume(voter)

    def resume(self, voter: Voter) -> None:
        self.act(voter, voter.vote.begin(a_ready(), self.electorate.votes, self.now))

    def disturb(self, num_events: int) -> None:
        events = {self.deliver_any: 60, self.tick_any: 6, self.pause_any: 2, self.resume_any: 4, self.crash_any: 1}
        events |= {self.restart_any: 3, self.lie: 10 if self.liar else 0}
        for event in self.chance.choices(list(events), list(events.values()), k=num_events):
            event()

    def any_up(self) -> Voter:
        up = [voter for voter in self.voters.values() if voter.is_up]
        return self.chance.choice(up or [self.crashed()])

    def crashed(self) -> Voter:
        down = next(voter for voter in self.voters.values() if not voter.is_up)
        self.restart(down)
        return down

    def deliver_any(self) -> None:
        if self.mail:
            index = self.chance.randrange(len(self.mail))
            self.mail[index], self.mail[-1] = self.mail[-1], self.mail[index]
            self.deliver(*(self.mail[-1] if self.chance.random() < 0.1 else self.mail.pop()))

    def tick_any(self) -> None:
        voter = self.any_up()
        if voter.vote.deadline != float("inf"):
            self.now = max(self.now, voter.vote.deadline)
            self.act(voter, voter.vote.tick(self.now))

    def pause_any(self) -> None:
        self.any_up().vote.pause()

    def resume_any(self) -> None:
        self.resume(self.any_up())

    def crash_any(self) -> None:
        self.any_up().is_up = False

    def restart_any(self) -> None:
        for voter in self.voters.values():
            if not voter.is_up:
                self.restart(voter)
                return

    def restart(self, voter: Voter) -> None:
        voter.is_up = True
        voter.begin(self.electorate, is_known=True)
        if voter.certificate is not None:
            voter.vote.certified(voter.certificate)
        self.resume(voter)
        self.meet(voter)

    def meet(self, voter: Voter) -> None:
        for peer, other in self.voters.items():
            if other is not voter and other.is_up:
                self.act(voter, voter.vote.meet(peer, self.now))
                self.act(other, other.vote.meet(voter.identity.peer_id, self.now))

    def lie(self) -> None:
        """The liar signs anything that it can think of, also what it has contradicted, and sends it to some."""
        chance, liar = self.chance, self.liar
        assert liar is not None
        slot = chance.choice([voter.vote.slot for voter in self.voters.values()])
        slot = slot.at(max(0, slot.attempt + chance.choice((-1, 0, 0, 0, 1, 5))))
        value = chance.choice(self.values) if self.values else b""
        lock = wire.Lock(chance.randrange(slot.attempt + 1), value_hash(value))
        readys = [it for it in self.heard if (said := wire.opened(it)).slot == slot and isinstance(said, wire.Ready)]
        shown = {
            it.sender: encode(it) for it in chance.sample(readys, len(readys))[: chance.randrange(len(readys) + 1)]
        }
        roster = [it.hash for it in self.heard if isinstance(wire.opened(it), wire.Roster)]
        lies: list[wire.RoundMessage] = [
            a_ready(slot=slot),
            a_ready(slot=slot, lock=(lock,)),
            wire.Prevote(slot, value_hash(value)),
            wire.Precommit(slot, value_hash(value)),
            wire.Propose(
                slot, value or b"\x90", chance.choice([b"", *roster]), tuple(shown[it] for it in sorted(shown))
            ),
        ]
        word = sign(liar, chance.choice(lies))
        for peer in chance.sample(sorted(self.voters), chance.randrange(1, len(self.voters) + 1)):
            self.mail.append((peer, word))

    # What the driver does.

    def deliver(self, peer: str, mail: Mail) -> None:
        voter = self.voters[peer]
        if not voter.is_up:
            return
        if isinstance(mail, wire.Certificate):
            check_certificate(mail, verify_signed)
            check_votes(mail, self.electorate)
            voter.vote.certified(mail)
            self.act(voter, [])
        elif isinstance(mail, wire.Proof):
            check_proof(mail, verify_signed)
            self.act(voter, voter.vote.learn(mail, self.now))
        else:
            message = wire.opened(mail)
            if isinstance(message, wire.Ready) and voter.certificate is not None and mail.sender in self.voters:
                self.mail.append((mail.sender, voter.certificate))
            with contextlib.suppress(RemoteError):
                if isinstance(message, wire.Roster):
                    voter.vote.roster(mail, message)
                elif isinstance(message, wire.VoteMessage):
                    self.act(voter, voter.vote.receive(mail, message, self.now))

    def act(self, voter: Voter, actions: list[Action]) -> None:
        vote, me = voter.vote, voter.identity.peer_id
        for action in actions:
            match action:
                case Forward(to, mail):
                    self.send(me, to, mail)
                case FetchValue():
                    voter.wanted.append(action)
        if vote.making and voter.made != vote.slot:
            self.make(voter)
        for wanted in [*voter.wanted]:
            hash_ = value_hash(wanted.value)
            holders = [it for it in (voter, *(self.voters[p] for p in wanted.voters if p in self.voters)) if it.is_up]
            if any(hash_ in holder.stored for holder in holders):
                voter.wanted.remove(wanted)
                self.hold(voter, wanted.value)
        if vote.certificate is not None and voter.certificate is None:
            check_certificate(vote.certificate, verify_signed)
            check_votes(vote.certificate, self.electorate)
            voter.certificate = vote.certificate
            self.certified.add(vote.certificate.value)

    def make(self, voter: Voter) -> None:
        """The proposer makes a value; some of the others hold its bytes as well."""
        me, vote = voter.identity, voter.vote
        setup = a_setup(me.peer_id, self.electorate.votes, verify=verify_signed)
        words = {
            peer: (sign(other.identity, word), word)
            for peer, other in self.voters.items()
            if other.is_up and other.vote.slot == vote.slot and (word := heard(setup, other.vote)) is not None
        }
        proposed = proposal(setup, vote, words, held(vote))
        if isinstance(proposed, str):
            return
        roster, _ = proposed
        voter.made = vote.slot
        signed = sign(me, roster)
        shown = vote.roster(signed, roster)
        self.send(me.peer_id, self.electorate.votes, signed)
        count = len(roster.members)
        everybody, empty, mark = tuple(range(count)), (EMPTY,) * count, self.chance.randbytes(32)
        made = wire.Value(
            *FIRST.decision,
            bytes(32),
            roster.members,
            roster.bounds,
            roster.seats,
            bytes(32),
            everybody,
            empty,
            mark,
            100,
            credit=(100,) + (0,) * (len(everybody) - 1),
        )
        value = encode(made)
        self.values.append(value)
        for other in self.voters.values():
            if other is not voter and other.is_up and (self.is_calm or self.chance.random() < 0.8):
                self.hold(other, value)
        voter.stored.add(value_hash(value))
        self.act(voter, vote.offer(value, shown, self.now))

    def hold(self, voter: Voter, value: bytes) -> None:
        voter.stored.add(value_hash(value))
        self.act(voter, voter.vote.hold(value, self.now))

    def send(self, me: str, to: object, mail: Mail) -> None:
        if isinstance(mail, wire.Signed):
            self.heard.append(mail)
            said = wire.opened(mail)
            key = mail.sender, said.slot, mail.code
            if mail.sender == me:
                assert self.signed.setdefault(key, mail.payload) == mail.payload, f"a second {type(said).__name__}"
        for peer in to:  # type: ignore[attr-defined]
            if peer in self.voters and peer != me and self.chance.random() >= self.loss:
                self.mail.append((peer, mail))

    # Calm.

    def calm(self) -> None:
        """Bring everybody back and deliver everything: all must decide within an attempt for each voter and one."""
        self.loss, self.is_calm = 0.0, True
        for voter in self.voters.values():
            if not voter.is_up:
                self.restart(voter)
            self.resume(voter)
        for voter in self.voters.values():
            self.meet(voter)
        last = max(voter.vote.slot.attempt for voter in self.voters.values()) + len(self.electorate.voters) + 1
        while True:
            while self.mail:
                if self.liar and self.chance.random() < 0.01:
                    self.lie()
                self.deliver(*self.mail.pop(0))
            undecided = [voter for voter in self.voters.values() if voter.certificate is None]
            if not undecided:
                return
            due = min(undecided, key=lambda voter: voter.vote.deadline)
            assert due.vote.deadline != float("inf"), "nobody waits for anything"
            assert max(voter.vote.slot.attempt for voter in undecided) <= last, "too many attempts without a decision"
            self.now = max(self.now, due.vote.deadline)
            self.act(due, due.vote.tick(self.now))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 600))
def test_votes_decide_one_value_and_every_round_after_calm(seed: int, num_events: int) -> None:
    with TemporaryDirectory() as folder:
        schedule = Schedule(seed, Path(folder))
        schedule.disturb(num_events)
        schedule.calm()
        assert len(schedule.certified) == 1
