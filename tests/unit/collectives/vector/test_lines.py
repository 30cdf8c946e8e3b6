"""Lines and codecs. Lines as their receivers state them: liars neither pull parts to themselves nor push them to a victim."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from itertools import pairwise

from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.vector.lines import GRADES, CodecChoice, StatedLines, grade_of, rate_of, stated
from flockstep.collectives.vector.mixed import codecs_named
from flockstep.peer import wire
from hypothesis import given
from hypothesis import strategies as st

SLOT = wire.Slot("run", 2, bytes(32))
CELLS = range(1000)


def a_ready(rates: bytes = b"", *, upload: float = 1e6, tokens: int = 10) -> wire.Ready:
    return wire.Ready(SLOT, bytes(32), tokens, upload, 1e6, bytes(32), rates=rates)


def lines_of(readies: Mapping[str, wire.Ready], last: str, voters: str = "") -> StatedLines:
    return StatedLines(readies, last, Electorate(dict.fromkeys(voters or readies, 1)).frontier)


def shares(readies: Mapping[str, wire.Ready], last: str, voters: str = "", without: str = "") -> dict[str, float]:
    bounds = lines_of(readies, last, voters).bounds(CELLS, set(without))
    return {peer: (high - low) / 1000 for peer, (low, high) in zip(readies, pairwise(bounds), strict=True)}


def grades(*rates: float) -> bytes:
    return bytes(map(grade_of, rates))


@given(rate=st.floats(600, 1e12))
def test_a_grade_is_within_an_eighth_below_the_rate(rate: float) -> None:
    assert rate * 8 / 9.001 <= rate_of(grade_of(rate)) <= rate


def test_grades_ascend_from_none_to_beyond_any_line() -> None:
    assert [grade_of(rate_of(grade)) for grade in range(GRADES)] == [*range(GRADES)]
    assert (rate_of(0), grade_of(0.0), grade_of(100.0), grade_of(1e15)) == (0, 0, 0, GRADES - 1)
    assert stated("AB", {"A": 0.0, "B": 1e6}.__getitem__) == bytes([0, grade_of(1e6)])


def test_parts_follow_what_receivers_measured_and_not_what_is_claimed() -> None:
    says = grades(8e6, 1e6, 1e6, 2e6)
    readies = {"A": a_ready(says), "B": a_ready(says, upload=1e12), "C": a_ready(says), "D": a_ready(says)}
    assert shares(readies, "ABCD") == {"A": 0.5, "B": 0.125, "C": 0.125, "D": 0.25}  # 8:1:1:2, cut to a half.


def test_less_than_a_third_of_the_votes_neither_pulls_parts_to_itself_nor_pushes_them_to_a_victim() -> None:
    """A and B of seven voters lie: about themselves, and about the victim C in either direction."""
    honest = grades(*[1e6] * 7)
    for lie in (grades(1e12, 1e12, 1e12, 1, 1, 1, 1), grades(1e12, 1e12, 0, 1e12, 1e12, 1e12, 1e12)):
        readies = {peer: a_ready(honest) for peer in "ABCDEFG"}
        readies |= {peer: a_ready(lie, upload=1e15) for peer in "AB"}
        told = shares(readies, "ABCDEFG")
        assert max(told.values()) - min(told.values()) <= 0.0015, told


def test_keys_without_a_vote_testify_nothing() -> None:
    honest, lie = grades(1e6, 1e6, 1e6, 1e6, *[0.0] * 8), grades(0, 0, 0, 0, *[1e12] * 8)
    readies = {peer: a_ready(honest if peer in "ABCD" else lie, upload=1e15) for peer in "ABCDstuvwxyz"}
    readies |= {peer: a_ready(honest) for peer in "ABCD"}
    told = shares(readies, "ABCDstuvwxyz", voters="ABCD")
    assert {told[peer] for peer in "ABCD"} == {0.167}  # As much as without them, but for the share of who is not measured.


def test_nobody_testifies_for_itself() -> None:
    """One voter of two: its own word would be a third of the votes."""
    readies = {"A": a_ready(grades(1e12, 1e6)), "B": a_ready(grades(1e6, 0))}
    assert shares(readies, "AB") == {"A": 0.5, "B": 0.5}


@given(liar=st.binary(min_size=6, max_size=6), upload=st.floats(0, 1e15), truth=st.lists(st.integers(80, 130), min_size=6))
def test_no_single_statement_moves_a_rate_beyond_what_honest_voters_say(liar: bytes, upload: float, truth: list[int]) -> None:
    """Of six voters one lies; whatever it says, everybody else's rate stays within the honest statements about it."""
    peers = "ABCDEF"
    said = {peer: bytes(truth[:6]) for peer in peers}
    readies = {peer: a_ready(said[peer]) for peer in peers} | {"F": a_ready(liar, upload=upload)}
    lines = lines_of(readies, peers)
    assert [lines.measured(peer) for peer in peers] == [rate_of(grade) for grade in truth[:6]]


def test_who_was_not_measured_counts_for_no_more_than_voters_claim() -> None:
    readies = {peer: a_ready(upload=1e6) for peer in "ABC"} | {"x": a_ready(upload=1e15), "y": a_ready(upload=0.5e6)}
    told = shares(readies, "", voters="ABC")
    assert abs(told["x"] - told["A"]) <= 0.0015
    assert abs(told["y"] - told["A"] / 2) < 0.01


