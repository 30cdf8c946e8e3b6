"""Fork choice: which state is the run's, which peer starts a new run, and equal models."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.chain import NOTHING, ChainPosition, Head, HeldChain
from flockstep.collectives.chain.fork_choice import (
    Expected,
    OwnChain,
    alike,
    check_model,
    choose_provider,
    elected,
    goes_first,
    is_keeper,
    lagging,
)
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import Member
from flockstep.dht.records import Record
from flockstep.dht.run.layout import NO_LAYOUT
from flockstep.peer import wire
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from support.certificates import certify, grow

A, B = b"a" * 32, b"b" * 32
START = ChainPosition(0, A, 0, None)
SEVEN = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 8)), key=lambda one: one.peer_id)
IDS = [identity.peer_id for identity in SEVEN]
CHAINS: dict[Head, Sequence[wire.Certificate]] = {NOTHING: []}
"""The certificates of the chain that leads to each head."""


def place(rounds: int, root: bytes = A, *, tokens: int = 100, mark: bytes = A) -> ChainPosition:
    """After so many rounds of one voter, each with so many tokens, the last of which certified `mark` as its state."""
    before = grow(None, rounds - 1, tokens=tokens)
    return end([*before, certify(before[-1] if before else None, tokens, mark=mark)], root)


def end(chain: Sequence[wire.Certificate], root: bytes = A) -> ChainPosition:
    at = ChainPosition(len(chain), root, value_of(chain[-1]).tokens, chain[-1])
    CHAINS[at.head] = chain
    return at


def after(*rosters: Sequence[Identity], mark: bytes = A) -> ChainPosition:
    """After a round of all seven and one of each of these rosters."""
    chain = [certify(None, 100, roster=SEVEN)]
    for roster in rosters:
        chain.append(certify(chain[-1], 100, roster=roster, mark=mark))
    return end(chain)


def member(peer: str, at: ChainPosition, state: MemberState = MemberState.TRAINING) -> Member:
    record = Record("run", "member", peer, 1, 60.0, b"", bytes(64))
    body = MemberBody(state=state, layout=A, round=at.round, root=at.root, head=at.head.hash, chain_tokens=at.head.tokens)
    return Member(record, body, expires=60.0)


def own(at: ChainPosition, chain: ChainPosition | None = None, first: int = 1) -> OwnChain:
    """Where a peer stands whose ledger leads from `first` on to its state, or further."""
    ahead = at if chain is None else chain
    return OwnChain(at, HeldChain.of(CHAINS[ahead.head][first - 1 :], ahead.head))


def provider(
    members: list[Member], at: ChainPosition, backed_off: tuple[str, ...] = (), chain: ChainPosition | None = None
) -> str | None:
    chosen = choose_provider(members, "me", own(at, chain), backed_off=backed_off)
    return chosen.peer if chosen else None


def follows(members: list[Member], at: ChainPosition, chain: ChainPosition | None = None, first: int = 1) -> Head | None:
    return elected(members, "me", own(at, chain, first))


def all_at(peers: Sequence[str], at: ChainPosition) -> list[Member]:
    return [member(peer, at) for peer in peers]


def test_no_number_of_records_moves_a_peer_along_a_chain_that_it_does_not_hold() -> None:
    mine, other = after(SEVEN, SEVEN), end(grow(None, 9, tokens=10**9))
    crowd = [member(f"p{index}", other) for index in range(900)]
    for at in (mine, START):
        assert follows(crowd, at) is None
        assert provider(crowd, at) is None


def test_what_the_chain_that_i_hold_leads_to_is_followed_however_few_members_state_it() -> None:
    mine, ahead, newest = after(SEVEN), after(SEVEN, SEVEN[:5], SEVEN[:4]), after(SEVEN, SEVEN[:5], SEVEN[:4], SEVEN)
    for at in (mine, START):
        assert follows([*all_at(IDS[:5], mine), member(IDS[5], ahead)], at, newest) == ahead.head
        assert provider([member("x", ahead)], at, chain=newest) == "x"
        assert follows([member("x", newest), member("y", ahead)], at, newest) == newest.head
    assert follows([member("x", mine)], ahead) is None
    assert follows([member("x", mine)], mine, newest) is None  # Nobody has what I know of.


def test_once_a_provider_has_failed_those_come_first_that_decided_on_the_state() -> None:
    mine, ahead = after(SEVEN), after(SEVEN, SEVEN)
    crowd = [*all_at([f"p{index}" for index in range(900)], ahead), *all_at(IDS, ahead)]
    first = provider(crowd, mine, chain=ahead)
    assert first is not None
    assert first not in IDS
    second = provider(crowd, mine, (first,), ahead)
    assert second in IDS
    assert provider(crowd, mine, (first, second), ahead) in set(IDS) - {second}
    assert provider(crowd, mine, (first, *IDS), ahead) not in {first, *IDS}


def test_where_my_chain_was_before_is_no_other_chain() -> None:
    before, mine = after(), after(SEVEN, SEVEN)
    older = end(grow(None, 1, tokens=1000))
    assert own(mine).has_applied(before.head)
    assert own(mine).has_applied(START.head)
    assert not own(mine).holds(older.head)
    assert own(mine, first=3).holds(older.head)  # What ends before all that I know cannot be compared.
    assert not own(before, mine).has_applied(mine.head)
    assert own(before, mine).holds(mine.head)


def test_at_the_start_of_a_run_the_state_that_most_hold_is_the_runs() -> None:
    members = [member("p", ChainPosition(0, B, 0, None)), member("q", ChainPosition(0, B, 0, None)), member("r", START)]
    assert provider(members, START) in ("p", "q")
    assert provider(members, ChainPosition(0, B, 0, None)) is None


def start(mark: bytes) -> ChainPosition:
    return ChainPosition(0, mark, 0, None)


@pytest.mark.parametrize(
    ("me", "others", "founders", "taken"),
    [
        ("", {"f": B, "p": A, "q": A}, "f", B),  # The founders' state, however many are on another one.
        (A, {"f": B, "p": A, "q": A}, "f", B),
        (B, {"p": A, "q": A, "r": A}, ("me",), None),
        ("", {"p": A, "q": A}, ("me",), None),  # A founder makes the state itself.
        ("", {"f": B, "p": A}, ("me", "f"), B),  # Of two, the second one takes that of the first.
        (B, {"f": A, "g": B}, ("me", "f", "g"), None),
        (A, {"f": B, "g": B}, ("me", "f", "g"), B),
        (B, {"f": A}, ("me", "f"), A),  # At a tie the smaller one.
        ("", {"p": A, "q": A, "r": B}, "f", A),  # The founder keeps, and has no state yet.
        (A, {"p": B}, "f", None),  # Mine counts too: two would change places for ever.
    ],
)
def test_the_founders_state_is_that_of_the_start(
    me: bytes, others: dict[str, bytes], founders: Sequence[str], taken: bytes | None
) -> None:
    """`me` is the state that I hold; none while I am syncing, with C."""
    mine = start(me or b"c" * 32)
    members = [member(peer, start(root)) for peer, root in others.items()]
    members.append(member("me", mine, MemberState.TRAINING if me else MemberState.SYNCING))
    chosen = choose_provider(members, "me", own(mine), founders=founders)
    assert (chosen and chosen.body.root) == taken


def test_a_founder_goes_on_without_the_start_state_that_another_one_does_not_give() -> None:
    members = [member("f", start(A)), member("me", start(B))]

    def chosen(*founders: str) -> Member | None:
        return choose_provider(members, "me", own(start(B)), founders=founders, backed_off=["f"])

    assert chosen("me", "f") is None
    assert chosen("f") == members[0]  # Who founds nothing can begin nothing.


def test_a_given_start_state_is_the_only_one_whatever_founders_and_members_hold() -> None:
    def chosen(mine: bytes, *others: bytes) -> bytes | None:
        members = [member(f"f{number}", start(root)) for number, root in enumerate(others)] + [member("me", start(mine))]
        known = own(start(mine))
        found = choose_provider(members, "me", known, start=A, founders=("f0", "f1", "me"))
        return None if found is None else found.body.root

    assert chosen(B, B, B, A) == A
    assert chosen(B, B, B, B) is None
    assert chosen(A, B, B, B) is None


def test_who_knows_certificates_beyond_its_state_takes_no_state_of_the_start() -> None:
    members = [member("p", ChainPosition(0, B, 0, None)), member("q", ChainPosition(0, B, 0, None))]
    assert provider(members, START) in ("p", "q")
    assert provider(members, START, chain=place(5)) is None


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
    assert provider([member("p", place(5), MemberState.SYNCING)], START, chain=place(5)) is None
    assert provider([member("me", place(5))], START, chain=place(5)) is None


def test_who_failed_to_give_is_asked_only_where_nobody_else_has_it() -> None:
    members = [member(peer, place(1)) for peer in ("p", "q")]
    first = provider(members, START, chain=place(1))
    assert first is not None
    (other,) = {"p", "q"} - {first}
    assert provider(members, START, (first,), place(1)) == other
    assert provider(members, START, ("p", "q"), place(1)) == first


def test_the_smallest_id_begins_and_the_others_wait_for_it() -> None:
    newcomers = [member(peer, ChainPosition(0, bytes(32), 0, None), MemberState.SYNCING) for peer in ("a", "me", "z")]
    assert not goes_first(newcomers, "me", START)
    assert goes_first(newcomers[1:], "me", START)
    assert goes_first([*newcomers, member("y", START)], "me", START)
    assert goes_first(newcomers, "me", place(3))


def test_nobody_waits_for_a_keeper_to_begin_a_run_which_it_cannot() -> None:
    blank = ChainPosition(0, bytes(32), 0, None)
    keeper = member("a", blank, MemberState.SYNCING)
    assert is_keeper(replace(keeper, body=replace(keeper.body, layout=NO_LAYOUT)))
    assert goes_first([replace(keeper, body=replace(keeper.body, layout=NO_LAYOUT)), with_model("me", A)], "me", START)
    assert not goes_first([replace(keeper, body=replace(keeper.body, layout=A)), with_model("me", A)], "me", START)


def test_a_keeper_is_like_everybody_and_everybody_like_a_keeper() -> None:
    members = [with_model("me", A), with_model("p", B), with_model("q", NO_LAYOUT)]
    assert [one.peer for one in alike(members, "me")] == ["me", "q"]
    assert [one.peer for one in alike(members, "q")] == ["me", "p", "q"]


def test_keepers_have_no_say_in_which_model_a_newcomer_trains() -> None:
    keepers = [with_model(name, NO_LAYOUT) for name in "klmn"]
    me, base = with_model("me", A), with_model("p", A, frozen=B)
    check_model([me, *keepers], "me")
    check_model([me, with_model("q", A), base, *keepers], "me")
    with pytest.raises(UsageError, match="frozen parameters than 1 of 1 members have: p"):
        check_model([me, base, *keepers], "me")
    with pytest.raises(UsageError, match="names or shapes"):
        check_model([me, with_model("p", B), *keepers], "me")


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


def test_the_expected_members_are_found_anew_only_after_a_change() -> None:
    me, other, syncing = member("a", START), member("b", START), member("c", START, MemberState.SYNCING)
    other_model = replace(member("d", START), body=replace(other.body, layout=B))
    now: list[tuple[Member, ...]] = [(me, other, syncing, other_model)]
    expected = Expected(lambda: now[0], "a")
    assert expected() == {"a", "b"}
    assert expected() is expected()
    now[0] = (me, other, member("c", START))
    assert expected() == {"a", "b", "c"}
