"""The machine of one decision, rule by rule. Four voters A to D with one vote each; A proposes in attempt 0."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

import pytest
from flockstep.collectives.agreement.actions import (
    AgreementAction,
    AgreementTiming,
    Dispatch,
    FetchProven,
    Note,
)
from flockstep.collectives.agreement.collected import NewestStatements
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.agreement.machine import VoterMachine
from flockstep.collectives.agreement.statements import Decision, PrevoteQuorum, Propose, Statement, VoterReady
from flockstep.peer.wire import Precommit, Prevote, Slot
from hypothesis import given
from hypothesis import strategies as st

E = Electorate(dict.fromkeys("ABCD", 1))
SLOT = Slot("run", 4, b"p" * 32)
X, Y = b"X" * 32, b"Y" * 32
TIMING = AgreementTiming(control=1.0, attempt=4.0)


def proof(value: bytes = X, attempt: int = 0, voters: str = "ABC") -> PrevoteQuorum:
    return PrevoteQuorum(SLOT.at(attempt), value, tuple(voters))


def proposal(value: bytes = X, attempt: int = 0, shown: str = "ABC", **proofs: PrevoteQuorum) -> Propose:
    return Propose(SLOT.at(attempt), value, tuple((voter, proofs.get(voter)) for voter in shown))


def a_machine(me: str, attempt: int = 0, lock: PrevoteQuorum | None = None, electorate: Electorate = E) -> VoterMachine:
    return VoterMachine(me, SLOT.at(attempt), electorate, TIMING, lock)


def started(me: str, attempt: int = 0, lock: PrevoteQuorum | None = None, electorate: Electorate = E) -> VoterMachine:
    machine = a_machine(me, attempt, lock, electorate)
    machine.resume(0.0)
    return machine


def all_ready(machine: VoterMachine, voters: Iterable[str] = "ABCD", attempt: int = 0, now: float = 0.0) -> None:
    for voter in voters:
        if voter != machine.me:
            machine.receive(voter, VoterReady(SLOT.at(attempt)), now)


def sent(actions: list[AgreementAction]) -> list[Statement]:
    return [action.statement for action in actions if isinstance(action, Dispatch)]


def said(machine: VoterMachine) -> list[Statement]:
    """What a machine repeats to a voter that it meets again."""
    return sent(machine.meet("C", 0.0))


def reasons(actions: list[AgreementAction]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Note)]


def test_an_accept_waits_for_the_bytes_and_only_the_proposer_is_accepted() -> None:
    machine = started("B")
    assert reasons(machine.receive("C", proposal(), 0.0)) == ["a proposal by another voter than the proposer"]
    assert sent(machine.receive("A", proposal(), 0.0)) == []
    assert sent(machine.hold(X, 0.0)) == [Prevote(SLOT, X)]
    assert sent(machine.hold(Y, 0.0)) == []
    (conflict,) = machine.receive("A", proposal(Y), 0.0)
    assert isinstance(conflict, Note)
    assert (conflict.event, conflict.peer) == ("agreement.equivocation", "A")


@pytest.mark.parametrize(
    ("propose", "why"),
    [
        (proposal(shown="AB"), "a proposal without the Readys of a quorum"),
        (proposal(shown="ABX"), "a proposal without the Readys of a quorum"),
        (proposal(shown="ABBC"), "a proposal that shows two Readys of one voter"),
        (proposal(shown="ABCX"), "a proposal without the Readys of a quorum"),
        (proposal(Y, A=proof(X)), "a proposal of another value than the newest proof that it shows"),
        (proposal(X, A=proof(X, 1), B=proof(Y, 2)), "a proposal of another value than the newest proof that it shows"),
        (proposal(A=proof(voters="AB")), "a certificate without a quorum"),
        (proposal(A=proof(voters="ABB")), "a certificate that counts a voter twice"),
        (proposal(A=proof(voters="ABCX")), "a certificate by others than voters"),
        (proposal(A=proof(attempt=-1)), "a negative attempt"),
        (proposal(A=replace(proof(), slot=replace(SLOT, previous=b"q" * 32))), "a certificate of another decision"),
        (replace(proposal(), slot=replace(SLOT, previous=b"q" * 32)), "a statement on another chain"),
    ],
)
def test_a_proposal_that_its_readys_do_not_justify_is_refused(propose: Propose, why: str) -> None:
    machine = started("B")
    machine.hold(X, 0.0)
    machine.hold(Y, 0.0)
    assert machine.receive("A", propose, 0.0) == [Note("agreement.refused", "A", "Propose", why)]
    assert machine.slot == SLOT


def test_strangers_are_refused_and_older_rounds_and_other_runs_are_not_received() -> None:
    machine = started("B")
    assert reasons(machine.receive("X", Prevote(SLOT, X), 0.0)) == ["it is no voter of this decision"]
    assert machine.receive("A", Prevote(replace(SLOT, round=3), X), 0.0) == []
    assert machine.receive("A", Prevote(replace(SLOT, run="other"), X), 0.0) == []


def test_a_confirm_needs_the_bytes_and_they_are_fetched_from_those_that_accepted() -> None:
    machine = started("B")
    for voter in "AC":
        machine.receive(voter, Prevote(SLOT, X), 0.0)
    assert machine.receive("D", Prevote(SLOT, X), 0.0) == [FetchProven(X, ("A", "C", "D"))]
    assert sent(machine.hold(X, 0.0)) == [Precommit(SLOT, X)]


def test_proofs_are_learned_from_readys_and_proposals_and_shown_in_the_next_ready() -> None:
    slot = SLOT.at(1)
    for source, statement in (("C", VoterReady(slot, proof(Y))), ("B", proposal(Y, 1, C=proof(Y)))):
        machine = started("D", 1)
        machine.receive(source, statement, 0.0)
        all_ready(machine, "ABC", attempt=2)
        assert said(machine)[0] == VoterReady(SLOT.at(2), proof(Y))
    machine = started("D", 1)
    assert reasons(machine.receive("C", VoterReady(slot, proof(Y, voters="AB")), 0.0)) == ["a certificate without a quorum"]
    all_ready(machine, "ABC", attempt=2)
    assert said(machine)[0] == VoterReady(SLOT.at(2))


def test_an_old_value_that_is_proposed_is_fetched_and_then_accepted() -> None:
    machine = started("B", 4)
    newer = proof(Y, attempt=3)
    machine.receive("C", VoterReady(SLOT.at(4), newer), 0.0)  # The proposer did not show this one.
    assert FetchProven(X, tuple("ABC")) in machine.receive("A", proposal(X, 4, "ABD", D=proof(X)), 0.0)
    assert sent(machine.hold(X, 0.0)) == [Prevote(SLOT.at(4), X)]


def test_a_proposer_proposes_only_what_was_made_in_its_slot_and_under_a_quorum() -> None:
    slot = SLOT.at(4)
    machine = started("A", 4)
    all_ready(machine, "B", attempt=4)
    machine.receive("C", VoterReady(SLOT.at(9)), 0.0)  # It starts the clock, and is no longer to be had for this slot.
    assert machine.deadline == 1.0
    assert machine.tick(1.0) == []
    assert machine.making is None
    assert machine.receive("D", VoterReady(slot), 1.0) == []
    assert machine.making == (shown := (("A", None), ("B", None), ("D", None)))
    assert sent(machine.offer(SLOT, Y, shown, 1.0)) == []
    assert Propose(slot, X, shown) in sent(machine.offer(slot, X, shown, 1.0))


def test_a_proposer_fetches_the_old_value_that_it_proposes() -> None:
    machine = started("A")
    for voter in "BC":
        machine.receive(voter, VoterReady(SLOT), 0.0)
    actions = machine.receive("D", VoterReady(SLOT, proof(Y, voters="BCD")), 0.0)
    assert FetchProven(Y, ("B", "C", "D")) in actions


def test_confirms_of_a_quorum_in_one_slot_decide_in_any_attempt() -> None:
    earlier, decision = SLOT.at(2), Decision(SLOT.at(2), X, tuple("ACD"))
    machine = started("B", 7)
    for voter in "AC":
        assert machine.receive(voter, Precommit(earlier, X), 0.0) == []
    assert machine.receive("D", Precommit(earlier, X), 0.0) == machine.meet("A", 0.0) == []
    assert machine.decision == decision
    assert machine.deadline == inf
    # Three of two slots are none.
    machine = started("B", 7)
    for voter, slot in (("A", earlier), ("C", SLOT.at(3)), ("D", earlier)):
        assert machine.receive(voter, Precommit(slot, X), 0.0) == []
    assert machine.decision is None


# Attempts.


def test_an_attempt_has_no_deadline_before_a_quorum_is_in_it() -> None:
    machine = started("B")
    all_ready(machine, "A")
    assert machine.deadline == inf
    assert machine.tick(1e9) == []
    machine.receive("C", VoterReady(SLOT), 10.0)
    assert machine.deadline == 14.0
    assert machine.tick(13.9) == []
    assert reasons(machine.tick(14.0)) == ["no decision with A as the proposer"]
    assert machine.slot.attempt == 1
    assert machine.deadline == inf


def test_invariant_8_less_than_a_third_move_nobody_whatever_they_send() -> None:
    electorate = Electorate({"A": 2, "B": 2, "C": 2, "D": 2, "M": 3})
    machine = started("B", electorate=electorate)
    assert machine.proposer == "M"
    for attempt in (0, 1, 5, 1 << 30):
        slot = machine.slot.at(attempt)
        for statement in (VoterReady(slot), Propose(slot, X, ()), Prevote(slot, X), Precommit(slot, X)):
            assert sent(machine.receive("M", statement, 0.0)) == []
    assert not machine.receive("M", VoterReady(replace(SLOT, round=99)), 0.0)
    assert (machine.slot.attempt, machine.deadline) == (0, inf)


def test_a_third_in_a_later_round_says_that_i_am_behind_once_a_round() -> None:
    machine = started("B")
    assert machine.receive("C", VoterReady(replace(SLOT, round=9)), 0.0) == []
    assert machine.receive("X", VoterReady(replace(SLOT, round=9)), 0.0) == []  # No voter.
    assert machine.receive("C", VoterReady(replace(SLOT, round=5)), 0.0) == []  # Late: it is in round 9.
    assert not machine.is_behind
    reason = "more than 1/3 of the votes are in round"
    assert reasons(machine.receive("D", VoterReady(replace(SLOT, round=6)), 0.0)) == [f"{reason} 6"]
    assert machine.is_behind
    assert machine.receive("D", VoterReady(replace(SLOT, round=6)), 0.0) == []
    assert reasons(machine.receive("D", VoterReady(replace(SLOT, round=10)), 0.0)) == [f"{reason} 9"]


def test_who_is_paused_says_no_ready_and_counts_those_of_others() -> None:
    machine = a_machine("B")
    assert machine.hold(X, 0.0) == []
    all_ready(machine, "CD", attempt=3)
    assert (machine.slot.attempt, said(machine)) == (3, [])
    assert sent(machine.resume(0.0)) == [VoterReady(SLOT.at(3))]
    machine.pause()
    all_ready(machine, "CD", attempt=4)
    assert (machine.slot.attempt, said(machine)) == (4, [])
    # What it holds the bytes of it accepts and confirms, while it trains.
    propose = proposal(X, 4, "ACD")
    assert sent(machine.receive("A", propose, 0.0)) == [Prevote(propose.slot, X)]
    answers = [sent(machine.receive(voter, Prevote(propose.slot, X), 0.0)) for voter in "AC"]
    assert answers == [[], [Precommit(propose.slot, X)]]


# Statements.


def test_equal_statements_of_a_quorum_are_found_and_a_voter_that_moved_on_no_longer_counts() -> None:
    statements = NewestStatements()
    assert [statements.add(voter, Prevote(SLOT, X)) for voter in "CAA"] == ["new", "new", "known"]
    assert statements.quorum_with(Prevote(SLOT, X), E) is None
    assert statements.add("B", Prevote(SLOT, X)) == "new"
    assert statements.quorum_with(Prevote(SLOT, X), E) == ("A", "B", "C")
    assert statements.quorum_with(Prevote(SLOT, Y), E) is statements.quorum_with(Precommit(SLOT, X), E) is None
    assert statements.add("B", Prevote(SLOT, Y)) == "conflict"
    assert statements.add("C", Prevote(SLOT.at(1), X)) == "new"
    assert statements.quorum_with(Prevote(SLOT, X), E) is None
    assert statements.add("C", Prevote(SLOT, X)) == "known"
    assert statements.quorum_with(Prevote(SLOT, X), E) is None


SLOTS, VALUES = [SLOT, SLOT.at(1), SLOT.at(2)], [X, Y]
STATEMENTS = [kind(slot, value) for kind in (Prevote, Precommit) for slot in SLOTS for value in VALUES]


@given(st.lists(st.tuples(st.sampled_from("ABCDZ"), st.sampled_from(STATEMENTS)), max_size=40))
def test_quorums_are_those_of_the_newest_statements(heard: list[tuple[str, Prevote | Precommit]]) -> None:
    statements = NewestStatements()
    for voter, statement in heard:
        statements.add(voter, statement)
    for statement in STATEMENTS:
        voters = tuple(sorted(voter for voter, it in statements.of(type(statement)).items() if it == statement))
        assert statements.quorum_with(statement, E) == (voters if E.is_quorum(voters) else None)


def test_who_learns_of_a_decision_before_it_holds_the_value_precommits_once_it_does() -> None:
    """Another one may lack a vote that has decided it here: what a liar told this voter alone."""
    machine = started("D")
    all_ready(machine)
    for voter in "ABC":
        machine.receive(voter, Prevote(SLOT, X), 0.0)
    for voter in "ABC":
        assert Precommit(SLOT, X) not in sent(machine.receive(voter, Precommit(SLOT, X), 0.0))
    assert machine.decision is not None
    assert sent(machine.hold(X, 1.0)) == [Precommit(SLOT, X)]
    assert sent(machine.hold(X, 2.0)) == []
