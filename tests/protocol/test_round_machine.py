"""The machines of one round, `Round` and `Vote`, on a wire that reorders, repeats and loses messages.

No bytes and no clock but a number: the tests cover what the machines conclude from each other's messages.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.accountability.evidence import Witness
from flockstep.collectives.accountability.statements import MAX_WORDS
from flockstep.collectives.accountability.trust import token_weights
from flockstep.collectives.allreduce.actions import (
    FetchOutput,
    FetchPart,
    Forward,
    OutcomeKind,
    Phase,
    Reduce,
    Send,
)
from flockstep.collectives.allreduce.exchange import RosterRound
from flockstep.collectives.allreduce.words import claims_in
from flockstep.collectives.chain.certificate import check_certificate, check_votes, open_value, signed_in, value_hash
from flockstep.collectives.chain.quorum import drawn_for
from flockstep.collectives.robust.checks import columns_of, num_bytes
from flockstep.collectives.robust.rules import MEAN, rule_named
from flockstep.collectives.round.gather import held, mark_of, marks_in, proposal
from flockstep.collectives.round.machine import RESTARTS, STALL_SECONDS, Round
from flockstep.collectives.round.vote import Vote
from flockstep.peer import wire
from flockstep.peer.base.errors import ProtocolViolation
from flockstep.peer.wire.schema import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounds import (
    PEERS,
    PENDING,
    SLOT,
    TIMING,
    ConnectedRounds,
    Fetch,
    Made,
    Mail,
    Rounds,
    a_ready,
    a_roster,
    a_setup,
    a_vote,
    electorate,
    order_of,
    signed,
    verify,
    words_of,
)

ORDER = order_of(PEERS[:4])
DONE, VOID, MISSED, BEHIND = OutcomeKind.DONE, OutcomeKind.VOID, OutcomeKind.MISSED, OutcomeKind.BEHIND
OTHER_STATE = b"o" * 32


def settled(count: int = 4, **fields: Any) -> Rounds:
    """Return a round of `count` peers after all have ended."""
    rounds = Rounds(PEERS[:count], **fields)
    rounds.start()
    rounds.settle()
    check_all_or_nothing(rounds)
    return rounds


def check_all_or_nothing(rounds: Rounds) -> None:
    """All that are done hold the same, and its certificate is valid; nobody else has one."""
    outcomes = rounds.outcomes()
    done = [outcome for outcome in outcomes if outcome.kind is DONE]
    assert (
        len({(outcome.value.next_root, outcome.value.outputs, outcome.cut, outcome.members) for outcome in done}) <= 1
    )
    assert all((outcome.certificate is None) == (outcome.kind is not DONE) for outcome in outcomes)
    for outcome in done:
        assert outcome.certificate is not None
        value = check_certificate(outcome.certificate, verify, charter=rounds.charter)
        voters = rounds.peers if rounds.voters is None else rounds.voters
        check_votes(outcome.certificate, electorate(voters))
        assert (value, value.members) == (outcome.value, outcome.members)
        assert tuple(value.members[index] for index in value.contributors) == outcome.cut


def contradictions(rounds: Rounds) -> list[tuple[str, str]]:
    """Return who made two statements that convict it."""
    witness = Witness()
    return [
        (peer, type(message).__name__)
        for peer, message in rounds.said
        if witness.see(signed(peer, message), message, SLOT) is not None
    ]


def tampering(kind: type, by: str | tuple[str, ...] | None, **changes: Any) -> Callable[[str, Any], Any]:
    """Return a lie: messages of this class by these peers (None: all) have these fields changed."""
    liars = (by,) if isinstance(by, str) else by

    def tampered(peer: str, message: Any) -> Any:
        is_lie = isinstance(message, kind) and (liars is None or peer in liars)
        return replace(message, **changes) if is_lie else message

    return tampered


# The whole round.


@given(st.integers(1, 10), st.integers(0, 2**32))
def test_any_order_of_messages_ends_with_the_same_value(count: int, seed: int) -> None:
    rounds = settled(count, seed=seed)
    assert rounds.kinds() == {DONE}
    assert set(rounds.outcomes()[0].cut) == set(PEERS[:count])
    assert {outcome.slot.attempt for outcome in rounds.outcomes()} == {0}
    assert contradictions(rounds) == []


@given(
    st.integers(2, 8),
    st.integers(0, 2**32),
    st.dictionaries(st.integers(1, 400), st.sampled_from(PEERS[:8]), max_size=3),
)
def test_a_quorum_that_survives_any_deaths_decides(count: int, seed: int, deaths: dict[int, str]) -> None:
    rounds = Rounds(PEERS[:count], seed, attempts=12)
    rounds.start()
    rounds.settle({at: peer for at, peer in deaths.items() if peer in rounds.peers})
    check_all_or_nothing(rounds)
    if electorate(rounds.peers).is_quorum(rounds.living()):
        assert rounds.kinds() == {DONE}


@settings(max_examples=30)
@given(
    st.integers(2, 7),
    st.integers(0, 2**32),
    st.dictionaries(st.integers(1, 250), st.sampled_from(PEERS[:7]), max_size=4),
    st.floats(0.0, 0.4),
)
def test_nobody_honest_ever_contradicts_itself(count: int, seed: int, deaths: dict[int, str], chance: float) -> None:
    luck = random.Random(seed)

    def broken(peer: str, fetch: Fetch) -> str | None:
        late = isinstance(fetch, FetchPart) and luck.random() < chance
        return (PENDING if luck.random() < 0.3 else "the connection is bad") if late else None

    rounds = Rounds(PEERS[:count], seed, broken=broken, attempts=3)
    rounds.start()
    rounds.settle({at: peer for at, peer in deaths.items() if peer in rounds.peers})
    check_all_or_nothing(rounds)
    assert contradictions(rounds) == []
    assert not rounds.noted("round.equivocation") | rounds.noted("agreement.equivocation")


# GATHER: Readys, rosters, and the reasons to refuse one.


def test_a_member_that_is_not_ready_in_time_is_left_out_and_told_so() -> None:
    rounds, late = Rounds(PEERS[:4]), PEERS[0]
    rounds.start(*PEERS[1:4])
    rounds.deliver_all()
    assert {rounds.machines[peer].phase for peer in PEERS[1:4]} == {Phase.GATHER}
    rounds.now = TIMING.gather
    for peer in PEERS[1:4]:
        rounds.do(peer, rounds.machines[peer].tick(rounds.now))
    rounds.until(lambda: any(machine.phase is Phase.COLLECT for machine in rounds.machines.values()))
    rounds.start(late)
    rounds.deliver_all()
    assert {peer: outcome.kind for peer, outcome in zip(PEERS, rounds.outcomes(), strict=False)} == {
        late: MISSED,
        **dict.fromkeys(PEERS[1:4], DONE),
    }


def with_ready(made: Made, ready: wire.Signed) -> Made:
    return made.but(readys=(*made.basis.readys[:-1], encode(ready)))


def with_word(made: Made, voter: str, *marks: bytes) -> Made:
    """Let a voter say that it holds these Readys alone, beside its own."""
    own = next((mark_of(signed_in(data)) for data in made.basis.readys if signed_in(data).sender == voter), bytes(8))
    word = signed(voter, wire.Heard(SLOT, b"".join([own, *marks])))
    others = [data for data in made.basis.heards if signed_in(data).sender != voter]
    return made.but(heards=tuple(sorted([*others, encode(word)], key=lambda data: signed_in(data).sender)))


def forged(data: bytes) -> bytes:
    return encode(replace(signed_in(data), signature=bytes(64)))


FIVE = PEERS[:5]
ORDER_OF_FIVE = order_of(FIVE)
FLAWS: dict[str, tuple[Callable[[Made], Made], str]] = {
    "proposer": (lambda r: r.but(members=r.roster.members[1:] + r.roster.members[:1]), "is not the proposer"),
    "bounds": (lambda r: r.but(bounds=(*r.roster.bounds[:-1], r.roster.bounds[-1] + 1)), "do not ascend"),
    "parts": (
        lambda r: r.but(bounds=(r.roster.bounds[0], r.roster.bounds[1] + 1, *r.roster.bounds[2:])),
        "do not follow from the lines",
    ),
    "state": (lambda r: r.but(base_root=b"o" * 32), "another state"),
    "basis": (lambda r: Made(replace(r.roster, basis=bytes(32)), r.basis), "another basis"),
    "training": (lambda r: r.but(training=b"\x0f"), "misquotes who trains"),
    "votes": (lambda r: r.but(heards=r.basis.heards[:3]), "a quorum of the voters hold"),
    "no word of its own": (
        lambda r: r.but(heards=tuple(data for data in r.basis.heards if signed_in(data).sender != r.roster.members[0])),
        "whom its proposer",
    ),
    "too few hold it": (
        lambda r: r.but(readys=(*r.basis.readys, encode(signed(PEERS[7], a_ready())))),
        "Readys that enough voters hold",
    ),
    "no word": (lambda r: r.but(heards=(*r.basis.heards[:4], r.basis.readys[4])), "shows no Heard of"),
    "a stranger's word": (lambda r: with_word(r, PEERS[7]), "not of a voter"),
    "one word twice": (lambda r: r.but(heards=(*r.basis.heards[:4], r.basis.heards[3])), "once each"),
    "a forged word": (lambda r: r.but(heards=(forged(r.basis.heards[0]), *r.basis.heards[1:])), "has not signed"),
    "left out": (
        lambda r: r.but(
            members=r.roster.members[:4],
            seats=r.roster.seats[:4],
            bounds=(0, 3, 6, 9, 12),
            training=b"\x0f",
            readys=r.basis.readys[:4],
        ),
        "Readys that enough voters hold",
    ),
    "order": (
        lambda r: r.but(
            members=(r.roster.members[0], r.roster.members[2], r.roster.members[1], *r.roster.members[3:]),
            readys=(r.basis.readys[0], r.basis.readys[2], r.basis.readys[1], *r.basis.readys[3:]),
        ),
        "members do not follow",
    ),
    "twice": (lambda r: r.but(members=(*r.roster.members[:4], r.roster.members[0])), "two seats"),
    "seats": (lambda r: r.but(seats=r.roster.seats[:4]), "4 seats for 5"),
    "readys": (lambda r: r.but(readys=r.basis.readys[:4]), "4 Readys for 5"),
    "garbage": (lambda r: r.but(readys=(*r.basis.readys[:4], b"\xc1")), "not MessagePack"),
    "other": (lambda r: r.but(readys=(*r.basis.readys[:4], r.basis.readys[0])), "shows no Ready of"),
    "forged": (
        lambda r: with_ready(r, replace(signed(r.roster.members[4], a_ready()), signature=bytes(64))),
        "has not signed",
    ),
    "attempt": (lambda r: with_ready(r, signed(r.roster.members[4], a_ready(slot=SLOT.at(1)))), "shows no Ready of"),
    "lock": (
        lambda r: with_ready(r, signed(r.roster.members[4], a_ready(lock=(wire.Lock(0, bytes(32)),)))),
        "without a lock",
    ),
    "quote": (lambda r: r.but(seats=(*r.roster.seats[:4], replace(r.roster.seats[4], voucher=b"another's"))), "misquotes"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_roster_that_breaks_a_rule_is_refused(flaw: str) -> None:
    proposer, me, *_ = order_of(FIVE)
    roster = a_roster(FIVE)
    setup, vote = a_setup(me, FIVE), a_vote(me, FIVE)
    assert roster.why_not(setup, vote, proposer) is None
    change, words = FLAWS[flaw]
    bad = change(roster)
    assert words in (bad.why_not(setup, vote, bad.roster.members[0]) or "")


def test_the_readys_that_a_third_of_the_voters_name_must_be_shown() -> None:
    roster, vote = a_roster(FIVE), a_vote(ORDER_OF_FIVE[1], FIVE)
    unseen = mark_of(signed(PEERS[7], a_ready()))
    for liars, why in ((1, None), (2, "it does not show the Readys that enough voters hold, and no others")):
        said = roster
        for liar in ORDER_OF_FIVE[3 : 3 + liars]:
            said = with_word(said, liar, *(mark_of(signed(peer, a_ready())) for peer in FIVE if peer != liar), unseen)
        assert said.why_not(a_setup(ORDER_OF_FIVE[1], FIVE), vote, ORDER_OF_FIVE[0]) == why


def test_a_voter_says_whom_it_holds_when_all_are_ready_or_had_their_time() -> None:
    """A proposer that closes with the first quorum would choose the voters of the next round."""
    proposer, me, other, slow = order_of(PEERS[:4])
    asks = wire.Heard(SLOT, mark_of(signed(proposer, a_ready())))
    for late in (True, False):
        machine = Round(a_setup(me, PEERS[:4]), a_vote(me, PEERS[:4]), 0.0)
        machine.start(0.0)
        for peer in (proposer, other):
            machine.receive(signed(peer, a_ready()), a_ready(), 0.0)
        machine.receive(signed(proposer, asks), asks, 1.0)
        assert words_in(machine.tick(1.0)) == []
        assert machine.deadline == TIMING.gather
        if not late:
            machine.receive(signed(slow, a_ready()), a_ready(), 2.0)
        done = machine.tick(TIMING.gather if late else 2.0)
        (word,) = words_in(done)
        named = [me, proposer, other] if late else [me, proposer, other, slow]
        assert {*marks_in(word)} == {mark_of(signed(peer, a_ready())) for peer in named}
        # What the proposer lacks goes before it.
        forwarded = [it.mail.sender for it in done if isinstance(it, Forward) and isinstance(it.mail, wire.Signed)]
        assert {*forwarded} == {*named} - {proposer}
        assert words_in(machine.tick(TIMING.gather)) == []


def words_in(actions: list[Any]) -> list[wire.Heard]:
    return [it.message for it in actions if isinstance(it, Send) and isinstance(it.message, wire.Heard)]


@given(st.lists(st.frozensets(st.integers(0, 9)), min_size=4, max_size=4), st.sets(st.integers(0, 3), min_size=3))
def test_every_voter_accepts_an_honest_roster_whatever_it_has_heard_itself(
    known: list[frozenset[int]], who_says: set[int]
) -> None:
    """Ready are four voters and six keys, each of them to whom it likes."""
    voters, peers = list(ORDER), [*ORDER, *(peer for peer in PEERS if peer not in ORDER)][:10]
    who_says.add(0)
    votes = {voter: a_vote(voter, voters) for voter in voters}
    for (voter, vote), indices in zip(votes.items(), known, strict=True):
        for peer in {voter, *(peers[index] for index in indices)}:
            vote.receive(signed(peer, a_ready()), a_ready(), 0.0)
    speakers = {voters[index]: votes[voters[index]] for index in sorted(who_says)}
    shown = [entry for vote in speakers.values() for entry in vote.ready.values()]
    setup, first = a_setup(ORDER[0], peers), votes[ORDER[0]]
    made = proposal(setup, first, words_of(setup, speakers), held(first, shown))
    if not electorate(voters).is_quorum(speakers):
        assert isinstance(made, str)
        return
    assert not isinstance(made, str)
    heard = {peer: sum(peer in vote.ready for vote in speakers.values()) for peer in peers}
    assert {*made[0].members} == {*speakers} | {peer for peer, count in heard.items() if count >= 2}
    for voter, vote in votes.items():
        assert Made(*made).why_not(a_setup(voter, peers), vote, ORDER[0]) is None


def test_a_banned_peer_is_in_no_roster_unless_too_few_voters_know() -> None:
    peers, banned = [*PEERS[:4], PEERS[5]], PEERS[5]
    for aware in range(5):
        knows = {"is_banned": lambda peer: peer == banned}
        rounds = Rounds(peers, voters=PEERS[:4], setups=dict.fromkeys(ORDER[:aware], knows))
        rounds.start()
        rounds.settle()
        assert {outcome.slot.attempt for outcome in rounds.outcomes()} == {0}
        assert not rounds.noted("round.roster_refused")
        assert {banned in outcome.members for outcome in rounds.outcomes() if outcome.kind is DONE} == {aware <= 2}


def with_readys_of(vote: Vote, voter: str) -> Vote:
    """Return the vote of a voter that has heard the same."""
    other = a_vote(voter, ORDER)
    for word, ready in vote.ready.values():
        other.receive(word, ready, 0.0)
    return other


def test_readys_as_long_as_they_may_be_make_no_roster_that_nobody_takes() -> None:
    voters, vote = PEERS[:4], a_vote(ORDER[0], PEERS[:4])
    for peer in voters:
        vote.receive(signed(peer, a_ready()), a_ready(), 0.0)
    invite, voucher, rates = map(bytes, (wire.MAX_INVITE_BYTES, wire.MAX_VOUCHER_BYTES, wire.MAX_PARTS))
    long = encode(replace(a_ready(), invite=invite, voucher=voucher, rates=rates))
    strangers = [f"12D3KooW{number:044d}" for number in range(400)]
    for peer in strangers:
        vote.receive(wire.Signed(peer, wire.code_of(a_ready()), long, bytes(64)), a_ready(), 0.0)
    setup = a_setup(ORDER[0], [*voters, *strangers])
    words = words_of(setup, {ORDER[0]: vote}) | words_of(
        setup, {voter: with_readys_of(vote, voter) for voter in ORDER[1:]}
    )
    made = proposal(setup, vote, words, held(vote))
    assert not isinstance(made, str)
    assert set(voters) < set(made[0].members)
    assert len(encode(made[0])) <= wire.MAX_STATEMENT_BYTES
    assert len(encode(made[1])) <= wire.MAX_SIGNED_BYTES


def test_a_proposer_whose_own_state_is_another_one_makes_no_roster() -> None:
    rounds = settled(4, setups={ORDER[0]: {"base": b"o" * 32}})
    done = {peer for peer in ORDER if (it := rounds.machines[peer].outcome) is not None and it.kind is DONE}
    assert done >= set(ORDER[1:])
    assert {outcome.cut for outcome in rounds.outcomes() if outcome.kind is DONE} == {
        tuple(peer for peer in order_of(PEERS[:4], SLOT.at(1)) if peer != ORDER[0])
    }


def test_too_few_for_the_run_are_a_void_with_that_reason() -> None:
    rounds = settled(1, setups={PEERS[0]: {"min_peers": 2}})
    (outcome,) = rounds.outcomes()
    assert outcome.kind is VOID
    assert "1 members are ready and here, 2 are needed" in outcome.reason


# COLLECT: contributions, words, the cut, failover.


def counted(rounds: Rounds) -> dict[int, frozenset[int]]:
    """Return who counts in which part, which all that are done agree on."""
    found = [dict(outcome.counted) for outcome in rounds.outcomes() if outcome.kind is DONE]
    assert found
    assert all(each == found[0] for each in found)
    return found[0]


def everywhere_but(count: int, part: int, *victims: int) -> dict[int, frozenset[int]]:
    everybody = frozenset(range(count))
    return {each: everybody - {*victims} if each == part else everybody for each in range(count)}


def listing(have: wire.Have, part: int, held: Callable[[int], bool]) -> wire.Have:
    """Return a word that lists in a part only those members that `held` accepts."""
    claims = claims_in(have)
    assert claims is not None
    kept = {at: {index: it for index, it in said.items() if at != part or held(index)} for at, said in claims.items()}
    names = {index: it for said in kept.values() for index, it in said.items()}
    parts = tuple((at, tuple(said)) for at, said in kept.items())
    return replace(have, parts=parts, names=b"".join(names[index] for index in sorted(names)))


@pytest.mark.parametrize(("awaited", "waited"), [(True, TIMING.control + TIMING.transfer), (False, 0.0)])
def test_a_contribution_that_never_arrives_is_waited_for_once_unless_it_never_did_lately(
    awaited: bool, waited: float
) -> None:
    """Its author counts nowhere, and is in no later round awaited again before it contributes (`Setup.awaits`)."""
    peers = PEERS[:5]
    late = order_of(peers)[4]
    rounds = Rounds(
        peers,
        broken=lambda peer, fetch: PENDING if isinstance(fetch, FetchPart) and fetch.contributor == 4 else None,
        setups={key: {"awaits": lambda peer: awaited or peer != late} for key in peers},
    )
    rounds.start()
    rounds.deliver_all()
    if awaited:
        assert {machine.deadline for machine in rounds.machines.values()} == {waited}
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert {late in outcome.cut for outcome in rounds.outcomes()} == {False}
    assert rounds.now >= waited
    assert awaited or rounds.now == 0.0


@pytest.mark.parametrize("count", [4, 6, 10])
def test_what_an_owner_cannot_fetch_counts_as_zeros_in_its_part(count: int) -> None:
    """One connection of it has broken: its part goes without that contribution, and nobody waits."""
    order = order_of(PEERS[:count])
    owner, sender = order[-1], order[1]

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "lost" if peer == owner and isinstance(fetch, FetchPart) and fetch.source == sender else None

    rounds = Rounds(PEERS[:count], broken=broken)
    rounds.start()
    rounds.until(lambda: rounds.machines[owner].phase is Phase.COLLECT)
    rounds.do(owner, rounds.machines[owner].lose(sender, "the connection broke", rounds.now))
    rounds.deliver_all()
    check_all_or_nothing(rounds)
    assert [(outcome.kind, set(outcome.cut)) for outcome in rounds.outcomes()] == [(DONE, set(order))] * count
    assert counted(rounds) == everywhere_but(count, count - 1, 1)
    assert rounds.noted("round.masked") == {sender}
    assert rounds.now == 0.0


def test_who_comes_in_the_middle_of_an_attempt_is_shown_my_ready_once() -> None:
    """Two that have lost each other would else answer each other's Ready with theirs, without end."""
    one, other = order_of(PEERS[:7])[-2:]
    rounds = Rounds(PEERS[:7])
    rounds.start()
    machines = [rounds.machines[one], rounds.machines[other]]
    rounds.until(lambda: all(machine.phase is Phase.COLLECT for machine in machines))
    for machine, peer in zip(machines, (other, one), strict=True):
        machine.lose(peer, "the connection broke", rounds.now)
        shown = machine.add_member(peer, rounds.now)
        assert {type(wire.opened(action.mail)) for action in shown if isinstance(action, Forward)} == {wire.Ready}
        assert machine.add_member(peer, rounds.now) == []
        machine.lose(peer, "it broke again", rounds.now)
        assert machine.add_member(peer, rounds.now) == shown


