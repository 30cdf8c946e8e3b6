"""The message log of a round: which messages count, and that those of strangers do not."""

from dataclasses import replace
from itertools import combinations

from flockstep.collectives.accountability.evidence import Witness
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.robust.checks import commitment
from flockstep.collectives.round.facts import MessageLog
from flockstep.collectives.round.roster import DEPUTIES, MAX_TOKENS, RosterView
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.certificates import seats

PEERS = tuple(f"12D3KooW{letter * 44}" for letter in "ABCDE")
STRANGER = "12D3KooW" + "Z" * 44
SLOT = wire.Slot("r" * 52, 1, bytes(32))
LATER = SLOT.at(0, 1)
HASH = b"h" * 32
E = Electorate(dict.fromkeys(PEERS, 1))


def said(sender: str, message: wire.RoundMessage) -> wire.Signed:
    return wire.Signed(sender, wire.code_of(message), encode(message), bytes(64))


def a_ready(peer: str, tokens: int = 1) -> bytes:
    return encode(said(peer, wire.Ready(SLOT, bytes(32), tokens, 1.0, 1.0, commitment(bytes(32)))))


ROSTER = wire.Roster(SLOT, bytes(32), PEERS, (0, 2, 4, 4, 6, 8), seats(5), tuple(map(a_ready, PEERS)), (b"",))


def say(facts: MessageLog, sender: str, message: wire.RoundMessage) -> str:
    return facts.add(said(sender, message), message)


def a_commit(slot: wire.Slot, roster: bytes, tokens: int = 1) -> wire.Commit:
    return wire.Commit(slot, roster, tokens, 1, 0.0, (bytes(32),) * 5)


def a_table(facts: MessageLog) -> RosterView:
    return RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], E, facts)


def test_acknowledgements_of_a_cut_are_counted_once_a_peer_and_by_cut() -> None:
    facts = MessageLog()
    for peer in PEERS[:3]:
        assert say(facts, peer, wire.CutAck(SLOT, HASH)) == "new"
        assert say(facts, peer, wire.CutAck(SLOT, HASH)) == "known"
    assert say(facts, PEERS[0], wire.CutAck(SLOT, bytes(32))) == "new"  # Of a re-cut.
    assert facts.acknowledged(HASH) == set(PEERS[:3])
    assert facts.acknowledged(bytes(32)) == {PEERS[0]}
    assert facts.acknowledged(b"x" * 32) == frozenset()


def test_a_second_and_different_statement_is_a_conflict_and_the_first_one_counts() -> None:
    facts = MessageLog()
    assert say(facts, PEERS[0], wire.Prevote(SLOT, HASH)) == "new"
    assert say(facts, PEERS[0], wire.Prevote(SLOT, HASH)) == "known"
    assert say(facts, PEERS[0], wire.Prevote(SLOT, bytes(32))) == "conflict"
    assert say(facts, PEERS[1], wire.Prevote(SLOT, bytes(32))) == "new"
    assert facts.of(wire.Prevote, SLOT) == {PEERS[0]: wire.Prevote(SLOT, HASH), PEERS[1]: wire.Prevote(SLOT, bytes(32))}


def test_a_stranger_has_no_say() -> None:
    facts = MessageLog()
    for peer in (*PEERS[:2], STRANGER):
        say(facts, peer, wire.CutAck(SLOT, HASH))
        say(facts, peer, wire.Void(SLOT, "enough"))
        say(facts, peer, a_commit(SLOT, said(PEERS[0], ROSTER).hash))
    assert STRANGER in facts.of(wire.Void, SLOT)
    facts.restrict(PEERS)
    assert facts.acknowledged(HASH) == set(PEERS[:2])
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
    facts = MessageLog()
    for number in range(STATEMENTS[wire.CutAck].most):
        assert say(facts, PEERS[0], wire.CutAck(SLOT, number.to_bytes(32))) == "new"
    assert say(facts, PEERS[0], wire.CutAck(SLOT, HASH)) == "conflict"
    assert say(facts, PEERS[1], wire.CutAck(SLOT, HASH)) == "new"


