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
from flockstep.collectives.agreement.electorate import NOBODY, Electorate
from flockstep.collectives.agreement.machine import VoterMachine
from flockstep.collectives.agreement.statements import Decision, PrevoteQuorum, Propose, Statement, VoterReady
from flockstep.peer.base.errors import LocalError
from flockstep.peer.wire import Precommit, Prevote, Slot
from hypothesis import given
from hypothesis import strategies as st

E = Electorate(dict.fromkeys("ABCD", 1))
SLOT = Slot("run", 4, b"p" * 32)
X, Y = b"X" * 32, b"Y" * 32
TIMING = AgreementTiming(control=1.0, attempt=4.0)


def proof(value: bytes = X, attempt: int = 0, voters: str = "ABC", term: int = 0) -> PrevoteQuorum:
    return PrevoteQuorum(SLOT.at(term, attempt), value, tuple(voters))


def proposal(value: bytes = X, attempt: int = 0, shown: str = "ABC", **proofs: PrevoteQuorum) -> Propose:
    return Propose(SLOT.at(0, attempt), value, tuple((voter, proofs.get(voter)) for voter in shown))


def a_machine(me: str, attempt: int = 0, lock: PrevoteQuorum | None = None, electorate: Electorate = E) -> VoterMachine:
    return VoterMachine(me, SLOT.at(0, attempt), (electorate,), TIMING, lock)


def started(me: str, attempt: int = 0, lock: PrevoteQuorum | None = None, electorate: Electorate = E) -> VoterMachine:
    machine = a_machine(me, attempt, lock, electorate)
    machine.resume(0.0)
    return machine


def all_ready(machine: VoterMachine, voters: Iterable[str] = "ABCD", attempt: int = 0, now: float = 0.0) -> None:
    for voter in voters:
        if voter != machine.me:
            machine.receive(voter, VoterReady(SLOT.at(0, attempt)), now)


def sent(actions: list[AgreementAction]) -> list[Statement]:
    return [action.statement for action in actions if isinstance(action, Dispatch)]


def said(machine: VoterMachine) -> list[Statement]:
    """What a machine repeats to a voter that it meets again."""
    return sent(machine.meet("C", 0.0))


def reasons(actions: list[AgreementAction]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Note)]


def run(machines: dict[str, VoterMachine], now: float = 0.0) -> dict[str, Decision | None]:
    """Deliver everything among these machines; a new value is X and its bytes are everywhere."""
    queue = [(name, action) for name, machine in machines.items() for action in machine.resume(now)]
    queue += [(name, action) for name, machine in machines.items() for action in machine.hold(X, now)]
    made = set[str]()
    while queue or made < {name for name, machine in machines.items() if machine.making is not None}:
        for name, machine in machines.items():
            if machine.making is not None and name not in made:
                made.add(name)
                queue += [(name, action) for action in machine.offer(machine.slot, X, machine.making, now)]
        name, action = queue.pop(0)
        results: dict[str, list[AgreementAction]] = {}
        match action:
            case Dispatch(statement):
                results = {it: machines[it].receive(name, statement, now) for it in machines if it != name}
        queue += [(other, result) for other, actions in results.items() for result in actions]
    return {name: machine.decision for name, machine in machines.items()}


@pytest.mark.parametrize("voters", ["A", "AB", "ABCD", "ABCDEFGHIJ"])
def test_voters_that_are_all_there_decide_in_the_first_attempt_without_a_clock(voters: str) -> None:
    electorate = Electorate(dict.fromkeys(voters, 1))
    decisions = run({voter: a_machine(voter, electorate=electorate) for voter in voters})
    assert {decision.value for decision in decisions.values() if decision} == {X}
    assert {decision.slot for decision in decisions.values() if decision} == {SLOT}


def test_a_later_process_says_nothing_in_the_same_slot_and_holds_the_lock() -> None:
    machine = started("B")
    machine.hold(X, 0.0)
    all_ready(machine)
    actions = machine.receive("A", proposal(), 0.0) + machine.receive("A", Prevote(SLOT, X), 0.0)
    actions += machine.receive("C", Prevote(SLOT, X), 0.0)
    assert sent(actions) == [Prevote(SLOT, X), Precommit(SLOT, X)]
    assert machine.newest_proof == proof()
    again = a_machine("B", attempt=4, lock=proof())
    assert sent(again.resume(9.0)) == [VoterReady(SLOT.at(0, 4), proof())]
    # The other half of an equivocation finds the next slot, and a new value the lock.
    again.hold(Y, 9.0)
    assert sent(again.receive("A", proposal(Y), 9.0)) == []
    assert sent(again.receive("A", proposal(Y, 4), 9.0)) == []


