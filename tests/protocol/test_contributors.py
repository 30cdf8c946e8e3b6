"""Members without a vote: they contribute, and own parts at most. Here a roster has four parts, those of the voters."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded
from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.allreduce.actions import (
    Action,
    AskFor,
    OutcomeKind,
    Send,
)
from flockstep.collectives.allreduce.contributor import ContributorRound
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.round import gather
from flockstep.collectives.round.machine import Round
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.liars import lies
from support.rounds import PEERS, SLOT, ConnectedRounds, Mail, a_ready, order_of, signed
from support.swarm import SimSwarm, all_at_once, with_swarm

VOTERS, MEMBERS = PEERS[:4], PEERS[:9]
OTHERS = MEMBERS[4:]


@pytest.fixture(autouse=True)
def four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PARTS", 4)


def run_rounds(body: Callable[[SimSwarm], object], **kind: Any) -> None:
    run_virtual(partial(with_swarm, 9, body, charter=founded(4), **kind))


@pytest.mark.parametrize("rule", ["mean", "gramguard"])
def test_all_contribute_and_have_the_same_state(rule: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        for sim in swarm.sims:
            sim.common = 2.0
        await all_at_once(swarm.sims, rounds=3)
        assert {outcome.kind for sim in swarm.sims for outcome in sim.outcomes} == {OutcomeKind.DONE}
        assert len({sim.root for sim in swarm.sims}) == 1
        for outcome in swarm.sims[-1].outcomes:
            assert {*outcome.cut} == {sim.peer for sim in swarm.sims}
            assert len(outcome.value.outputs) == 4

    run_rounds(body, rule=rule)


def test_who_trains_nothing_sketches_nothing() -> None:
    """A keeper among those that only contribute has no parts: its process ended with the first cut."""

    async def body(swarm: SimSwarm) -> None:
        for sim in swarm.sims[-2:]:
            sim.trains = False
        await all_at_once(swarm.sims, rounds=2)
        assert {outcome.kind for sim in swarm.sims for outcome in sim.outcomes} == {OutcomeKind.DONE}
        assert {*swarm.sims[-1].outcomes[-1].cut} == {sim.peer for sim in swarm.sims[:-2]}

    run_rounds(body, rule="gramguard")


def test_all_state_the_lines_of_those_that_judged_the_last_round() -> None:
    async def body(swarm: SimSwarm) -> None:
        stated = Counter[int]()

        def note(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
            if isinstance(message, wire.Ready) and message.slot.round == 2:
                stated[len(message.rates)] += 1
            return message

        for sim in swarm.sims:
            lies(sim, note)
        await all_at_once(swarm.sims, rounds=2)
        assert stated.keys() == {4}

    run_rounds(body)


def test_who_is_ready_and_has_no_place_is_sent_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MOST_PLACES_BYTES", 6 * gather.PLACE_BYTES)

    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        outcomes = [sim.outcomes[0] for sim in swarm.sims]
        assert {(outcome.kind, len(outcome.members)) for outcome in outcomes} == {(OutcomeKind.DONE, 6)}
        assert trio.current_time() < 20.0

    run_rounds(body)


def started(**fields: Any) -> ConnectedRounds:
    rounds = ConnectedRounds(MEMBERS, voters=VOTERS, **fields)
    rounds.start()
    return rounds


def test_no_member_that_only_contributes_hears_of_what_it_does_not_judge() -> None:
    heard = Counter[tuple[str, str]]()

    def note(target: str, mail: Mail) -> bool:
        if isinstance(mail, wire.Signed):
            heard["to" if target in OTHERS else "", type(wire.opened(mail)).__name__] += 1
            assert not (target in OTHERS and mail.sender in OTHERS and mail.sender != target)
        return False

    rounds = started(lost=note)
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {name for to, name in heard if to} == {"Ready", "Roster", "Cut", "Outputs"}
    assert heard["to", "Cut"] == 2 * len(OTHERS)
    assert heard["to", "Outputs"] == len(OTHERS)
    assert {type(rounds.machines[peer].exchange) for peer in OTHERS} == {ContributorRound}


@pytest.mark.parametrize("first", range(1, 6))
def test_two_voters_of_seven_that_pass_no_roster_on_leave_nobody_out(first: int) -> None:
    voters, members = PEERS[:7], PEERS[:14]
    silent = order_of(voters)[first : first + 2]
    rounds = ConnectedRounds(members, voters=voters, deaf={*itertools.product(silent, members[7:])})
    rounds.start()
    rounds.settle()
    assert {*rounds.outcomes()[0].cut} == {*members}


def test_keys_without_a_vote_that_judge_keep_the_roster_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six judges do, one after the other in the ring: the others waited for whom they left out to the deadline."""
    monkeypatch.setattr(wire, "MAX_PARTS", 6)
    others = PEERS[4:]
    rounds = ConnectedRounds(PEERS, voters=VOTERS, deaf={*itertools.product(others[:2], others)})
    began = rounds.now
    rounds.start()
    rounds.settle()
    assert {*rounds.outcomes()[0].cut} == {*PEERS}
    assert rounds.now == began