def is_kind(mail: Mail, kind: type) -> bool:
    return isinstance(mail, wire.Signed) and isinstance(wire.opened(mail), kind)


def test_a_cut_of_words_that_nobody_has_voids_the_attempt() -> None:
    rounds = settled(4, tampered=tampering(wire.Cut, None, words=tuple((index, bytes(16)) for index in range(4))))
    assert rounds.kinds() == {VOID}
    assert not rounds.messages(wire.Result)


CUTS: dict[str, Callable[[wire.Cut], wire.Cut]] = {
    "no order": lambda cut: replace(cut, words=cut.words[::-1]),
    "a word twice": lambda cut: replace(cut, words=(*cut.words, cut.words[-1])),
    "a word of nobody": lambda cut: replace(cut, words=(*cut.words, (9, bytes(16)))),
    "few words": lambda cut: replace(cut, words=cut.words[:2]),
    "few holders": lambda cut: replace(cut, holders=cut.holders[:3]),
    "another holder": lambda cut: replace(cut, holders=cut.holders[::-1]),
    "another roster": lambda cut: replace(cut, roster=bytes(32)),
}


@pytest.mark.parametrize("flaw", CUTS)
@pytest.mark.parametrize("is_second", [False, True])
def test_a_cut_that_does_not_follow_from_its_words_charges_the_proposer(flaw: str, is_second: bool) -> None:
    def tampered(peer: str, message: Any) -> Any:
        is_lie = isinstance(message, wire.Cut) and bool(message.before) is is_second
        return CUTS[flaw](message) if is_lie else message

    rounds = settled(4, tampered=tampered)
    assert rounds.kinds() == {VOID}
    assert rounds.noted("peer.charged") == {ORDER[0]}


