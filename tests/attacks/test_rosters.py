"""What a voter and keys without a vote do to the roster of an honest proposer: they cost it no attempt, and no member.

On the machines of a round (`support.rounds`): four voters, of which one lies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flockstep.collectives.round.gather import held, mark_of, proposal, refusal
from flockstep.dht.run import admission
from flockstep.dht.run.admission import Charter, Invitation, Ticket
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from support.rounds import (
    PEERS,
    RUN,
    SLOT,
    a_ready,
    a_setup,
    a_vote,
    order_of,
    signed,
    words_of,
)

VOTERS = PEERS[:4]
ORDER = PROPOSER, FIRST, SECOND, LIAR = order_of(VOTERS)


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
    if isinstance(made, wire.Roster):
        for voter in ORDER[:3]:
            mine = a_setup(voter, [*VOTERS, *peers], charter=charter)
            assert refusal(mine, votes[voter], PROPOSER, made) is None
    return made


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
