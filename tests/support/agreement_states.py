"""Every state that three honest voters and one liar can reach in the first attempts of a decision.

A breadth-first search whose steps are made by the real machine. The state: what each honest voter knows, and what honest
voters have sent. A step makes a machine that knows the same, delivers what one reaction needs, and takes what it knows then
and its statements. Or it is a crash: the voter begins again as its disk lets it, in the next slot and with its lock. The
liar's statements are not part of the state: it may send anything that it can sign, to each voter another thing, whenever a
step can use it.

Why these steps are enough:

- *Whole quorums, on demand.* A single Prevote or Precommit changes nothing at its receiver until it completes a quorum, and
  what was sent can always arrive later. So any order of delivery has the effect of one in which all parts of a quorum
  arrive when the last one does. A proof that is seen late takes effect with the next Ready: it arrives right before.
- *One attempt after the other.* What a voter does in an attempt depends only on statements of this and earlier attempts,
  except that later Readys end it, as its own deadline does too. So the events of a run can be sorted by attempt without
  a change of what anybody signs: a voter enters the next attempt after all steps of the present one, A before B before C.
- *Proofs and proposals by what they say.* Which quorum a proof names, and which Readys lead a proposal to one newest
  proof, changes no reaction: the machine compares slots and values. So one of each stands for all that say the same.
- *Past statements by what they complete.* Nobody signs in an attempt that all have left; its quorums remain.
- *Names of values.* The first value is X: with Y for it the same would happen.

A decision is not a step: Precommits of a quorum, the liar's among them, are a decision that somebody may hold.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, NamedTuple, TypeVar

from flockstep.collectives.agreement.actions import AgreementTiming, Dispatch
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.agreement.machine import VoterMachine
from flockstep.collectives.agreement.statements import PrevoteQuorum, Propose, Statement, VoterReady, newest
from flockstep.peer.wire import Precommit, Prevote, Slot

HONEST, LIAR = ("A", "B", "C"), "M"
E = Electorate(dict.fromkeys((*HONEST, LIAR), 1))
X, Y = b"X" * 32, b"Y" * 32
QUORUM = ("A", "B", "M")
"""Stands for every quorum."""
TIMING = AgreementTiming(control=1.0, attempt=4.0)
Fact = tuple[str, Statement]
Disk = tuple[Slot, PrevoteQuorum | None]
"""What a later process begins with: its first slot and its lock."""
_T = TypeVar("_T")


class Ids(Generic[_T]):
    """Numbers for things, so that states are made of small integers."""

    def __init__(self) -> None:
        self.things: list[_T] = []
        self._ids: dict[_T, int] = {}

    def of(self, thing: _T) -> int:
        """Return the number of a thing."""
        if (known := self._ids.get(thing)) is None:
            known = self._ids[thing] = len(self.things)
            self.things.append(thing)
        return known


def next_slot(signed: Slot, lock: PrevoteQuorum | None) -> Disk:
    """What a later process begins with after the last slot that it signed in, and its newest lock."""
    return signed.at(signed.attempt + 1), lock


class Known(NamedTuple):
    """What a voter's machine knows between two steps."""

    slot: Slot
    said: tuple[Statement, ...] = ()
    lock: PrevoteQuorum | None = None
    newest_proof: PrevoteQuorum | None = None


class State(NamedTuple):
    """A state of the search, in numbers. `sent` is that of the present attempt: of those before, the quorums remain."""

    voters: tuple[int, ...]
    sent: frozenset[int]
    proofs: frozenset[int] = frozenset()
    decided: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One reaction of a voter: what is delivered to it, in this order, and what it finds."""

    deliver: tuple[Fact, ...] = ()
    hold: bytes = b""
    """The value whose bytes arrive first."""
    offer: bytes = b""
    """The value that it makes as the proposer."""
    is_late: bool = False
    """True if the attempt's deadline passes."""
    is_crash: bool = False
    """True if the voter begins again from its disk."""


@dataclass(frozen=True)
class Reaction:
    """What a voter knows and has sent after a step."""

    known: int
    said: frozenset[int]
    step: Step


