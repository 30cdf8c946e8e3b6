"""Fork choice: which state is the run's, which peer starts a new run, and equal models."""

import itertools
from dataclasses import replace

import pytest
from flockstep.collectives.chain.certificate import result_of
from flockstep.collectives.chain.chain import NOTHING, ChainLink, ChainPosition, Head
from flockstep.collectives.chain.fork_choice import (
    ENOUGH,
    Chains,
    Proof,
    alike,
    check_model,
    choose_provider,
    elected,
    goes_first,
    head_of,
    lagging,
)
from flockstep.dht.members.table import Member, MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.peer.errors import UsageError
from support.certificates import certify, grow

A, B = b"a" * 32, b"b" * 32
START = ChainPosition(0, A, 0, None)
CHAINS: dict[Head, list[Head]] = {NOTHING: []}
"""The heads of the chain that leads to each."""
PLACES: dict[Head, ChainPosition] = {}
"""Where the certificate of each leads to."""


def place(rounds: int, root: bytes = A, *, tokens: int = 100, mark: bytes = A) -> ChainPosition:
    """After so many rounds, each with so many tokens, the last of which certified `mark` as its state."""
    before = grow(None, rounds - 1, tokens=tokens)
    last = certify(before[-1] if before else None, tokens, mark=mark)
    at = ChainPosition(rounds, root, result_of(last).tokens, last)
    CHAINS[at.head] = [ChainLink.of(certificate).head for certificate in (*before, last)]
    PLACES[at.head] = at
    return at


def on(rounds: int, number: int) -> ChainPosition:
    """After a round of the chain of so many."""
    certificate = grow(None, rounds)[number - 1]
    at = ChainPosition(number, A, result_of(certificate).tokens, certificate)
    CHAINS[at.head] = [ChainLink.of(certificate).head for certificate in grow(None, number)]
    PLACES[at.head] = at
    return at


def member(peer: str, at: ChainPosition, state: MemberState = MemberState.TRAINING) -> Member:
    record = Record("run", "member", peer, 1, 60.0, b"", bytes(64))
    body = MemberBody(state=state, round=at.round, root=at.root, head=at.head.hash, chain_tokens=at.head.tokens)
    return Member(record, body, expires=60.0)


def chains(members: list[Member], at: ChainPosition, first: int = 1) -> Chains:
    """Every head is proven, and known to part from mine if it does."""
    proven = {
        head: Proof(PLACES[head], at.head.hash, at.head not in (NOTHING, *CHAINS[head]))
        for row in members
        if (head := head_of(row)) in PLACES
    }
    mine = {head.round: head for head in CHAINS[at.head] if head.round >= first}
    return Chains(at, mine.get, first, proven)


def provider(members: list[Member], at: ChainPosition, backed_off: tuple[str, ...] = ()) -> str | None:
    chosen = choose_provider(members, "me", chains(members, at), backed_off=backed_off)
    return chosen.peer if chosen else None


def follows(members: list[Member], at: ChainPosition, first: int = 1) -> Head | None:
    return elected(members, "me", chains(members, at, first))


def all_at(peers: str, at: ChainPosition) -> list[Member]:
    return [member(peer, at) for peer in peers]


def test_the_chain_that_more_members_are_on_wins_whatever_its_tokens_are() -> None:
    mine, other = place(3), place(2, B, tokens=10**9, mark=B)
    assert follows([*all_at("ab", mine), *all_at("xy", other)], mine) is None
    assert follows([*all_at("a", mine), *all_at("xyz", other)], mine) == other.head
    assert provider([*all_at("a", mine), *all_at("xyz", other)], mine) in ("x", "y", "z")
    poorer = place(1, B, tokens=1, mark=B)
    assert follows([*all_at("a", mine), *all_at("xyz", poorer)], mine) == poorer.head
    assert follows([*all_at("ab", mine), *all_at("xyz", poorer)], mine) is None


def test_of_two_chains_with_as_many_members_the_one_with_more_tokens_wins() -> None:
    shorter, longer = place(1, B, mark=B), place(3)
    assert follows([*all_at("a", shorter), *all_at("xy", longer)], shorter) == longer.head
    assert follows([*all_at("a", longer), *all_at("xy", shorter)], longer) is None


def test_at_equal_tokens_both_sides_elect_the_same_chain() -> None:
    one, other = place(1, A, mark=A), place(1, B, mark=B)
    winner, loser = (one, other) if one.head.hash < other.head.hash else (other, one)
    assert follows([member("p", winner)], loser) == winner.head
    assert follows([member("p", loser)], winner) is None
    assert provider([member("p", winner)], loser) == "p"


def test_who_makes_a_round_alone_takes_nobody_along_as_long_as_the_others_can_do_without_it() -> None:
    mine, next_one = on(3, 2), on(3, 3)
    assert follows([*all_at("ab", mine), *all_at("x", next_one)], mine) is None  # Three of four are a quorum.
    assert follows([*all_at("a", mine), *all_at("x", next_one)], mine) == next_one.head  # Two of three are none.
    apart = place(3, B, tokens=90, mark=B)
    assert follows([*all_at("a", mine), *all_at("x", apart)], mine) is None  # It does not go on from mine.
    assert follows([*all_at("abcde", mine), *all_at("xy", next_one)], mine) is None
    assert follows([*all_at("abcde", mine), *all_at("xyz", next_one)], mine) == next_one.head


