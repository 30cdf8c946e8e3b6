"""The round's machine alone, on a wire that reorders, repeats and loses messages.

No signatures, no bytes, no clock but a number: the tests cover what the machines conclude from each other's messages.
"""

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pytest
from flockstep.collectives.accountability.evidence import Witness
from flockstep.collectives.accountability.trust import token_weights
from flockstep.collectives.chain.certificate import check_certificate
from flockstep.collectives.chain.quorum import drawn_for, quorum, ranked
from flockstep.collectives.robust.checks import commitment, num_bytes
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.round.actions import (
    Action,
    CheckOutputs,
    CompareSketch,
    Ended,
    FetchOutput,
    FetchPart,
    Finalize,
    Forward,
    HashParts,
    Judge,
    Note,
    Outcome,
    OutcomeKind,
    Phase,
    Reduce,
    Send,
    Setup,
    SketchParts,
    Timing,
)
from flockstep.collectives.round.facts import MessageLog
from flockstep.collectives.round.gather import MAX_LEAP, election, proposal, refusal
from flockstep.collectives.round.machine import Round
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.digest import keyed
from flockstep.peer.errors import ProtocolViolation
from flockstep.peer.wire.schema import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from support.certificates import seats

RUN = "a" * 52
SLOT = wire.Slot(RUN, 1, 0)
BASE = bytes(32)
CELLS = 12
TIMING = Timing(gather=5.0, control=2.0, transfer=5.0, patience=50.0)
PEERS = [f"12D3KooW{name * 44}" for name in "ABCDEFGHJKLMNPQR"]

PENDING = "still on its way"
RESULT = next(code for code, cls in wire.CODES.items() if cls is wire.Result)
Fetch: TypeAlias = FetchPart | FetchOutput
Broken: TypeAlias = Callable[[str, Fetch], str | None]


def signed(sender: str, message: wire.RoundMessage) -> wire.Signed:
    return wire.Signed(sender, wire.code_of(message), encode(message), bytes(64))


def a_ready(peer: str, *, base: bytes = BASE, attempt: int = 0) -> wire.Ready:
    return wire.Ready(wire.Slot(RUN, 1, attempt), base, 10, 1e6, 1e6, commitment(bytes(32)))


def a_setup(
    peer: str,
    peers: list[str],
    *,
    tokens: int = 10,
    min_peers: int = 1,
    base: bytes = BASE,
    phase_seconds: float = 60.0,
    rule: str = "gramguard",
) -> Setup:
    return Setup(
        me=peer,
        ready=a_ready(peer, base=base),
        active=frozenset(peers),
        num_cells=CELLS,
        part_bytes=lambda cells: 34 * cells,
        output_bytes=lambda cells: 34 * cells,
        previous=bytes(32),
        tokens_before=1000,
        tokens=tokens,
        steps=5,
        loss=1.0,
        min_peers=min_peers,
        phase_seconds=phase_seconds,
        timing=TIMING,
        verify=lambda signed: True,
        rule=rule_named(rule),
    )


@dataclass
class Swarm:
    """Machines, the mail between them, and a driver that does at once whatever they ask for."""

    peers: list[str]
    seed: int
    machines: dict[str, Round] = field(default_factory=dict)
    mail: list[tuple[str, wire.Signed]] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    now: float = 0.0
    notes: list[Note] = field(default_factory=list)
    said: list[tuple[str, wire.RoundMessage]] = field(default_factory=list)
    false: set[bytes] = field(default_factory=set)
    """Outputs that no check lets pass."""
    broken: Broken = lambda peer, fetch: None
    tampered: Callable[[str, wire.RoundMessage], wire.RoundMessage] = lambda peer, message: message

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for peer in self.peers:
            self.machines[peer] = Round(a_setup(peer, self.peers), self.now)

    def start(self, *peers: str) -> None:
        for peer in peers or self.peers:
            self.do(peer, self.machines[peer].start())

    def do(self, peer: str, actions: list[Action]) -> None:
        machine = self.machines[peer]
        for action in actions:
            match action:
                case Send(to, message):
                    message = self.tampered(peer, message)
                    self.mail += [(target, signed(peer, message)) for target in to]
                    self.said.append((peer, message))
                case Forward(to, word):
                    self.mail += [(target, word) for target in to]
                case HashParts(_, readers):
                    hashes = tuple(keyed("part", peer.encode(), str(i).encode()) for i in range(len(readers)))
                    machine.exchange.collect_phase.parts_hashed(hashes)
                    self.do(peer, machine.after_work(self.now))
                case FetchPart(part, index):
                    if (reason := self.broken(peer, action)) == PENDING:
                        continue
                    if reason is not None:
                        notes = machine.exchange.collect_phase.not_fetched(part, index, reason)
                        self.do(peer, machine.after_work(self.now, notes))
                    elif machine.exchange.collect_phase.fetched(part, index):
                        self.do(peer, machine.after_work(self.now))
                case FetchOutput(part, _, hash_):
                    if (reason := self.broken(peer, action)) is not None:
                        notes = machine.exchange.reduce_phase.not_fetched(part, hash_, reason)
                        self.do(peer, machine.after_work(self.now, notes))
                    elif machine.exchange.reduce_phase.fetched(part, hash_):
                        self.do(peer, machine.after_work(self.now))
                case SketchParts(seed, columns):
                    tables = bytes(num_bytes(len(machine.exchange.reduce_phase.hashes()), columns))
                    self.do(peer, machine.after_work(self.now, machine.exchange.sketched(seed, tables)))
                case CompareSketch():
                    machine.exchange.compared(action)
                    self.do(peer, machine.after_work(self.now))
                case Judge(cut, masses, _):
                    rows = (masses,) * len(machine.exchange.reduce_phase.hashes())
                    self.do(peer, machine.after_work(self.now, machine.exchange.judged(cut, rows, {})))
                case CheckOutputs():
                    false = [part for part, output in action.outputs.items() if output in self.false]
                    self.do(peer, machine.after_work(self.now, machine.exchange.checked(action, false, ())))
                case Reduce(cut, part, contributors, _):
                    output = keyed("output", bytes([part, *contributors]))
                    machine.exchange.reduced(cut, part, output)
                    self.do(peer, machine.after_work(self.now))
                case Finalize(_, outputs):
                    machine.exchange.finalized(outputs, keyed("root", *outputs))
                    self.do(peer, machine.after_work(self.now))
                case Note():
                    self.notes.append(action)
                case Ended() if machine.outcome is not None and machine.outcome.certificate is not None:
                    for quitter in machine.outcome.gave_up:
                        self.show(quitter, machine.outcome.certificate)

    def deliver(self, index: int, *, keep: bool = False) -> None:
        target, message = self.mail[index] if keep else self.mail.pop(index)
        if target in self.dead:
            return
        machine, word = self.machines[target], wire.opened(message)
        ended = machine.outcome
        if isinstance(word, wire.Void) and ended is not None and ended.certificate is not None:
            # What the averager does: whoever gives up a round that is certified is shown the certificate.
            self.show(message.sender, ended.certificate)
        else:
            self.do(target, machine.receive(message, word, self.now))

    def show(self, peer: str, certificate: wire.Certificate) -> None:
        """A certificate comes to `peer`."""
        _, _, result = check_certificate(certificate, lambda signed: True)
        self.do(peer, self.machines[peer].certified(certificate, result))

    def kill(self, peer: str) -> None:
        """Its words on the way are lost with it; the others learn of it one by one, in any order."""
        self.dead.add(peer)
        self.mail = [(target, message) for target, message in self.mail if message.sender != peer]
        others = [other for other in self.peers if other not in self.dead]
        self.random.shuffle(others)
        for other in others:
            self.do(other, self.machines[other].lose(peer, "killed", self.now))

    def settle(self, deaths: dict[int, str] | None = None) -> None:
        """Deliver in a seeded order, now and then twice, until everything is quiet and everybody has ended."""
        delivered = 0
        while len(self.outcomes()) < len(self.living()):
            while self.mail:
                self.deliver(self.random.randrange(len(self.mail)), keep=self.random.random() < 0.1)
                delivered += 1
                if deaths and delivered in deaths and deaths[delivered] not in self.dead:
                    self.kill(deaths[delivered])
            waiting = [machine for peer, machine in self.machines.items() if peer not in self.dead]
            self.now = min((machine.deadline for machine in waiting if machine.outcome is None), default=self.now)
            for peer in self.living():
                self.do(peer, self.machines[peer].tick(self.now))

    def living(self) -> list[str]:
        return [peer for peer in self.peers if peer not in self.dead]

    def outcomes(self) -> list[Outcome]:
        found = [self.machines[peer].outcome for peer in self.living()]
        return [outcome for outcome in found if outcome is not None]


