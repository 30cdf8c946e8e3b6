"""The message log of a round: which messages count, and that those of strangers do not."""

from dataclasses import replace

import pytest
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.allreduce.facts import MessageLog
from flockstep.collectives.allreduce.roster import MAX_TOKENS, RosterView, readies_of
from flockstep.collectives.allreduce.words import DEPUTIES, Seating
from flockstep.collectives.robust.checks import commitment
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.wire.schema import encode
from support.certificates import seats

PEERS = tuple(f"12D3KooW{letter * 44}" for letter in "ABCDE")
STRANGER = "12D3KooW" + "Z" * 44
SLOT = wire.Slot("r" * 52, 1, bytes(32))
LATER = SLOT.at(1)
HASH = b"h" * 32
E = Electorate(dict.fromkeys(PEERS, 1))


def said(sender: str, message: wire.RoundMessage) -> wire.Signed:
    return wire.Signed(sender, wire.code_of(message), encode(message), bytes(64))


def a_ready(peer: str) -> bytes:
    return encode(said(peer, wire.Ready(SLOT, bytes(32), 1, 1.0, 1.0, commitment(bytes(32)))))


ROSTER = wire.Roster(SLOT, bytes(32), PEERS, (0, 2, 4, 4, 6, 8), seats(5), b"\x1f", bytes(32))
READIES = readies_of(tuple(PEERS), tuple(map(a_ready, PEERS)))


def say(facts: MessageLog, sender: str, message: wire.RoundMessage) -> str:
    return facts.add(said(sender, message), message)


def a_commit(slot: wire.Slot, roster: bytes, tokens: int = 1) -> wire.Commit:
    return wire.Commit(slot, roster, tokens, 1, 0.0, (bytes(32),) * 5)


def a_word(roster: bytes, *held: int, part: int = 0, cut: bytes = b"", nonce: bytes = bytes(32)) -> wire.Have:
    """Return the word of a holder that has these members' statements, whose names are their indices."""
    return wire.Have(SLOT, roster, cut, ((part, held),), b"".join(map(name_of, held)), nonce)


def name_of(index: int) -> bytes:
    return bytes([index]) * wire.NAME_BYTES


def a_result(cut: bytes = HASH, part: int = 0, output: bytes = HASH) -> wire.Result:
    return wire.Result(SLOT, cut, part, output)


def a_table(facts: MessageLog) -> RosterView:
    return RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], E, facts, READIES)


def test_statements_on_several_subjects_are_kept_once_each() -> None:
    facts = MessageLog()
    for peer in PEERS[2::-1]:
        for message in (a_result(), a_result(part=1), a_result(cut=bytes(32))):
            assert say(facts, peer, message) == "new"
            assert say(facts, peer, message) == "known"
        assert say(facts, peer, a_result(output=bytes(32))) == "conflict"
    found = facts.every(wire.Result, SLOT)
    assert [signed.sender for signed, _ in found] == [peer for peer in PEERS[:3] for _ in range(3)]
    assert {message for _, message in found} == {a_result(), a_result(part=1), a_result(cut=bytes(32))}
    assert facts.every(wire.Result, LATER) == []


def test_a_contradiction_does_not_count_but_can_be_named() -> None:
    """A holder may have received the other one of two Commits, and then its word names that."""
    facts = MessageLog()
    table = a_table(facts)
    first, second, third = (a_commit(SLOT, table.hash, tokens=tokens) for tokens in (1, 2, 3))
    names = [said(PEERS[3], commit).name for commit in (first, second, third)]
    assert [say(facts, PEERS[3], commit) for commit in (first, second, third)] == ["new", "conflict", "conflict"]
    assert table.commits() == {3: first}
    assert table.commit_name(3) == names[0]
    assert [table.commit_named(3, name) for name in names] == [first, second, None]
    assert table.signed_commit(3, names[1]) == said(PEERS[3], second)
    assert table.signed_commit(3) == said(PEERS[3], first)
    assert table.commit_named(2, names[0]) is None
    elsewhere = a_commit(SLOT, HASH)
    say(facts, PEERS[2], elsewhere)
    assert table.commit_named(2, said(PEERS[2], elsewhere).name) is None