def test_a_second_cut_of_first_words_voids_the_attempt() -> None:
    """Else a proposer could let it seem that a holder vouches for no sketch, and its part would count nobody."""

    def tampered(peer: str, message: Any) -> Any:
        is_lie = isinstance(message, wire.Cut) and message.before
        return replace(message, words=rounds.messages(wire.Cut)[0].words) if is_lie else message

    rounds = Rounds(PEERS[:4], tampered=tampered)
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {VOID}
    assert not rounds.messages(wire.Result)


def test_a_holder_that_lacks_what_it_has_listed_takes_it_back_in_its_second_word() -> None:
    def tampered(peer: str, message: Any) -> Any:
        if not isinstance(message, wire.Have) or peer != ORDER[1] or message.cut:
            return message
        name = next(signed(by, it).name for by, it in rounds.said if by == ORDER[3] and isinstance(it, wire.Commit))
        parts = tuple((part, (*held, 3) if part == 1 and 3 not in held else held) for part, held in message.parts)
        is_listed = any(3 in held for _, held in message.parts)
        return replace(message, parts=parts, names=message.names if is_listed else message.names + name)

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "no" if peer == ORDER[1] and isinstance(fetch, FetchPart) and fetch.source == ORDER[3] else None

    rounds = Rounds(PEERS[:4], tampered=tampered, broken=broken)
    rounds.start()
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert set(rounds.outcomes()[0].cut) == set(ORDER)
    assert counted(rounds) == everywhere_but(4, 1, 3)