def check_all_or_nothing(swarm: Swarm) -> None:
    """Invariants 1 to 3: all who are done hold the same; who is not done knows that it is behind, unless nobody is."""
    outcomes = swarm.outcomes()
    done = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.DONE]
    assert len({(outcome.root, outcome.outputs, outcome.cut, outcome.members) for outcome in done}) <= 1
    if done:
        assert {outcome.kind for outcome in outcomes} <= {OutcomeKind.DONE, OutcomeKind.BEHIND}
        assert done[0].certificate is not None
        roster, cut, result = check_certificate(done[0].certificate, lambda signed: True)
        assert (roster.members, result.outputs, result.next_root) == (
            done[0].members,
            done[0].outputs,
            done[0].root,
        )
        assert tuple(roster.members[index] for index in cut.contributors) == done[0].cut
    else:
        assert all(outcome.certificate is None for outcome in outcomes)


def contradictions(swarm: Swarm) -> list[tuple[str, str]]:
    """Of all that was said: who made two statements that convict it."""
    witness = Witness()
    words = [(peer, signed(peer, message), message) for peer, message in swarm.said]
    return [(peer, type(word).__name__) for peer, said, word in words if witness.see(said, word, SLOT) is not None]


@given(st.integers(1, 16), st.integers(0, 2**32))
def test_whatever_the_order_all_end_with_the_same(count: int, seed: int) -> None:
    swarm = Swarm(PEERS[:count], seed)
    swarm.start()
    swarm.settle()
    check_all_or_nothing(swarm)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert set(swarm.outcomes()[0].cut) == set(PEERS[:count])


@given(
    st.integers(2, 8),
    st.integers(0, 2**32),
    st.dictionaries(st.integers(1, 400), st.sampled_from(PEERS[:8]), max_size=3),
)
def test_whoever_dies_at_whichever_message_the_survivors_agree(count: int, seed: int, deaths: dict[int, str]) -> None:
    swarm = Swarm(PEERS[:count], seed)
    swarm.start()
    swarm.settle({at: peer for at, peer in deaths.items() if peer in swarm.peers})
    check_all_or_nothing(swarm)


def test_a_death_before_the_round_only_makes_it_smaller() -> None:
    swarm = Swarm(PEERS[:4], 0)
    swarm.kill(PEERS[2])
    swarm.start(*swarm.living())
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert set(swarm.outcomes()[0].members) == set(swarm.living())


def test_who_is_not_ready_in_time_is_left_out_and_told_so() -> None:
    swarm = Swarm(PEERS[:4], 0)
    late = PEERS[0]
    swarm.start(*PEERS[1:4])
    while swarm.mail:
        swarm.deliver(0)
    assert all(swarm.machines[peer].phase is Phase.GATHER for peer in PEERS[1:4])
    swarm.now = TIMING.gather
    for peer in PEERS[1:4]:
        swarm.do(peer, swarm.machines[peer].tick(swarm.now))
    swarm.deliver(0)
    swarm.start(late)
    swarm.settle()
    kinds = {peer: machine.outcome.kind for peer, machine in swarm.machines.items() if machine.outcome}
    assert kinds == {late: OutcomeKind.MISSED, **dict.fromkeys(PEERS[1:4], OutcomeKind.DONE)}


def test_a_contribution_that_one_owner_lacks_enters_no_part() -> None:
    swarm = Swarm(PEERS[:4], 3)
    order = ranked(SLOT, PEERS[:4])
    victim = order[3]

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "refused" if isinstance(fetch, FetchPart) and peer != victim and fetch.contributor == 3 else None

    swarm.broken = broken
    swarm.start()
    swarm.settle()
    check_all_or_nothing(swarm)
    assert {outcome.cut for outcome in swarm.outcomes()} == {order[:3]}
    assert any(note.event == "round.left_out" and note.peer == victim for note in swarm.notes)


