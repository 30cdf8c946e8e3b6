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
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.allreduce.actions import (
    Action,
    AskFor,
    CheckOutputs,
    Forward,
    OutcomeKind,
    SecondPart,
    Send,
    ShowPart,
)
from flockstep.collectives.allreduce.check import TABLE_BYTES
from flockstep.collectives.allreduce.contributor import ContributorRound
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.round import gather
from flockstep.collectives.round.machine import Round
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.liars import lies
from support.rounds import PEERS, PENDING, SLOT, ConnectedRounds, Fetch, Mail, a_ready, order_of, signed
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


def test_sixty_that_do_not_sketch_after_the_outputs_cost_each_session_few_messages() -> None:
    """A message for each part of each of them filled the queues of sessions, and voters had more to send than one may."""
    mute = [f"12D3KooW{number:044}" for number in range(60)]

    def lost(target: str, mail: Mail) -> bool:
        message = wire.opened(mail) if isinstance(mail, wire.Signed) and mail.sender in mute else None
        return isinstance(message, wire.Sketch) and bool(message.outputs)

    rounds = ConnectedRounds([*VOTERS, *mute], voters=VOTERS, lost=lost)
    rounds.start()
    rounds.settle()
    assert {rounds.machines[peer].outcome.kind for peer in VOTERS} == {OutcomeKind.DONE}  # type: ignore[union-attr]
    assert {*rounds.outcomes()[0].cut} == {*rounds.peers}
    sent = Counter((giver, it.contributor) for giver, it in rounds.said if isinstance(it, wire.Second))
    assert max(len(it.tables) for it in rounds.messages(wire.Second)) == 3, "of its own part, and of two that it deputizes"
    assert max(sent.values()) <= 2


class Silent:
    """A round of eight parts with a contributor that is silent after the outputs, and a voter that answers for it.

    That voter has the bytes of its own part, and of those that it deputizes what arrives by `bring`. Owners without a vote
    are not heard.
    """

    def __init__(self, **fields: Any) -> None:
        self.giver, mute = order_of(VOTERS)[1], OTHERS[-1]

        def lost(target: str, mail: Mail) -> bool:
            message = wire.opened(mail) if isinstance(mail, wire.Signed) else None
            if isinstance(message, wire.Second) and message.contributor == self.index:
                return mail.sender in self.withholding or mail.sender not in VOTERS  # type: ignore[union-attr]
            return isinstance(message, wire.Sketch) and bool(message.outputs) and mail.sender == mute  # type: ignore[union-attr]

        def broken(peer: str, fetch: Fetch) -> str | None:
            return PENDING if peer == self.giver and fetch.source == mute and fetch.part in self.deputized else None

        self.withholding: set[str] = set()
        self.slow, self.waiting = False, list[SecondPart]()
        self.checks: list[CheckOutputs] = []
        """What the giver is to check, where it has `slow_checks`."""
        self.slow_checks = False
        self.index, self.deputized = -1, set[int]()
        self.rounds = ConnectedRounds(MEMBERS, voters=VOTERS, lost=lost, broken=broken, **fields)
        self.machine, self.do = self.rounds.machines[self.giver], self.rounds._do
        self.rounds._do = self.later  # type: ignore[method-assign]
        self.rounds.start()
        self.rounds.until(lambda: self.machine.has_roster)
        self.table = self.machine.exchange.table
        self.index, self.deputized = self.table.places[mute], {*self.table.deputized}
        self.first, self.second = (
            [part for part in sorted(self.deputized) if self.table.deputies(part)[place] == self.table.me] for place in (0, 1)
        )
        self.rounds.deliver_all()

    def later(self, peer: str, machine: Round, action: Action) -> None:
        if self.slow and peer == self.giver and isinstance(action, SecondPart):
            self.waiting.append(action)
        elif self.slow_checks and peer == self.giver and isinstance(action, CheckOutputs):
            self.checks.append(action)
        else:
            self.do(peer, machine, action)

    def make(self) -> None:
        """Make the sketches that it has begun while it was slow."""
        self.slow = False
        for action in self.waiting:
            self.do(self.giver, self.machine, action)

    def bring(self, *parts: int) -> None:
        for part in parts:
            self.rounds.do(self.giver, self.machine.done(lambda it, part=part: it.collect_phase.fetched(part, self.index)))  # type: ignore[misc]

    def answers(self) -> list[list[int]]:
        """Return of which parts of the silent contributor the giver has sent sketches, by message."""
        said = [it for peer, it in self.rounds.said if peer == self.giver and isinstance(it, wire.Second)]
        return [[part for part, _ in it.tables] for it in said if it.contributor == self.index]


SILENT_AT_ONCE: dict[str, dict[str, Any]] = {peer: {"awaits_sketch": lambda it: it != OTHERS[-1]} for peer in MEMBERS}


@pytest.fixture
def eight_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PARTS", 8)