class Search:
    """The search for one first proposer and one kind of machine; with crashes if `restart` tells what follows them."""

    def __init__(
        self,
        first: int,
        attempts: int,
        machine: type[VoterMachine] = VoterMachine,
        restart: Callable[[Slot, PrevoteQuorum | None], Disk] | None = None,
    ) -> None:
        self.slot = Slot("run", first, bytes(32))
        self.attempts = attempts
        self.machine = machine
        self.restart = restart
        self.num_states = 0
        self.reached = set[tuple[str, int]]()
        """The kinds of quorum certificates that were reached, with their attempts."""
        self._knowns, self._facts = Ids[Known](), Ids[Fact]()
        self._known: dict[tuple[object, ...], list[Reaction]] = {}

    def run(self) -> str | None:
        """Visit all states; returns the first violation with the steps that lead to it, or None."""
        state = State((self._knowns.of(Known(self.slot)),) * 3, frozenset())
        for voter in range(3):
            state = self._after(state, voter, self._react(voter, state.voters[voter], Step()))
        origin: dict[State, tuple[State, int, Step] | None] = {state: None}
        queue = deque([state])
        while queue:
            state = queue.popleft()
            self.num_states += 1
            if (why := self._violation(state)) is not None:
                return f"{why}\n{_story(origin, state)}"
            for voter in self._turns(state):
                for reaction in self._reactions(state, voter):
                    after = self._after(state, voter, reaction)
                    if after not in origin:
                        origin[after] = state, voter, reaction.step
                        queue.append(after)
        return None

    def _attempt(self, state: State) -> int:
        return min(self._knowns.things[known].slot.attempt for known in state.voters)

    def _turns(self, state: State) -> list[int]:
        """The voters that may make a step: all, and once one has left the attempt the next that has not."""
        attempts = [self._knowns.things[known].slot.attempt for known in state.voters]
        return list(range(3)) if len(set(attempts)) == 1 else [attempts.index(min(attempts))]

    def _reactions(self, state: State, voter: int) -> list[Reaction]:
        """All reactions of a voter in a state that change anything."""
        kinds = (VoterReady, Propose)
        context = frozenset(fact for fact in state.sent if isinstance(self._facts.things[fact][1], kinds))
        key = voter, state.voters[voter], context, state.proofs, tuple(self._turns(state)), state.sent == context
        if (known := self._known.get(key)) is None:
            reactions = [self._react(voter, state.voters[voter], step) for step in self._steps(state, voter)]
            known = self._known[key] = list({(it.known, it.said): it for it in reversed(reactions)}.values())
        return known

    def _steps(self, state: State, voter: int) -> Iterator[Step]:
        slot = self.slot.at(self._attempt(state))
        facts = sorted((self._facts.things[fact] for fact in state.sent), key=lambda fact: (fact[0], repr(fact[1])))
        proofs = [self._proof(fact) for fact in sorted(state.proofs)]
        if len(self._turns(state)) == 3:
            readys = {name: it.proof for name, it in facts if isinstance(it, VoterReady)}
            proposals = [it for _, it in facts if isinstance(it, Propose)]
            values = (X, Y) if any(not isinstance(it, VoterReady) for _, it in facts) or proofs else (X,)
            yield from self._votes(voter, slot, readys, proposals, proofs, values)
        if slot.attempt + 1 < self.attempts and voter == self._turns(state)[0]:
            yield from [Step(is_crash=True)] if self.restart else []
            others = tuple(fact for fact in facts if isinstance(fact[1], VoterReady) and fact[0] != HONEST[voter])
            for proof in [None, *proofs]:
                seen = () if proof is None else _accepts(voter, proof)
                yield Step((*seen, (LIAR, VoterReady(slot)), *others), is_late=True)

    def _votes(
        self,
        voter: int,
        slot: Slot,
        readys: dict[str, PrevoteQuorum | None],
        proposals: list[Propose],
        proofs: list[PrevoteQuorum],
        values: tuple[bytes, ...],
    ) -> Iterator[Step]:
        proposer = E.proposer(slot.round, slot.attempt)
        if proposer == LIAR:
            proposals = [Propose(slot, v, shown) for shown in _justifications(readys, proofs, LIAR) for v in values]
        elif proposer == HONEST[voter] and not proposals:
            for shown in _justifications(readys, proofs, proposer):
                deliver = tuple((name, VoterReady(slot, proof)) for name, proof in shown if name != proposer)
                yield from (Step(deliver, offer=value) for value in values)
        for propose in dict.fromkeys(map(_canonical_proposal, proposals)):
            yield Step(((proposer, propose),), hold=propose.value)
        for proof in proofs:
            yield Step(_accepts(voter, proof), hold=proof.value)

    def _react(self, voter: int, number: int, step: Step) -> Reaction:
        """Let a voter react that knows this."""
        me, known = HONEST[voter], self._knowns.things[number]
        if step.is_crash and self.restart is not None:
            slot, lock = self.restart(known.slot, known.lock)
            known = Known(slot, lock=lock, newest_proof=lock)
        machine = self.machine(me, known.slot, E, TIMING, known.lock)
        machine.newest_proof = known.newest_proof
        for statement in known.said:
            machine._say(statement)
        actions = machine.resume(0.0)
        if step.hold:
            actions += machine.hold(step.hold, 0.0)
        for name, statement in step.deliver:
            actions += machine.receive(name, statement, 0.0)
        if step.offer and machine.making is None:
            actions += machine.tick(TIMING.control)
        if step.offer and machine.making is not None:
            actions += machine.offer(machine.slot, step.offer, machine.making, TIMING.control)
        if step.is_late and machine.slot == known.slot:  # Else the others have moved it already.
            actions += machine.tick(TIMING.attempt)
        said = {self._facts.of((me, _canonical(it.statement))) for it in actions if isinstance(it, Dispatch)}
        proofs = _canonical_proof(machine._lock), _canonical_proof(machine.newest_proof)
        after = Known(machine.slot, tuple(map(_canonical, machine._attempt.said.values())), *proofs)
        return Reaction(self._knowns.of(after), frozenset(said), step)

    def _after(self, state: State, voter: int, reaction: Reaction) -> State:
        """Add what a voter sent and what the liar completes to a quorum; drop the statements of attempts that all left."""
        voters = (*state.voters[:voter], reaction.known, *state.voters[voter + 1 :])
        sent = state.sent | reaction.said
        whole = [fact for fact in map(self._completed, reaction.said) if fact is not None and self._num(fact, sent) >= 2]
        accepts = {fact for fact in whole if isinstance(self._facts.things[fact][1], Prevote)}
        after = State(voters, sent, state.proofs | accepts, state.decided | (set(whole) - accepts))
        if voters != state.voters and (attempt := self._attempt(after)) > self._attempt(state):
            kept = frozenset(fact for fact in sent if self._facts.things[fact][1].slot.attempt >= attempt)
            return after._replace(sent=kept)
        return after

    def _completed(self, fact: int) -> int | None:
        """The same statement by the liar, who completes every quorum with it; None for a kind that needs no quorum."""
        statement = self._facts.things[fact][1]
        return self._facts.of((LIAR, statement)) if isinstance(statement, (Prevote, Precommit)) else None

    def _num(self, fact: int, sent: frozenset[int]) -> int:
        """The number of honest voters that have sent a statement."""
        return sum(self._facts.of((name, self._facts.things[fact][1])) in sent for name in HONEST)

    def _proof(self, fact: int) -> PrevoteQuorum:
        statement = self._facts.things[fact][1]
        assert isinstance(statement, Prevote)
        return PrevoteQuorum(statement.slot, statement.value, QUORUM)

    def _violation(self, state: State) -> str | None:
        """Return which invariant of docs/round.md a state violates, or None."""
        facts = self._facts.things
        kinds = [(facts[fact][0], type(facts[fact][1]), facts[fact][1].slot.attempt) for fact in state.sent]
        if len(set(kinds)) < len(kinds):
            name, kind, attempt = Counter(kinds).most_common(1)[0][0]
            return f"invariant 4: {name} signed two {kind.__name__} in attempt {attempt}"
        proofs = [self._proof(fact) for fact in state.proofs]
        confirms = [it for fact in state.decided if isinstance(it := facts[fact][1], Precommit)]
        self.reached |= {("proof", it.slot.attempt) for it in proofs} | {("decision", it.slot.attempt) for it in confirms}
        if len({it.slot for it in proofs}) < len(proofs):
            return "two proofs in one attempt"
        if len({it.value for it in confirms}) > 1:
            return "invariant 1: two values are decided"
        for confirm in confirms:
            for proof in proofs:
                if proof.slot.attempt >= confirm.slot.attempt and proof.value != confirm.value:
                    return f"invariant 3: a proof of another value in attempt {proof.slot.attempt} after the decision"
        return None


