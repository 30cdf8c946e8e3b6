"""Machines of one round and the mail between them: no bytes, no clock but a number, and signatures that are hashes."""

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from flockstep.collectives.accountability.bans import Bans
from flockstep.collectives.accountability.conduct import Conduct
from flockstep.collectives.agreement.actions import AgreementTiming, Note
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.allreduce import actions
from flockstep.collectives.allreduce.actions import (
    Action,
    FetchOutput,
    FetchPart,
    Outcome,
    OutcomeKind,
    Setup,
    Timing,
    VoteSetup,
)
from flockstep.collectives.chain.certificate import value_hash
from flockstep.collectives.chain.quorum import ranked
from flockstep.collectives.robust.checks import commitment, num_bytes
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.round import gather
from flockstep.collectives.round.machine import Round
from flockstep.collectives.round.vote import Vote
from flockstep.collectives.spec import Spec
from flockstep.collectives.vector.codec import codec_named
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.peer import wire
from flockstep.peer.base.digest import digest, keyed
from flockstep.peer.base.errors import RemoteError
from flockstep.peer.wire.schema import encode

RUN = "a" * 52
SLOT = wire.Slot(RUN, 1, bytes(32))
BASE = bytes(32)
CELLS = 12
TIMING = Timing(gather=5.0, control=2.0, transfer=5.0, patience=50.0)
VOTING = AgreementTiming(control=2.0, attempt=100.0)
PEERS = [f"12D3KooW{name * 44}" for name in "ABCDEFGHJKLMNPQR"]
PENDING = "still on its way"

Fetch: TypeAlias = FetchPart | FetchOutput
Mail: TypeAlias = wire.Signed | wire.Proof | wire.Certificate


def signed(sender: str, message: wire.RoundMessage) -> wire.Signed:
    code, payload = wire.code_of(message), encode(message)
    signature = keyed("a signature in a test", sender.encode(), bytes([code]), payload)
    return wire.Signed(sender, code, payload, 2 * signature)


def verify(message: wire.Signed) -> bool:
    return message == signed(message.sender, wire.opened(message))


def order_of(peers: Collection[str], slot: wire.Slot = SLOT) -> tuple[str, ...]:
    """Return the members of a roster of these voters, in its order."""
    proposer = electorate(peers).proposer(slot.round, slot.attempt)
    return proposer, *(peer for peer in ranked(slot, peers) if peer != proposer)


def electorate(peers: Collection[str]) -> Electorate:
    return Electorate(dict.fromkeys(peers, 1))


def a_ready(
    *, base: bytes = BASE, slot: wire.Slot = SLOT, tokens: int = 10, lock: tuple[wire.Lock, ...] = ()
) -> wire.Ready:
    return wire.Ready(slot, base, tokens, 1e6, 1e6, commitment(bytes(32)), lock=lock)


class Banned(Bans):
    """The bans of one peer, as a test states them."""

    def __init__(self, is_banned: Callable[[str], bool]) -> None:
        self._is_banned = is_banned

    def __contains__(self, peer: object) -> bool:
        return self._is_banned(str(peer))


class StatedConduct(Conduct):
    """The conduct of all peers, as a test states it: by default nobody is banned, and everybody waited for."""

    def __init__(self, *, is_banned: Callable[[str], bool] = lambda peer: False, **stated: Any) -> None:
        self.bans = Banned(is_banned)
        judged = dict.fromkeys(("may_own", "is_prompt", "awaits", "awaits_ready", "awaits_sketch"), lambda peer: True)
        self.__dict__ |= {"charter": OPEN, "revision": b"", "trust_of": lambda peer: None, **judged, **stated}


def a_setup(peer: str, peers: Collection[str], **fields: Any) -> Setup:
    """Return the inputs of one peer to an attempt, with `fields` replaced: those of `Setup`, of its spec or conduct."""
    codec = codec_named("int8")
    spec = Spec(
        run=fields.pop("run", RUN),
        num_cells=fields.pop("num_cells", CELLS),
        contribution=codec,
        output=codec,
        min_peers=fields.pop("min_peers", 1),
        floor=2.0,
        ceiling=60.0,
        rule=fields.pop("rule", rule_named("gramguard")),
        why_not_revise=fields.pop("why_not_revise", lambda revision, before: ""),
    )
    return Setup(
        ready=a_ready(base=fields.pop("base", BASE), tokens=fields.pop("tokens", 10)),
        active=frozenset(peers),
        spec=spec,
        before=None,
        steps=5,
        loss=1.0,
        ramp=fields.pop("ramp", 1.0),
        phase_seconds=60.0,
        timing=fields.pop("timing", TIMING),
        verify=verify,
        conduct=StatedConduct(**fields),
    )