def test_what_may_be_said_again_is_not_kept_for_ever() -> None:
    facts, table = MessageLog(), a_table(MessageLog())
    most = STATEMENTS[wire.Have].most
    for number in range(2 * most):
        say(facts, PEERS[0], wire.Have(SLOT, table.hash, ((number % 64, (number // 64,)),), bytes(32)))
        say(facts, PEERS[0], ROSTER)
        facts.drop(wire.Roster, PEERS[0])
    assert facts.num_ever(wire.Have) == facts.num_ever(wire.Roster) == most
    newest = facts.of(wire.Have)[PEERS[0]]
    assert [have for _, have in facts.since(wire.Have, 0)] == [newest]  # A full one takes 40 kB.
    assert facts.since(wire.Roster, 0) == []
    facts.restrict(PEERS[:2])
    assert facts.num_ever(wire.Have) == 1
    say(facts, PEERS[1], wire.Have(SLOT, table.hash, ((0, (1,)),), bytes(32)))
    say(facts, PEERS[1], wire.Have(SLOT, table.hash, ((0, (2,)),), bytes(32)))
    assert [have for _, have in facts.since(wire.Have, 0)] == list(facts.of(wire.Have).values())
    assert say(facts, PEERS[1], wire.Have(SLOT, table.hash, (), bytes(32))) == "new"


def test_a_claim_of_more_tokens_than_anybody_could_train_is_no_commit() -> None:
    facts = MessageLog()
    table = a_table(facts)
    say(facts, PEERS[3], a_commit(SLOT, table.hash, tokens=MAX_TOKENS))
    say(facts, PEERS[4], a_commit(SLOT, table.hash, tokens=MAX_TOKENS + 1))
    assert table.commits().keys() == {3}


def test_commits_and_haves_are_those_to_this_roster() -> None:
    facts = MessageLog()
    table = a_table(facts)
    assert not table.commits()
    say(facts, PEERS[3], a_commit(SLOT, table.hash))
    assert list(table.commits()) == [3]
    say(facts, PEERS[0], a_commit(SLOT, table.hash, tokens=7))
    say(facts, PEERS[1], a_commit(SLOT, HASH))
    say(facts, PEERS[2], a_commit(LATER, table.hash))
    assert table.commits().keys() == {0, 3}
    assert [signed.sender for signed in table.commits_signed((3, 0))] == [PEERS[3], PEERS[0]]
    say(facts, PEERS[0], wire.Have(SLOT, table.hash, ((0, (1,)),), bytes(32)))
    assert (table.held(0, 0), table.held(0, 1), table.held(3, 3)) == (frozenset({1}), None, None)
    say(facts, PEERS[0], wire.Have(SLOT, table.hash, ((0, (1, 2)),), bytes(32)))
    assert table.held(0, 0) == frozenset({1, 2})
    assert table.haves().keys() == {0}
    say(facts, PEERS[1], wire.Have(SLOT, table.hash, ((1, (1,)),), HASH))
    assert table.haves().keys() == {0}
    assert [(note.event, note.peer) for note in table.notes()] == [("round.refused", PEERS[1])]


def test_a_cut_has_a_quorum_of_the_voters_that_train_whoever_else_is_in_it() -> None:
    readys = tuple(a_ready(peer, tokens=int(peer != PEERS[4])) for peer in PEERS)
    roster = replace(ROSTER, readys=readys)
    votes = Electorate(dict.fromkeys(PEERS[1:], 1))  # The first has none, the last trains nothing: 1, 2 and 3 count.
    table = RosterView(said(PEERS[0], roster), roster, PEERS[1], votes, MessageLog())
    enough = {some for size in range(6) for some in combinations(range(5), size) if table.is_enough(some)}
    assert enough == {some for size in range(6) for some in combinations(range(5), size) if {1, 2, 3} <= set(some)}
    idle = replace(ROSTER, readys=tuple(a_ready(peer, tokens=0) for peer in PEERS))
    table = RosterView(said(PEERS[0], idle), idle, PEERS[1], E, MessageLog())
    assert table.is_enough((0,))
    assert not table.is_enough(())


def test_voters_are_of_tenure_at_once_where_the_owner_says_who_votes() -> None:
    votes = Electorate(dict.fromkeys(PEERS[:2], 1))
    table = RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], votes, MessageLog())
    by_owner = table.seats((1, 2), Charter(earned=True, keepers=frozenset(PEERS[:2])))
    assert by_owner == [replace(ROSTER.seats[1], rounds=YOUNG_ROUNDS), ROSTER.seats[2]]
    assert table.seats((1, 2), Charter(earned=True)) == list(ROSTER.seats[1:3])  # Where all vote, keys are free.


def test_deputies_are_the_next_in_the_ring_owners_first() -> None:
    table = a_table(MessageLog())  # Member 2 owns nothing.
    assert [table.deputies(part) for part in range(5)] == [(1, 3), (3, 4), (3, 4), (4, 0), (0, 1)]
    assert table.deputized == {0, 4}
    few = wire.Roster(SLOT, bytes(32), PEERS[:3], (0, 4, 4, 4), seats(3), ROSTER.readys[:3], (b"",))
    alone = RosterView(said(PEERS[0], few), few, PEERS[1], E, MessageLog())
    assert alone.deputies(0) == (1, 2)
    assert len(alone.deputies(0)) == DEPUTIES


def test_voters_are_deputies_before_others_so_that_free_keys_never_hold_a_part_alone() -> None:
    votes = Electorate(dict.fromkeys((PEERS[0], PEERS[2], PEERS[4]), 1))  # The third owns nothing.
    table = RosterView(said(PEERS[0], ROSTER), ROSTER, PEERS[1], votes, MessageLog())
    in_turns = [(4, 2), (0, 2), (4, 0), (2, 4), (0, 2)]  # For the parts of the second and the fourth, which do not vote.
    assert [table.deputies(part) for part in range(5)] == in_turns


def test_a_second_different_ready_in_a_slot_is_an_equivocation_for_the_log_and_for_the_witness() -> None:
    facts, witness = MessageLog(), Witness()
    author = Identity.generate()
    first, second = (wire.Ready(SLOT, bytes(32), tokens, 1.0, 1.0, bytes(32)) for tokens in (1, 2))
    assert facts.add(sign(author, first), first) == "new"
    assert facts.add(sign(author, second), second) == "conflict"
    assert facts.of(wire.Ready, SLOT)[author.peer_id] == first
    assert witness.see(sign(author, first), first, SLOT) is None
    assert witness.see(sign(author, second), second, SLOT) == sign(author, first)


def test_every_message_of_a_round_stands_in_the_table_of_statements() -> None:
    assert STATEMENTS.keys() == set(wire.ROUND_MESSAGES)
    assert not any(kind.convicts and kind.newest_counts for kind in STATEMENTS.values())