@pytest.mark.parametrize(("phase_seconds", "waited"), [(12.0, 3.0), (2.0, TIMING.control), (400.0, 7.0)])
def test_a_slow_peer_is_waited_for_as_long_as_that_costs_less_than_to_leave_it_out(
    phase_seconds: float, waited: float
) -> None:
    """Four of five are there: to wait is worth a quarter of a phase, at least an exchange, at most the deadline."""
    peers = PEERS[:5]
    swarm = Swarm(
        peers,
        0,
        broken=lambda peer, fetch: PENDING if isinstance(fetch, FetchPart) and fetch.contributor == 4 else None,
    )
    for peer in peers:
        swarm.machines[peer] = Round(a_setup(peer, peers, phase_seconds=phase_seconds), 0.0)
    swarm.start()
    while swarm.mail:
        swarm.deliver(0)
    assert {machine.deadline for machine in swarm.machines.values()} == {waited}
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert {len(outcome.cut) for outcome in swarm.outcomes()} == {4}


def test_an_output_that_cannot_be_had_voids_the_round_for_all() -> None:
    swarm = Swarm(PEERS[:4], 3)

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "gone" if isinstance(fetch, FetchOutput) and fetch.part == 2 else None

    swarm.broken = broken
    swarm.start()
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert any("reduce took too long" in outcome.reason for outcome in swarm.outcomes())
    assert {note.reason for note in swarm.notes if note.event == "round.output_missing"} == {"gone"}


def test_nobody_signs_a_result_after_saying_void() -> None:
    swarm = Swarm(PEERS[:4], 5)
    swarm.start()
    quitter = PEERS[0]
    while swarm.machines[quitter].phase is not Phase.REDUCE:
        swarm.deliver(swarm.random.randrange(len(swarm.mail)))
    for _ in range(2):  # At first whoever stands in for an owner is given the time to.
        swarm.now = swarm.machines[quitter].deadline
        swarm.do(quitter, swarm.machines[quitter].tick(swarm.now))
    assert swarm.machines[quitter].phase is Phase.ABANDON
    swarm.settle()
    assert not any(peer == quitter and isinstance(message, wire.ResultAck) for peer, message in swarm.said)
    check_all_or_nothing(swarm)


@pytest.mark.parametrize("phase", [Phase.AGREE, Phase.COLLECT, Phase.REDUCE, Phase.CONFIRM])
def test_one_that_gives_up_at_any_step_ends_nobody_elses_round(phase: Phase) -> None:
    swarm = Swarm(PEERS[:4], 5)
    swarm.start()
    quitter, *others = PEERS[:4]
    while swarm.machines[quitter].phase is not phase:
        swarm.deliver(swarm.random.randrange(len(swarm.mail)))
    slot = swarm.machines[others[0]].slot
    for other in others:
        swarm.mail.insert(0, (other, signed(quitter, wire.Void(slot, "I will not", ()))))
        swarm.deliver(0)
    swarm.dead.add(quitter)  # It says nothing more; nobody is told that it is lost.
    swarm.settle()
    ended = [swarm.machines[other].outcome for other in others]
    assert [outcome.kind for outcome in ended if outcome is not None] == [OutcomeKind.DONE] * 3
    assert {note.peer for note in swarm.notes if note.event == "round.given_up"} == {quitter}
    check_all_or_nothing(swarm)


def test_what_the_convener_has_heard_of_a_lost_sender_all_hear() -> None:
    swarm = Swarm(PEERS[:4], 3)
    swarm.start()
    convener, victim, *_ = ORDER

    def is_last(target: str, word: wire.Signed) -> bool:
        """A second sketch of the victim's, for somebody else."""
        said = [message for peer, message in swarm.said if peer == victim and isinstance(message, wire.Sketch)]
        return target != victim and word.sender == victim and len(said) == 2 and wire.opened(word) == said[1]

    heard = False
    while not heard:  # The last that anybody hears of the victim, only the convener does.
        mail = enumerate(swarm.mail)
        index = next(i for i, (target, word) in mail if target == convener or not is_last(target, word))
        heard = is_last(*swarm.mail[index])
        swarm.deliver(index)
    swarm.kill(victim)
    swarm.settle()
    check_all_or_nothing(swarm)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert set(swarm.outcomes()[0].cut) == set(PEERS[:4])