def test_an_accept_waits_for_the_bytes_and_only_the_proposer_is_accepted() -> None:
    machine = started("B")
    assert reasons(machine.receive("C", proposal(), 0.0)) == ["a proposal by another voter than the proposer"]
    assert sent(machine.receive("A", proposal(), 0.0)) == []
    assert sent(machine.hold(X, 0.0)) == [Prevote(SLOT, X)]
    assert sent(machine.hold(Y, 0.0)) == []
    (conflict,) = machine.receive("A", proposal(Y), 0.0)
    assert isinstance(conflict, Note)
    assert (conflict.event, conflict.peer) == ("agreement.equivocation", "A")


def test_a_lock_holds_against_a_new_value_and_an_older_proof_and_gives_way_to_a_newer_one() -> None:
    lock = proof(X, attempt=2)
    for shown, value, accepted in (
        ({}, Y, []),
        ({"C": proof(Y, attempt=1)}, Y, []),
        ({"C": proof(Y, attempt=3)}, Y, [Prevote(SLOT.at(0, 4), Y)]),
        ({}, X, [Prevote(SLOT.at(0, 4), X)]),
    ):
        machine = started("B", 4, lock)
        machine.hold(X, 0.0)
        machine.hold(Y, 0.0)
        actions = machine.receive("A", proposal(value, 4, "ACD", **shown), 0.0)
        assert sent(actions) == accepted
        assert reasons(actions) == ([] if accepted else ["I am locked on another value by a newer proof"])


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
        (proposal(A=proof(voters="ABCX")), "a certificate by others than voters of term 0"),
        (proposal(A=proof(term=1)), "term 1 is unknown"),
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
    assert reasons(machine.receive("X", Prevote(SLOT, X), 0.0)) == ["it is no voter of term 0"]
    assert machine.receive("A", Prevote(replace(SLOT, round=3), X), 0.0) == []
    assert machine.receive("A", Prevote(replace(SLOT, run="other"), X), 0.0) == []


def test_a_proposer_waits_one_exchange_for_more_readys_than_a_quorum() -> None:
    machine = started("A")
    all_ready(machine, "BC", now=5.0)
    assert machine.deadline == 6.0
    assert machine.tick(5.9) == []
    assert machine.tick(6.0) == []
    assert machine.making == (("A", None), ("B", None), ("C", None))
    assert machine.deadline == 9.0
    # A proof that comes while the value is made replaces it.
    machine.receive("D", VoterReady(SLOT, proof(Y, voters="BCD")), 7.0)
    assert proposal(Y, shown="ABCD", D=proof(Y, voters="BCD")) in sent(machine.meet("B", 7.0))
    assert sent(machine.offer(SLOT, X, machine.making, 8.0)) == []


def test_a_new_value_is_proposed_under_the_readys_that_it_was_made_under() -> None:
    machine = started("A")
    all_ready(machine, "BC")
    machine.tick(1.0)
    assert machine.making is not None
    machine.receive("D", VoterReady(SLOT), 2.0)
    machine.receive("C", VoterReady(SLOT.at(0, 1)), 2.0)  # It has left: three of the four are still in the slot.
    assert sent(machine.offer(SLOT, X, machine.making, 3.0))[0] == proposal()


def test_a_proof_of_an_earlier_attempt_is_shown_and_not_confirmed() -> None:
    machine = started("B", 1)
    machine.hold(X, 0.0)
    actions = [machine.receive(voter, Prevote(SLOT, X), 0.0) for voter in "ACD"]
    assert actions == [[], [], []]
    all_ready(machine, attempt=2)
    assert said(machine) == [VoterReady(SLOT.at(0, 2), proof(voters="ACD"))]


def test_a_confirm_needs_the_bytes_and_they_are_fetched_from_those_that_accepted() -> None:
    machine = started("B")
    for voter in "AC":
        machine.receive(voter, Prevote(SLOT, X), 0.0)
    assert machine.receive("D", Prevote(SLOT, X), 0.0) == [FetchProven(X, ("A", "C", "D"))]
    assert sent(machine.hold(X, 0.0)) == [Precommit(SLOT, X)]


