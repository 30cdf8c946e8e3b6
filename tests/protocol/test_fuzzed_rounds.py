"""Rounds with up to a third of Byzantine members, which send arbitrary messages.

Byzantine members have a machine of their own, whose messages they may change or withhold for some. Or they have two
machines and run one toward some members and the other toward the rest, which receive each other's messages late (Bano et
al. 2020, "Twins: BFT systems made robust"): so there may be two of everything, each consistent in itself. They also send
any well-formed message of a round that they can sign, at any time, to any member: its slot, hashes, indices and names are
drawn from those of the round so far, and from junk. They replay what others have signed, forge proofs and certificates, serve
bytes to some only, and join and leave. An attempt that fails is followed by the next one, until all honest members have the
same value. For longer: `pytest --hypothesis-profile=long tests/protocol/test_fuzzed_rounds.py`.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
from flockstep.collectives.accountability.evidence import Conviction, Witness, claim_of, judge_claim
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.agreement.actions import AgreementTiming
from flockstep.collectives.allreduce.actions import (
    Action,
    AskFor,
    CheckOutputs,
    CompareSketch,
    FetchOutput,
    FetchPart,
    FetchValue,
    Finalize,
    Forward,
    HashParts,
    Judge,
    Outcome,
    OutcomeKind,
    Reduce,
    Send,
    Setup,
    SketchParts,
    Timing,
    VoteSetup,
)
from flockstep.collectives.allreduce.exchange import RosterRound
from flockstep.collectives.chain.certificate import (
    check_certificate,
    check_proof,
    check_votes,
    genesis,
    open_value,
    value_hash,
)
from flockstep.collectives.chain.voters import electorate_after
from flockstep.collectives.robust.checks import commitment, num_bytes
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.round.machine import Round
from flockstep.collectives.round.vote import Vote
from flockstep.collectives.spec import Spec, Terms
from flockstep.collectives.vector.codec import EMPTY, codec_named
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.base.digest import keyed
from flockstep.peer.base.errors import ProtocolViolation, RemoteError
from flockstep.peer.wire.schema import encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.deeds import Forger
from support.rounds import StatedConduct

RUN = "a" * 52
SLOT = wire.Slot(RUN, 1, genesis(RUN))
CELLS = 20
BASE = bytes(32)
TIMING = Timing(gather=5.0, control=2.0, transfer=5.0, patience=50.0)
PEERS = [f"12D3KooW{name * 44}" for name in "ABCDEFGHJK"]
ID = len(PEERS[0])
STRANGER = f"12D3KooW{'Z' * 44}"
INT8 = codec_named("int8")
TERMS = Terms(RUN, CELLS, INT8, INT8)
EXAMPLES: int = settings.default.max_examples  # type: ignore[union-attr]  # A profile is loaded.
"""The same ones every time, unless one asks for thousands."""
MOST_DELIVERIES = 100_000
"""An attempt of ten has some thousand; what needs more than this answers itself for ever."""
MOST_TICKS = 300
"""Deadlines of one peer until it has the value: some ten an attempt, and as many attempts as it takes to meet an honest
proposer after the last lie."""
Mail: TypeAlias = wire.Signed | wire.Proof | wire.Certificate

Lie: TypeAlias = tuple[int, int, int, int, list[int]]
"""After how many words it is told, by which liar, of which kind, to whom (as a bit mask), and what its fields are."""
Spoilt: TypeAlias = tuple[int, list[int]]
"""To whom (as a bit mask), and which fields become what."""


def seal(sender: str, code: int, payload: bytes) -> bytes:
    """A signature that is quick, and that nobody here makes for somebody else."""
    return keyed("seal", sender.encode(), bytes((code,)), payload) * 2


def signed(sender: str, message: wire.RoundMessage) -> wire.Signed:
    code, payload = wire.code_of(message), encode(message)
    return wire.Signed(sender, code, payload, seal(sender, code, payload))


def verify(word: wire.Signed) -> bool:
    return word.signature == seal(word.sender, word.code, word.payload)


def a_setup(peer: str, peers: list[str], number: int, is_banned: Callable[[str], bool]) -> Setup:
    """Return the setup of a peer's attempt; each has a nonce of its own."""
    nonce = nonce_of(peer, number)
    spec = Spec(
        run=SLOT.run,
        num_cells=CELLS,
        contribution=INT8,
        output=INT8,
        min_peers=1,
        floor=2.0,
        ceiling=60.0,
        rule=rule_named("gramguard"),
    )
    return Setup(
        ready=wire.Ready(SLOT, BASE, 10, 1e6, 1e6, commitment(nonce)),
        nonce=nonce,
        active=frozenset(peers),
        spec=spec,
        conduct=StatedConduct(charter=charter_of(peers), is_banned=is_banned),
        before=None,
        steps=5,
        loss=1.0,
        phase_seconds=60.0,
        timing=TIMING,
        verify=verify,
    )