def test_contributions_without_any_tokens_are_no_cut() -> None:
    rounds = settled(3, setups={key: {"tokens": 0} for key in PEERS[:3]})
    assert rounds.kinds() == {VOID}
    assert not rounds.messages(wire.Cut)


def test_a_rule_that_is_blind_to_contributions_needs_no_sketches() -> None:
    rounds = settled(4, setups={peer: {"rule": MEAN} for peer in PEERS[:4]})
    assert rounds.kinds() == {DONE}
    assert not rounds.messages(wire.Sketch)
    assert [cut.before for cut in rounds.messages(wire.Cut)] == [b""]


UNDER_ANOTHER_CUT: dict[str, wire.RoundMessage] = {
    "Have": wire.Have(SLOT, bytes(32), bytes(32), ((3, ()),), b"", bytes(32)),
    "Sketch": wire.Sketch(SLOT, bytes(32), (), bytes(num_bytes(4, columns_of(4)))),
    "Sketch after outputs": wire.Sketch(SLOT, bytes(32), (bytes(32),) * 4, bytes(num_bytes(4, columns_of(4)))),
    "Result": wire.Result(SLOT, bytes(32), 3, bytes(32)),
}


@pytest.mark.parametrize("rule", ["gramguard", "mean"])
@pytest.mark.parametrize("kind", UNDER_ANOTHER_CUT)
def test_a_statement_under_another_cut_shows_its_author_mine(kind: str, rule: str) -> None:
    """A proposer may have sent two cuts in place of one: whoever has both proves it."""
    rounds = Rounds(PEERS[:4], setups={peer: {"rule": rule_named(rule)} for peer in PEERS[:4]})
    machine = rounds.machines[ORDER[1]]
    rounds.start()
    rounds.until(lambda: machine.phase not in (Phase.GATHER, Phase.COLLECT, Phase.JUDGE))
    cuts = rounds.messages(wire.Cut)
    other = UNDER_ANOTHER_CUT[kind]
    mine = replace(other, cut=signed(ORDER[0], cuts[0] if kind in ("Have", "Sketch") else cuts[-1]).hash)  # type: ignore[arg-type]
    assert shown(machine.receive(signed(ORDER[2], mine), mine, 0.0)) == []
    assert shown(machine.receive(signed(ORDER[3], other), other, 0.0)) == [((ORDER[3],), cut) for cut in cuts]