def _justifications(
    readys: dict[str, PrevoteQuorum | None], proofs: list[PrevoteQuorum], proposer: str
) -> Iterator[tuple[tuple[str, PrevoteQuorum | None], ...]]:
    """Every set of Readys that a proposer could show: of two or three honest voters, and the liar's with any proof."""
    for names in (*combinations(HONEST, 2), HONEST):
        if proposer in (LIAR, *names):
            for proof in [None, *proofs]:
                yield (*((name, readys[name]) for name in names), (LIAR, proof))


def _accepts(voter: int, proof: PrevoteQuorum) -> tuple[Fact, ...]:
    """A quorum of Prevotes, delivered to a voter: by all others."""
    return tuple((name, Prevote(proof.slot, proof.value)) for name in (*HONEST, LIAR) if name != HONEST[voter])


def _canonical_proof(proof: PrevoteQuorum | None) -> PrevoteQuorum | None:
    return proof if proof is None else PrevoteQuorum(proof.slot, proof.value, QUORUM)


def _canonical_proposal(propose: Propose) -> Propose:
    proof = _canonical_proof(newest(proof for _, proof in propose.readys))
    return Propose(propose.slot, propose.value, tuple((name, proof if name == LIAR else None) for name in QUORUM))


def _canonical(statement: Statement) -> Statement:
    match statement:
        case VoterReady():
            return VoterReady(statement.slot, _canonical_proof(statement.proof))
        case Propose():
            return _canonical_proposal(statement)
    return statement


def _story(origin: dict[State, tuple[State, int, Step] | None], state: State) -> str:
    lines: list[str] = []
    while (before := origin[state]) is not None:
        state, voter, step = before
        received = ", ".join(f"{name} {_short(it)}" for name, it in step.deliver)
        end = "(late)" * step.is_late + "(crash)" * step.is_crash
        lines.append(f"{HONEST[voter]}: {received} {step.offer[:1].decode()} {end}")
    return "\n".join(reversed(lines))


def _short(statement: Statement) -> str:
    value = getattr(statement, "value", b"")[:1].decode()
    proof = getattr(statement, "newest_proof", getattr(statement, "proof", None))
    under = "" if proof is None else f" ({proof.value[:1].decode()}@{proof.slot.attempt})"
    return f"{type(statement).__name__}@{statement.slot.attempt} {value}{under}"