def a_vote(
    peer: str, voters: Collection[str], *, slot: wire.Slot = SLOT, charter: Charter = OPEN, **fields: Any
) -> Vote:
    """Return the vote of one peer on the round of a slot, with `fields` replaced."""

    def sign(message: wire.RoundMessage, lock: wire.Proof | None) -> wire.Signed:
        return signed(peer, message)

    setup = VoteSetup(
        **{
            "me": peer,
            "slot": slot,
            "electorate": electorate(voters),
            "charter": charter,
            "timing": VOTING,
            "sign": sign,
            "verify": verify,
            **fields,
        }
    )
    return Vote(setup)


def words_of(setup: Setup, votes: Mapping[str, Vote]) -> dict[str, tuple[wire.Signed, wire.Heard]]:
    """Return whose Readys these voters say they hold, signed."""
    words = {voter: gather.heard(replace(setup, ready=vote.ready[voter][1]), vote) for voter, vote in votes.items()}
    return {voter: (signed(voter, word), word) for voter, word in words.items() if word is not None}


def a_roster(
    peers: Collection[str],
    *,
    voters: Collection[str] | None = None,
    said: Collection[str] | None = None,
    readies: Mapping[str, wire.Ready] | None = None,
    **fields: Any,
) -> "Made":
    """Return the roster that the proposer of these voters (None: all) makes where all of them hold all Readys.

    `said` are the voters that answer it (None: all), `fields` those of the proposer's setup.
    """
    voters = peers if voters is None else voters
    readies = readies or dict.fromkeys(peers, a_ready())
    proposer = order_of(voters)[0]
    votes = {voter: a_vote(voter, voters) for voter in (voters if said is None else said)}
    for vote in votes.values():
        for peer, ready in readies.items():
            vote.receive(signed(peer, ready), ready, 0.0)
    setup = a_setup(proposer, peers, **fields)
    made = gather.proposal(setup, votes[proposer], words_of(setup, votes), gather.held(votes[proposer]))
    assert not isinstance(made, str), made
    return Made(*made)


class Made(NamedTuple):
    """A roster, and what it follows from."""

    roster: wire.Roster
    basis: wire.Basis

    def but(self, **fields: Any) -> "Made":
        """Return another one with these fields of either."""
        shown = {name: fields.pop(name) for name in ("readys", "heards") if name in fields}
        basis = replace(self.basis, **shown)
        return Made(replace(self.roster, basis=digest(encode(basis)), **fields), basis)

    def why_not(self, setup: Setup, vote: Vote, sender: str) -> str | None:
        """Return why a voter refuses it."""
        flaw = gather.misfit(setup, vote, sender, self.roster)
        return flaw or gather.refusal(setup, vote, sender, self.roster, self.basis)


