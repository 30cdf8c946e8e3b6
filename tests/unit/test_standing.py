"""Whose state is the run's, and who begins where nobody has one yet."""

from flockstep.collectives.transfer import Place
from flockstep.dht.members import Member, MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.optim.standing import choose_giver, goes_first, lagging, outrun

A, B = b"a" * 32, b"b" * 32


def member(peer: str, round_: int, root: bytes, state: MemberState = MemberState.TRAINING) -> Member:
    record = Record("run", "member", peer, 1, 60.0, b"", bytes(64))
    return Member(record, MemberBody(state=state, round=round_, root=root), expires=60.0)


def giver(members: list[Member], place: Place) -> str | None:
    chosen = choose_giver(members, "me", place)
    return chosen.peer if chosen else None


def test_the_newest_round_wins_whatever_most_hold() -> None:
    members = [member("p", 1, A), member("q", 1, A), member("r", 2, B)]
    assert giver(members, Place(1, A, 0, None)) == "r"


def test_of_one_round_the_state_that_most_hold_is_the_runs() -> None:
    members = [member("p", 1, B), member("q", 1, B), member("r", 1, A)]
    assert giver(members, Place(1, A, 0, None)) in ("p", "q")
    assert giver(members, Place(1, B, 0, None)) is None


def test_at_a_tie_the_smaller_root_is_the_runs() -> None:
    members = [member("p", 0, B), member("q", 0, A)]
    assert giver(members, Place(0, B, 0, None)) == "q"


def test_nobody_gives_to_who_is_ahead_and_newcomers_give_to_nobody() -> None:
    assert giver([member("p", 1, A)], Place(2, B, 0, None)) is None
    assert giver([member("p", 5, A, MemberState.SYNCING)], Place(0, B, 0, None)) is None
    assert giver([member("me", 5, A)], Place(0, B, 0, None)) is None


def test_the_smallest_id_begins_and_the_others_wait_for_it() -> None:
    newcomers = [member(peer, 0, bytes(32), MemberState.SYNCING) for peer in ("a", "me", "z")]
    assert not goes_first(newcomers, "me", Place(0, A, 0, None))
    assert goes_first(newcomers[1:], "me", Place(0, A, 0, None))
    assert goes_first([*newcomers, member("y", 0, A)], "me", Place(0, A, 0, None))
    assert goes_first(newcomers, "me", Place(3, A, 0, None))


def test_who_is_ahead_and_who_lags() -> None:
    members = [member("p", 1, A), member("q", 3, A), member("r", 0, A, MemberState.SYNCING)]
    assert outrun(members, Place(2, A, 0, None))
    assert not outrun(members, Place(3, A, 0, None))
    assert lagging(members, Place(2, A, 0, None)) == 1