def shown(actions: list[Any]) -> list[tuple[tuple[str, ...], wire.Cut]]:
    """Return whom these show which cuts."""
    forwarded = [(it.to, wire.opened(it.mail)) for it in actions if isinstance(it, Forward)]
    return [(to, message) for to, message in forwarded if isinstance(message, wire.Cut)]


def test_a_duty_taken_over_after_the_deadline_is_reported_once_it_is_done() -> None:
    """A deputy states nothing of that part before its bytes are here: else it would seem to hold nothing."""

    def broken(peer: str, fetch: Fetch) -> str | None:
        return PENDING if isinstance(fetch, FetchPart) and fetch.part == 1 and peer != ORDER[1] else None

    def said() -> list[wire.Have]:
        return [have for peer, have in rounds.said if peer == ORDER[2] and isinstance(have, wire.Have)]

    rounds = Rounds(PEERS[:4], broken=broken, lost=lambda to, mail: is_kind(mail, wire.Have) and to == ORDER[0])
    rounds.start()
    rounds.deliver_all()
    rounds.tick()
    deputy = rounds.machines[ORDER[2]]
    before = len(said())
    rounds.kill(ORDER[1])
    rounds.do(ORDER[2], deputy.lose(ORDER[1], "it died", rounds.now))
    assert deputy.exchange.collect_phase.duties == {1, 2}
    assert len(said()) == before
    for index in (0, 2, 3):
        deputy.exchange.collect_phase.fetched(1, index)
    deputy.exchange.collect_phase.fetched(1, 1)
    rounds.do(ORDER[2], deputy.done(lambda exchange: None))
    assert len(said()) == before + 1
    assert dict(said()[-1].parts)[1] == (0, 1, 2, 3)


def test_who_stands_in_for_many_says_no_more_words_than_others_keep_of_it() -> None:
    """Else they take one of its later words for equivocation. The words after the first cut have room, too."""
    rounds = Rounds(PEERS[:4], broken=lambda peer, fetch: PENDING)
    rounds.start()
    rounds.deliver_all()
    stage = rounds.machines[ORDER[2]].exchange.collect_phase.stage

    def say(count: int, looks: int) -> int:
        for _ in range(looks):
            stage.look()
        return len(stage.say({2: dict.fromkeys(range(count % 4), bytes(wire.NAME_BYTES))}))

    assert [say(count, looks=0) for count in range(3)] == [1, 0, 0]  # One that what others do has not used up.
    assert sum(say(count, looks=1) for count in range(2 * MAX_WORDS)) == MAX_WORDS // 2 - 1


# JUDGE, REDUCE and CHECK: weights and outputs.


def is_sketch_of(mail: Mail, peer: str, *, after_outputs: bool) -> bool:
    if not isinstance(mail, wire.Signed) or mail.sender != peer:
        return False
    message = wire.opened(mail)
    return isinstance(message, wire.Sketch) and bool(message.outputs) is after_outputs


OUTPUTS: dict[str, Callable[[wire.Outputs], wire.Outputs]] = {
    "few": lambda it: replace(it, outputs=it.outputs[:3]),
    "a cut": lambda it: replace(it, cut=bytes(32)),
    "silent nobody": lambda it: replace(it, silent=(9,)),
    "an output that nobody made": lambda it: replace(it, outputs=(bytes(32), *it.outputs[1:])),
}


@pytest.mark.parametrize("flaw", OUTPUTS)
def test_outputs_that_do_not_fit_decide_nothing(flaw: str) -> None:
    def tampered(peer: str, message: Any) -> Any:
        return OUTPUTS[flaw](message) if isinstance(message, wire.Outputs) else message

    rounds = settled(4, tampered=tampered)
    assert rounds.kinds() == {VOID}
    assert not rounds.messages(wire.Propose)


def test_an_output_that_nobody_can_fetch_voids_the_attempt_for_all() -> None:
    def broken(peer: str, fetch: Fetch) -> str | None:
        return "gone" if isinstance(fetch, FetchOutput) and fetch.part == 2 else None

    rounds = settled(4, seed=3, broken=broken)
    assert rounds.kinds() == {VOID}
    assert any("reduce took too long" in outcome.reason for outcome in rounds.outcomes())
    assert {note.reason for note in rounds.notes if note.event == "round.output_missing"} == {"gone"}


def test_an_output_that_is_not_named_does_not_take_the_place_of_the_one_that_is() -> None:
    rounds = Rounds(PEERS[:4], 1)
    rounds.start()
    machine = rounds.machines[ORDER[3]]
    rounds.until(lambda: machine.phase is Phase.CHECK and bool(rounds.messages(wire.Outputs)))
    rounds.until(lambda: any(it.outputs for it in rounds.messages(wire.Sketch)))
    assert machine.phase is Phase.CHECK

    def late(exchange: RosterRound) -> None:
        exchange.output_fetched(0, b"o" * 32)

    rounds.do(ORDER[3], machine.done(late))
    rounds.deliver_all()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert b"o" * 32 not in rounds.outcomes()[0].value.outputs