def test_proofs_are_learned_from_readys_and_proposals_and_shown_in_the_next_ready() -> None:
    slot = SLOT.at(0, 1)
    for source, statement in (("C", VoterReady(slot, proof(Y))), ("B", proposal(Y, 1, C=proof(Y)))):
        machine = started("D", 1)
        machine.receive(source, statement, 0.0)
        all_ready(machine, "ABC", attempt=2)
        assert said(machine)[0] == VoterReady(SLOT.at(0, 2), proof(Y))
    machine = started("D", 1)
    assert reasons(machine.receive("C", VoterReady(slot, proof(Y, voters="AB")), 0.0)) == ["a certificate without a quorum"]
    all_ready(machine, "ABC", attempt=2)
    assert said(machine)[0] == VoterReady(SLOT.at(0, 2))


def test_an_old_value_that_is_proposed_is_fetched_and_then_accepted() -> None:
    machine = started("B", 4)
    newer = proof(Y, attempt=3)
    machine.receive("C", VoterReady(SLOT.at(0, 4), newer), 0.0)  # The proposer did not show this one.
    assert FetchProven(X, tuple("ABC")) in machine.receive("A", proposal(X, 4, "ABD", D=proof(X)), 0.0)
    assert sent(machine.hold(X, 0.0)) == [Prevote(SLOT.at(0, 4), X)]


def test_a_proposer_proposes_only_what_was_made_in_its_slot_and_under_a_quorum() -> None:
    slot = SLOT.at(0, 4)
    machine = started("A", 4)
    all_ready(machine, "B", attempt=4)
    machine.receive("C", VoterReady(SLOT.at(0, 9)), 0.0)  # It starts the clock, and is no longer to be had for this slot.
    assert machine.deadline == 1.0
    assert machine.tick(1.0) == []
    assert machine.making is None
    assert machine.receive("D", VoterReady(slot), 1.0) == []
    assert machine.making == (shown := (("A", None), ("B", None), ("D", None)))
    assert sent(machine.offer(SLOT, Y, shown, 1.0)) == []
    assert Propose(slot, X, shown) in sent(machine.offer(slot, X, shown, 1.0))


def test_a_late_statement_does_not_replace_a_newer_one() -> None:
    machine = started("B")
    for attempt in (3, 1):
        machine.receive("D", VoterReady(SLOT.at(0, attempt)), 0.0)
    machine.receive("C", VoterReady(SLOT.at(0, 3)), 0.0)
    assert machine.slot.attempt == 3


def test_a_proposer_fetches_the_old_value_that_it_proposes() -> None:
    machine = started("A")
    for voter in "BC":
        machine.receive(voter, VoterReady(SLOT), 0.0)
    actions = machine.receive("D", VoterReady(SLOT, proof(Y, voters="BCD")), 0.0)
    assert FetchProven(Y, ("B", "C", "D")) in actions


def test_confirms_of_a_quorum_in_one_slot_decide_in_any_attempt() -> None:
    earlier, decision = SLOT.at(0, 2), Decision(SLOT.at(0, 2), X, tuple("ACD"))
    machine = started("B", 7)
    for voter in "AC":
        assert machine.receive(voter, Precommit(earlier, X), 0.0) == []
    assert machine.receive("D", Precommit(earlier, X), 0.0) == machine.meet("A", 0.0) == []
    assert machine.decision == decision
    assert machine.deadline == inf
    # Three of two slots are none.
    machine = started("B", 7)
    for voter, slot in (("A", earlier), ("C", SLOT.at(0, 3)), ("D", earlier)):
        assert machine.receive(voter, Precommit(slot, X), 0.0) == []
    assert machine.decision is None


# Attempts and terms.


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


def test_an_attempt_outlasts_the_gathering_of_readys() -> None:
    with pytest.raises(LocalError, match="outlast"):
        AgreementTiming(control=4.0, attempt=4.0)


def test_one_of_three_voters_in_a_later_attempt_moves_the_others() -> None:
    machine = started("B", electorate=Electorate({"A": 1, "B": 1, "C": 1}))
    assert sent(machine.receive("C", VoterReady(SLOT.at(0, 1 << 14)), 0.0)) == [VoterReady(SLOT.at(0, 1 << 14))]


def test_a_third_in_a_later_attempt_moves_me_and_less_does_not() -> None:
    machine = started("B")
    assert machine.receive("C", VoterReady(SLOT.at(0, 1 << 40)), 0.0) == []
    assert machine.slot == SLOT
    actions = machine.receive("D", VoterReady(SLOT.at(0, 3)), 0.0)
    assert reasons(actions) == ["1/3 of the votes or more are there"]
    assert sent(actions) == [VoterReady(SLOT.at(0, 3))]
    all_ready(machine, attempt=2)  # Late ones: never back.
    assert machine.slot.attempt == 3