def test_a_stranger_has_no_say() -> None:
    facts = MessageLog()
    for peer in (*PEERS[:2], STRANGER):
        say(facts, peer, a_result())
        say(facts, peer, wire.Void(SLOT, "enough"))
        say(facts, peer, a_commit(SLOT, said(PEERS[0], ROSTER).hash))
    assert STRANGER in facts.of(wire.Void, SLOT)
    facts.restrict(PEERS)
    assert [signed.sender for signed, _ in facts.every(wire.Result, SLOT)] == list(PEERS[:2])
    assert [signed.sender for signed, _ in facts.since(wire.Result, 0)] == list(PEERS[:2])
    assert list(facts.of(wire.Void, SLOT)) == list(PEERS[:2])
    assert list(a_table(facts).commits()) == [0, 1]


def test_views_follow_what_is_said() -> None:
    facts = MessageLog()
    assert not facts.of(wire.Roster, SLOT)
    say(facts, PEERS[1], ROSTER)
    say(facts, PEERS[0], ROSTER)
    assert list(facts.of(wire.Roster, SLOT)) == [PEERS[0], PEERS[1]]
    assert not facts.of(wire.Roster, LATER)
    facts.drop(wire.Roster, PEERS[0])
    assert list(facts.of(wire.Roster, SLOT)) == [PEERS[1]]


def test_a_flood_of_words_is_refused() -> None:
    facts, table = MessageLog(), a_table(MessageLog())
    words = [a_word(table.hash, number % 5, part=number // 5) for number in range(STATEMENTS[wire.Have].most + 1)]
    assert [say(facts, PEERS[0], word) for word in words[:-1]] == ["new"] * (len(words) - 1)
    assert say(facts, PEERS[0], words[-1]) == "conflict"
    assert say(facts, PEERS[1], words[-1]) == "new"
    assert facts.num_ever(wire.Have) == len(words)


def test_what_was_refused_is_not_kept() -> None:
    facts = MessageLog()
    for _ in range(2 * STATEMENTS[wire.Roster].most):
        assert say(facts, PEERS[0], ROSTER) == "new"
        facts.drop(wire.Roster, PEERS[0])
    assert facts.since(wire.Roster, 0) == []
    assert facts.by(PEERS[0]) == []


def test_a_claim_of_more_tokens_than_anybody_could_train_is_no_commit() -> None:
    facts = MessageLog()
    table = a_table(facts)
    say(facts, PEERS[3], a_commit(SLOT, table.hash, tokens=MAX_TOKENS))
    say(facts, PEERS[4], a_commit(SLOT, table.hash, tokens=MAX_TOKENS + 1))
    assert table.commits().keys() == {3}


def test_commits_and_words_are_those_to_this_roster() -> None:
    facts = MessageLog()
    table = a_table(facts)
    assert not table.commits()
    say(facts, PEERS[3], a_commit(SLOT, table.hash))
    assert list(table.commits()) == [3]
    say(facts, PEERS[0], a_commit(SLOT, table.hash, tokens=7))
    say(facts, PEERS[1], a_commit(SLOT, HASH))
    say(facts, PEERS[2], a_commit(LATER, table.hash))
    assert table.commits().keys() == {0, 3}
    assert not table.words(b"")
    say(facts, PEERS[0], first := a_word(table.hash, 1))
    assert table.words(b"")[0][-1].claims == {0: {1: name_of(1)}}
    say(facts, PEERS[0], a_word(table.hash, 1, 2))
    say(facts, PEERS[0], a_word(table.hash, 3, cut=HASH))
    assert table.words(b"")[0][-1].claims == {0: {1: name_of(1), 2: name_of(2)}}
    assert table.words(HASH)[0][-1].claims == {0: {3: name_of(3)}}
    named = table.word(b"", 0, said(PEERS[0], first).name)
    assert named is not None
    assert named.claims == {0: {1: name_of(1)}}
    assert table.word(b"", 1, named.name) is None
    assert table.word(HASH, 0, named.name) is None
    say(facts, PEERS[2], a_word(HASH, 1))
    say(facts, PEERS[3], replace(a_word(table.hash, 1), names=bytes(15)))
    say(facts, PEERS[1], a_word(table.hash, 1, nonce=HASH))
    assert table.words(b"").keys() == {0}
    assert [(note.event, note.peer) for note in table.notes()] == [("round.refused", PEERS[1])]
    assert table.notes() == []


def test_seats_that_matter_to_a_cut_are_those_of_the_roster() -> None:
    roster = replace(ROSTER, training=b"\x17")
    votes = Electorate(dict.fromkeys((*PEERS[:4], STRANGER), 1))
    table = RosterView(said(PEERS[0], roster), roster, PEERS[1], votes, MessageLog(), READIES)
    assert table.voters == tuple(PEERS[:4])
    assert table.receivers == tuple(PEERS)
    assert replace(table.seating, deputies=()) == Seating(
        frozenset({0, 1, 3, 4}),
        frozenset({0, 1, 2, 3}),
        frozenset({0, 1, 2, 4}),
        frozenset({0, 1, 2}),
        (),
    )
    assert [table.deputies(part) for part in (0, 1)] == [table.seating.deputies[part][:2] for part in (0, 1)]
    assert table.seating.jurors == {0, 1, 3}
    assert [table.living(part, {*PEERS} - {PEERS[1]}) for part in (0, 1)] == [[0, 3], [3, 0]]


@pytest.mark.parametrize(
    ("opened", "are_enough"), [((), False), ((0,), False), ((2,), False), ((0, 2), True), ((1,), True), ((0, 1), True)]
)
def test_nonces_of_more_than_a_third_of_the_owners_or_of_the_votes_make_a_seed(
    opened: tuple[int, ...], are_enough: bool
) -> None:
    """Of four owners two, one of which may be a liar's; or of the votes so many that one of them is honest."""
    votes = Electorate({PEERS[1]: 3, PEERS[2]: 1, PEERS[3]: 1, PEERS[4]: 1})
    table = RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], votes, MessageLog(), READIES)
    assert table.are_enough_nonces(opened) is are_enough