def charter_of(peers: list[str]) -> Charter:
    return Charter(founders=frozenset(peers))


def nonce_of(peer: str, number: int) -> bytes:
    return keyed("nonce", peer.encode(), bytes([number % 256]))


def sketch_of(peer: str, seed: bytes, size: int) -> bytes:
    """What an honest peer says of its parts, of each the same: real numbers, since holders compare them."""
    piece = np.frombuffer(keyed("sketch", peer.encode(), seed), np.int8).astype("<f4").tobytes()
    return (piece * (size // len(piece) + 1))[:size]


@dataclass
class World:
    """The machines of all members, the mail between them, and what the liars know: everything."""

    peers: list[str]
    liars: list[str]
    seed: int
    withheld: frozenset[tuple[int, int]] = frozenset()
    """By the number of a kind of message and of its addressee: what liars do not say."""
    spoilt: Mapping[int, Spoilt] = field(default_factory=dict)
    """By the number of a kind of message: what liars say in another way, and to whom."""
    split: tuple[int, int] | None = None
    """Who sees which face of the liars (as a bit mask), and after how many deadlines both sides hear each other."""
    machines: dict[str, Round] = field(default_factory=dict)
    """By peer id; a liar's second one by its peer id and an accent."""
    votes: dict[str, Vote] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    """The attempts that each has begun."""
    said: dict[tuple[str, wire.Slot, int, object], bytes] = field(default_factory=dict)
    """What each machine has signed, by its slot, code and subject."""
    late: list[tuple[str, Mail, str]] = field(default_factory=list)
    """Mail from one side to the other."""
    mail: list[tuple[str, Mail, str]] = field(default_factory=list)
    witnesses: dict[str, Witness] = field(default_factory=lambda: defaultdict(Witness))
    words: list[tuple[wire.Signed, wire.RoundMessage]] = field(default_factory=list)
    """Everything that was ever signed."""
    proofs: list[wire.Proof] = field(default_factory=list)
    over: list[Round] = field(default_factory=list)
    """The machines whose end is announced."""
    certificates: list[wire.Certificate] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    """Every value that was ever proposed."""
    hashes: list[bytes] = field(default_factory=lambda: [bytes(32), b"j" * 32])
    held: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)
    banned: set[str] = field(default_factory=set)
    made: set[bytes] = field(default_factory=set)
    """The outputs that are the sums they should be."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self.luck = random.Random(self.seed)
        self.honest = [peer for peer in self.peers if peer not in self.liars]
        self.electorate = electorate_after(None, charter_of(self.peers))
        faces = [*self.peers, *([f"{liar}'" for liar in self.liars] if self.split is not None else [])]
        for face in faces:
            setup = VoteSetup(
                me=face[:ID],
                slot=SLOT,
                electorate=self.electorate,
                charter=charter_of(self.peers),
                timing=AgreementTiming(control=2.0, attempt=100.0),
                sign=lambda message, lock, face=face: self.guarded(face, message),  # type: ignore[misc]
                verify=verify,
            )
            self.votes[face] = Vote(setup)
            self.begin(face)
        for face in faces:
            self.do(face, self.machines[face].start(self.now))

    def begin(self, face: str) -> None:
        """Make the machine of the next attempt."""
        self.numbers[face] += 1
        setup = a_setup(face[:ID], self.peers, self.numbers[face], self.banned.__contains__)
        rate = 2e6 if face not in self.peers else 1e6
        setup = replace(setup, ready=replace(setup.ready, upload=rate), active=setup.active - self.banned)
        self.machines[face] = Round(setup, self.votes[face], self.now)

    def go_on(self) -> None:
        """Begin the next attempt of all whose last one was without a decision; who is behind needs a certificate first."""
        for face, machine in [*self.machines.items()]:
            ended = machine.outcome
            is_behind = machine.vote.behind and machine.vote.certificate is None
            if ended is not None and ended.certificate is None and face[:ID] not in self.banned and not is_behind:
                self.begin(face)
                self.do(face, self.machines[face].start(self.now))

    def guarded(self, face: str, message: wire.RoundMessage) -> wire.Signed | str:
        """Sign as the guard does: never a second and different statement on one subject in a slot."""
        rules = STATEMENTS[type(message)]
        subject = face, message.slot, wire.code_of(message), rules.subject(message)
        if rules.convicts and self.said.setdefault(subject, encode(message)) != encode(message):
            return "a second one"
        if isinstance(message, wire.Propose):
            self.values.append(message.value)
            self.hashes.append(value_hash(message.value))
        return self.sign(face, message)

    def side(self, face: str) -> int:
        """Which side somebody is on."""
        if self.split is None or face[:ID] in self.liars:
            return int(face not in self.peers)
        return self.split[0] >> self.peers.index(face) & 1

    def post(self, sender: str, target: str, item: Mail) -> None:
        """Bring what one machine has to say on its way to the other one, or to that one's face on this side."""
        if target not in self.peers:
            return
        if self.split is not None and target in self.liars:
            target += "'" * self.side(sender)
        if self.side(sender) == self.side(target):
            self.mail.append((target, item, sender))
        elif sender in self.honest:
            self.late.append((target, item, sender))

    def say(self, sender: str, to: tuple[str, ...], message: wire.RoundMessage) -> None:
        word = self.sign(sender, message)
        for target in to:
            if sender in self.honest or (word.code, self.peers.index(target)) not in self.withheld:
                self.post(sender, target, word)

    def sign(self, sender: str, message: wire.RoundMessage) -> wire.Signed:
        word = signed(sender[:ID], message)
        if word.hash not in self.hashes[-200:]:
            self.words.append((word, message))
            self.hashes.append(word.hash)
        return word

    def utter(self, sender: str, to: tuple[str, ...], message: wire.RoundMessage) -> None:
        """A word of a machine's: a liar may change it for some."""
        to, code = tuple(target for target in to if target in self.peers), wire.code_of(message)
        if sender[:ID] in self.liars and code in self.spoilt:
            mask, numbers = self.spoilt[code]
            some = tuple(target for target in to if mask >> self.peers.index(target) & 1)
            self.say(sender, some, spoil(self, sender[:ID], message, Draws(numbers)))
            to = tuple(target for target in to if target not in some)
        self.say(sender, to, message)

    def do(self, peer: str, actions: list[Action]) -> None:
        machine = self.machines[peer]
        while actions or machine.deadline == -math.inf:
            if not actions:
                actions = machine.tick(self.now)
                continue
            action, *actions = actions
            match action:
                case Send(to, message):
                    assert set(to) <= {*self.peers, STRANGER}  # Anybody may be Ready.
                    word = self.guarded(peer, message)
                    if isinstance(word, str):
                        self.do(peer, machine.give_up(word, self.now))
                        return
                    self.utter(peer, tuple(target for target in to if target != peer[:ID]), message)
                    self.hear(peer, word, peer[:ID])  # As the driver does: before anything else.
                case Forward(to, wire.Signed() as word) if word.sender == peer[:ID]:
                    self.utter(peer, tuple(target for target in to if target != peer[:ID]), wire.opened(word))
                case Forward(to, wire.Signed() as word):
                    for target in to:
                        if target != peer[:ID]:
                            self.post(peer, target, word)
                case Forward(to, wire.Proof() as proof):
                    self.proofs.append(proof)
                    for target in to:
                        if target != peer[:ID]:
                            self.post(peer, target, proof)
                case AskFor(to, about):
                    for other in to:
                        if self.serves(other, peer):
                            mine = self.machines[other].statements_of(about), self.votes[other].statements_of(about)
                            for item in itertools.chain(*mine):
                                self.post(other, peer[:ID], item)
                case FetchValue(value):
                    self.fetch(peer, value)
                case HashParts(_, readers):
                    name = peer.encode() + bytes([self.numbers[peer] % 256])
                    parts = tuple(keyed("part", name, bytes([part])) for part in range(len(readers)))
                    self.hashes += parts
                    self.done(peer, lambda exchange, parts=parts: exchange.collect_phase.parts_hashed(parts))  # type: ignore[misc]
                case FetchPart(part, source, hash_, contributor=index):
                    if self.serves(source, peer):
                        self.held[peer, part, index] = hash_
                        self.done(peer, fetched(part, index))
                    elif self.luck.random() < 0.7:
                        self.done(peer, not_fetched(part, index))
                case FetchOutput(part, source, hash_):
                    if self.serves(source, peer):
                        self.done(peer, output_fetched(part, hash_))
                    elif self.luck.random() < 0.7:
                        self.done(peer, output_not_fetched(part, source, hash_))
                case SketchParts(seed, columns):
                    size = num_bytes(len(machine.exchange.members), columns)
                    self.done(peer, sketched(seed, sketch_of(peer[:ID], seed, size)))
                case CompareSketch():
                    self.compare(peer, action)
                case Judge(_, _, masses, sketches):
                    skew = 1 + keyed("skew", *sketches)[0]
                    skewed = [mass * skew if index else mass for index, mass in enumerate(masses)]
                    row = tuple(mass / sum(skewed) for mass in skewed)
                    self.done(peer, judged((row,) * len(machine.exchange.members)))
                case CheckOutputs():
                    self.done(peer, checked(action, [part for part, key in action.outputs.items() if key not in self.made]))
                case Reduce(cut, part, contributors, weights):
                    assert sum(weights) < 1 + 1e-9
                    summands = [index for index, weight in zip(contributors, weights, strict=True) if weight]
                    sums = [self.held[peer, part, index] for index in summands]
                    output = keyed("output", bytes([part, *summands]), repr(weights).encode(), *sums)
                    self.hashes.append(output)
                    self.made.add(output)
                    self.done(peer, reduced(cut, part, output))
                case Finalize(_, outputs):
                    self.done(peer, finalized(outputs))
        if machine.outcome is not None and machine not in self.over:
            self.over.append(machine)
            self.announce(peer)

    def done(self, peer: str, report: Callable[[RosterRound], Any]) -> None:
        """Report finished work."""
        self.do(peer, self.machines[peer].done(report))

    def fetch(self, peer: str, packed: bytes) -> None:
        """Fetch a value: its outputs exist where they are sums that somebody has made."""
        value = open_value(packed)
        if set(value.outputs) <= self.made | {EMPTY} and value.next_root == keyed("root", *value.outputs):
            self.do(peer, self.machines[peer].value_held(packed, self.now))

    def compare(self, peer: str, action: CompareSketch) -> None:
        """What the driver does: a false sketch convicts its author, of whom everybody hears."""
        machine = self.machines[peer]
        statements = machine.exchange.bound_to(action)
        if not statements:
            return
        said = wire.opened(statements[0])
        assert isinstance(said, wire.Sketch)
        if said.tables == sketch_of(machine.exchange.members[action.contributor], action.seed, len(said.tables)):
            self.done(peer, lambda exchange: exchange.compared(action))
        elif peer in self.honest:
            self.ban(statements[0].sender)

    def ban(self, liar: str) -> None:
        """What follows from an accusation: everybody bans who was convicted."""
        if liar in self.banned:
            return
        self.banned.add(liar)
        for face in self.machines:
            self.do(face, self.machines[face].lose(liar, "banned", self.now))

    def serves(self, source: str, reader: str) -> bool:
        """Honest ones give their bytes to everybody, liars to whom they like."""
        return source in self.honest or keyed("serves", source.encode(), reader.encode(), str(self.seed).encode())[0] < 170

    def announce(self, peer: str) -> None:
        """Send the certificate to everybody, as to whoever is Ready for a round that is over."""
        outcome = self.machines[peer].outcome
        assert outcome is not None
        if outcome.certificate is not None and peer in self.honest:
            self.certificates.append(outcome.certificate)
            for other in self.peers:
                self.post(peer, other, outcome.certificate)

    def hear(self, target: str, word: wire.Signed, carrier: str) -> None:
        """A word arrives, its signature checked; a rule that it breaks is its sender's fault."""
        machine, message = self.machines[target], wire.opened(word)
        ended = machine.outcome
        if carrier != word.sender and isinstance(message, wire.Ready):
            machine.show(carrier, word, message)
        if word.sender in self.banned:
            return
        if target in self.honest and self.witnesses[target].see(word, message, machine.slot) is not None:
            self.ban(word.sender)
            return
        if isinstance(message, wire.Ready) and ended is not None and ended.certificate is not None:
            if target in self.honest and word.sender != target:
                self.post(target, word.sender, ended.certificate)
            return
        try:
            actions = machine.receive(word, message, self.now)
        except ProtocolViolation:
            self.charged.add(word.sender)
            return
        self.do(target, actions)

    def deliver(self) -> None:
        index = self.luck.randrange(len(self.mail))
        self.mail[index], self.mail[-1] = self.mail[-1], self.mail[index]
        target, item, carrier = self.mail.pop()
        machine, charter = self.machines[target], charter_of(self.peers)
        try:
            if isinstance(item, wire.Signed):
                self.hear(target, item, carrier[:ID])
            elif item.slot.decision != SLOT.decision:
                return
            elif isinstance(item, wire.Certificate):
                check_certificate(item, verify, charter=charter)
                check_votes(item, self.electorate)
                machine.vote.certified(item)
                machine.certified(item)
                self.do(target, [])
            else:
                check_proof(item, verify, charter=charter)
                check_votes(wire.Certificate(item.slot, item.value, item.voters, item.signatures), self.electorate)
                self.do(target, machine.learn(item, self.now) if machine.outcome is None else [])
        except RemoteError:
            return  # Its carrier is charged: only liars have sent such a thing, as `send` is the only place that makes it.

    def settle(self, lies: list[Lie]) -> None:
        """Deliver in a seeded order, tell the lies in between, let time pass where all is quiet, until all have ended."""
        waiting = sorted(lies, key=lambda lie: -lie[0])
        delivered, ticks = 0, Counter[str]()
        while True:
            while self.mail:
                self.deliver()
                self.go_on()
                delivered += 1
                assert delivered < MOST_DELIVERIES
                while waiting and waiting[-1][0] <= delivered:
                    self.send(waiting.pop())
            self.go_on()
            if self.mail:
                continue
            living = [peer for peer in self.honest if self.machines[peer].outcome is None]
            if waiting and (self.luck.random() < 0.5 or not living):
                self.send(waiting.pop())
                continue
            if self.split is None or not living or max(ticks.values(), default=0) >= self.split[1]:
                self.mail, self.late = self.late, []
            if self.mail:
                continue
            if not living:
                return
            self.now = max(self.now, min(self.machines[peer].deadline for peer in living))
            for face, machine in self.machines.items():
                if machine.outcome is None:
                    self.do(face, machine.tick(self.now))
            ticks.update(living)
            assert max(ticks.values()) < MOST_TICKS

    def send(self, lie: Lie) -> None:
        _, who, kind, mask, numbers = lie
        liar = self.liars[who % len(self.liars)]
        to = tuple(peer for number, peer in enumerate(self.peers) if mask >> number & 1)
        act = ACTS[kind % len(ACTS)]
        message = act(self, liar, to, Draws(numbers))
        if isinstance(message, wire.Proof | wire.Certificate):
            self.mail += [(target, message, liar) for target in to]
        elif message is not None and not isinstance(message, wire.Signed):
            word = self.sign(liar, message)
            self.mail += [(target, word, liar) for target in to]


def fetched(part: int, index: int) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.collect_phase.fetched(part, index)


def not_fetched(part: int, index: int) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.collect_phase.not_fetched(part, index, "refused")


def output_fetched(part: int, key: bytes) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.output_fetched(part, key)


def output_not_fetched(part: int, source: str, key: bytes) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.output_not_fetched(part, source, key, "refused")


def sketched(seed: bytes, tables: bytes) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.sketched(seed, tables)


def judged(rows: tuple[tuple[float, ...], ...]) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.judged(rows, {}, {})


def checked(action: CheckOutputs, false: list[int]) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.checked(action, false, ())


def reduced(cut: bytes, part: int, output: bytes) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.reduced(cut, part, output)


def finalized(outputs: tuple[bytes, ...]) -> Callable[[RosterRound], Any]:
    return lambda exchange: exchange.finalized(outputs, keyed("root", *outputs))


class Draws:
    """Picks from what there is, by numbers that were drawn."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self._next: Iterator[int] = itertools.cycle(numbers or [0])

    def of(self, pool: list[Any]) -> Any:
        return pool[next(self._next) % len(pool)]


def spoil(world: World, liar: str, message: wire.RoundMessage, draws: Draws) -> wire.RoundMessage:
    """Return the same message with one or two other fields."""
    forger = Forger(random.Random(repr(draws.numbers)), world.peers, partial(signed, liar))
    for _, said in world.words[-40:]:
        forger.hear(said)
    forger.heard += world.hashes[-40:]
    for _ in range(draws.of([1, 2])):
        message = forger.changed(message) or message
    return message


def say(kind: type, world: World, liar: str, to: tuple[str, ...], draws: Draws) -> wire.RoundMessage | None:
    """Return what somebody has said of a kind, or as it with other fields; None before anybody has."""
    said = [message for _, message in world.words if type(message) is kind]
    if not said:
        return None
    message = draws.of(said[-6:] * 2 + said[-20:])
    return spoil(world, liar, message, draws) if draws.of([False, True, True, True]) else message


def a_slot(world: World, draws: Draws) -> wire.Slot:
    """Return a slot that somebody honest is in, as a rule; else another attempt, chain, round or run."""
    here = [world.votes[peer].slot for peer in world.honest]
    ahead = [slot.at(slot.attempt + 1) for slot in here]
    far = [SLOT.at(wire.MAX_ATTEMPT), SLOT]
    other = [replace(SLOT, previous=bytes(32)), replace(SLOT, round=2), replace(SLOT, round=0), replace(SLOT, run="b" * 52)]
    return draws.of(here * 4 + ahead + far + other)  # type: ignore[no-any-return]


def a_hash(world: World, draws: Draws) -> bytes:
    return draws.of([*world.hashes[-40:], *world.hashes[:20]])  # type: ignore[no-any-return]


def a_value(world: World, draws: Draws) -> bytes:
    """Return a value that was proposed, or one of the liar's making."""
    evil = []
    for value in world.values[-2:]:
        opened = open_value(value)
        outputs = tuple(a_hash(world, draws) for _ in opened.outputs)
        evil.append(encode(replace(opened, outputs=outputs, next_root=keyed("root", *outputs))))
        evil.append(encode(replace(opened, tokens=wire.MAX_COUNT, next_root=a_hash(world, draws))))
    return draws.of([*world.values[-3:] * 2, *evil, b"", bytes(wire.MAX_VALUE_BYTES)])  # type: ignore[no-any-return]


def value_of_hash(world: World, draws: Draws) -> bytes:
    return draws.of([value_hash(a_value(world, draws)), a_hash(world, draws)])  # type: ignore[no-any-return]


def a_quorum(world: World, liar: str, draws: Draws, kind: type) -> tuple[Any, ...]:
    """Return the fields of a proof or certificate: of real statements, and of signatures that the liar makes up."""
    slot, value = a_slot(world, draws), a_value(world, draws)
    said = kind(slot, value_hash(value))
    real = {word.sender: word.signature for word, message in world.words if message == said}
    mine = {one: signed(one, said).signature for one in world.liars}
    junk = {peer: bytes(64) for peer in world.peers}
    found = draws.of([{**real, **mine}, mine, {**junk, **mine, **real}]) or mine
    voters = tuple(sorted(found))
    return slot, value, voters, tuple(found[voter] for voter in voters)


def proof(world: World, liar: str, to: tuple[str, ...], draws: Draws) -> Any:
    shown = wire.Proof(*a_quorum(world, liar, draws, wire.Prevote))
    return draws.of([shown, shown, *world.proofs[-3:]])


def certificate(world: World, liar: str, to: tuple[str, ...], draws: Draws) -> Any:
    made = wire.Certificate(*a_quorum(world, liar, draws, wire.Precommit))
    known = [wire.Certificate(it.slot, it.value, it.voters, it.signatures) for it in world.proofs[-1:]]
    return draws.of([made, made, *known])


def repeat(world: World, liar: str, to: tuple[str, ...], draws: Draws) -> None:
    """Send on what somebody has signed, long ago or just now."""
    word, _ = draws.of([*world.words[-30:], *world.words[:10]])
    world.mail += [(target, word, liar) for target in to]


def stranger(world: World, liar: str, to: tuple[str, ...], draws: Draws) -> None:
    """Somebody without a place in the round speaks."""
    message = say(draws.of([*wire.ROUND_MESSAGES]), world, liar, to, draws)
    world.mail += [(target, signed(STRANGER, message), STRANGER) for target in to if message is not None]


def vanish(world: World, liar: str, to: tuple[str, ...], draws: Draws) -> None:
    """The connections to some break."""
    for peer in to:
        if peer in world.honest:
            world.do(peer, world.machines[peer].lose(liar, "reset", world.now))


def come(world: World, liar: str, to: tuple[str, ...], draws: Draws) -> None:
    """Some meet the liar, or a stranger, as a member that has just come, or as one that has gone on."""
    for peer in to:
        machine = world.machines[peer]
        if peer in world.honest:
            if draws.of([True, True, False]):
                world.do(peer, machine.add_member(liar, world.now))
            else:
                machine.peer_ahead(liar)


ACTS: list[Callable[[World, str, tuple[str, ...], Draws], Mail | wire.RoundMessage | None]] = [
    *(partial(say, kind) for kind in wire.ROUND_MESSAGES),
    *(proof, certificate, repeat, stranger, vanish, come),
]


def check(world: World) -> None:
    """Invariants 1 to 4 and 6 of the honest members."""
    assert world.charged <= {*world.liars, STRANGER}
    assert world.banned <= {*world.liars, STRANGER}
    ended = [outcome for peer in world.honest if (outcome := world.machines[peer].outcome) is not None]
    assert [outcome.kind for outcome in ended] == [OutcomeKind.DONE] * len(world.honest)
    assert len({_what(outcome) for outcome in ended}) == 1
    for outcome in ended:
        assert outcome.certificate is not None
        assert outcome.certificate.slot.attempt < wire.MAX_ATTEMPT // 2  # Liars cannot use the attempts of a round up.
        value = check_certificate(outcome.certificate, verify)
        check_votes(outcome.certificate, world.electorate)
        assert (value, value.members) == (outcome.value, outcome.members)
        assert set(value.outputs) <= world.made | {EMPTY}
    witness, statements = Witness(), dict[tuple[str, int], list[wire.Signed]]()
    for word, message in world.words:
        if word.sender in world.honest and STATEMENTS[type(message)].convicts:
            assert witness.see(word, message, SLOT) is None, (word.sender, message)
            statements.setdefault((word.sender, word.code), []).append(word)
    for (peer, _), words in statements.items():
        for first, second in itertools.combinations(words[-4:], 2):
            judgement = judge_claim(world.liars[0], claim_of(RUN, (first, second)), TERMS, verify)
            assert isinstance(judgement, Conviction)
            assert judgement.guilty != peer, judgement.reason
    for machine in world.machines.values():
        journals = machine._facts._journal.values()
        kept = Counter(word[0].sender for journal in journals for word in journal if word is not None)
        assert max(kept.values(), default=0) <= sum(kind.most for kind in STATEMENTS.values())


def _what(outcome: Outcome) -> tuple[object, ...]:
    return outcome.members, outcome.cut, outcome.value


splits = st.none() | st.tuples(st.integers(1, 1023), st.integers(0, 8))
masks = st.one_of(st.integers(1, 1023), st.just(1023))
numbers = st.lists(st.integers(0, 251), max_size=8)
lies = st.lists(
    st.tuples(st.integers(0, 1500), st.integers(0, 2), st.integers(0, len(ACTS) - 1), masks, numbers), max_size=40
)
ROUND_CODES = [code for code, cls in wire.CODES.items() if cls in wire.ROUND_MESSAGES]
spoilt = st.dictionaries(st.sampled_from(ROUND_CODES), st.tuples(masks, numbers), max_size=3)
withheld = st.frozensets(st.tuples(st.sampled_from(ROUND_CODES), st.integers(0, 9)), max_size=25)


@pytest.mark.parametrize("count", [4, 7, pytest.param(10, marks=pytest.mark.explore)])
@settings(max_examples=EXAMPLES // 3, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), first=st.integers(0, 9), after_work=lies, kept=withheld, changed=spoilt, split=splits)
def test_whatever_a_third_says_the_others_hold_the_same(
    count: int,
    seed: int,
    first: int,
    after_work: list[Lie],
    kept: frozenset[tuple[int, int]],
    changed: dict[int, Spoilt],
    split: tuple[int, int] | None,
) -> None:
    peers = PEERS[:count]
    liars = [peers[(first + 3 * number) % count] for number in range((count - 1) // 3)]
    world = World(peers, liars, seed, kept, changed, split)
    world.settle(after_work)
    check(world)
