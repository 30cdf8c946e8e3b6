"""The list of a bootstrap's runs."""

from flockstep.dht.keys import head_key, member_key, run_key
from flockstep.dht.run.link import JoinLink
from flockstep.scripts.page.page import unseen
from flockstep.scripts.page.runs import run_ids, run_line
from support.fake_runs import FakeRun


def test_the_runs_of_a_directory_are_those_with_a_manifest() -> None:
    keys = [run_key("b"), head_key("b"), member_key("c", "12D3"), run_key("a"), run_key("b"), b"a provider's key".decode()]
    assert run_ids(key.encode() for key in keys) == ["b", "a"]


def test_a_run_is_listed_before_and_after_it_is_seen() -> None:
    assert run_line(unseen(JoinLink("bafy", ()), "looking")) == {"run": "bafy", "state": ""}
    run = FakeRun(planned=9)
    run.advance(3)
    picture = run.picture
    assert run_line(picture) == {
        **{name: picture[name] for name in ("run", "name", "model")},
        "round": 3, "rounds": 9, "state": "training",
    }