def test_voters_are_of_tenure_at_once_where_the_owner_says_who_votes() -> None:
    votes = Electorate(dict.fromkeys(PEERS[:2], 1))
    table = RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], votes, MessageLog(), READIES)
    by_owner = table.seats((1, 2), Charter(earned=True, keepers=frozenset(PEERS[:2])))
    assert by_owner == [replace(ROSTER.seats[1], rounds=YOUNG_ROUNDS), ROSTER.seats[2]]
    assert table.seats((1, 2), Charter(earned=True)) == list(ROSTER.seats[1:3])  # Where all vote, keys are free.


def test_deputies_are_the_next_in_the_ring_owners_first() -> None:
    table = a_table(MessageLog())  # Member 2 owns nothing.
    assert [table.deputies(part) for part in range(5)] == [(1, 3), (3, 4), (3, 4), (4, 0), (0, 1)]
    assert table.deputized == {0, 4}
    few = wire.Roster(SLOT, bytes(32), PEERS[:3], (0, 4, 4, 4), seats(3), b"\7", bytes(32))
    alone = RosterView(said(PEERS[0], few), few, PEERS[1], E, MessageLog(), READIES)
    assert alone.deputies(0) == (1, 2)
    assert len(alone.deputies(0)) == DEPUTIES


def test_voters_alone_are_deputies_and_take_turns_so_that_free_keys_never_hold_a_part_alone() -> None:
    votes = Electorate(dict.fromkeys(PEERS[:3], 1))  # The third owns nothing.
    table = RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], votes, MessageLog(), READIES)
    in_turns = [(1, 2), (0, 2), (0, 1), (0, 1), (1, 2)]
    assert [table.deputies(part) for part in range(5)] == in_turns


def test_every_message_of_a_round_stands_in_the_table_of_statements() -> None:
    assert STATEMENTS.keys() == set(wire.ROUND_MESSAGES)
