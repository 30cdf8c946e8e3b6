"""What a voter and keys without a vote do to the roster of an honest proposer: they cost it no attempt, and no member.

On the machines of a round (`support.rounds`): four voters, of which one lies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind, Timing
from flockstep.collectives.round.gather import held, mark_of, proposal
from flockstep.dht.run import admission
from flockstep.dht.run.admission import Charter, Invitation, Ticket
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from support.rounds import (
    PEERS,
    RUN,
    SLOT,
    Made,
    Mail,
    Rounds,
    a_ready,
    a_setup,
    a_vote,
    order_of,
    signed,
    words_of,
)

VOTERS = PEERS[:4]
ORDER = PROPOSER, FIRST, SECOND, LIAR = order_of(VOTERS)
LONG = Timing(gather=20.0, control=2.0, transfer=5.0, patience=200.0)
"""The time to become ready is many exchanges long: a quarter of an inner phase is."""


def attempts_of_the_honest(rounds: Rounds) -> set[tuple[OutcomeKind, int]]:
    found = [rounds.machines[peer].outcome for peer in ORDER[:3]]
    return {(outcome.kind, outcome.slot.attempt) for outcome in found if outcome is not None}


@pytest.mark.parametrize("told", [(0,), (0, 1), (1,), (1, 2), (2,)])
@pytest.mark.parametrize("late", [None, 0, 1, 2])
@pytest.mark.parametrize("says", [True, False])
def test_a_voter_that_is_ready_to_some_makes_no_honest_one_leave_the_attempt(
    told: tuple[int, ...], late: int | None, *, says: bool
) -> None:
    """Whom it tells closes the gathering earlier than the others, or has had a quorum for longer."""

    def is_lost(target: str, mail: Mail) -> bool:
        message = wire.opened(mail) if isinstance(mail, wire.Signed) and mail.sender == LIAR else None
        return isinstance(message, wire.Heard) and not says

    deaf = {(LIAR, voter) for place, voter in enumerate(ORDER[:3]) if place not in told}
    rounds = Rounds(VOTERS, lost=is_lost, deaf=deaf, setups={voter: {"timing": LONG} for voter in VOTERS})
    rounds.start(*(peer for place, peer in enumerate(ORDER) if place != late))
    rounds.deliver_all()
    if late is not None:
        rounds.now = 0.75 * LONG.gather
        rounds.start(ORDER[late])
        rounds.deliver_all()
    rounds.deaf = ()
    rounds.settle()
    assert attempts_of_the_honest(rounds) == {(OutcomeKind.DONE, 0)}
    assert rounds.now <= 1.75 * LONG.gather + 2 * LONG.control


def word_of(voter: str, ready: wire.Ready, others: Sequence[wire.Signed] = ()) -> tuple[wire.Signed, wire.Heard]:
    marks = b"".join(map(mark_of, [signed(voter, ready), *others][: wire.MAX_ROSTER]))
    word = wire.Heard(SLOT, marks)
    return signed(voter, word), word


def roster_of(
    known: Mapping[str, Mapping[str, wire.Ready]],
    lie: tuple[wire.Signed, wire.Heard] | None,
    peers: Collection[str] = (),
    charter: Charter = admission.OPEN,
    **fields: Any,
) -> wire.Roster | str:
    """Return the roster of an honest proposer where each honest voter holds these Readys; all honest voters accept it."""
    votes = {voter: a_vote(voter, VOTERS, charter=charter) for voter in ORDER[:3]}
    for voter, vote in votes.items():
        for peer, ready in known[voter].items():
            vote.receive(signed(peer, ready), ready, 0.0)
    setup = a_setup(PROPOSER, [*VOTERS, *peers], charter=charter, **fields)
    words = words_of(setup, votes) | ({LIAR: lie} if lie is not None else {})
    shown = [entry for vote in votes.values() for entry in vote.ready.values()]
    made = proposal(setup, votes[PROPOSER], words, held(votes[PROPOSER], shown))
    if isinstance(made, str):
        return made
    for voter in ORDER[:3]:
        assert Made(*made).why_not(a_setup(voter, [*VOTERS, *peers], charter=charter), votes[voter], PROPOSER) is None
    return made[0]


OWNER = Identity.from_seed(b"o" * 32)
INVITED = Charter(run=RUN, owner=OWNER.peer_id, kind="invite")


def ticket(name: bytes, count: int = 8) -> Ticket:
    seed = name * 32
    return Ticket(Invitation.sign(OWNER, RUN, Identity.from_seed(seed).peer_id, count=count), seed)


def invited(peer: str, name: bytes, count: int = 8, **fields: Any) -> wire.Ready:
    return replace(a_ready(), invite=ticket(name, count).credential(peer), **fields)


def test_a_voter_whose_ready_shows_no_invitation_spoils_no_roster_by_its_own_word() -> None:
    readies = {peer: invited(peer, b"a") for peer in ORDER[:3]}
    known = dict.fromkeys(ORDER[:3], readies | {LIAR: a_ready()})
    made = roster_of(known, word_of(LIAR, a_ready()), charter=INVITED)
    assert isinstance(made, wire.Roster)
    assert {*made.members} == {*ORDER[:3]}


def test_a_banned_voter_has_no_place_by_its_own_word() -> None:
    known = dict.fromkeys(ORDER[:3], dict.fromkeys(VOTERS, a_ready()))
    made = roster_of(known, word_of(LIAR, a_ready()), is_banned=lambda peer: peer == LIAR)
    assert isinstance(made, wire.Roster)
    assert {*made.members} == {*ORDER[:3]}


def test_two_readys_with_two_invitations_spoil_no_roster() -> None:
    """A key shows one that is spent in its first Ready, and one that is not in its second."""
    key, other = PEERS[8], PEERS[9]
    base = {peer: invited(peer, b"a") for peer in VOTERS}
    full = invited(other, b"b", 1)
    spent = [invited(key, b"b", 1, download=float(number)) for number in range(20)]
    free = [invited(key, b"a", download=float(number)) for number in range(20)]
    first, second = min(spent, key=lambda it: mark_of(signed(key, it))), max(free, key=lambda it: mark_of(signed(key, it)))
    assert mark_of(signed(key, first)) < mark_of(signed(key, second))
    known = {
        PROPOSER: base | {other: full},
        FIRST: base | {key: first},
        SECOND: base | {key: second},
    }
    lie = word_of(LIAR, base[LIAR], [signed(other, full), signed(key, first), signed(key, second)])
    made = roster_of(known, lie, [key, other], charter=INVITED)
    assert isinstance(made, wire.Roster)
    assert {*made.members} == {*VOTERS, key, other}


def test_free_keys_that_are_ready_to_two_voters_each_take_nobodys_place() -> None:
    """With the liar's word they have as many votes as an honest trainer, are more than 64, and have ground their marks."""
    trainers = [f"12D3KooWh{number:043d}" for number in range(16)]
    keys = [f"12D3KooWk{number:043d}" for number in range(66)]

    def ground(key: str) -> wire.Ready:
        tried = (replace(a_ready(), download=float(number)) for number in range(30))
        return min(tried, key=lambda ready: mark_of(signed(key, ready)))

    of_keys = {key: ground(key) for key in keys}
    everybody = dict.fromkeys([*VOTERS, *trainers], a_ready())
    pairs = ((PROPOSER, FIRST), (FIRST, SECOND), (SECOND, PROPOSER))
    known = {
        voter: everybody | {key: of_keys[key] for place, key in enumerate(keys) if voter in pairs[place % 3]}
        for voter in ORDER[:3]
    }
    lie = word_of(LIAR, a_ready(), [signed(key, of_keys[key]) for key in keys])
    made = roster_of(known, lie, trainers)
    assert isinstance(made, wire.Roster)
    assert {*made.members} >= {*VOTERS, *trainers}