@dataclass
class Rounds:
    """Peers in one round, and a driver that does at once whatever their machines ask for."""

    peers: list[str]
    seed: int = 0
    voters: Collection[str] | None = None
    """The voters; None: all peers."""
    attempts: int = 1
    """Attempts of each peer before it gives up for good."""
    charter: Charter = OPEN
    broken: Callable[[str, Fetch], str | None] = lambda peer, fetch: None
    tampered: Callable[[str, Any], Any] = lambda peer, message: message
    lost: Callable[[str, Mail], bool] = lambda target, mail: False
    """Returns True for mail that does not arrive."""
    deaf: Collection[tuple[str, str]] = ()
    """Pairs of a carrier and a target that does not receive what it carries."""
    setups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Replaced fields of a peer's setup."""
    machines: dict[str, Round] = field(default_factory=dict)
    mail: list[tuple[str, Mail, str]] = field(default_factory=list)
    """By target, with its carrier."""
    early: dict[str, list[tuple[str, Mail, str]]] = field(default_factory=dict)
    """What has come to a peer between two attempts, as its averager keeps it."""
    dead: set[str] = field(default_factory=set)
    now: float = 0.0
    notes: list[Note] = field(default_factory=list)
    said: list[tuple[str, wire.RoundMessage]] = field(default_factory=list)
    false: set[bytes] = field(default_factory=set)
    """Outputs that no check lets pass."""
    holders: dict[bytes, set[str]] = field(default_factory=dict)
    ended: dict[str, list[Outcome]] = field(default_factory=dict)
    todo: dict[str, deque[Action]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    """The peers whose actions are being executed."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        voters = self.peers if self.voters is None else self.voters
        self.votes = {peer: a_vote(peer, voters, charter=self.charter) for peer in self.peers}
        for peer in self.peers:
            self.begin(peer)

    def begin(self, peer: str) -> None:
        """Make the machine of a peer's next attempt."""
        fields = {"charter": self.charter, **self.setups.get(peer, {})}
        self.machines[peer] = Round(a_setup(peer, self.living(), **fields), self.votes[peer], self.now)
        self.mail += self.early.pop(peer, [])

    def start(self, *peers: str) -> None:
        for peer in peers or self.living():
            self.do(peer, self.machines[peer].start(self.now))

    def do(self, peer: str, done: list[Action]) -> None:
        """Execute actions, and those that follow from them, in order, as the driver of an attempt does."""
        machine, todo = self.machines[peer], self.todo.setdefault(peer, deque())
        todo.extend(done)
        if peer in self.busy:
            return
        self.busy.add(peer)
        try:
            while todo or machine.deadline == -math.inf:
                if todo:
                    self._do(peer, machine, todo.popleft())
                else:
                    todo.extend(machine.tick(self.now))
        finally:
            self.busy.discard(peer)
        if machine.outcome is not None and not any(it is machine.outcome for it in self.ended.get(peer, [])):
            self._end(peer, machine)

    def _do(self, peer: str, machine: Round, action: Action) -> None:
        def report(result: Callable[[Any], Any]) -> None:
            self.do(peer, machine.done(result))

        match action:
            case actions.Send(to, message):
                message = self.tampered(peer, message)
                self.said.append((peer, message))
                if peer in to:
                    self.do(peer, machine.receive(signed(peer, message), message, self.now))
                self.post(to, signed(peer, message), peer)
            case actions.Forward(to, wire.Proof() as proof):
                self.post(to, proof, peer)
            case actions.Forward(to, wire.Signed() as message):
                opened = wire.opened(message)
                if message.sender == peer:
                    opened = self.tampered(peer, opened)
                    self.said.append((peer, opened))
                self.post(to, signed(message.sender, opened), peer)
            case actions.FetchValue(value, voters):
                if self.holders.get(value_hash(value), set()) & set(voters) - self.dead:
                    self.hold(peer, value)
            case actions.HashParts(_, readers):
                hashes = tuple(keyed("part", peer.encode(), str(i).encode()) for i in range(len(readers)))
                report(lambda exchange: exchange.collect_phase.parts_hashed(hashes))
            case actions.FetchPart(part, contributor=index):
                if (reason := self.broken(peer, action)) is None:
                    report(lambda exchange: exchange.collect_phase.fetched(part, index))
                elif reason != PENDING:
                    report(lambda exchange: exchange.collect_phase.not_fetched(part, index, reason))
            case actions.FetchOutput(part, source, hash_):
                if (reason := self.broken(peer, action)) is None:
                    report(lambda exchange: exchange.output_fetched(part, hash_))
                elif reason != PENDING:
                    report(lambda exchange: exchange.output_not_fetched(part, source, hash_, reason))
            case actions.SketchParts(seed, columns):
                tables = bytes(num_bytes(machine.exchange.table.num_parts, columns))
                report(lambda exchange: exchange.sketched(seed, tables))
            case actions.CompareSketch():
                report(lambda exchange: exchange.compared(action))
            case actions.AskFor(to, about):
                for other in to:
                    if other not in self.dead:
                        for mail in (
                            *self.machines[other].statements_of(about),
                            *self.votes[other].statements_of(about),
                        ):
                            self.post([peer], mail, other)
            case actions.Judge(_, _, masses, _):
                rows = (masses,) * machine.exchange.table.num_parts
                report(lambda exchange: exchange.judged(rows, {}, {}))
            case actions.CheckOutputs():
                false = [part for part, output in action.outputs.items() if output in self.false]
                mute = {part: sum(action.weights[part][place] for place in action.silent) for part in action.outputs}
                unheard = [part for part, weight in mute.items() if 3 * weight > sum(action.weights[part])]
                report(lambda exchange: exchange.checked(action, false, unheard))
            case actions.Reduce(cut, part, contributors, weights):
                weighted = [index for index, weight in zip(contributors, weights, strict=True) if weight]
                output = keyed("output", cut, bytes([part, *weighted]))
                report(lambda exchange: exchange.reduced(cut, part, output))
            case actions.Finalize(_, outputs):
                report(lambda exchange: exchange.finalized(outputs, keyed("root", *outputs)))
            case Note():
                self.notes.append(action)

    def hold(self, peer: str, value: bytes) -> None:
        self.holders.setdefault(value_hash(value), set()).add(peer)
        self.do(peer, self.machines[peer].value_held(value, self.now))

    def _end(self, peer: str, machine: Round) -> None:
        """What the averager does: it tells the others of a decision, and tries again."""
        outcome = machine.outcome
        assert outcome is not None
        self.ended.setdefault(peer, []).append(outcome)
        if outcome.certificate is not None:
            outsiders = set(self.living()) - {*machine.vote.told, peer}
            self.post(sorted(outsiders), outcome.certificate, peer)

    def post(self, to: Collection[str], mail: Mail, sender: str) -> None:
        if isinstance(mail, wire.Signed) and isinstance(accept := wire.opened(mail), wire.Prevote):
            self.holders.setdefault(accept.value, set()).add(mail.sender)
        self.mail += [
            (peer, mail, sender)
            for peer in to
            if peer != sender
            and peer in self.machines
            and (sender, peer) not in self.deaf
            and not self.lost(peer, mail)
        ]

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        target, mail, carrier = self.mail[index] if keep else self.mail.pop(index)
        if target in self.dead:
            return
        machine, vote = self.machines[target], self.votes[target]
        if isinstance(mail, wire.Certificate):
            machine.certified(mail)
            self.do(target, [])
        elif isinstance(mail, wire.Proof):
            self.do(target, machine.learn(mail, self.now))
        else:
            message = wire.opened(mail)
            if isinstance(message, wire.Ready) and carrier != mail.sender:
                machine.show(carrier, mail, message)
            if isinstance(message, wire.Ready) and vote.certificate is not None:
                self.post([mail.sender], vote.certificate, target)
            is_vote = isinstance(message, wire.VoteMessage)
            try:
                if machine.outcome is None:
                    self.do(target, machine.receive(mail, message, self.now))
                elif is_vote:
                    self.do(target, vote.receive(mail, message, self.now))  # type: ignore[arg-type]
                else:
                    self.early.setdefault(target, []).append((target, mail, carrier))
            except RemoteError as error:
                self.notes.append(Note("peer.charged", mail.sender, type(message).__name__, str(error)))

    def deliver_all(self) -> None:
        while self.mail:
            self.deliver()

    def until(self, condition: Callable[[], bool], *, random_order: bool = False) -> None:
        """Deliver until a condition holds."""
        while not condition():
            self.deliver(self.random.randrange(len(self.mail)) if random_order else 0)

    def kill(self, peer: str) -> None:
        """Its messages on the way are lost with it; the others learn of it one by one, in any order."""
        self.dead.add(peer)
        self.mail = [it for it in self.mail if not isinstance(it[1], wire.Signed) or it[1].sender != peer]
        others = self.living()
        self.random.shuffle(others)
        for other in others:
            self.do(other, self.machines[other].lose(peer, "killed", self.now))

    def tick(self) -> None:
        """Let time pass until somebody has to react to it, and all react to it."""
        due = [
            machine.deadline for peer, machine in self.machines.items() if peer not in self.dead and not machine.outcome
        ]
        self.now = max(self.now, min(due))
        for peer in self.living():
            self.do(peer, self.machines[peer].tick(self.now))

    def settle(self, deaths: dict[int, str] | None = None) -> None:
        """Deliver in a seeded order, now and then twice, until everybody has a decision, or no attempt left."""
        delivered = 0
        while True:
            while self.mail:
                self.deliver(self.random.randrange(len(self.mail)), keep=self.random.random() < 0.1)
                delivered += 1
                if deaths and delivered in deaths and deaths[delivered] not in self.dead:
                    self.kill(deaths[delivered])
            for peer in self.living():
                last = self.machines[peer].outcome
                if last is not None and last.kind is OutcomeKind.VOID and len(self.ended[peer]) < self.attempts:
                    self.begin(peer)
                    self.start(peer)
            if self.mail:
                continue
            if all(self.machines[peer].outcome is not None for peer in self.living()):
                return
            self.tick()

    def living(self) -> list[str]:
        return [peer for peer in self.peers if peer not in self.dead]

    def outcomes(self) -> list[Outcome]:
        """The last outcome of each living peer."""
        found = [self.machines[peer].outcome for peer in self.living()]
        return [outcome for outcome in found if outcome is not None]

    def kinds(self) -> set[OutcomeKind]:
        return {outcome.kind for outcome in self.outcomes()}

    def messages(self, kind: type) -> list[Any]:
        return [message for _, message in self.said if isinstance(message, kind)]

    def noted(self, event: str) -> set[str]:
        """The peers that events of this name are about."""
        return {note.peer for note in self.notes if note.event == event}


@dataclass
class ConnectedRounds(Rounds):
    """A round on connections: each delivers in order, and who was asked for another one passes on what comes later."""

    now: float = 1.0
    readers: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """By who was asked and about whom: who has asked."""

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Deliver the first mail on the connection of that one."""
        target, _, carrier = self.mail[index]
        first = next(at for at, it in enumerate(self.mail) if (it[0], it[2]) == (target, carrier))
        mail = self.mail[first][1]
        if isinstance(mail, wire.Signed) and carrier == mail.sender and not keep:
            self.post(sorted(self.readers.get((target, carrier), ())), mail, target)
        super().deliver(first, keep=keep)

    def _do(self, peer: str, machine: Round, action: Action) -> None:
        if isinstance(action, actions.AskFor):
            for other in action.to:
                self.readers.setdefault((other, action.peer), set()).add(peer)
        super()._do(peer, machine, action)
