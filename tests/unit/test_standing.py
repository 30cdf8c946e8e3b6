"""Whose state is the run's, who begins where nobody has one yet, and who trains the same model."""

from dataclasses import replace

import pytest
from certificates import certify, grow
from flockstep.collectives.place import Place
from flockstep.collectives.quorum import result_of
from flockstep.dht.members import Member, MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.optim.standing import alike, check_model, choose_giver, goes_first, lagging, outrun
from flockstep.peer.errors import UsageError

A, B = b"a" * 32, b"b" * 32
START = Place(0, A, 0, None)


def place(rounds: int, root: bytes = A, *, tokens: int = 100, mark: bytes = A) -> Place:
    """After so many rounds, each with so many tokens, the last of which certified `mark` as its state."""
    before = grow(None, rounds - 1, tokens=tokens)
    last = certify(before[-1] if before else None, tokens, mark=mark)
    return Place(rounds, root, result_of(last).tokens, last)


def member(peer: str, at: Place, state: MemberState = MemberState.TRAINING) -> Member:
    record = Record("run", "member", peer, 1, 60.0, b"", bytes(64))
    body = MemberBody(state=state, round=at.round, root=at.root, head=at.head.hash, chain_tokens=at.head.tokens)
    return Member(record, body, expires=60.0)


def giver(members: list[Member], at: Place, tired: tuple[str, ...] = ()) -> str | None:
    chosen = choose_giver(members, "me", at, tired=tired)
    return chosen.peer if chosen else None


def test_the_chain_with_more_tokens_wins_whatever_most_hold_and_however_many_rounds_it_has() -> None:
    shorter, longer, richer = place(1), place(3), place(2, B, tokens=1000, mark=B)
    members = [member("p", shorter), member("q", longer), member("r", longer)]
    assert giver(members, shorter) in ("q", "r")
    assert giver([*members, member("s", richer)], longer) == "s"
    assert giver(members, richer) is None
    assert outrun([member("s", richer)], longer)
    assert not outrun(members, richer)


def test_at_equal_tokens_both_sides_elect_the_same_chain() -> None:
    one, other = place(1, A, mark=A), place(1, B, mark=B)
    winner, loser = (one, other) if one.head.hash < other.head.hash else (other, one)
    assert giver([member("p", winner)], loser) == "p"
    assert giver([member("p", loser), member("q", loser)], winner) is None
    assert outrun([member("p", winner)], loser)
    assert not outrun([member("p", loser)], winner)


def test_at_the_start_of_a_run_the_state_that_most_hold_is_the_runs() -> None:
    members = [member("p", Place(0, B, 0, None)), member("q", Place(0, B, 0, None)), member("r", START)]
    assert giver(members, START) in ("p", "q")
    assert giver(members, Place(0, B, 0, None)) is None


def test_at_a_tie_the_smaller_root_is_the_runs() -> None:
    members = [member("p", Place(0, B, 0, None)), member("q", START)]
    assert giver(members, Place(0, B, 0, None)) == "q"


def test_a_certified_round_says_itself_which_state_is_right() -> None:
    right, drifted = place(1, A, mark=A), place(1, B, mark=A)
    members = [member("p", drifted), member("q", drifted), member("r", right)]
    assert giver(members, right) is None
    assert giver(members, drifted) == "r"
    assert giver(members[:2], drifted) is None


def test_nobody_gives_to_who_is_ahead_and_newcomers_give_to_nobody() -> None:
    assert giver([member("p", place(1))], place(2)) is None
    assert giver([member("p", place(5), MemberState.SYNCING)], START) is None
    assert giver([member("me", place(5))], START) is None


def test_who_failed_to_give_is_asked_only_where_nobody_else_has_it() -> None:
    members = [member(peer, place(1)) for peer in ("p", "q")]
    first = giver(members, START)
    assert first is not None
    (other,) = {"p", "q"} - {first}
    assert giver(members, START, (first,)) == other
    assert giver(members, START, ("p", "q")) == first


def test_the_smallest_id_begins_and_the_others_wait_for_it() -> None:
    newcomers = [member(peer, Place(0, bytes(32), 0, None), MemberState.SYNCING) for peer in ("a", "me", "z")]
    assert not goes_first(newcomers, "me", START)
    assert goes_first(newcomers[1:], "me", START)
    assert goes_first([*newcomers, member("y", START)], "me", START)
    assert goes_first(newcomers, "me", place(3))


def test_who_is_ahead_and_who_lags() -> None:
    members = [member("p", place(1)), member("q", place(3)), member("r", START, MemberState.SYNCING)]
    assert outrun(members, place(2))
    assert not outrun(members, place(3))
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