@pytest.mark.parametrize("seed", range(12))
def test_one_that_fails_at_any_moment_costs_its_own_contribution_at_most(seed: int) -> None:
    rounds = started(seed=seed, attempts=3)
    victim = OTHERS[seed % len(OTHERS)]
    rounds.settle(deaths={40 + 23 * seed: victim})
    assert rounds.kinds() == {OutcomeKind.DONE}
    outcome = rounds.outcomes()[0]
    assert {*outcome.cut} >= {*MEMBERS} - {victim}
    assert outcome.slot.attempt == 0


def test_members_that_hold_nothing_and_leave_move_no_deadline() -> None:
    """One is silent, and the others of one stranger leave one after the other, each just before the deadline."""
    mute, leaving = OTHERS[0], OTHERS[1:4]
    rounds = started()
    rounds.until(lambda: all(rounds.machines[peer].has_roster for peer in VOTERS))
    rounds.deaf = {(mute, voter) for voter in VOTERS}
    rounds.mail = [it for it in rounds.mail if it[2] != mute]
    rounds.deliver_all()
    due = rounds.machines[VOTERS[0]].deadline
    for peer in leaving:
        rounds.now = rounds.machines[VOTERS[0]].deadline - 0.01
        for voter in VOTERS:
            rounds.do(voter, rounds.machines[voter].lose(peer, "it left", rounds.now))
    assert rounds.machines[VOTERS[0]].deadline == due
    rounds.settle()
    assert rounds.now == due


@pytest.mark.parametrize("moment", [wire.Roster, wire.Cut, wire.Outputs])
def test_after_the_loss_of_the_proposer_all_contribute_to_the_next_attempt(moment: type) -> None:
    rounds = started(attempts=3)
    rounds.until(lambda: bool(rounds.messages(moment)))
    rounds.kill(order_of(VOTERS)[0])
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    outcome = rounds.outcomes()[0]
    assert outcome.slot.attempt == 1
    assert {*outcome.cut} == {*MEMBERS} - {order_of(VOTERS)[0]}


def test_one_that_hears_no_end_of_an_attempt_gives_it_up() -> None:
    alone = OTHERS[0]
    rounds = started()
    rounds.until(lambda: bool(rounds.messages(wire.Cut)))
    rounds.lost = lambda target, mail: target == alone
    rounds.mail = [it for it in rounds.mail if it[0] != alone]
    rounds.settle()
    outcome = rounds.machines[alone].outcome
    assert outcome is not None
    assert outcome.kind is OutcomeKind.VOID
    assert outcome.reason == "the voters have not ended the attempt"
    assert {rounds.machines[peer].outcome.kind for peer in VOTERS} == {OutcomeKind.DONE}  # type: ignore[union-attr]


def test_one_that_sees_the_next_round_begin_waits_for_the_certificate() -> None:
    """Voters are Ready again once they have it; it may come later than that, to who is sent it by others."""
    rounds, one = started(), OTHERS[0]
    rounds.until(lambda: all(rounds.machines[peer].outcome is not None for peer in VOTERS))
    machine, certificate = rounds.machines[one], rounds.outcomes()[0].certificate
    assert certificate is not None
    slot = wire.Slot(SLOT.run, 2, bytes(32))
    for voter in VOTERS:
        ready = a_ready(slot=slot)
        rounds.do(one, machine.receive(signed(voter, ready), ready, rounds.now))
    assert machine.outcome is None
    machine.certified(certificate)
    rounds.do(one, [])
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}