@pytest.mark.usefixtures("eight_parts")
def test_who_answers_for_a_silent_contributor_sends_one_message_once_all_of_its_bytes_are_here() -> None:
    silent = Silent(setups=SILENT_AT_ONCE)
    assert len(silent.first) > 1
    silent.bring(*silent.first[:-1])
    assert silent.answers() == []
    silent.slow = True
    silent.bring(silent.first[-1])
    silent.rounds.do(silent.giver, silent.machine.done(lambda it: None))
    assert silent.answers() == [], "the last sketch is not made yet"
    silent.make()
    assert silent.answers() == [silent.first]
    silent.rounds.settle()
    assert silent.rounds.kinds() == {OutcomeKind.DONE}
    assert {outcome.slot.attempt for outcome in silent.rounds.outcomes()} == {0}


@pytest.mark.usefixtures("eight_parts")
def test_bytes_that_others_have_answered_for_delay_no_sketch_to_the_deadline() -> None:
    """The giver alone does not wait for an earlier one, and is to sketch what that one does."""
    voters = order_of(VOTERS)
    alone = {"awaits_sketch": lambda it: it not in (OTHERS[-1], voters[0])}
    silent = Silent(setups=SILENT_AT_ONCE | {voters[1]: alone})
    table = silent.table
    hanging = [part for part in silent.second if table.members[table.deputies(part)[0]] == voters[0]]
    assert hanging
    silent.bring(*silent.first)
    assert silent.answers() == [silent.first]
    silent.rounds.settle()
    assert silent.rounds.kinds() == {OutcomeKind.DONE}
    assert silent.rounds.now == ConnectedRounds.now, "no deadline has passed"


@pytest.mark.usefixtures("eight_parts")
def test_beyond_the_limit_of_an_author_sketches_are_kept_that_count_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATEMENTS, wire.Second, replace(STATEMENTS[wire.Second], most=0))
    silent = Silent(setups=SILENT_AT_ONCE)
    judge = silent.rounds.machines[VOTERS[0] if VOTERS[0] != silent.giver else VOTERS[1]]
    (answered, *_) = silent.rounds.messages(wire.Second)
    mine, foreign = silent.first, next(part for part in range(8) if silent.table.me not in silent.table.seating.three(part))

    def is_kept(parts: list[int], index: int = silent.index, seed: bytes = answered.seed) -> bool:
        second = wire.Second(judge.slot, seed, index, bytes(16), tuple((part, b"") for part in parts))
        notes = judge.receive(signed(silent.giver, second), second, silent.rounds.now)
        return not any(isinstance(note, Note) and note.event == "round.equivocation" for note in notes)

    assert not is_kept([*mine, foreign]), "that others answer for"
    assert not is_kept(mine, silent.table.places[VOTERS[2]]), "of which its own sketch counts"
    assert not is_kept(mine, seed=bytes(32)), "after no outputs that are named"
    assert is_kept(mine)


@pytest.mark.usefixtures("eight_parts")
@pytest.mark.parametrize("passes", [True, False])
def test_sketches_that_differ_are_shown_and_end_the_attempt_if_nobody_is_convicted_in_time(passes: bool) -> None:
    """Those of others may be false: who holds the bytes finds it, and then the outputs pass."""
    silent = Silent(setups=SILENT_AT_ONCE)
    rounds, machine, table, lost = silent.rounds, silent.machine, silent.table, silent.rounds.lost
    silent.slow_checks, shown = True, list[Forward]()

    def undecided(target: str, mail: Mail) -> bool:
        return lost(target, mail) or (isinstance(mail, wire.Signed) and mail.code == wire.code_of_kind(wire.Precommit))

    def observed(peer: str, machine: Round, action: Action) -> None:
        shown.extend([action] if isinstance(action, Forward) else [])
        silent.later(peer, machine, action)

    rounds.lost = undecided
    silent.bring(*silent.first)
    rounds.deliver_all()
    (check,) = silent.checks
    part = next(it for it in range(8) if table.me not in table.seating.three(it))
    rounds._do = observed  # type: ignore[method-assign]
    rounds.do(silent.giver, machine.done(lambda it: it.checked(check, (), [(part, silent.index)])))
    assert [{*it.to} for it in shown] == [{table.members[index] for index in table.seating.three(part)}]
    if passes:
        for _ in range(2):  # Until the deadline is over.
            rounds.tick()
            rounds.deliver_all()
        rounds.do(silent.giver, machine.done(lambda it: it.checked(check, (), ())))
    while machine.outcome is None:
        rounds.tick()
        rounds.deliver_all()
    assert ("cannot be of one contribution" in machine.outcome.reason) is not passes