def test_a_convener_proposes_once_in_an_attempt_though_ranks_change_there_and_back() -> None:
    """Liars whose attempts rise and who leave bring me back to an attempt of which I had refused my own roster."""
    me, one, other, last = PEERS[:4]
    mine = next(n for n in range(MAX_LEAP + 11, 1000) if ranked(wire.Slot(RUN, 1, n), [me, one, other, last])[0] == me)
    theirs = next(n for n in range(mine + 1, mine + MAX_LEAP) if ranked(wire.Slot(RUN, 1, n), [me, one, other])[0] == other)
    machine = Round(a_setup(me, PEERS[:4]), 0.0)
    said: list[wire.RoundMessage] = []

    def do(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                said.append(action.message)
                do(machine.receive(signed(me, action.message), action.message, 0.0))

    do(machine.start())
    for peer, attempt in [(one, 10), (other, mine)]:
        ready = a_ready(peer, attempt=attempt)
        do(machine.receive(signed(peer, ready), ready, 0.0))
    do(machine.tick(machine.deadline))
    ready = a_ready(other, attempt=theirs)
    do(machine.receive(signed(other, ready), ready, 0.0))
    do(machine.lose(other, "reset", 0.0))
    for peer in (one, last):
        ready = a_ready(peer, attempt=mine)
        do(machine.receive(signed(peer, ready), ready, 0.0))
    rosters = [message for message in said if isinstance(message, wire.Roster)]
    assert [roster.slot.attempt for roster in rosters] == [mine]


def test_who_has_acknowledged_a_cut_is_bound_until_the_round_is_over() -> None:
    swarm = Swarm(PEERS[:4], 2)
    swarm.start()
    while swarm.mail:
        for peer, machine in swarm.machines.items():
            said = any(sender == peer and isinstance(message, wire.CutAck) for sender, message in swarm.said)
            assert machine.is_bound == (said and machine.outcome is None)
        swarm.deliver(0)
    assert not any(machine.is_bound for machine in swarm.machines.values())


def spoiled_round(
    tampered: Callable[[str, wire.RoundMessage], wire.RoundMessage],
    broken: Broken = lambda peer, fetch: None,
) -> Swarm:
    """A round of four in which some words are changed before they are said."""
    swarm = Swarm(PEERS[:4], 1, tampered=tampered, broken=broken)
    swarm.start()
    swarm.settle()
    check_all_or_nothing(swarm)
    return swarm


ORDER = ranked(SLOT, PEERS[:4])


def killed_when(victim: str, said: type, count: int = 4, *, seed: int = 0) -> Swarm:
    """A round in which `victim` dies as soon as every living member has received its message of that kind."""
    swarm = Swarm(PEERS[:count], seed)
    swarm.start()
    code = next(code for code, cls in wire.CODES.items() if cls is said)

    def on_its_way() -> bool:
        return any(word.sender == victim and word.code == code for _, word in swarm.mail)

    spoken = False
    while not spoken or on_its_way():
        spoken = spoken or on_its_way()
        own = [i for i, (_, word) in enumerate(swarm.mail) if word.sender == victim and word.code == code]
        swarm.deliver(own[0] if own else swarm.random.randrange(len(swarm.mail)))
    swarm.kill(victim)
    swarm.settle()
    check_all_or_nothing(swarm)
    assert contradictions(swarm) == []
    return swarm


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("said", [wire.RosterAck, wire.Commit, wire.Have, wire.CutAck, wire.Result])
def test_four_lose_one_at_any_step_and_the_round_is_done(said: type, index: int, seed: int) -> None:
    """Convener, owner or sender: whoever it is, a deputy or the next in the roster takes over."""
    swarm = killed_when(ORDER[index], said, seed=seed)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert set(swarm.outcomes()[0].cut) >= set(swarm.living())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("said", [wire.Roster, wire.Cut])
def test_the_convener_is_lost_right_after_its_word(said: type, seed: int) -> None:
    swarm = killed_when(ORDER[0], said, seed=seed)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert ORDER[0] in swarm.outcomes()[0].members


def test_a_convener_that_dies_before_its_roster_costs_nothing() -> None:
    swarm = Swarm(PEERS[:4], 0)
    swarm.start(*(peer for peer in PEERS[:4] if peer != ORDER[0]))
    while swarm.mail:
        swarm.deliver(0)
    swarm.kill(ORDER[0])
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert swarm.now == 0.0


def test_an_owner_that_denies_what_two_deputies_hold_loses_its_part() -> None:
    censor, victim = ORDER[2], 1

    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if isinstance(message, wire.Have) and peer == censor:
            parts = tuple((part, tuple(i for i in held if i != victim)) for part, held in message.parts)
            return replace(message, parts=parts)
        return message

    swarm = spoiled_round(tampered)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert set(swarm.outcomes()[0].cut) == set(ORDER)
    assert {note.peer for note in swarm.notes if note.event == "round.disowned"} == {censor}


@pytest.mark.parametrize("count", [4, 6, 10])
def test_an_owner_that_cannot_fetch_one_contribution_stays_in_the_cut(count: int) -> None:
    """One connection of it has broken: its deputies hold all of its part, so it needs none of that to acknowledge."""
    order = ranked(SLOT, PEERS[:count])
    owner, sender = order[-1], order[2]

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "lost" if peer == owner and isinstance(fetch, FetchPart) and fetch.source == sender else None

    swarm = Swarm(PEERS[:count], 0, broken=broken)
    swarm.start()
    while swarm.machines[owner].phase is not Phase.COLLECT:
        swarm.deliver(0)
    swarm.do(owner, swarm.machines[owner].lose(sender, "the connection broke", swarm.now))
    while swarm.mail:
        swarm.deliver(0)
    check_all_or_nothing(swarm)
    assert {note.peer for note in swarm.notes if note.event == "round.disowned"} == {owner}
    assert [(outcome.kind, outcome.cut) for outcome in swarm.outcomes()] == [(OutcomeKind.DONE, order)] * count
    assert swarm.now == 0.0


def test_a_contribution_that_a_deputy_cannot_have_is_cut_out_again() -> None:
    """An owner dies after the cut, and one sender no longer serves: the rest is cut again, and the round is done."""
    peers = PEERS[:7]
    order = ranked(SLOT, peers)
    owner, sender = order[3], 5
    dead: list[str] = []

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "gone" if dead and isinstance(fetch, FetchPart) and fetch.contributor == sender else None

    swarm = Swarm(peers, 2, broken=broken)
    swarm.start()
    while not all(swarm.machines[peer].phase is Phase.REDUCE for peer in peers if peer != owner):
        words = [i for i, (_, word) in enumerate(swarm.mail) if word.code != RESULT]
        swarm.deliver(swarm.random.choice(words))
    swarm.mail = [(to, word) for to, word in swarm.mail if word.sender != owner]
    dead.append(owner)
    swarm.kill(owner)
    swarm.settle()
    check_all_or_nothing(swarm)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}
    assert order[sender] not in swarm.outcomes()[0].cut
    assert {message.version for _, message in swarm.said if isinstance(message, wire.Cut)} == {0, 1}


def test_after_two_recuts_the_round_is_void() -> None:
    swarm = Swarm(PEERS[:10], 4)
    order = ranked(SLOT, PEERS[:10])
    machine = swarm.machines[order[0]]
    swarm.start()
    while machine.phase is not Phase.REDUCE:
        swarm.deliver(swarm.random.randrange(len(swarm.mail)))
    exchange, table = machine._exchange, machine._table
    assert exchange is not None
    assert table is not None
    exchange.collect_phase.close()  # Or the deputies would be heard first.
    for count in (9, 8, 7):
        have = wire.Have(SLOT, table.hash, ((1, tuple(range(count))),), bytes(32))
        swarm.do(order[0], machine.receive(signed(order[1], have), have, swarm.now))
        for index in reversed(range(len(swarm.mail))):
            to, word = swarm.mail[index]
            if to == order[0] and word.sender == order[0]:
                swarm.deliver(index)
    cuts = [message for peer, message in swarm.said if isinstance(message, wire.Cut)]
    assert [cut.version for cut in cuts] == [0, 1, 2]
    assert swarm.machines[order[0]].phase is Phase.ABANDON
    assert any(isinstance(m, wire.Void) and "2 re-cuts were not enough" in m.reason for _, m in swarm.said)