def test_what_the_proposer_names_to_it_alone_is_sketched_for_nobody_else() -> None:
    """Outputs of another cut than the proposer's last one are none: a liar would make it sketch without end."""
    rounds = started()
    rounds.until(lambda: all(rounds.machines[peer].phase == "judge" for peer in OTHERS))
    machine, proposer = rounds.machines[OTHERS[0]], order_of(VOTERS)[0]
    mute = sum(isinstance(message, wire.Sketch) for peer, message in rounds.said if peer == OTHERS[0])
    for number in range(3):
        false = wire.Outputs(machine.slot, bytes([number]) * 32, number, (bytes(32),) * 4, ())
        rounds.do(OTHERS[0], machine.receive(signed(proposer, false), false, rounds.now))
    assert sum(isinstance(message, wire.Sketch) for peer, message in rounds.said if peer == OTHERS[0]) == mute == 1


SILENT_AT_ONCE: dict[str, dict[str, Any]] = {peer: {"awaits_sketch": lambda it: it != OTHERS[-1]} for peer in MEMBERS}


def made_alike(rounds: ConnectedRounds) -> set[int]:
    """Return the parts whose outputs more than one voter has made."""
    makers = Counter((result.part, peer) for peer, result in rounds.said if isinstance(result, wire.Result))
    return {part for part, count in Counter(part for part, _ in makers).items() if count > 1}


@pytest.mark.parametrize("num_silent", [2, 3])
def test_what_too_few_sketch_for_voters_make_alike(num_silent: int) -> None:
    """Of seven that weigh alike more than a third fall silent after the outputs: the sketches say nothing of any part."""
    silent = OTHERS[-num_silent:]
    rounds = ConnectedRounds(
        [*VOTERS, *OTHERS[-3:]], voters=VOTERS, lost=lambda _, mail: any(is_sketch_of(mail, peer) for peer in silent)
    )
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {outcome.slot.attempt for outcome in rounds.outcomes()} == {0}
    assert {*rounds.outcomes()[0].cut} == {*rounds.peers}, "who is silent is in all the same"
    assert made_alike(rounds) == (set() if num_silent == 2 else {0, 1, 2, 3})


def test_an_honest_output_that_a_sketch_contradicts_counts_once_voters_make_it_alike() -> None:
    rounds = started()
    rounds.until(lambda: bool(rounds.messages(wire.Result)))
    doubted = next(it for it in rounds.messages(wire.Result))
    rounds.false.add(doubted.output)  # By a false sketch of somebody: nobody is convicted here.
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert rounds.outcomes()[0].value.outputs[doubted.part] == doubted.output
    assert made_alike(rounds) == {doubted.part}
    assert not any(outcome.late for outcome in rounds.outcomes())


def test_words_of_who_does_not_judge_are_not_kept() -> None:
    rounds = started()
    rounds.until(lambda: all(rounds.machines[peer].has_roster for peer in MEMBERS))
    judge, liar = rounds.machines[VOTERS[0]], OTHERS[0]
    roster = judge.exchange.table.hash
    for message in (
        wire.Have(judge.slot, roster, b"", ((0, (1,)),), bytes(16), bytes(32)),
        wire.Result(judge.slot, roster, 0, roster),
    ):
        (note,) = judge.receive(signed(liar, message), message, rounds.now)
        assert isinstance(note, Note)
        assert (note.event, note.peer) == ("round.refused", liar)
    assert {wire.CODES[it.code] for it in judge.statements_of(liar)} <= {wire.Commit, wire.Sketch}