@pytest.mark.usefixtures("eight_parts")
def test_a_contributor_is_not_taken_for_one_of_two_liars_once_its_sketches_by_others_pass() -> None:
    """The holder of a part alone had sketched for it, and lied."""
    silent = Silent(setups=SILENT_AT_ONCE)
    rounds, machine, table = silent.rounds, silent.machine, silent.table
    part, outputs, (answered, *_) = silent.first[0], rounds.messages(wire.Outputs)[-1], rounds.messages(wire.Second)
    name = next(it.commit for it in rounds.messages(wire.Second) if it.contributor == silent.index)
    second = wire.Second(machine.slot, answered.seed, silent.index, name, ((part, bytes(TABLE_BYTES)),))
    rounds.do(silent.giver, machine.receive(signed(table.members[part], second), second, rounds.now))
    check = CheckOutputs(answered.seed, dict(enumerate(outputs.outputs)), (), (), (), outputs.silent)
    machine.done(lambda it: it.checked(check, (), [(part, silent.index)]))
    assert {*machine.exchange.lied} == {table.members[part], OTHERS[-1]}
    machine.done(lambda it: it.checked(check, (), ()))
    assert machine.exchange.lied == ()


@pytest.mark.usefixtures("eight_parts")
def test_after_the_deadline_bytes_that_do_not_come_delay_no_other_sketch_by_more_than_an_exchange() -> None:
    """A contributor that lets one part hang could else withhold another one, with the two others of its three."""
    silent = Silent()
    rounds, (first, *_), (hanging, *_, part) = silent.rounds, silent.first, silent.second
    silent.withholding = {silent.table.members[it] for it in silent.table.seating.three(part)} - {silent.giver}
    own = silent.table.me
    while silent.answers() == []:
        rounds.tick()
        rounds.deliver_all()
    for _ in range(3):  # Until it has asked everybody for what it lacks.
        rounds.tick()
        rounds.deliver_all()
    assert silent.answers() == [[own]]
    silent.bring(first)
    assert silent.answers() == [[own], [first]]
    silent.bring(part)
    assert silent.answers() == [[own], [first]]
    rounds.tick()
    rounds.deliver_all()
    assert silent.answers() == [[own], [first], [part]]
    assert hanging != part
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {outcome.slot.attempt for outcome in rounds.outcomes()} == {0}


def test_words_of_who_does_not_judge_are_not_kept() -> None:
    rounds = started()
    rounds.until(lambda: all(rounds.machines[peer].has_roster for peer in MEMBERS))
    judge, liar = rounds.machines[VOTERS[0]], OTHERS[0]
    roster = judge.exchange.table.hash
    for message in (
        wire.Have(judge.slot, roster, b"", ((0, (1,)),), bytes(16), bytes(32)),
        wire.Result(judge.slot, roster, 0, roster),
        wire.Second(judge.slot, roster, 1, bytes(16), ((0, b""),)),
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
    assert {(outcome.slot.attempt, outcome.late, outcome.lied) for outcome in rounds.outcomes()} == {(0, (), ())}
    assert rounds.noted("round.output_false") == set()


def test_one_voter_alone_lets_no_owner_reduce(owners: list[str]) -> None:
    liar, owner = order_of(VOTERS)[1], owners[0]
    rounds = started()
    machine = rounds.machines[owner]
    rounds.until(lambda: any(peer == owner and isinstance(it, wire.Have) and it.cut for peer, it in rounds.said))
    table = machine.exchange.table
    false = wire.Weigh(machine.slot, bytes(32), table.me, ((table.me, 1.0),))
    rounds.do(owner, machine.receive(signed(liar, false), false, rounds.now))
    assert not any(peer == owner and isinstance(it, wire.Result) and it.cut == bytes(32) for peer, it in rounds.said)


def test_an_owner_shows_voters_what_it_contributes_itself_once_outputs_are_named(owners: list[str]) -> None:
    shown: list[tuple[str, tuple[str, ...]]] = []

    class Showing(ConnectedRounds):
        def _do(self, peer: str, machine: Round, action: Action) -> None:
            if isinstance(action, ShowPart) and peer in owners:
                shown.append((peer, (*action.readers,)))
            super()._do(peer, machine, action)

    rounds = Showing(MEMBERS, voters=VOTERS)
    rounds.start()
    rounds.settle()
    assert sorted(shown) == sorted((owner, order_of(VOTERS)) for owner in owners)


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


def test_an_owner_without_a_vote_answers_for_a_silent_contributor_in_its_own_part_alone(owners: list[str]) -> None:
    mute = next(peer for peer in OTHERS if peer not in owners)
    rounds = started(lost=lambda target, mail: is_sketch_of(mail, mute))
    rounds.settle()
    assert rounds.kinds() == {OutcomeKind.DONE}
    assert {*rounds.outcomes()[0].cut} == {*MEMBERS}
    said = [(peer, message.tables) for peer, message in rounds.said if isinstance(message, wire.Second) and peer in owners]
    places = rounds.machines[mute].exchange.table.places
    assert sorted(peer for peer, _ in said) == sorted(owners)
    assert all([part for part, _ in tables] == [places[peer]] for peer, tables in said)


def is_sketch_of(mail: Mail, peer: str) -> bool:
    """Return True for a sketch of a peer after the outputs."""
    message = wire.opened(mail) if isinstance(mail, wire.Signed) and mail.sender == peer else None
    return isinstance(message, wire.Sketch) and bool(message.outputs)