def test_a_cut_of_other_commits_than_were_sent_voids_the_round() -> None:
    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return replace(message, commits=bytes(32)) if isinstance(message, wire.Cut) else message

    swarm = spoiled_round(tampered)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert any("other commits" in outcome.reason for outcome in swarm.outcomes())


@pytest.mark.parametrize("contributors", [(0, 1), (1, 0, 2, 3), (0, 1, 2, 9), (0, 1, 1, 2)])
def test_a_cut_that_does_not_fit_its_roster_charges_the_convener(contributors: tuple[int, ...]) -> None:
    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return replace(message, contributors=contributors) if isinstance(message, wire.Cut) else message

    swarm = spoiled_round(tampered)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert {note.peer for note in swarm.notes if note.event == "peer.charged"} == {ORDER[0]}


def test_an_owner_does_not_acknowledge_a_cut_that_it_does_not_hold() -> None:
    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        # The owner says that it holds what it could not fetch, so that the convener cuts it in.
        if isinstance(message, wire.Have):
            return replace(message, parts=tuple((part, (0, 1, 2, 3)) for part, _ in message.parts))
        return message

    owners = ORDER[1:3]
    swarm = spoiled_round(
        tampered,
        lambda peer, fetch: (
            "no" if peer in owners and isinstance(fetch, FetchPart) and fetch.contributor == 3 else None
        ),
    )
    assert not any(peer in owners and isinstance(message, wire.CutAck) for peer, message in swarm.said)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}


def test_contributions_of_less_than_a_quorum_are_no_cut() -> None:
    swarm = spoiled_round(
        lambda peer, message: message,
        lambda peer, fetch: (
            "no"
            if isinstance(fetch, FetchPart) and fetch.contributor > 1 and peer != ORDER[fetch.contributor]
            else None
        ),
    )
    assert not any(isinstance(message, wire.Cut) for _, message in swarm.said)
    assert any("only 2 of 4 contributions" in outcome.reason for outcome in swarm.outcomes())


def test_contributions_without_any_tokens_are_no_cut() -> None:
    swarm = Swarm(PEERS[:3], 1)
    for peer in PEERS[:3]:
        swarm.machines[peer] = Round(a_setup(peer, PEERS[:3], tokens=0), 0.0)
    swarm.start()
    swarm.settle()
    assert any("any tokens" in outcome.reason for outcome in swarm.outcomes())


def test_an_owner_that_weighs_otherwise_voids_the_round() -> None:
    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if isinstance(message, wire.Result) and peer == ORDER[2]:
            return replace(message, weights=(0.7, 0.1, 0.1, 0.1))
        return message

    swarm = spoiled_round(tampered)
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert any(f"{ORDER[2]} weighs" in outcome.reason for outcome in swarm.outcomes())