def test_a_newcomers_tokens_weigh_as_little_as_its_commit_says() -> None:
    rounds, reductions = Rounds(PEERS[:4], setups={PEERS[3]: {"ramp": 0.25}}), list[Reduce]()
    done = rounds._do

    def observed(peer: str, machine: Round, action: Any) -> None:
        reductions.extend([action] if isinstance(action, Reduce) else [])
        done(peer, machine, action)

    rounds._do = observed  # type: ignore[method-assign]
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {DONE}
    assert {reduction.part for reduction in reductions} == {0, 1, 2, 3}
    for reduction in reductions:
        weights = dict(zip(reduction.contributors, reduction.weights, strict=True))
        place = ORDER.index(PEERS[3])
        masses = {index: 0.25 if index == place else 1.0 for index in range(4)}
        masses[reduction.part] = 0.0  # The holder's own: the others have more than two thirds of the mass.
        total = sum(masses.values())
        assert weights == pytest.approx({index: mass / total for index, mass in masses.items()})


def test_a_state_root_of_other_outputs_is_not_accepted() -> None:
    rounds = Rounds(PEERS[:4], 1)
    rounds.start()
    machine = rounds.machines[ORDER[3]]
    rounds.until(lambda: machine.phase is Phase.REDUCE)
    rounds.do(ORDER[3], machine.done(lambda exchange: exchange.finalized((bytes(32),) * 4, bytes(32))))
    assert not any(peer == ORDER[3] and isinstance(message, wire.Prevote) for peer, message in rounds.said)
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}


# The loss of a proposer, an owner, a voter; Void.


@pytest.mark.parametrize("phase", [Phase.COLLECT, Phase.JUDGE, Phase.REDUCE, Phase.CHECK, Phase.CONFIRM])
@pytest.mark.parametrize("quitter", ORDER[1:3])
def test_one_that_gives_up_in_any_phase_ends_nobody_elses_attempt(phase: Phase, quitter: str) -> None:
    rounds = Rounds(PEERS[:4], 5)
    rounds.start()
    others = [peer for peer in PEERS[:4] if peer != quitter]
    rounds.until(lambda: rounds.machines[quitter].phase is phase)
    void = wire.Void(SLOT, "I will not")
    rounds.mail.sort(key=lambda item: not isinstance(item[1], wire.Signed) or item[1].sender != quitter)
    last = next(
        (i for i, (_, it, _) in enumerate(rounds.mail) if not isinstance(it, wire.Signed) or it.sender != quitter), 0
    )
    rounds.mail[last:last] = [(other, signed(quitter, void), quitter) for other in others]
    rounds.dead.add(quitter)  # It sends nothing more; nobody is told that it is lost.
    for _ in range(last + len(others)):
        rounds.deliver()
    rounds.settle()
    assert rounds.kinds() == {DONE}
    assert {outcome.slot.attempt for outcome in rounds.outcomes()} == {0}
    assert rounds.noted("round.given_up") == {quitter}
    check_all_or_nothing(rounds)


def test_who_is_not_waited_for_is_in_where_no_cut_is_possible_without_it() -> None:
    """The only one that trains may have been in no cut lately."""
    alone, peers = ORDER[1], PEERS[:4]
    keeping = {peer: {"tokens": 0} for peer in peers if peer != alone}
    awaits = {"awaits": lambda peer: peer != alone}
    setups = {peer: {**awaits, **keeping.get(peer, {})} for peer in peers}
    rounds = Rounds(peers, attempts=3, setups=setups)
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {DONE}
    assert {outcome.cut for outcome in rounds.outcomes()} == {(alone,)}


def killed_when(victim: str, kind: type, *, seed: int) -> Rounds:
    """Return a round in which a peer dies as soon as every living member has received its message of that kind."""
    rounds = ConnectedRounds(PEERS[:4], seed, attempts=5)
    rounds.start()

    def under_way() -> list[int]:
        return [i for i, (_, it, _) in enumerate(rounds.mail) if is_kind(it, kind) and it.sender == victim]  # type: ignore[union-attr]

    while not under_way():
        rounds.deliver(rounds.random.randrange(len(rounds.mail)))
    while own := under_way():
        rounds.deliver(own[0])
    rounds.kill(victim)
    rounds.settle()
    check_all_or_nothing(rounds)
    assert contradictions(rounds) == []
    return rounds


@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("kind", [wire.Ready, wire.Commit, wire.Have, wire.Sketch, wire.Result, wire.Prevote])
def test_four_lose_one_at_any_step_and_the_round_is_done(kind: type, index: int) -> None:
    rounds = killed_when(ORDER[index], kind, seed=index)
    assert rounds.kinds() == {DONE}
    assert set(rounds.outcomes()[0].cut) >= set(rounds.living())


@pytest.mark.parametrize(
    "kind", [wire.Roster, wire.Commit, wire.Cut, wire.Sketch, wire.Result, wire.Outputs, wire.Propose, wire.Prevote]
)
def test_the_loss_of_the_proposer_costs_one_attempt(kind: type) -> None:
    rounds = killed_when(ORDER[0], kind, seed=2)
    assert rounds.kinds() == {DONE}
    assert {outcome.slot.attempt for outcome in rounds.outcomes()} <= {0, 1}


def test_who_follows_the_others_into_the_next_attempt_goes_no_further() -> None:
    """It gave up its own attempt for that, and the next one with it."""
    rounds = Rounds(PEERS[:4])
    rounds.start()
    rounds.until(lambda: all(rounds.machines[peer].phase is Phase.COLLECT for peer in PEERS[:4]))
    ready = a_ready(slot=SLOT.at(1))
    for other in ORDER[2:]:
        rounds.do(ORDER[1], rounds.machines[ORDER[1]].receive(signed(other, ready), ready, rounds.now))
    assert rounds.votes[ORDER[1]].slot.attempt == 1
    assert rounds.machines[ORDER[1]].outcome is not None


def test_too_few_left_is_void_at_once_and_not_at_a_deadline() -> None:
    rounds = Rounds(PEERS[:4])
    rounds.start()
    rounds.until(lambda: all(rounds.machines[peer].phase is Phase.COLLECT for peer in PEERS[:4]))
    for victim in ORDER[2:]:
        rounds.kill(victim)
    rounds.deliver_all()
    assert rounds.now == 0.0
    assert rounds.kinds() == {VOID}
    assert any("are no quorum" in outcome.reason for outcome in rounds.outcomes())


def test_an_owner_lost_with_both_of_its_deputies_voids_the_attempt_at_once() -> None:
    peers = PEERS[:10]
    rounds = Rounds(peers)
    rounds.start()
    rounds.until(lambda: all(rounds.machines[peer].phase is Phase.COLLECT for peer in peers))
    for index in (4, 5, 6):
        rounds.kill(order_of(peers)[index])
    rounds.deliver_all()
    assert rounds.now == 0.0
    assert rounds.kinds() == {VOID}
    assert any("the last who answered for part 4" in outcome.reason for outcome in rounds.outcomes())


