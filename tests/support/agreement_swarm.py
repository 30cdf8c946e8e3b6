"""A random schedule of one decision: up to ten voters with weights, liars, crashes, lost disks and partitions.

The network delivers in any order, twice, or not at all. Each liar is two machines under one key (Twins,
arXiv:2004.10617), and beside them signs whatever can be made of what others have signed. A voter that crashes may have
done only some of its last actions; of what it knew its disk has the last slot that it signed in, its lock, and the bytes of
what it accepted. A decision ends its part: it shows the certificate to whom it meets. `Swarm.check` compares everything that
honest voters ever signed with the invariants of docs/round.md: a quorum that the liars could complete at any later time
counts as complete.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random

from flockstep.collectives.agreement.actions import (
    AgreementAction,
    AgreementTiming,
    Dispatch,
    FetchProven,
    Note,
)
from flockstep.collectives.agreement.electorate import LIAR_PROOF, Electorate
from flockstep.collectives.agreement.machine import VoterMachine
from flockstep.collectives.agreement.statements import (
    Decision,
    PrevoteQuorum,
    Propose,
    Shown,
    Statement,
    VoterReady,
    newest,
)
from flockstep.peer.wire import Precommit, Prevote, Slot

TIMING = AgreementTiming(control=1.0, attempt=4.0)


@dataclass
class Node:
    """A machine with its disk. A liar has two under its name."""

    name: str
    machine: VoterMachine
    is_liar: bool
    signed: Slot | None = None
    """The last slot that it signed in, on its disk."""
    lock: PrevoteQuorum | None = None
    """The lock on its disk."""
    is_observer: bool = False
    """True if its disk was lost."""
    stored: set[bytes] = field(default_factory=set)
    """The values whose bytes are on its disk."""
    proposals: list[Propose] = field(default_factory=list)
    """The proposals that it received or made."""
    wanted: set[bytes] = field(default_factory=set)
    """The values that it could not fetch so far."""
    made: Slot | None = None
    """The last slot that it made a value in."""
    certificate: Decision | None = None
    """The decision in the ledger on its disk."""
    is_up: bool = True
    side: int = 0


@dataclass(frozen=True)
class Mail:
    """A message under way to a node, or a result of its data movement."""

    source: Node
    target: Node
    what: tuple[str, Statement] | Decision | bytes | tuple[Slot, Shown, bytes]


class Violation(AssertionError):
    """An invariant does not hold."""


class Swarm:
    """One schedule. Everything follows from the seed."""

    def __init__(self, seed: int, machine: type[VoterMachine] = VoterMachine) -> None:
        self.random = chance = Random(seed)
        self.machine = machine
        self.now = 0.0
        self.is_calm = False
        kinds: tuple[type[Statement | Decision], ...] = (VoterReady, Propose, Prevote, Precommit, Decision)
        self.loss = {kind: chance.choice((0.0, 0.3, 0.7) if kind in kinds[2:] else (0.0, 0.0, 0.3)) for kind in kinds}
        self.seen = Counter[str]()
        names = [f"v{number}" for number in range(chance.choice((1, 2, 3, 4, 4, 4, 4, 4, 4, 5, 6, 7, 10)))]
        weights = chance.choice(((1,), (1,), (1, 2, 5)))
        self.electorate = Electorate({name: chance.choice(weights) for name in names})
        self.may_lose_disks = chance.random() < 0.3
        self.liars: frozenset[str] = frozenset()
        for name in chance.sample(names, len(names)):
            if chance.random() < 0.8 and self._is_bearable(self.liars | {name}):
                self.liars |= {name}
        self.slot = Slot("run", chance.randrange(20), bytes(32))
        self.mail: list[Mail] = []
        self.values: list[bytes] = []
        self.signed: dict[tuple[str, Slot, type[Statement]], Statement] = {}
        self.signers: dict[Statement, set[str]] = defaultdict(set)
        self.entered: set[int] = {0}
        self.lost: set[str] = set()
        self.nodes = [
            Node(name, machine(name, self.slot, self.electorate, TIMING), name in self.liars)
            for name in names
            for _ in range(2 if name in self.liars else 1)
        ]
        for node in self.nodes:
            self._resume(node)

    def _is_bearable(self, liars: frozenset[str]) -> bool:
        electorate = self.electorate
        is_few = len(electorate.votes) < LIAR_PROOF
        return not electorate.votes_of(liars) if is_few else 3 * electorate.votes_of(liars) < electorate.total

    @property
    def honest(self) -> list[Node]:
        """The nodes of honest voters."""
        return [node for node in self.nodes if not node.is_liar]

    # The schedule.

    def disturb(self, num_events: int) -> None:
        """Let so many random things happen."""
        events = {
            self._deliver_any: 60,
            self._tick_any: self.random.choice((2, 8, 20)),
            self._crash_any: self.random.choice((1, 2, 6)),
            self._restart_any: 4,
            self._part: 1,
            self._heal: 2,
            self._pause_any: 1,
            self._resume_any: 2,
            self._abandon_any: 1,
            self._lie: 12 if self.liars else 0,
        }
        for event in self.random.choices(list(events), list(events.values()), k=num_events):
            event()

    def _deliver_any(self) -> None:
        if self.mail:
            index = self.random.randrange(len(self.mail))
            self.mail[index], self.mail[-1] = self.mail[-1], self.mail[index]
            mail = self.mail[-1] if self.random.random() < 0.05 else self.mail.pop()
            self._deliver(mail)

    def _deliver(self, mail: Mail) -> None:
        node, what = mail.target, mail.what
        if not node.is_up or node.certificate is not None or node.side != mail.source.side:
            return
        match what:
            case bytes():
                self._do(node, node.machine.hold(what, self.now))
            case Decision():
                self._decide(node, what)
            case (str(voter), statement):
                assert not isinstance(statement, bytes | tuple)
                if isinstance(statement, Propose):
                    node.proposals.append(statement)
                    if statement.newest_proof is None:  # The making of a new value brings its bytes.
                        self.mail.append(Mail(node, node, statement.value))
                self._do(node, node.machine.receive(voter, statement, self.now))
            case (Slot() as slot, tuple(readys), bytes(value)):
                self._do(node, node.machine.offer(slot, value, readys, self.now))

    def _is_held(self, value: bytes) -> bool:
        return any(value in node.stored for node in self.honest if node.is_up)

    def _tick_any(self) -> None:
        self._tick(self.random.choice(self.nodes))

    def _tick(self, node: Node) -> None:
        if node.is_up and node.certificate is None and node.machine.deadline != float("inf"):
            self.now = max(self.now, node.machine.deadline)
            self._do(node, node.machine.tick(self.now), may_enter=True)

    def _crash_any(self) -> None:
        node = self.random.choice(self.nodes)
        if node.is_up:
            self._crash(node)

    def _crash(self, node: Node) -> None:
        node.is_up = False
        self.seen["crash"] += 1
        if self.may_lose_disks and self.random.random() < 0.3:
            self.seen["lost disk"] += 1
            self.lost.add(node.name)
            node.signed = node.lock = node.certificate = None
            node.is_observer = True
            node.stored.clear()

    def _restart_any(self) -> None:
        if down := [node for node in self.nodes if not node.is_up]:
            self._restart(self.random.choice(down))

    def _restart(self, node: Node) -> None:
        node.is_up = True
        slot = self.slot if node.signed is None else node.signed.at(node.signed.attempt + 1)
        self.entered.add(slot.attempt)
        node.machine = self.machine(node.name, slot, self.electorate, TIMING, node.lock, is_observer=node.is_observer)
        node.wanted.clear()
        self._resume(node)
        for value in sorted(node.stored):
            self._do(node, node.machine.hold(value, self.now))
        self._connect(node, [other for other in self.nodes if other is not node])

    def _connect(self, node: Node, others: list[Node]) -> None:
        for other in others:
            if node.is_up and other.is_up and node.side == other.side:
                self._meet(node, other)
                self._meet(other, node)

    def _meet(self, node: Node, other: Node) -> None:
        if node.certificate is not None:
            self._send(node, (other.name,), node.certificate)
        else:
            self._do(node, node.machine.meet(other.name, self.now))

    def _part(self) -> None:
        self.seen["partition"] += 1
        for node in self.nodes:
            node.side = self.random.randrange(2)

    def _heal(self) -> None:
        for node in self.nodes:
            node.side = 0
        for index, node in enumerate(self.nodes):
            self._connect(node, self.nodes[:index])

    def _pause_any(self) -> None:
        self.seen["pause"] += 1
        self.random.choice(self.nodes).machine.pause()

    def _resume_any(self) -> None:
        self._resume(self.random.choice(self.nodes))

    def _resume(self, node: Node) -> None:
        if node.is_up and node.certificate is None:
            self._do(node, node.machine.resume(self.now))

    def _abandon_any(self) -> None:
        node = self.random.choice(self.nodes)
        if node.is_up and node.certificate is None:
            self._do(node, node.machine.abandon("its data did not arrive", self.now), may_enter=True)

    # The liars.

    def _lie(self) -> None:
        """Send a statement that a liar may sign, to one voter."""
        chance = self.random
        liar, target = chance.choice(sorted(self.liars)), chance.choice(self.honest)
        slot = target.machine.slot
        if chance.random() < 0.3:
            slot = slot.at(chance.randrange(4))
        proposer = self.electorate.proposer(slot.round, slot.attempt)
        value = chance.choice([*self.values, bytes(32)])
        statement: Statement
        if proposer in self.liars and chance.random() < 0.7:
            liar, statement = proposer, self._false_proposal(slot, value)
        elif chance.random() < 0.4:
            statement = VoterReady(slot, chance.choice([None, *self._proofs()]))
        else:
            statement = chance.choice((Prevote, Precommit))(slot, value)
        source = next(node for node in self.nodes if node.name == liar)
        source.side = target.side
        self.mail.append(Mail(source, target, (liar, statement)))

    def _false_proposal(self, slot: Slot, value: bytes) -> Propose:
        """Some of the honest Readys in the slot, and those of liars with any proof; now and then for another value."""
        chance = self.random
        said = [(name, it) for (name, its, _), it in self.signed.items() if its == slot and isinstance(it, VoterReady)]
        readys = {name: ready.proof for name, ready in said if chance.random() < 0.8}
        readys |= {name: chance.choice([None, *self._proofs()]) for name in sorted(self.liars)}
        if (proof := newest(readys.values())) is not None and chance.random() < 0.8:
            value = proof.value
        return Propose(slot, value, tuple(sorted(readys.items(), key=lambda ready: ready[0])))

    def _proofs(self) -> list[PrevoteQuorum]:
        """All proofs that somebody could show."""
        return [
            PrevoteQuorum(it.slot, it.value, tuple(sorted(voters & self.electorate.votes.keys())))
            for it, honest in self.signers.items()
            if isinstance(it, Prevote) and self.electorate.is_quorum(voters := honest | self.liars)
        ]

    # What the driver does.

    def _do(self, node: Node, actions: list[AgreementAction], *, may_enter: bool = False) -> None:
        if not node.is_up:
            return  # It crashed in the middle of what it was doing.
        at = node.machine.slot
        if not node.is_liar and at.attempt not in self.entered:
            if not may_enter:
                raise Violation(f"invariant 8: {node.name} was moved to {at.attempt} by liars")
            self.entered.add(at.attempt)
        cut_short = not self.is_calm and self.random.random() < 0.01
        done = self.random.randrange(len(actions) + 1) if cut_short else len(actions)
        for action in actions[:done]:
            self._do_one(node, action)
        if done < len(actions):
            if isinstance(action := actions[done], Dispatch) and self.random.random() < 0.5:
                self._persist(node, action.statement)  # It was signed, and nobody has heard it.
            self._crash(node)
            return
        if node.certificate is None and node.machine.decision is not None:
            self._decide(node, node.machine.decision)
            self._send(node, tuple({it.name for it in self.nodes} - {node.name}), node.machine.decision)
        if (readys := node.machine.making) is not None and node.made != node.machine.slot:
            node.made = node.machine.slot
            self.values.append(len(self.values).to_bytes(32, "big"))
            self.mail.append(Mail(node, node, (node.made, readys, self.values[-1])))

    def _persist(self, node: Node, statement: Statement) -> None:
        """What the signing guard and the driver write before a statement is sent."""
        node.signed = statement.slot
        if isinstance(statement, Prevote):
            node.stored.add(statement.value)
        elif isinstance(statement, Precommit):
            node.lock = node.machine.newest_proof

    def _do_one(self, node: Node, action: AgreementAction) -> None:
        match action:
            case Dispatch(statement):
                self._persist(node, statement)
                self._sign(node, statement)
                self._send(node, tuple({it.name for it in self.nodes} - {node.name}), (node.name, statement))
            case FetchProven(value, _):
                node.wanted.add(value)
                self._fetch(node)
            case Note(event, _, _, why):
                self.seen[event if event != "agreement.refused" else why] += 1

    def _fetch(self, node: Node) -> None:
        """Fetch what it wants and an honest voter that is up still holds."""
        found = {value for value in node.wanted if self._is_held(value)}
        node.wanted -= found
        self.mail += [Mail(node, node, value) for value in sorted(found)]

    def _send(self, node: Node, to: tuple[str, ...], what: tuple[str, Statement] | Decision) -> None:
        loss = 0.0 if self.is_calm else self.loss[type(what[1] if isinstance(what, tuple) else what)]
        self.mail += [Mail(node, it, what) for it in self.nodes if it.name in to and self.random.random() >= loss]

    def _sign(self, node: Node, statement: Statement) -> None:
        if isinstance(statement, Propose):
            node.proposals.append(statement)
        if node.is_liar:
            return
        key = node.name, statement.slot, type(statement)
        if self.signed.setdefault(key, statement) != statement:
            raise Violation(f"invariant 4: {node.name} signed a second {key[2].__name__} in {statement.slot.attempt}")
        self.signers[statement].add(node.name)
        if isinstance(statement, Prevote):
            if statement.value not in node.stored:
                raise Violation(f"invariant 6: {node.name} accepted a value that its disk does not hold")
            shown = [it for it in node.proposals if (it.slot, it.value) == (statement.slot, statement.value)]
            if not any(it.newest_proof is None or it.newest_proof.value == it.value for it in shown):
                raise Violation(f"invariant 2: {node.name} accepted another value than the newest proof of the Readys")

    def _decide(self, node: Node, decision: Decision) -> None:
        node.certificate = decision
        if node.is_liar:
            return
        self.seen["decision"] += 1
        signed = self.signers[Precommit(decision.slot, decision.value)] | self.liars
        if not set(decision.voters) <= signed or not self.electorate.is_quorum(decision.voters):
            raise Violation(f"invariant 1: {node.name} took a decision that no quorum has confirmed")

    # The checks.

    def check(self) -> None:
        """Raise `Violation` unless the invariants hold for everything that was signed."""
        confirmed, proven = self._complete(Precommit), self._complete(Prevote)
        for one in confirmed:
            for other in confirmed:
                if one.value != other.value:
                    raise Violation(f"invariant 1: two values: {one.slot}, {other.slot}")
            for other in proven:
                if other.slot.attempt >= one.slot.attempt and other.value != one.value:
                    raise Violation(f"invariant 3: a proof in {other.slot.attempt} against {one.slot.attempt}")
        for accept in proven:
            if self.electorate.votes_of(self.signers[accept]) < self.electorate.third:
                raise Violation(f"invariant 6: the bytes of a proof in {accept.slot.attempt} are with too few")
        self.seen["proof"] += len(proven)
        self.seen["decided"] += len(confirmed)

    def _complete(self, kind: type[Prevote] | type[Precommit]) -> list[Prevote | Precommit]:
        """The statements that a quorum has signed, or that the liars could complete to one."""
        return [
            it
            for it, honest in self.signers.items()
            if isinstance(it, kind) and self.electorate.is_quorum(honest | self.liars)
        ]

    # Calm.

    def calm(self) -> bool:
        """Bring everybody back, and deliver all; False where the decision may have to wait.

        That is so without a quorum of honest voters that remember, and without a copy of a value. Raises `Violation` if
        a quorum is there and does not decide within one attempt a voter and one.
        """
        self.is_calm = True
        for node in self.nodes:
            node.side = 0
        for node in self.nodes:
            if not node.is_up:
                self._restart(node)
            self._resume(node)
        present = {node.name for node in self.honest if not node.is_observer}
        if not self.electorate.is_quorum(present) and all(node.certificate is None for node in self.honest):
            return False
        if not all(self._is_held(proof.value) for proof in self._proofs()):
            return False  # Lost with the disks of all that held it.
        self._heal()
        for node in self.nodes:
            self._fetch(node)
        last = max(node.machine.slot.attempt for node in self.honest) + len(self.electorate.voters) + 1
        while self._settle():
            due = min((it for it in self.nodes if it.certificate is None), key=lambda node: node.machine.deadline)
            if due.machine.deadline == float("inf") or max(n.machine.slot.attempt for n in self.honest) > last:
                raise Violation(f"invariant 7: no decision by attempt {last}")
            self._tick(due)
        return True

    def _settle(self) -> bool:
        """Deliver all mail, with a lie in between; returns False once every honest node has decided."""
        while self.mail:
            if self.liars and self.random.random() < 0.02:
                self._lie()
            self._deliver(self.mail.pop(0))
        return any(node.certificate is None for node in self.honest)