def test_acknowledgements_of_another_cut_or_result_do_not_count() -> None:
    liars = ORDER[2:]

    def other_cut(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return replace(message, cut=bytes(32)) if peer in liars and isinstance(message, wire.CutAck) else message

    def other_result(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return (
            replace(message, next_root=bytes(32)) if peer in liars and isinstance(message, wire.ResultAck) else message
        )

    for tampered in (other_cut, other_result):
        swarm = spoiled_round(tampered)
        assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert {note.peer for note in swarm.notes if note.event == "round.result_differs"} >= set(liars)


def test_a_commit_to_another_roster_does_not_enter() -> None:
    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if isinstance(message, wire.Commit) and peer == ORDER[3]:
            return replace(message, roster=bytes(32))
        return message

    swarm = spoiled_round(tampered)
    assert {outcome.cut for outcome in swarm.outcomes()} == {ORDER[:3]}


def test_a_second_and_different_roster_is_an_equivocation() -> None:
    swarm = Swarm(PEERS[:4], 0)
    order = ranked(SLOT, PEERS[:4])
    machine = swarm.machines[order[1]]
    first = wire.Roster(SLOT, BASE, order, (0, 3, 6, 9, 12), seats(4))
    second = wire.Roster(SLOT, BASE, order, (0, 4, 6, 9, 12), seats(4))
    machine.receive(signed(order[0], first), first, 0.0)
    (note,) = machine.receive(signed(order[0], second), second, 0.0)
    assert isinstance(note, Note)
    assert (note.event, note.peer) == ("round.equivocation", order[0])


@pytest.mark.parametrize("flaw", ["order", "sender", "bounds", "root", "few"])
def test_a_roster_that_breaks_a_rule_is_refused(flaw: str) -> None:
    peers = PEERS[:5]
    order = ranked(SLOT, peers)
    machine = Round(a_setup(order[1], peers), 0.0)
    roster = {
        "order": wire.Roster(SLOT, BASE, (order[0], *order[:0:-1]), (0, 3, 6, 9, 11, 12), seats(5)),
        "sender": wire.Roster(SLOT, BASE, order, (0, 3, 6, 9, 11, 12), seats(5)),
        "bounds": wire.Roster(SLOT, BASE, order, (0, 3, 6, 9, 11, 13), seats(5)),
        "root": wire.Roster(SLOT, bytes(31) + b"1", order, (0, 3, 6, 9, 11, 12), seats(5)),
        "few": wire.Roster(SLOT, BASE, order[:2], (0, 3, 12), seats(2)),
    }[flaw]
    sender = order[2] if flaw == "sender" else order[0]
    actions = machine.receive(signed(sender, roster), roster, 0.0)
    assert [action.event for action in actions if isinstance(action, Note)] == ["round.roster_refused"]
    assert machine.phase is Phase.GATHER


def test_a_word_of_somebody_outside_the_roster_breaks_a_rule() -> None:
    swarm = Swarm(PEERS[:4], 1)
    swarm.start()
    machine = swarm.machines[PEERS[0]]
    while machine.phase is Phase.GATHER:
        swarm.deliver(0)
    assert machine._table is not None
    stranger = wire.RosterAck(SLOT, machine._table.hash)
    with pytest.raises(ProtocolViolation):
        machine.receive(signed(PEERS[9], stranger), stranger, 0.0)
    elsewhere = wire.RosterAck(SLOT, bytes(32))
    assert machine.receive(signed(PEERS[9], elsewhere), elsewhere, 0.0) == []


def test_members_of_another_state_are_told_that_they_are_behind() -> None:
    swarm = Swarm(PEERS[:4], 0)
    odd = PEERS[3]
    swarm.machines[odd] = Round(a_setup(odd, PEERS[:4], base=b"o" * 32), 0.0)
    swarm.start()
    swarm.settle()
    kinds = {peer: machine.outcome.kind for peer, machine in swarm.machines.items() if machine.outcome}
    assert kinds == {**dict.fromkeys(PEERS[:3], OutcomeKind.DONE), odd: OutcomeKind.BEHIND}


def test_who_has_taken_the_others_state_is_waited_for_no_longer_than_it_takes() -> None:
    """Two have begun the run alone: one hears that its state is not the run's, takes the other's, and is ready again."""
    for count, seed in itertools.product((2, 4, 8), range(5)):
        peers = PEERS[:count]
        swarm = Swarm(peers, seed)
        bases = dict(zip(peers, [b"a" * 32, b"b" * 32] * (count // 2), strict=True))
        for peer, base in bases.items():
            swarm.machines[peer] = Round(a_setup(peer, peers, base=base), 0.0)
        swarm.start()
        while swarm.mail:
            swarm.deliver(swarm.random.randrange(len(swarm.mail)))
        behind = [peer for peer in peers if bases[peer] == b"b" * 32]
        assert {swarm.machines[peer].outcome.kind for peer in behind} == {OutcomeKind.BEHIND}  # type: ignore[union-attr]
        for peer in behind:
            again = a_ready(peer, base=b"a" * 32, attempt=1)
            swarm.machines[peer] = Round(replace(a_setup(peer, peers), ready=again), 0.0)
        swarm.start(*behind)
        while swarm.mail:
            swarm.deliver(swarm.random.randrange(len(swarm.mail)))
        outcomes = swarm.outcomes()
        # More than half start from one state as soon as the first few have come: the last of many may miss the round.
        assert len(outcomes) == count
        assert {outcome.kind for outcome in outcomes} <= {OutcomeKind.DONE, OutcomeKind.MISSED}
        assert all(len(outcome.cut) > count // 2 for outcome in outcomes if outcome.kind is OutcomeKind.DONE)
        assert contradictions(swarm) == []


def test_no_single_member_ends_the_wait_of_another_by_a_roster_without_it() -> None:
    machine = Round(a_setup(ORDER[1], PEERS[:4]), 0.0)
    machine.start()
    far = wire.Slot(RUN, 1, 1 << 20)
    for members, slot in (((ORDER[0],), SLOT), ((PEERS[9],), SLOT), (ranked(far, PEERS[1:4]), far)):
        roster = wire.Roster(slot, BASE, members, tuple(range(0, CELLS + 1, CELLS // len(members))), seats(len(members)))
        (note,) = machine.receive(signed(members[0], roster), roster, 0.0)
        assert isinstance(note, Note)
        assert note.event == "round.roster_refused"
    assert machine.phase is Phase.GATHER


def test_no_claim_of_a_third_uses_up_the_attempts_of_a_round() -> None:
    """A liar may be one leap ahead; who claims more takes no part, and the others go on without it."""
    setup, liar = a_setup(ORDER[0], PEERS[:4]), ORDER[3]
    for claimed, taken in ((MAX_LEAP, MAX_LEAP), (MAX_LEAP + 1, 0), (1 << 20, 0)):
        slot, _, members = election(setup, {peer: a_ready(peer, attempt=claimed * (peer == liar)) for peer in ORDER})
        assert slot.attempt == taken
        assert (liar in members) == (taken == claimed)
        assert set(members) >= set(ORDER) - {liar}
    slot, _, members = election(setup, {peer: a_ready(peer, attempt=1000 * (peer in ORDER[2:])) for peer in ORDER})
    assert (slot.attempt, len(members)) == (1000, 4)  # Two of four cannot both be liars.


def test_too_few_for_the_run_is_a_void_with_that_reason() -> None:
    machine = Round(a_setup(PEERS[0], PEERS[:1], min_peers=2), 0.0)
    (send,) = machine.start()
    assert isinstance(send, Send)
    machine.receive(signed(PEERS[0], send.message), send.message, 0.0)
    machine.tick(TIMING.patience)
    assert machine.outcome is not None
    assert machine.outcome.kind is OutcomeKind.VOID
    assert "1 members became ready in time, 2 are needed" in machine.outcome.reason


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=64))
def test_weights_sum_to_one_and_nobody_exceeds_its_cap(tokens: list[int]) -> None:
    weights = token_weights(tokens)
    if not any(weights):
        return
    assert sum(weights) == pytest.approx(1)
    cap = 1.5 * statistics.median(tokens)
    capped = [min(count, cap) for count in tokens]
    assert weights == pytest.approx([count / sum(capped) for count in capped])


def test_a_claim_of_many_tokens_weighs_one_and_a_half_times_the_median() -> None:
    weights = token_weights([100, 100, 100, 10**9])
    assert weights[3] == pytest.approx(1.5 * weights[0])


def test_a_newcomers_tokens_weigh_as_little_as_its_commit_says() -> None:
    swarm = Swarm(PEERS[:4], 1)
    swarm.machines[PEERS[3]] = Round(replace(a_setup(PEERS[3], PEERS[:4]), ramp=0.25), 0.0)
    swarm.start()
    swarm.settle()
    weights = next(message.weights for _, message in swarm.said if isinstance(message, wire.Result))
    assert sorted(weights) == pytest.approx([0.25 / 3.25, 1 / 3.25, 1 / 3.25, 1 / 3.25])


@given(st.integers(1, 64))
def test_any_two_quorums_share_more_than_a_third(count: int) -> None:
    assert 2 * quorum(count) - count > count / 3


def test_a_run_that_demands_its_owners_signature_has_no_round_without_it() -> None:
    owner = ORDER[2]
    for away in (False, True):
        swarm = Swarm(PEERS[:4], 0)
        for peer in PEERS[:4]:
            swarm.machines[peer] = Round(replace(a_setup(peer, PEERS[:4]), charter=Charter(authority=owner)), 0.0)
        if away:
            swarm.kill(owner)
        swarm.start(*swarm.living())
        swarm.settle()
        wanted = OutcomeKind.VOID if away else OutcomeKind.DONE
        assert {outcome.kind for outcome in swarm.outcomes()} == {wanted}
    assert all("owner" in outcome.reason for outcome in swarm.outcomes())


def test_the_owners_signature_is_in_every_certificate_of_such_a_run() -> None:
    owner = ORDER[3]

    def tampered(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return (
            replace(message, next_root=bytes(32)) if peer == owner and isinstance(message, wire.ResultAck) else message
        )

    swarm = Swarm(PEERS[:4], 1, tampered=tampered)
    for peer in PEERS[:4]:
        swarm.machines[peer] = Round(replace(a_setup(peer, PEERS[:4]), charter=Charter(authority=owner)), 0.0)
    swarm.start()
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}


def test_a_roster_without_that_owner_is_refused() -> None:
    order = ranked(SLOT, PEERS[:4])
    machine = Round(replace(a_setup(order[1], PEERS[:4]), charter=Charter(authority=PEERS[7])), 0.0)
    roster = wire.Roster(SLOT, BASE, order, (0, 3, 6, 9, 12), seats(4))
    (note,) = machine.receive(signed(order[0], roster), roster, 0.0)
    assert isinstance(note, Note)
    assert "owner" in note.reason


def test_a_large_run_draws_64_members_a_round_and_other_ones_the_next_time() -> None:
    members = [f"12D3KooW{index:044d}" for index in range(300)]
    first = drawn_for(SLOT, members)
    assert len(first) == wire.MAX_ROSTER
    assert first == drawn_for(wire.Slot(RUN, 1, 3), reversed(members))
    assert len(first & drawn_for(wire.Slot(RUN, 2, 0), members)) < 40
    assert drawn_for(SLOT, members[:64]) == set(members[:64])
    assert all(drawn_for(wire.Slot(RUN, round_, 0), members, members[0]) >= {members[0]} for round_ in range(20))


def test_too_few_left_is_void_at_once_and_not_at_a_deadline() -> None:
    swarm = Swarm(PEERS[:4], 0)
    swarm.start()
    while not all(swarm.machines[peer].phase is Phase.COLLECT for peer in PEERS[:4]):
        swarm.deliver(0)
    for victim in ORDER[2:]:
        swarm.kill(victim)
    while swarm.mail:
        swarm.deliver(0)
    assert swarm.now == 0.0
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert any("2 are left, 3 are needed" in outcome.reason for outcome in swarm.outcomes())


def test_an_owner_lost_with_both_of_its_deputies_voids_the_round_at_once() -> None:
    peers = PEERS[:10]
    order = ranked(SLOT, peers)
    swarm = Swarm(peers, 0)
    swarm.start()
    while not all(swarm.machines[peer].phase is Phase.COLLECT for peer in peers):
        swarm.deliver(0)
    for index in (4, 5, 6):
        swarm.kill(order[index])
    while swarm.mail:
        swarm.deliver(0)
    assert swarm.now == 0.0
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.VOID}
    assert any("the last who answered for part 4" in outcome.reason for outcome in swarm.outcomes())


def test_who_comes_next_by_rank_proposes_where_the_convener_dies_with_its_roster_unsaid() -> None:
    swarm = Swarm(PEERS[:4], 0)
    swarm.start()
    words = [(to, word) for to, word in swarm.mail if to != ORDER[0]]
    swarm.mail = words
    while swarm.mail:
        swarm.deliver(0)
    assert all(swarm.machines[peer].phase is Phase.GATHER for peer in ORDER)
    swarm.kill(ORDER[0])
    while swarm.mail:
        swarm.deliver(0)
    assert swarm.now == 0.0
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}


def finished() -> wire.Certificate:
    """The certificate of a round of four in which nothing happened."""
    certificate = spoiled_round(lambda peer, message: message).outcomes()[0].certificate
    assert certificate is not None
    return certificate


def test_a_certificate_of_what_i_do_not_hold_leaves_me_behind() -> None:
    certificate = finished()
    _, _, result = check_certificate(certificate, lambda signed: True)
    swarm = Swarm(PEERS[:4], 1)
    swarm.start()
    machine = swarm.machines[ORDER[3]]
    while machine.phase is not Phase.REDUCE:
        swarm.deliver(0)
    machine.certified(certificate, result)
    assert machine.outcome is not None
    assert machine.outcome.kind is OutcomeKind.BEHIND


def test_a_state_root_of_other_outputs_is_not_signed() -> None:
    swarm = Swarm(PEERS[:4], 1)
    swarm.start()
    machine = swarm.machines[ORDER[3]]
    while machine.phase is not Phase.REDUCE:
        swarm.deliver(0)
    machine.exchange.finalized((bytes(32),) * 4, bytes(32))
    actions = machine.after_work(0.0)
    assert not any(isinstance(action, Send) and isinstance(action.message, wire.ResultAck) for action in actions)


@pytest.mark.parametrize("link", ["roster", "cut"])
def test_a_certificate_whose_messages_do_not_belong_together_proves_nothing(link: str) -> None:
    certificate = finished()
    roster, cut, result = check_certificate(certificate, lambda signed: True)
    convener = roster.members[0]
    other_cut = signed(convener, replace(cut, roster=bytes(32)) if link == "roster" else replace(cut, version=1))
    if link == "roster":
        result = replace(result, cut=other_cut.hash)
    acks = tuple(encode(signed(peer, result)) for peer in roster.members)
    with pytest.raises(ProtocolViolation, match="belongs to another"):
        check_certificate(wire.Certificate(SLOT, certificate.roster, encode(other_cut), acks), lambda signed: True)


def test_an_output_from_before_a_recut_does_not_take_the_place_of_the_new_one() -> None:
    swarm = Swarm(PEERS[:4], 1)
    swarm.start()
    machine = swarm.machines[ORDER[3]]
    while machine.phase is not Phase.REDUCE:
        swarm.deliver(0)
    exchange = machine._exchange
    assert exchange is not None
    exchange.reduce_phase._fetching[0] = (ORDER[0], b"n" * 32)
    exchange.reduce_phase.fetched(0, b"o" * 32)
    assert 0 not in exchange.reduce_phase.outputs
    exchange.reduce_phase.fetched(0, b"n" * 32)
    assert exchange.reduce_phase.outputs[0] == b"n" * 32


def test_a_certificate_of_another_round_ends_nothing_and_one_of_this_round_ends_the_wait() -> None:
    certificate = finished()
    _, _, result = check_certificate(certificate, lambda signed: True)
    late = Round(a_setup(PEERS[0], PEERS[:4]), 0.0)
    for round_ in (0, 2, 5):
        late.certified(replace(certificate, slot=wire.Slot(RUN, round_, 0)), result)
        assert late.outcome is None
    late.certified(certificate, result)
    assert late.outcome is not None
    assert late.outcome.kind is OutcomeKind.BEHIND


def test_a_duty_taken_over_after_time_was_up_is_spoken_of_once_it_is_done() -> None:
    """Who stands in late says nothing of that part before its bytes are here: else it would seem to hold nothing."""
    pending: list[bool] = [True]

    def broken(peer: str, fetch: Fetch) -> str | None:
        late = isinstance(fetch, FetchPart) and fetch.part == 1 and peer != ORDER[1]
        return PENDING if late and pending[0] else None

    swarm = Swarm(PEERS[:4], 0, broken=broken)
    swarm.start()
    while not all(swarm.machines[peer].phase is Phase.COLLECT for peer in PEERS[:4]):
        swarm.deliver(0)
    deputy = swarm.machines[ORDER[2]]
    assert deputy._exchange is not None
    deputy._exchange.collect_phase.close()
    swarm.kill(ORDER[1])
    while swarm.mail:
        swarm.deliver(0)
    spoken = [
        part for peer, word in swarm.said if peer == ORDER[2] and isinstance(word, wire.Have) for part, _ in word.parts
    ]
    assert 1 not in spoken
    assert 2 in spoken


def test_where_too_many_are_in_a_later_round_nobody_waits_for_this_one() -> None:
    machine = Round(a_setup(PEERS[0], PEERS[:7]), 0.0)
    machine.start()
    for peer in (PEERS[1], PEERS[1], PEERS[2]):
        assert not machine.peer_ahead(peer)
        assert machine.outcome is None  # Five of seven are a quorum still.
    machine.peer_ahead(PEERS[3])
    assert machine.outcome is not None
    assert machine.outcome.kind is OutcomeKind.BEHIND
    assert machine.outcome.reason == "of 7 members 3 are in a later round"


def test_who_has_a_roster_finishes_its_round_whatever_others_say_of_later_ones() -> None:
    swarm = Swarm(PEERS[:4], 0)
    swarm.start()
    while swarm.machines[PEERS[0]].phase is not Phase.COLLECT:
        swarm.deliver(0)
    for peer in PEERS[1:4]:
        assert not swarm.machines[PEERS[0]].peer_ahead(peer)
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}


def test_what_strangers_said_before_the_roster_counts_for_nothing() -> None:
    """Acknowledgements, commits, cuts and voids of peers without a place in the roster, all here before it came."""
    swarm = Swarm(PEERS[:4], 0)
    swarm.start()
    code = wire.code_of(wire.Roster(SLOT, BASE, tuple(ORDER), (0, 3, 6, 9, 12), seats(4)))
    while not any(message.code == code for _, message in swarm.mail):
        swarm.deliver(0)
    index = next(i for i, (target, message) in enumerate(swarm.mail) if message.code == code and target == ORDER[1])
    machine, roster = swarm.machines[ORDER[1]], swarm.mail[index][1]
    for stranger in PEERS[8:14]:
        for word in (
            wire.RosterAck(SLOT, roster.hash),
            wire.Commit(SLOT, roster.hash, 1, 1, 0.0, (bytes(32),) * 4),
            wire.Cut(SLOT, roster.hash, 0, (0, 1, 2), bytes(32), ()),
            wire.Void(SLOT, "a stranger gives up", ()),
        ):
            assert not machine.receive(signed(stranger, word), word, 0.0)
    swarm.deliver(index)
    assert machine.phase is Phase.AGREE
    swarm.settle()
    assert {outcome.kind for outcome in swarm.outcomes()} == {OutcomeKind.DONE}


@settings(max_examples=60)
@given(
    st.integers(2, 7),
    st.integers(0, 2**32),
    st.dictionaries(st.integers(1, 250), st.sampled_from(PEERS[:7]), max_size=4),
    st.floats(0.0, 0.4),
)
def test_nobody_honest_ever_convicts_itself(count: int, seed: int, deaths: dict[int, str], chance: float) -> None:
    """Whatever dies, is late or cannot be fetched, and in whatever order the words come, one's own among them."""
    luck = random.Random(seed)

    def broken(peer: str, fetch: Fetch) -> str | None:
        late = isinstance(fetch, FetchPart) and luck.random() < chance
        return (PENDING if luck.random() < 0.3 else "the road is bad") if late else None

    swarm = Swarm(PEERS[:count], seed, broken=broken)
    swarm.start()
    swarm.settle({at: peer for at, peer in deaths.items() if peer in swarm.peers})
    check_all_or_nothing(swarm)
    assert contradictions(swarm) == []
    assert not any(note.event == "round.equivocation" for note in swarm.notes)


def test_who_acknowledges_another_roster_or_cut_is_shown_mine() -> None:
    swarm = Swarm(PEERS[:7], 0)
    order = ranked(SLOT, PEERS[:7])
    swarm.start()
    while not all(swarm.machines[peer].phase is Phase.REDUCE for peer in order):
        swarm.deliver(0)
    machine = swarm.machines[order[2]]
    for word, kind in ((wire.RosterAck(SLOT, bytes(32)), wire.Roster), (wire.CutAck(SLOT, bytes(32)), wire.Cut)):
        shown = machine._table.shown_to(order[5], word) if machine._table is not None else []
        assert [type(wire.opened(action.signed)) for action in shown] == [kind]
        assert {action.to for action in shown} == {(order[5],)}
    assert machine._table is not None
    own = machine._facts.every(wire.CutAck, SLOT)[0][1]
    assert machine._table.shown_to(order[5], own) == []


def test_a_banned_peer_is_in_no_roster_whoever_proposes_it() -> None:
    banned = ORDER[2]
    setup = replace(a_setup(ORDER[0], PEERS[:4]), is_banned=lambda peer: peer == banned)
    readies = {peer: a_ready(peer) for peer in ORDER}
    assert proposal(setup, readies).members == tuple(peer for peer in ORDER if peer != banned)
    roster = proposal(a_setup(ORDER[0], PEERS[:4]), readies)
    assert banned in roster.members
    assert refusal(a_setup(ORDER[1], PEERS[:4]), PEERS[:4], ORDER[0], roster, MessageLog()) is None
    why = refusal(setup, PEERS[:4], ORDER[0], roster, MessageLog())
    assert why == f"it includes {banned}, which is banned"