def test_all_receive_what_the_proposer_received_of_a_lost_sender() -> None:
    proposer, victim, *_ = ORDER
    reached: list[bool] = []

    def is_second_sketch(mail: Mail) -> bool:
        is_its = is_kind(mail, wire.Sketch) and mail.sender == victim  # type: ignore[union-attr]
        return is_its and bool(wire.opened(mail).outputs)  # type: ignore[union-attr]

    rounds = Rounds(PEERS[:4], 3, lost=lambda to, mail: not reached and is_second_sketch(mail) and to != proposer)
    rounds.start()
    rounds.until(lambda: any(to == proposer and is_second_sketch(mail) for to, mail, _ in rounds.mail))
    index = next(i for i, (_, mail, _) in enumerate(rounds.mail) if is_second_sketch(mail))
    rounds.deliver(index)
    reached.append(True)
    rounds.kill(victim)
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert set(rounds.outcomes()[0].cut) == set(PEERS[:4])


def test_a_peer_that_has_taken_a_cut_is_bound_until_the_attempt_is_over() -> None:
    rounds = Rounds(PEERS[:4], 2)
    rounds.start()
    while rounds.mail:
        for peer, machine in rounds.machines.items():
            said = any(sender == peer and isinstance(message, wire.Sketch) for sender, message in rounds.said)
            assert machine.is_bound == (said and machine.outcome is None)
        rounds.deliver()
    assert not any(machine.is_bound for machine in rounds.machines.values())


# CONFIRM: values of earlier attempts, certificates.


def test_a_value_of_an_earlier_attempt_is_decided_without_moving_its_data_again() -> None:
    """All accept it, no Precommit arrives; the next proposer must propose it again, and one that lacks it fetches it."""
    lacking, is_first = ORDER[3], [True]

    def lost(to: str, mail: Mail) -> bool:
        return is_first[0] and is_kind(mail, wire.Precommit)

    def broken(peer: str, fetch: Fetch) -> str | None:
        return (
            PENDING if is_first[0] and peer == lacking and isinstance(fetch, FetchOutput) and fetch.part == 1 else None
        )

    rounds = Rounds(PEERS[:4], attempts=1, lost=lost, broken=broken)
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {VOID}
    made = {message.value for message in rounds.messages(wire.Prevote)}
    is_first[0], rounds.attempts, num_commits = False, 3, len(rounds.messages(wire.Commit))
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert {value_hash(outcome.certificate.value) for outcome in rounds.outcomes() if outcome.certificate} == made
    assert {outcome.slot.attempt for outcome in rounds.outcomes()} == {1}
    assert len(rounds.messages(wire.Commit)) == num_commits
    assert contradictions(rounds) == []


def one_without_the_last_output(*, is_there: bool) -> tuple[Rounds, Round]:
    """Return a round that the others decide while one lacks an output; `is_there`: it can be fetched later."""
    lacking = ORDER[3]

    def broken(peer: str, fetch: Fetch) -> str | None:
        return PENDING if peer == lacking and isinstance(fetch, FetchOutput) and fetch.part == 1 else None

    rounds = Rounds(PEERS[:4], broken=broken)
    if not is_there:
        rounds.hold = lambda peer, value: None  # type: ignore[method-assign]
    rounds.start()
    rounds.deliver_all()
    return rounds, rounds.machines[lacking]


def test_the_outputs_of_a_certified_value_are_fetched() -> None:
    rounds, machine = one_without_the_last_output(is_there=True)
    assert machine.outcome is not None
    assert machine.outcome.kind is DONE
    assert rounds.now == 0.0
    check_all_or_nothing(rounds)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_decision_whose_proposal_is_still_on_its_way_is_waited_for(arrives: bool) -> None:
    """Statements of others may overtake it: a round ends the same in any order."""

    def broken(peer: str, fetch: Fetch) -> str | None:
        return PENDING if peer == late and isinstance(fetch, FetchOutput) else None

    rounds = Rounds(PEERS[:4], broken=broken, lost=lambda to, mail: to == late and is_kind(mail, wire.Propose))
    late = next(peer for peer in PEERS[:4] if peer != rounds.votes[peer].proposer)
    machine = rounds.machines[late]
    rounds.start()
    rounds.deliver_all()
    assert {rounds.machines[peer].outcome is None for peer in PEERS[:4]} == {True, False}
    assert machine.outcome is None
    assert machine.vote.is_decided
    if arrives:
        proposer = machine.vote.proposer
        (propose,) = (
            message for peer, message in rounds.said if peer == proposer and isinstance(message, wire.Propose)
        )
        rounds.do(late, machine.receive(signed(proposer, propose), propose, rounds.now))
        check_all_or_nothing(rounds)
        assert rounds.now == 0.0
    else:
        rounds.settle()
        assert rounds.now == TIMING.control
    assert machine.outcome is not None
    assert machine.outcome.kind is (DONE if arrives else BEHIND)


def test_a_certificate_whose_outputs_do_not_arrive_leaves_me_behind() -> None:
    rounds, machine = one_without_the_last_output(is_there=False)
    assert machine.outcome is None
    rounds.settle()
    assert machine.outcome is not None
    assert machine.outcome.kind is BEHIND
    assert rounds.now <= TIMING.control + TIMING.transfer


def test_a_proposal_whose_value_is_of_another_round_charges_its_proposer() -> None:
    rounds = settled(4)
    propose = rounds.messages(wire.Propose)[0]
    other = encode(replace(open_value(propose.value), round=2))
    vote = a_vote(ORDER[1], PEERS[:4])
    with pytest.raises(ProtocolViolation, match="of another round"):
        vote.receive(signed(ORDER[0], message := replace(propose, value=other)), message, 0.0)


def test_a_proposal_names_the_roster_of_its_own_attempt() -> None:
    """The rosters of two attempts can show the same voters; another voter may have seen the later one only."""
    is_first = [True]

    def broken(peer: str, fetch: Fetch) -> str | None:
        return "gone" if is_first[0] and isinstance(fetch, FetchPart) else None

    rounds = Rounds(PEERS[:1], broken=broken)
    rounds.start()
    rounds.settle()
    assert rounds.kinds() == {VOID}
    is_first[0], rounds.attempts = False, 2
    rounds.settle()
    assert rounds.kinds() == {DONE}
    rosters = {roster.slot: signed(PEERS[0], roster).hash for roster in rounds.messages(wire.Roster)}
    assert len(rosters) == 2
    assert [rosters[propose.slot] for propose in rounds.messages(wire.Propose)] == [
        propose.roster for propose in rounds.messages(wire.Propose)
    ]