@pytest.mark.parametrize("charter", [admission.OPEN, INVITED], ids=["open", "invited"])
def test_a_roster_and_its_value_can_be_sent_whatever_keys_there_are(charter: Charter) -> None:
    """Of 2,000 keys each voter holds others, and the liar's word names as many as it can of those that it alone has heard."""
    keys, shared = [f"12D3KooWk{number:043d}" for number in range(2000)], ticket(b"i", 3000)

    def ready_of(peer: str) -> wire.Ready:
        invite = shared.credential(peer) if charter is INVITED else b""
        return replace(a_ready(), invite=invite, rates=bytes(wire.MAX_PARTS))

    readies = {peer: ready_of(peer) for peer in (*VOTERS, *keys)}
    known = {
        voter: {peer: readies[peer] for peer in (*VOTERS, *keys[at * 300 : at * 300 + 1200])}
        for at, voter in enumerate(ORDER[:3])
    }
    lie = word_of(LIAR, readies[LIAR], [signed(key, readies[key]) for key in keys[900:]])
    made = roster_of(known, lie, keys, charter)
    assert isinstance(made, wire.Roster)
    assert len(encode(made)) <= wire.MAX_STATEMENT_BYTES
    assert len(made.members) > 1.5 * wire.MAX_PARTS
    assert {*made.members} >= {*ORDER[:3]}
    everybody, hashes = tuple(range(len(made.members))), (bytes(32),) * (len(made.bounds) - 1)
    counts, absent = (wire.MAX_COUNT,) * len(everybody), tuple(wire.Absence(key, 2) for key in keys[:21])
    seats = tuple(replace(seat, rounds=wire.MAX_COUNT) for seat in made.seats)
    value = wire.Value(
        *(*SLOT.decision, bytes(32), made.members, made.bounds, seats, bytes(32), everybody, hashes, bytes(32)),
        *(wire.MAX_COUNT, everybody, bytes(wire.MAX_REVISION_BYTES), counts, absent),
    )
    assert len(encode(value)) <= wire.MAX_VALUE_BYTES