def test_both_sides_of_a_parted_run_find_the_same_of_each_other() -> None:
    left, right = place(3), place(3, B, tokens=50, mark=B)
    for on_left, on_right in itertools.product(range(1, 6), repeat=2):
        others = [*(f"l{index}" for index in range(1, on_left)), *(f"r{index}" for index in range(1, on_right))]
        rows = [member(peer, left if peer[0] == "l" else right) for peer in others]
        goes = follows([*rows, member("you", right)], left), follows([*rows, member("you", left)], right)
        assert goes == ((right.head, None) if on_right > on_left else (None, left.head)), (on_left, on_right)


def test_what_was_seen_from_elsewhere_than_where_i_stand_counts_for_nothing() -> None:
    mine, other = place(3), place(3, B, mark=B)
    known = chains(all_at("abcd", other), mine)
    assert elected(all_at("abcd", other), "me", known) == other.head
    assert elected(all_at("abcd", other), "me", replace(known, place=place(4))) is None


def test_what_is_not_proven_counts_for_nobody() -> None:
    mine, other = place(1), place(2)
    members = all_at("abc", other)
    assert elected(members, "me", replace(chains(members, mine), proven={})) is None


def test_of_more_members_than_a_roster_has_seats_half_of_these_are_enough() -> None:
    mine, next_one = place(1), place(2)
    crowd = [member(f"p{index}", mine) for index in range(900)]
    roster = [member(f"r{index}", next_one) for index in range(ENOUGH)]
    assert follows([*crowd, *roster], mine) == next_one.head
    assert follows([*crowd, *roster[1:]], mine) is None


def test_where_my_chain_was_before_is_no_other_chain() -> None:
    before, mine = on(3, 1), on(3, 3)
    assert follows(all_at("abcd", before), mine) is None
    assert follows(all_at("abcd", before), mine, first=3) is None  # I do not know it, but it has fewer tokens.
    assert follows(all_at("abcd", START), mine) is None
    richer = place(1, B, tokens=1000, mark=B)
    assert follows(all_at("abcd", richer), mine, first=3) == richer.head


def test_at_the_start_of_a_run_the_state_that_most_hold_is_the_runs() -> None:
    members = [member("p", ChainPosition(0, B, 0, None)), member("q", ChainPosition(0, B, 0, None)), member("r", START)]
    assert provider(members, START) in ("p", "q")
    assert provider(members, ChainPosition(0, B, 0, None)) is None


def test_at_a_tie_the_smaller_root_is_the_runs() -> None:
    members = [member("p", ChainPosition(0, B, 0, None)), member("q", START)]
    assert provider(members, ChainPosition(0, B, 0, None)) == "q"


def test_a_certified_round_says_itself_which_state_is_right() -> None:
    right, drifted = place(1, A, mark=A), place(1, B, mark=A)
    members = [member("p", drifted), member("q", drifted), member("r", right)]
    assert provider(members, right) is None
    assert provider(members, drifted) == "r"
    assert provider(members[:2], drifted) is None


def test_nobody_gives_to_who_is_ahead_and_newcomers_give_to_nobody() -> None:
    assert provider([member("p", place(1))], place(2)) is None
    assert provider([member("p", place(5), MemberState.SYNCING)], START) is None
    assert provider([member("me", place(5))], START) is None


def test_who_failed_to_give_is_asked_only_where_nobody_else_has_it() -> None:
    members = [member(peer, place(1)) for peer in ("p", "q")]
    first = provider(members, START)
    assert first is not None
    (other,) = {"p", "q"} - {first}
    assert provider(members, START, (first,)) == other
    assert provider(members, START, ("p", "q")) == first


def test_the_smallest_id_begins_and_the_others_wait_for_it() -> None:
    newcomers = [member(peer, ChainPosition(0, bytes(32), 0, None), MemberState.SYNCING) for peer in ("a", "me", "z")]
    assert not goes_first(newcomers, "me", START)
    assert goes_first(newcomers[1:], "me", START)
    assert goes_first([*newcomers, member("y", START)], "me", START)
    assert goes_first(newcomers, "me", place(3))


def test_who_lags() -> None:
    members = [member("p", place(1)), member("q", place(3)), member("r", START, MemberState.SYNCING)]
    assert lagging(members, place(2)) == 1


def with_model(peer: str, layout: bytes, frozen: bytes = A) -> Member:
    row = member(peer, START)
    return replace(row, body=replace(row.body, layout=layout, frozen=frozen))


def test_only_who_trains_the_same_model_on_the_same_base_counts() -> None:
    members = [with_model("me", A), with_model("p", A), with_model("q", B), with_model("r", A, frozen=B)]
    assert [row.peer for row in alike(members, "me")] == ["me", "p"]
    assert alike(members, "stranger") == members  # Who has not stated its own yet cannot compare.


def test_a_model_that_most_others_do_not_have_is_refused_and_the_reason_is_named() -> None:
    me = with_model("me", A)
    check_model([me], "me")
    check_model([me, with_model("p", A), with_model("q", B)], "me")
    with pytest.raises(UsageError, match="names or shapes"):
        check_model([me, with_model("p", A), with_model("q", B), with_model("r", B)], "me")
    with pytest.raises(UsageError, match="values of its frozen"):
        check_model([me, with_model("p", A, frozen=B)], "me")
    syncing = with_model("p", B)
    check_model([me, replace(syncing, body=replace(syncing.body, state=MemberState.SYNCING))], "me")