def test_invariant_8_less_than_a_third_move_nobody_whatever_they_send() -> None:
    electorate = Electorate({"A": 2, "B": 2, "C": 2, "D": 2, "M": 3})
    machine = started("B", electorate=electorate)
    assert machine.proposer == "M"
    for attempt in (0, 1, 5, 1 << 30):
        slot = machine.slot.at(0, attempt)
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


def test_a_voter_that_does_not_know_who_votes_in_its_term_learns_that_it_is_behind() -> None:
    machine = VoterMachine("A", SLOT.at(1, 1), (E, NOBODY), TIMING)
    machine.resume(0.0)
    machine.receive("B", VoterReady(replace(SLOT, round=8)), 1.0)
    assert not machine.is_behind
    machine.receive("C", VoterReady(replace(SLOT, round=9)), 1.0)
    assert machine.is_behind


def test_voters_of_an_earlier_term_stop_nobody_in_a_later_one() -> None:
    machine = started("A")
    machine.appoint(1, Electorate({"A": 1, "B": 1}), 0.0)
    for voter in "CD":
        assert machine.receive(voter, VoterReady(replace(SLOT, round=9)), 1.0) == []
    assert not machine.is_behind
    machine.receive("B", VoterReady(replace(SLOT, round=9)), 1.0)
    assert machine.is_behind


def test_a_term_brings_locks_along_and_is_appointed_once() -> None:
    lock = proof()
    machine = started("B", lock=lock)
    first, second = Electorate({"A": 1, "B": 1}), Electorate({"B": 1})
    assert reasons(machine.receive("A", VoterReady(SLOT.at(1, 0)), 0.0)) == ["term 1 is unknown"]
    assert sent(machine.appoint(1, first, 0.0)) == [VoterReady(SLOT.at(1, 0), lock)]
    assert machine.appoint(1, first, 0.0) == []
    assert reasons(machine.appoint(1, second, 0.0)) == ["term 1: another appointment for the same term"]
    machine.hold(X, 0.0)
    actions = machine.appoint(2, second, 0.0)  # Alone, and the value of the first term again.
    assert machine.decision == Decision(SLOT.at(2, 0), X, ("B",))
    assert machine.newest_proof == proof(voters="B", term=2)
    assert [type(statement) for statement in sent(actions)] == [VoterReady, Propose, Prevote, Precommit]


def test_terms_that_i_was_not_in_have_no_voters_for_me() -> None:
    lock = proof()
    machine = started("B", lock=lock)
    third = Electorate({"A": 1, "B": 1})
    assert sent(machine.appoint(3, third, 0.0)) == [VoterReady(SLOT.at(3, 0), lock)]
    assert machine.terms == (E, NOBODY, NOBODY, third)
    assert reasons(machine.receive("A", VoterReady(SLOT.at(1, 0)), 0.0)) == ["it is no voter of term 1"]
    skipped = VoterReady(SLOT.at(3, 0), proof(Y, voters="A", term=2))
    assert reasons(machine.receive("A", skipped, 0.0)) == ["a certificate by others than voters of term 2"]
    # It learns of one from its appointment, and goes nowhere.
    assert machine.appoint(2, third, 0.0) == []
    assert machine.terms == (E, NOBODY, third, third)
    skipped = VoterReady(SLOT.at(3, 0), proof(Y, voters="AB", term=2))
    assert reasons(machine.receive("A", skipped, 0.0)) == []
    assert reasons(machine.appoint(2, E, 0.0)) == ["term 2: another appointment for the same term"]
    assert (machine.slot, machine.newest_proof) == (SLOT.at(3, 0), skipped.proof)


def test_a_voter_that_may_not_sign_in_the_first_attempts_of_a_term_is_followed_to_a_later_one() -> None:
    machine, other = started("B"), started("A")
    far = VoterReady(SLOT.at(1, 4096))
    assert sent(machine.appoint(1, Electorate({"A": 1, "B": 1}), 0.0, attempt=4096)) == [far]
    other.appoint(1, Electorate({"A": 1, "B": 1}), 0.0)
    assert sent(other.receive("B", far, 0.0)) == [far]


