"""The decision of one round at one peer: messages become statements of the agreement, and its actions messages. Pure.

Theory of operation. `agreement.machine` decides; it knows no signatures. Here each statement keeps its signature, so that
a quorum of them becomes a `wire.Proof` or a `wire.Certificate`, and each hash the value behind it. A vote lasts as long as
its round, over all attempts, and also while its peer trains. A lock that a Ready states counts once its proof is here.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.errors import ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.wire.schema import encode
from ..agreement.actions import AgreementAction, Dispatch, FetchProven, Note
from ..agreement.electorate import Electorate
from ..agreement.machine import VoterMachine
from ..agreement.statements import Decision, PrevoteQuorum, Propose, Shown, Statement, VoterReady, newest
from ..agreement.validity import certificate_fault
from ..allreduce.actions import Action, FetchValue, Forward, VoteSetup
from ..chain.certificate import open_value, signed_in, value_hash

_Q = TypeVar("_Q", wire.Proof, wire.Certificate)


class Vote:
    """One round's decision at one peer."""

    def __init__(self, setup: VoteSetup) -> None:
        self.me = setup.me
        self._setup = setup
        self._certificate: wire.Certificate | None = None
        self._audience: Collection[PeerId] = ()
        self._ready: wire.Ready | None = None
        self.ready: dict[PeerId, tuple[wire.Signed, wire.Ready]] = {}
        self._reached: tuple[int, frozenset[PeerId]] | None = None
        """Of an attempt; None once another Ready is here."""
        self._said: dict[tuple[type[Statement], PeerId], tuple[Statement, wire.Signed]] = {}
        """The newest statement of each kind by each voter that my machine counts: it may have sent a later Ready, too."""
        self._held: dict[bytes, bytes] = {}
        """The encoded values that I hold the bytes of, by hash."""
        self._proposed: dict[PeerId, tuple[wire.Slot, bytes]] = {}
        """The newest encoded value that each voter has proposed in its turn."""
        self._proofs: dict[PrevoteQuorum, wire.Proof] = {}
        self._roster: tuple[wire.Slot, bytes, Shown] | None = None
        """The newest that I took: its slot, its hash, and the Readys of voters in it."""
        self._waiting: dict[tuple[PeerId, type], tuple[wire.Signed, wire.VoteMessage]] = {}
        """The newest statement of each kind by each voter that is without the proof or the roster it states."""
        lock = self._known(setup.proof) if setup.proof is not None else None
        electorate, timing = setup.electorate, setup.timing
        self._machine = VoterMachine(setup.me, setup.slot, electorate, timing, lock, is_observer=setup.is_observer)

    @property
    def certificate(self) -> wire.Certificate | None:
        """The certificate of the decision; None before, and while the value that was decided on has not arrived."""
        if self._certificate is None and (decision := self._machine.decision) is not None:
            self._certificate = self._signed_quorum(wire.Certificate, wire.Precommit, decision)
        return self._certificate

    @property
    def is_decided(self) -> bool:
        """True if the voters have decided, be it on a value that has not arrived."""
        return self._certificate is not None or self._machine.decision is not None

    @property
    def slot(self) -> wire.Slot:
        """The slot that I am in."""
        return self._machine.slot

    @property
    def electorate(self) -> Electorate:
        """The voters of my round."""
        return self._machine.electorate

    @property
    def proposer(self) -> PeerId:
        """The proposer of my slot."""
        return self._machine.proposer

    @property
    def charter(self) -> Charter:
        """Who may take part, by the manifest and the certificate before."""
        return self._setup.charter

    @property
    def is_voter(self) -> bool:
        """True if I vote in my round."""
        return self.me in self.electorate.votes and not self._machine.is_observer

    @property
    def since(self) -> float | None:
        """When a quorum was in my attempt or a later one; None before."""
        return self._machine.since

    @property
    def behind(self) -> bool:
        """True if voters with more than a third of the votes are in later rounds."""
        return self._machine.is_behind

    @property
    def making(self) -> bool:
        """True if I, the proposer of my slot, am to make a new value: a quorum is Ready, and no Ready states a lock."""
        return self._machine.making is not None

    @property
    def told(self) -> tuple[PeerId, ...]:
        """The peers that my statements go to."""
        return tuple(sorted({*self._audience, *self.electorate.votes} - {"", self.me}))

    @property
    def is_proven(self) -> bool:
        """True once a quorum of Prevotes of my slot is here: one exchange is left."""
        proof = self._machine.newest_proof
        return proof is not None and proof.slot == self.slot

    @property
    def deadline(self) -> float:
        """When to call `tick`."""
        return self._machine.deadline

    @property
    def reached(self) -> frozenset[PeerId]:
        """The members whose newest Ready is in my slot, or in a later one."""
        attempt = self.slot.attempt
        if self._reached is None or self._reached[0] != attempt:
            found = frozenset(peer for peer, (_, ready) in self.ready.items() if ready.slot.attempt >= attempt)
            self._reached = attempt, found
        return self._reached[1]

    def statements_of(self, peer: PeerId) -> list[wire.Signed | wire.Proof]:
        """Return the newest Ready of a member, after the proof of the lock that it states."""
        signed, ready = self.ready.get(peer, (None, None))
        proof = self._proof(ready.lock[0]) if ready is not None and ready.lock else None
        return [*([self._proofs[proof]] if proof is not None else []), *([signed] if signed is not None else [])]

    def value(self, hash_: bytes) -> bytes | None:
        """Return the encoded value of a hash; None if it has not arrived."""
        proposed, proven = (
            (value for _, value in self._proposed.values()),
            (proof.value for proof in self._proofs.values()),
        )
        known = (*self._held.values(), *proposed, *proven)
        return next((value for value in known if value_hash(value) == hash_), None)

    @property
    def proposal(self) -> bytes | None:
        """The encoded value that the proposer of my slot has proposed."""
        slot, value = self._proposed.get(self.proposer, (None, None))
        return value if slot == self.slot else None

    def begin(self, ready: wire.Ready, audience: Collection[PeerId], now: float) -> list[Action]:
        """Say Ready in my slot, again if need be, and in those that I go to; `ready` holds the rest of that message.

        My statements go to the `audience` as it is then, and to all voters.
        """
        self._ready, self._audience = ready, audience
        mine, machine = self.ready.get(self.me), self._machine
        if mine is not None and mine[1].slot == self.slot:
            again: list[Action] = [Forward(self.told, mine[0])]
        else:  # One that could not be signed, as on a full disk.
            again = self._say(VoterReady(self.slot, machine.newest_proof)) if machine.has_said_ready else []
        return [*again, *self._act([*machine.recall({*audience, self.me}, now), *machine.resume(now)])]

    def pause(self) -> None:
        """Say no further Ready: I train."""
        self._machine.pause()

    def tell(self, audience: Collection[PeerId]) -> None:
        """Set whom I send statements to."""
        self._audience = audience

    def roster(self, signed: wire.Signed, roster: wire.Roster) -> Shown:
        """Take the roster of my slot, whose Readys were checked; return those of its voters."""
        shown = tuple(sorted((peer, None) for peer in roster.members if peer in self.electorate.votes))
        if self._roster is None or self._roster[0].attempt < roster.slot.attempt:
            self._roster = roster.slot, signed.hash, shown
        return shown

    def gathered(self, now: float) -> list[Action]:
        """As the proposer, wait for no more Readys, unless one states a lock whose proof is still to come."""
        waits = any(kind is wire.Ready for _, kind in self._waiting)
        return [] if waits else self._act(self._machine.gathered(now))

    def hold(self, value: bytes, now: float) -> list[Action]:
        """Report that I hold the bytes of an encoded value, and checked them."""
        self._held[value_hash(value)] = value  # Its Propose may have arrived before its roster.
        return [*self._retry(now), *self._act(self._machine.hold(value_hash(value), now))]

    def offer(self, value: bytes, shown: Shown, now: float) -> list[Action]:
        """Report the value that I was to make, under these Readys."""
        self._held[value_hash(value)] = value
        return self._act(self._machine.offer(self.slot, value_hash(value), shown, now))

    def abandon(self, reason: str, now: float) -> list[Action]:
        """Go to the next attempt."""
        return self._act(self._machine.abandon(reason, now))

    def tick(self, now: float) -> list[Action]:
        """React to the passing of time; call it at `deadline`."""
        return self._act(self._machine.tick(now))

    def meet(self, peer: PeerId, now: float) -> list[Action]:
        """Bring a member up to date that has just come."""
        audience, self._audience = self._audience, (peer,)
        actions = self._act(self._machine.meet(peer, now))
        self._audience = audience
        return actions

    def certified(self, certificate: wire.Certificate) -> None:
        """Take a certificate of this round that counts (`check_votes`)."""
        self._certificate = self.certificate or certificate

    def receive(self, signed: wire.Signed, message: wire.VoteMessage, now: float) -> list[Action]:
        """Receive a message of this run whose signature is checked. Raises `ProtocolViolation` if it breaks a rule."""
        slot, mine, is_ready = message.slot, self.slot, isinstance(message, wire.Ready)
        if self.certificate is not None or slot.round < mine.round:
            return []
        if slot.round > mine.round:
            return self._act(self._machine.receive(signed.sender, VoterReady(slot), now)) if is_ready else []
        if slot.decision != mine.decision:
            return [Note("agreement.refused", signed.sender, type(message).__name__, "a statement on another chain")]
        if isinstance(message, wire.Ready):
            self._keep_ready(signed, message)
        if signed.sender not in self.electorate.votes:
            return []
        return self._take(signed, message, now)

    def learn(self, proof: wire.Proof, now: float) -> list[Action]:
        """Take a proof whose signatures are checked; whoever has shown it, what waited for it counts now."""
        if self.certificate is not None or proof.slot.decision != self.slot.decision:
            return []
        stated = PrevoteQuorum(proof.slot, value_hash(proof.value), proof.voters)
        if (why := certificate_fault(stated, self.slot, self.electorate)) is not None:
            return [Note("agreement.refused", self.me, "Proof", why)]
        self._known(proof)
        return self._retry(now)

    def _take(self, signed: wire.Signed, message: wire.VoteMessage, now: float) -> list[Action]:
        statement = self._statement(signed, message)
        if statement is None:
            self._waiting[signed.sender, type(message)] = signed, message
            return []
        self._waiting.pop((signed.sender, type(message)), None)
        known = self._said.get((type(statement), signed.sender))
        if known is None or known[0].slot.attempt < statement.slot.attempt:
            self._said[type(statement), signed.sender] = statement, signed
        return self._act(self._machine.receive(signed.sender, statement, now))

    def _statement(self, signed: wire.Signed, message: wire.RoundMessage) -> Statement | None:
        """Return the statement of a message; None if what it refers to is not here yet."""
        match message:
            case wire.Ready(slot=slot, lock=lock):
                if not lock:
                    return VoterReady(slot)
                proof = self._proof(lock[0])
                return VoterReady(slot, proof) if proof is not None else None
            case wire.Propose(slot=slot, value=value):
                value_of = open_value(value)
                if (value_of.run, value_of.round, value_of.previous) != slot.decision:
                    raise ProtocolViolation("a proposal whose value is of another round")
                known = self._proposed.get(signed.sender)
                is_turn = signed.sender == self.electorate.proposer(slot.round, slot.attempt)
                if is_turn and (known is None or known[0].attempt < slot.attempt):
                    self._proposed[signed.sender] = slot, value
                if not message.roster:
                    shown = self._shown(message)
                    return Propose(slot, value_hash(value), shown) if shown is not None else None
                if self._roster is None or self._roster[:2] != (slot, message.roster):
                    return None
                return Propose(slot, value_hash(value), self._roster[2])
            case wire.Prevote() | wire.Precommit():
                return message
        raise ProtocolViolation(f"{type(message).__name__} is no statement of a voter")

    def _shown(self, message: wire.Propose) -> Shown | None:
        """Return the Readys that a proposal shows; None if a proof that one of them states is not here yet."""
        shown: list[tuple[PeerId, PrevoteQuorum | None]] = []
        for data in message.readys:
            signed = signed_in(data)
            ready = wire.opened(signed)
            if not isinstance(ready, wire.Ready) or ready.slot != message.slot or not self._setup.verify(signed):
                raise ProtocolViolation("a proposal that shows something else than Readys of its slot")
            proof = self._proof(ready.lock[0]) if ready.lock else None
            if ready.lock and proof is None:
                return None
            shown.append((signed.sender, proof))
        return tuple(sorted(shown, key=lambda item: item[0]))

    def _proof(self, lock: wire.Lock) -> PrevoteQuorum | None:
        return next((it for it in self._proofs if (it.slot.attempt, it.value) == (lock.attempt, lock.value)), None)

    def _known(self, proof: wire.Proof) -> PrevoteQuorum:
        """Keep a checked proof, with its value."""
        statement = PrevoteQuorum(proof.slot, value_hash(proof.value), proof.voters)
        if (earlier := self._proof(wire.Lock(proof.slot.attempt, statement.value))) is not None:
            return earlier
        self._proofs[statement] = proof
        self._drop_old_proofs()
        return statement

    def _drop_old_proofs(self) -> None:
        """Keep the proofs that Readys state, and as many of the latest as there are voters: each may state one yet."""
        stated = {self._proof(ready.lock[0]) for _, ready in self.ready.values() if ready.lock}
        latest = sorted(self._proofs, key=lambda it: it.slot.attempt)[-len(self._setup.electorate.votes) :]
        self._proofs = {it: proof for it, proof in self._proofs.items() if it in stated or it in latest}

    def _keep_ready(self, signed: wire.Signed, ready: wire.Ready) -> None:
        earlier = self.ready.get(signed.sender)
        if earlier is None or earlier[1].slot.attempt < ready.slot.attempt:
            self.ready[signed.sender], self._reached = (signed, ready), None
        elif earlier[1].slot == ready.slot and earlier[1].lock and self._proof(earlier[1].lock[0]) is None:
            self.ready[signed.sender] = signed, ready  # It stated a lock without proof here, and none to others.

    def _signed_readys(self, voters: Sequence[PeerId], slot: wire.Slot) -> list[wire.Signed]:
        known = (self._said.get((VoterReady, voter)) for voter in voters)
        return [entry[1] for entry in known if entry is not None and entry[0].slot == slot]

    def _retry(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for signed, message in [*self._waiting.values()]:
            try:
                actions += self._take(signed, message, now)
            except RemoteError as error:
                self._waiting.pop((signed.sender, type(message)), None)
                actions.append(Note("agreement.refused", signed.sender, type(message).__name__, str(error)))
        return actions

    # Actions of the agreement to those of the round.

    def _act(self, actions: list[AgreementAction]) -> list[Action]:
        done: list[Action] = []
        for action in actions:
            match action:
                case Dispatch(statement):
                    done += self._say(statement)
                case FetchProven(hash_, voters):
                    if (value := self.value(hash_)) is not None:
                        done.append(FetchValue(value, tuple(voter for voter in voters if voter != self.me)))
                case Note():
                    done.append(action)
        if self._machine.is_present and self.me not in self.electorate.votes:
            done += self._say_as_member()
        if (proof := self._machine.newest_proof) is not None:
            self._wire_proof(proof)  # Now, while all its Prevotes are the newest of their voters.
        return done

    def _say_as_member(self) -> list[Action]:
        """Say Ready in my slot though I have no vote in it: I contribute."""
        mine = self.ready.get(self.me)
        if self._ready is None or (mine is not None and mine[1].slot == self.slot):
            return []
        return self._send(replace(self._ready, slot=self.slot, lock=()))

    def _say(self, statement: Statement) -> list[Action]:
        match statement:
            case VoterReady(slot, proof):
                if self._ready is None:
                    return []
                if proof is None or (packed := self._wire_proof(proof)) is None:
                    return self._send(replace(self._ready, slot=slot, lock=()))
                lock = wire.Lock(proof.slot.attempt, proof.value)
                return [Forward(self.told, packed), *self._send(replace(self._ready, slot=slot, lock=(lock,)))]
            case Propose(slot, hash_, readys):
                value = self.value(hash_)
                assert value is not None
                if newest(proof for _, proof in readys) is None:
                    assert self._roster is not None
                    return self._send(wire.Propose(slot, value, self._roster[1]))
                packed_readys = tuple(map(encode, self._signed_readys([voter for voter, _ in readys], slot)))
                shown = [Forward(self.told, it) for _, proof in readys if proof and (it := self._wire_proof(proof))]
                return [*shown, *self._send(wire.Propose(slot, value, b"", packed_readys))]
            case wire.Prevote():
                return self._send(statement)
            case wire.Precommit():
                proof = self._machine.newest_proof
                lock_ = self._wire_proof(proof) if proof is not None else None
                return self._send(statement, lock_) if lock_ is not None else []
        raise AssertionError(statement)

    def _send(self, message: wire.VoteMessage, lock: wire.Proof | None = None) -> list[Action]:
        """Sign a statement of mine and send it; it counts for me at once."""
        signed = self._setup.sign(message, lock)
        if isinstance(signed, str):
            return [Note("agreement.unsigned", self.me, type(message).__name__, "see the event before")]
        match message:
            case wire.Ready():
                self._keep_ready(signed, message)
                self._said[VoterReady, self.me] = VoterReady(message.slot), signed
            case wire.Prevote() | wire.Precommit():
                self._said[type(message), self.me] = message, signed
            case wire.Propose(slot, value):
                self._proposed[self.me] = slot, value
        return [Forward(self.told, signed)]

    def _wire_proof(self, proof: PrevoteQuorum) -> wire.Proof | None:
        """Return a proof with its signatures; None if I could not sign my own part of it."""
        quorum = self._proofs.get(proof) or self._signed_quorum(wire.Proof, wire.Prevote, proof)
        if quorum is not None and proof not in self._proofs:
            self._proofs[proof] = quorum
            self._drop_old_proofs()
        return quorum

    def _signed_quorum(
        self, cls: type[_Q], kind: type[wire.Prevote] | type[wire.Precommit], of: PrevoteQuorum | Decision
    ) -> _Q | None:
        value, said = self.value(of.value), kind(of.slot, of.value)
        known = [self._said.get((kind, voter)) for voter in of.voters]
        signatures = [it[1].signature for it in known if it is not None and it[0] == said]
        if value is None or len(signatures) < len(of.voters):
            return None
        return cls(of.slot, value, of.voters, tuple(signatures))