def test_fresh_keys_own_no_more_than_a_third_beside_measured_lines_whatever_voters_claim() -> None:
    """A and B claim 100 MB/s: more than a third of the votes. Twelve are measured at 1 MB/s, x and y are fresh."""
    twelve, says = "ABCDefghijkl", grades(*[1e6] * 12)
    readies = {peer: a_ready(says, upload=1e8 if peer in "AB" else 1e6) for peer in twelve}
    told = shares(readies | {peer: a_ready(upload=1e15) for peer in "xy"}, twelve, voters="ABCD")
    assert abs(told["x"] - told["A"]) <= 0.0015  # As a usual measured one.
    fresh = [f"fresh {number}" for number in range(12)]
    told = shares(readies | {peer: a_ready(upload=1e15) for peer in fresh}, twelve, voters="ABCD")
    assert abs(sum(told[peer] for peer in fresh) - 1 / 3) < 0.01


def test_free_keys_do_not_set_the_rate_of_who_was_not_measured() -> None:
    """All voters opt out: six keys that claim much beside five honest ones count no more than these."""
    readies = {"A": a_ready(upload=0)} | {peer: a_ready(upload=1e15 if peer in "stuvwx" else 1e6) for peer in "bcdefstuvwx"}
    told = shares(readies, "", voters="A")
    assert told["A"] == 0
    assert max(told[peer] for peer in "stuvwx") - min(told[peer] for peer in "bcdef") <= 0.0015


def test_leaving_owners_out_lifts_no_limit() -> None:
    says = grades(8e6, 1e6, 1e6)
    assert shares({peer: a_ready(says) for peer in "ABC"}, "ABC", without="C") == {"A": 0.5, "B": 0.5, "C": 0}
    readies = {"A": a_ready(upload=0), "b": a_ready(), "c": a_ready()}
    assert shares(readies, "", without="bc") == {"A": 0, "b": 0.5, "c": 0.5}


def test_a_relayed_voter_owns_nothing_while_others_can() -> None:
    readies = {"A": a_ready(upload=0), "b": a_ready(), "c": a_ready()}
    assert shares(readies, "", voters="A") == {"A": 0, "b": 0.5, "c": 0.5}
    assert shares({"A": a_ready(upload=0)}, "") == {"A": 1}


def test_a_statement_about_another_roster_counts_nothing() -> None:
    readies = {peer: a_ready(grades(1e9, 1e6, 1e6, 1e6)[:size]) for peer, size in zip("ABCD", (3, 3, 2, 0), strict=True)}
    assert set(shares(readies, "ABCD").values()) == {0.25}


def test_a_part_is_no_larger_than_its_owner_receives_while_the_slowest_sends() -> None:
    """D sends ten times as fast as the others, and receives half as fast as they send."""
    others, slow = grades(1e6, 1e6, 1e6, 1e7), grades(5e5, 5e5, 5e5, 0)
    readies = {peer: a_ready(others) for peer in "ABC"} | {"D": a_ready(slow)}
    seen, slowest = rate_of(grade_of(5e5)), rate_of(grade_of(1e6))
    told = shares(readies, "ABCD")
    assert abs(told["D"] - Fraction(2 * seen, 3 * slowest)) <= 0.001
    assert shares(readies | {"D": a_ready(others)}, "ABCD")["D"] == 0.5


@given(excluded=st.sets(st.sampled_from("ABCDEFGH")), cells=st.integers(1, 30), rates=st.binary(min_size=8, max_size=8))
def test_what_a_proposer_proposes_others_can_check(excluded: set[str], cells: int, rates: bytes) -> None:
    lines = lines_of({peer: a_ready(rates) for peer in "ABCDEFGH"}, "ABCDEFGH")
    able = lines.able(range(cells))

    def are_too_many(without: Collection[str]) -> bool:
        return 2 * len(able.intersection(without)) > len(able)

    bounds = lines.proposal(range(cells), lambda peer: peer not in excluded, are_too_many)
    without = lines.without(bounds)
    assert lines.bounds(range(cells), without) == bounds
    assert not are_too_many(without)
    assert excluded <= without or are_too_many(without | excluded)


def test_the_codec_of_most_bits_that_the_line_sends_in_time_is_chosen() -> None:
    """A thousand cells are 66 kB as lloyd2, 136 kB as int4 and 258 kB as int8."""
    choice = CodecChoice(codecs_named(["int4", "lloyd2", "int8"]))
    chosen: list[str] = []
    for rate in (136e3, 135e3, 150e3, 182e3, 343e3, 345e3, 259e3, 257e3, 1.0, 1e9):
        choice.choose(1000, rate, 1.0)
        chosen.append(choice.mine.name)
    assert chosen == ["int4", "lloyd2", "lloyd2", "int4", "int4", "int8", "int8", "int4", "lloyd2", "int8"]


def test_a_codec_changes_with_a_reason_and_not_without_a_measurement_or_a_limit() -> None:
    choice = CodecChoice(codecs_named(["int4", "lloyd2"]))
    for rate, seconds in ((0.0, 1.0), (1e3, float("inf")), (1e3, 0.0), (1e9, 1.0)):
        assert choice.choose(1000, rate, seconds) == ""
    assert choice.choose(0, 1e3, 1.0) == ""
    assert (choice.mine.name, choice.stated) == ("int4", "")
    assert choice.choose(1000, 68e3, 1.0) == "lloyd2 in place of int4, which takes 2 s of the 1 s for it"
    assert (choice.mine.name, choice.stated) == ("lloyd2", "lloyd2")
    assert choice.choose(1000, 68e3, 1.0) == ""
    alone = CodecChoice(codecs_named(["int4"]))
    assert (alone.choose(1000, 1.0, 1.0), alone.stated) == ("", "")