def test_a_voter_that_does_not_know_who_votes_in_its_term_learns_it() -> None:
    machine = VoterMachine("B", SLOT.at(1, 0), (E, NOBODY), TIMING)
    assert (machine.resume(0.0), machine.deadline) == ([], inf)
    assert sent(machine.appoint(1, E, 0.0)) == [VoterReady(SLOT.at(1, 0))]
    assert machine.slot == SLOT.at(1, 0)


def test_who_is_paused_says_no_ready_and_counts_those_of_others() -> None:
    machine = a_machine("B")
    assert machine.hold(X, 0.0) == []
    all_ready(machine, "CD", attempt=3)
    assert (machine.slot.attempt, said(machine)) == (3, [])
    assert sent(machine.resume(0.0)) == [VoterReady(SLOT.at(0, 3))]
    machine.pause()
    all_ready(machine, "CD", attempt=4)
    assert (machine.slot.attempt, said(machine)) == (4, [])
    # What it holds the bytes of it accepts and confirms, while it trains.
    propose = proposal(X, 4, "ACD")
    assert sent(machine.receive("A", propose, 0.0)) == [Prevote(propose.slot, X)]
    answers = [sent(machine.receive(voter, Prevote(propose.slot, X), 0.0)) for voter in "AC"]
    assert answers == [[], [Precommit(propose.slot, X)]]


def test_an_attempt_that_is_abandoned_leads_to_the_next_one_until_there_is_a_decision() -> None:
    machine = started("B")
    actions = machine.abandon("its data did not arrive", 0.0)
    assert reasons(actions) == ["its data did not arrive"]
    assert sent(actions) == [VoterReady(SLOT.at(0, 1))]
    for voter in "ACD":
        machine.receive(voter, Precommit(SLOT, X), 0.0)
    assert machine.abandon("its data did not arrive", 0.0) == []
    assert machine.slot == SLOT.at(0, 1)


def test_a_voter_that_was_not_appointed_signs_nothing_in_that_term() -> None:
    machine = started("B")
    assert sent(machine.appoint(1, Electorate({"A": 1}), 0.0)) == []
    assert machine.receive("A", Precommit(SLOT.at(1, 0), X), 0.0) == []
    assert machine.decision == Decision(SLOT.at(1, 0), X, ("A",))


def test_attempts_of_another_term_move_me_nowhere() -> None:
    machine = VoterMachine("B", SLOT, (E, Electorate(E.votes)), TIMING)
    machine.resume(0.0)
    all_ready(machine, "A")
    for voter in "CD":
        assert machine.receive(voter, VoterReady(SLOT.at(1, 5)), 0.0) == []
    assert (machine.slot, machine.deadline) == (SLOT, inf)


def test_an_observer_signs_nothing_in_any_term_and_learns_the_decision() -> None:
    machine = VoterMachine("B", SLOT, (E,), TIMING, is_observer=True)
    assert machine.resume(0.0) + machine.hold(X, 0.0) == []
    all_ready(machine)
    actions = machine.receive("A", proposal(), 0.0) + machine.appoint(1, E, 0.0) + machine.tick(1e9)
    for voter in "ACD":
        actions += machine.receive(voter, Precommit(SLOT, X), 0.0)
    assert [it for it in actions if isinstance(it, Dispatch)] == []
    assert machine.decision == Decision(SLOT, X, tuple("ACD"))


# Statements.


def test_equal_statements_of_a_quorum_are_found_and_a_voter_that_moved_on_no_longer_counts() -> None:
    statements = NewestStatements()
    assert [statements.add(voter, Prevote(SLOT, X)) for voter in "CAA"] == ["new", "new", "known"]
    assert statements.quorum_with(Prevote(SLOT, X), E) is None
    assert statements.add("B", Prevote(SLOT, X)) == "new"
    assert statements.quorum_with(Prevote(SLOT, X), E) == ("A", "B", "C")
    assert statements.quorum_with(Prevote(SLOT, Y), E) is statements.quorum_with(Precommit(SLOT, X), E) is None
    assert statements.add("B", Prevote(SLOT, Y)) == "conflict"
    assert statements.add("C", Prevote(SLOT.at(0, 1), X)) == "new"
    assert statements.quorum_with(Prevote(SLOT, X), E) is None
    assert statements.add("C", Prevote(SLOT, X)) == "known"
    assert statements.quorum_with(Prevote(SLOT, X), E) is None


SLOTS, VALUES = [SLOT, SLOT.at(0, 1), SLOT.at(1, 0)], [X, Y]
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