def test_certified_outputs_are_asked_of_all_judges_alike() -> None:
    rounds = started()
    rounds.until(lambda: all(rounds.machines[peer].has_roster for peer in OTHERS))
    first = [rounds.machines[peer].exchange.providers[0] for peer in OTHERS]
    assert max(Counter(first).values()) <= -(-len(OTHERS) // 4)
    assert {*first} == {*VOTERS}


# Owners without a vote.


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three members without a vote own parts."""
    monkeypatch.setattr(wire, "MAX_PARTS", 7)
    rounds = started()
    rounds.until(lambda: all(machine.has_roster for machine in rounds.machines.values()))
    table = rounds.machines[VOTERS[0]].exchange.table
    return [table.members[index] for index in sorted(table.owners - table.seating.voters)]


@pytest.mark.parametrize("rule", ["gramguard", "mean"])
def test_owners_without_a_vote_are_told_what_they_need_and_no_more(owners: list[str], rule: str) -> None:
    assert len(owners) == 3
    heard, sketches = Counter[tuple[bool, str]](), Counter[tuple[bool, bool]]()

    class Noting(ConnectedRounds):
        def _do(self, peer: str, machine: Round, action: Action) -> None:
            if isinstance(action, Send):
                for target in {*action.to} & {*OTHERS} - {peer}:
                    heard[target in owners, type(action.message).__name__] += 1
                    if isinstance(action.message, wire.Sketch):
                        sketches[target in owners, bool(action.message.outputs)] += 1
            super()._do(peer, machine, action)

    rounds = Noting(MEMBERS, voters=VOTERS, setups={peer: {"rule": rule_named(rule)} for peer in MEMBERS})
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {*rounds.outcomes()[0].cut} == {*MEMBERS}
    assert rounds.outcomes()[0].slot.attempt == 0
    assert {outcome.late for outcome in rounds.outcomes()} == {()}
    all_hear = {"Cut", "Outputs"}
    judged = {"Sketch"} if rule == "gramguard" else set()
    assert {name for is_owner, name in heard if not is_owner} == all_hear
    assert {name for is_owner, name in heard if is_owner} == {*all_hear, "Commit", "Weigh", *judged}
    assert sketches.keys() == ({(True, False)} if judged else set())
    assert heard[True, "Weigh"] == len(VOTERS) * len(owners)


def test_an_owner_reduces_with_the_weights_that_voters_with_a_third_of_the_votes_state(owners: list[str]) -> None:
    liar = order_of(VOTERS)[1]

    def less(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if peer == liar and isinstance(message, wire.Weigh):
            return replace(message, weights=message.weights[1:])
        return message

    rounds = started(tampered=less)
    rounds.until(lambda: bool(rounds.messages(wire.Weigh)))
    rounds.mail.sort(key=lambda it: it[2] != liar)  # The lie comes first.
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {(outcome.slot.attempt, outcome.late) for outcome in rounds.outcomes()} == {(0, ())}
    assert rounds.noted("round.output_doubted") == set()


def test_one_voter_alone_lets_no_owner_reduce(owners: list[str]) -> None:
    liar, owner = order_of(VOTERS)[1], owners[0]
    rounds = started()
    machine = rounds.machines[owner]
    rounds.until(lambda: any(peer == owner and isinstance(it, wire.Have) and it.cut for peer, it in rounds.said))
    table = machine.exchange.table
    false = wire.Weigh(machine.slot, bytes(32), table.me, ((table.me, 1.0),))
    rounds.do(owner, machine.receive(signed(liar, false), false, rounds.now))
    assert not any(peer == owner and isinstance(it, wire.Result) and it.cut == bytes(32) for peer, it in rounds.said)


def test_a_cut_that_tells_others_than_its_words_say_is_void(owners: list[str]) -> None:
    proposer = order_of(VOTERS)[0]

    def mask(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if peer == proposer and isinstance(message, wire.Cut):
            return replace(message, masks=(b"\1", *message.masks[1:]))
        return message

    rounds = started(tampered=mask, attempts=2)
    rounds.settle()
    assert rounds.noted("peer.charged") == {proposer}
    assert {(outcome.kind, outcome.slot.attempt) for outcome in rounds.outcomes()} == {(OutcomeKind.DONE, 1)}


@pytest.mark.parametrize("kept", [wire.Roster, wire.Cut])
def test_an_owner_gets_from_voters_what_the_proposer_keeps_from_it(owners: list[str], kept: type) -> None:
    proposer = order_of(VOTERS)[0]

    def is_kept(target: str, mail: Mail) -> bool:
        is_first = isinstance(mail, wire.Signed) and mail.sender == proposer and isinstance(wire.opened(mail), kept)
        return target == owners[0] and is_first and not asked

    asked: list[Action] = []

    class Asking(ConnectedRounds):
        def _do(self, peer: str, machine: Round, action: Action) -> None:
            if isinstance(action, AskFor) and peer == owners[0]:
                asked.append(action)
            super()._do(peer, machine, action)

    rounds = Asking(MEMBERS, voters=VOTERS, lost=is_kept)
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {*rounds.outcomes()[0].cut} == {*MEMBERS}
    assert owners[0] not in {peer for outcome in rounds.outcomes() for peer in (*outcome.silent, *outcome.late)}
    assert rounds.now == 1.0


def is_sketch_of(mail: Mail, peer: str) -> bool:
    """Return True for a sketch of a peer after the outputs."""
    message = wire.opened(mail) if isinstance(mail, wire.Signed) and mail.sender == peer else None
    return isinstance(message, wire.Sketch) and bool(message.outputs)