def test_keys_that_show_what_is_of_no_use_take_nobodys_place() -> None:
    keys, honest = ([f"12D3KooW{name}{number:043d}" for number in range(120)] for name in "kh")
    long = replace(a_ready(), invite=bytes(wire.MAX_INVITE_BYTES)), replace(a_ready(), voucher=bytes(wire.MAX_VOUCHER_BYTES))
    readies = {key: long[place % 2] for place, key in enumerate(keys)} | dict.fromkeys([*VOTERS, *honest], a_ready())
    made = roster_of(dict.fromkeys(ORDER[:3], readies), None, readies)
    assert isinstance(made, wire.Roster)
    assert {*made.members} == {*VOTERS, *honest}


def test_long_readys_that_others_hold_than_the_proposer_make_no_roster_too_long() -> None:
    """Each of two voters holds others, as many as have room for it, and the liar's word names all of them."""
    normal, one, other = ([f"12D3KooW{name}{number:043d}" for number in range(100)] for name in "nst")
    invite, voucher, rates = map(bytes, (wire.MAX_INVITE_BYTES, wire.MAX_VOUCHER_BYTES, wire.MAX_PARTS))
    long = encode(replace(a_ready(), invite=invite, voucher=voucher, rates=rates))

    def sign(peer: str) -> wire.Signed:
        payload = encode(a_ready()) if peer in (*VOTERS, *normal) else long
        return replace(signed(peer, a_ready()), payload=payload)

    votes = {voter: a_vote(voter, VOTERS) for voter in ORDER[:3]}
    for voter, more in zip(ORDER[:3], ([], one, other), strict=True):
        for peer in (*VOTERS, *normal, *more):
            votes[voter].receive(sign(peer), a_ready(), 0.0)
    words = words_of(a_setup(PROPOSER, [*VOTERS, *normal, *one, *other]), votes)
    words[LIAR] = word_of(LIAR, a_ready(), [sign(peer) for peer in (*one, *other)])
    shown = [entry for vote in votes.values() for entry in vote.ready.values()]
    made = proposal(a_setup(PROPOSER, VOTERS), votes[PROPOSER], words, held(votes[PROPOSER], shown))
    assert not isinstance(made, str)
    assert {*made[0].members} >= {*VOTERS, *normal}
    assert max(len(encode(it)) for it in made) <= wire.MAX_STATEMENT_BYTES


def test_who_may_vote_on_the_next_round_judges_this_one_before_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PARTS", 5)
    vouched, *keys = PEERS[4:14]
    statements = OwnerStatements(RUN, OWNER.peer_id).sign(OWNER, OwnerStatement("vouch", vouched))
    voucher = statements.voucher(vouched)
    charter = Charter(run=RUN, owner=OWNER.peer_id, founders=frozenset(VOTERS), keepers=frozenset(VOTERS))
    readies = {**dict.fromkeys([*VOTERS, *keys], a_ready()), vouched: replace(a_ready(), voucher=voucher)}
    made = roster_of(dict.fromkeys(ORDER[:3], readies), None, [vouched, *keys], charter)
    assert isinstance(made, wire.Roster)
    assert {*made.members[:5]} == {*VOTERS, vouched}
    assert len(made.members) == 14
    assert len(made.bounds) == 6


def test_what_a_voter_has_relayed_takes_no_place_of_the_readys_that_its_word_names() -> None:
    """A key tells the proposer another Ready than the rest; the voters have passed on those of many other keys before."""
    key, told = PEERS[5], replace(a_ready(), tokens=20)
    rounds = Rounds([*VOTERS, key], voters=VOTERS, deaf={(key, PROPOSER)})
    for voter in ORDER[1:]:
        for number in range(wire.MAX_ROSTER):
            stranger = f"12D3KooWk{number:043d}"
            rounds.machines[PROPOSER].show(voter, signed(stranger, a_ready()), a_ready())
    rounds.do(PROPOSER, rounds.machines[PROPOSER].receive(signed(key, told), told, 0.0))
    rounds.start()
    rounds.settle()
    assert attempts_of_the_honest(rounds) == {(OutcomeKind.DONE, 0)}
    assert key in rounds.outcomes()[0].members