def test_a_proposal_that_overtakes_its_roster_is_accepted() -> None:
    rounds = settled(4)
    propose, roster = rounds.messages(wire.Propose)[0], rounds.messages(wire.Roster)[0]
    vote = a_vote(ORDER[1], PEERS[:4])
    vote.begin(a_ready(), PEERS[:4], 0.0)
    assert not vote.receive(signed(ORDER[0], propose), propose, 0.0)
    vote.roster(signed(ORDER[0], roster), roster)
    sent = [wire.opened(it.mail) for it in vote.hold(propose.value, 0.0) if isinstance(it, Forward)]
    assert sent == [wire.Prevote(SLOT, value_hash(propose.value))]


# Later rounds, and too few voters.


def test_half_of_the_voters_decide_nothing_and_say_for_whom_they_wait() -> None:
    rounds = Rounds(PEERS[:6])
    for peer in PEERS[3:6]:
        rounds.kill(peer)
    rounds.start()
    rounds.deliver_all()
    while not rounds.noted("agreement.stalled"):
        rounds.tick()
    assert rounds.now == STALL_SECONDS
    rounds.settle()
    assert rounds.kinds() == {VOID}
    assert rounds.now == TIMING.patience
    reasons = [note.reason for note in rounds.notes if note.event == "agreement.stalled"]
    assert reasons == [f"3 of 5 votes are ready and here; missing: {', '.join(PEERS[3:6])}"] * 3


def test_voters_that_are_here_and_train_are_no_stall() -> None:
    rounds = Rounds(PEERS[:4])
    rounds.start(*PEERS[:2])
    rounds.settle()
    assert rounds.now == TIMING.patience
    assert not rounds.noted("agreement.stalled")


def test_a_process_that_begins_in_a_later_attempt_signs_in_none_before_and_the_others_come_along() -> None:
    first = PEERS[0]
    rounds = Rounds(PEERS[:2], attempts=4)
    rounds.votes[first] = a_vote(first, PEERS[:2], slot=SLOT.at(5))
    rounds.begin(first)
    rounds.start()
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert {outcome.slot.attempt for outcome in rounds.outcomes() if outcome.certificate} == {5}
    assert not any(message.slot.attempt < 5 for peer, message in rounds.said if peer == first)


def test_a_voter_that_is_lost_after_its_ready_is_named_as_missing() -> None:
    voter, others = PEERS[0], PEERS[1:3]
    rounds = Rounds(PEERS[:3], voters=[voter])
    rounds.start()
    rounds.until(lambda: all(voter in rounds.machines[peer].vote.ready for peer in others))
    rounds.kill(voter)
    rounds.settle()
    reasons = [note.reason for note in rounds.notes if note.event == "agreement.stalled"]
    reasons += [outcome.reason for peer in others for outcome in rounds.ended[peer]]
    assert reasons
    assert {reason for reason in reasons if "ready and here" in reason} == {
        f"0 of 1 votes are ready and here; missing: {voter}"
    }


def of_two_states(founder: str, other: str) -> Rounds:
    """Return a round that needs both, of which the founder alone votes, and the other starts from another state."""
    setups: dict[str, dict[str, Any]] = {founder: {"min_peers": 2}, other: {"min_peers": 2, "base": OTHER_STATE}}
    return Rounds([founder, other], voters=[founder], attempts=20, setups=setups)


def test_who_starts_from_another_state_than_the_voters_leaves_at_once_and_comes_back_with_theirs() -> None:
    """Its key counts nothing, and its attempt costs no wait."""
    founder, other = PEERS[:2]
    rounds = of_two_states(founder, other)
    rounds.start()
    rounds.deliver_all()
    outcome = rounds.machines[other].outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == (BEHIND, "the voters start from another state than I")
    assert rounds.machines[founder].outcome is None
    del rounds.setups[other]["base"]  # It has taken the founder's state.
    rounds.begin(other)
    rounds.start(other)
    rounds.settle()
    check_all_or_nothing(rounds)
    assert rounds.kinds() == {DONE}
    assert {frozenset(outcome.cut) for outcome in rounds.outcomes()} == {frozenset([founder, other])}
    assert rounds.now == 0.0


def test_a_key_with_another_start_state_ends_only_a_few_attempts_at_once() -> None:
    founder, liar = PEERS[:2]
    rounds = of_two_states(founder, liar)
    rounds.start()
    for _ in range(20):
        rounds.deliver_all()
        rounds.begin(liar)
        rounds.start(liar)
    assert rounds.now == 0.0
    assert rounds.machines[founder].slot.attempt == RESTARTS


@pytest.mark.parametrize("kind", ["certificate", "proof"])
def test_what_ends_a_round_or_its_wait_is_looked_at_at_once(kind: str) -> None:
    it = settled(3).outcomes()[0].certificate
    assert it is not None
    machine = Round(a_setup(PEERS[3], PEERS[:4]), a_vote(PEERS[3], PEERS[:3]), 0.0)
    machine.start(0.0)
    machine.tick(0.0)
    assert machine.deadline > 0.0
    if kind == "certificate":
        machine.certified(it)
    else:
        machine.learn(wire.Proof(it.slot, it.value, it.voters, it.signatures), 0.0)
    assert machine.deadline == -math.inf


def test_a_round_that_was_certified_from_another_state_leaves_me_behind_at_once() -> None:
    rounds = settled(3)
    certificate = rounds.outcomes()[0].certificate
    assert certificate is not None
    machine = Round(a_setup(PEERS[3], PEERS[:4], base=OTHER_STATE), a_vote(PEERS[3], PEERS[:3]), 0.0)
    machine.start(0.0)
    machine.certified(certificate)
    machine.tick(0.0)
    assert machine.outcome is not None
    assert machine.outcome.kind is BEHIND


# The draw.


def test_a_large_run_draws_1000_members_a_round_and_other_ones_the_next_time() -> None:
    members = [f"12D3KooW{index:044d}" for index in range(4000)]
    first = drawn_for(SLOT, members, (), ())
    assert len(first) == wire.MAX_ROSTER
    assert first == drawn_for(SLOT.at(7), reversed(members), (), ())
    assert len(first & drawn_for(replace(SLOT, round=2), members, (), ())) < 400
    assert drawn_for(SLOT, members[:1000], (), ()) == set(members[:1000])
    assert all(drawn_for(replace(SLOT, round=at), members, members[:3], ()) >= set(members[:3]) for at in range(20))


# Weights.


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=64))
def test_weights_sum_to_one_and_nobody_exceeds_its_cap(tokens: list[int]) -> None:
    weights = token_weights(tokens)
    if not any(weights):
        return
    assert sum(weights) == pytest.approx(1)
    cap = 1.5 * statistics.median(tokens)
    capped = [min(count, cap) for count in tokens]
    assert weights == pytest.approx([count / sum(capped) for count in capped])
