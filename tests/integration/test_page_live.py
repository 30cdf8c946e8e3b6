"""`flockstep page` and `bootstrap --page` as processes: a run that is kept, seen by a visitor and by its bootstrap."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import trio
from flockstep.dht.run.link import JoinLink
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import log_path, read_events
from flockstep.scripts.demo.local_run import START_SECONDS
from flockstep.scripts.demo.processes import Processes
from flockstep.scripts.page import page, runs
from flockstep.scripts.peers.bootstrap import BootstrapOptions, keep_bootstrap
from flockstep.scripts.runs.listed import list_run
from support.bootstraps import TINY_RUN, Bootstrap, kept, publish_run
from support.recorded import recorded

SECONDS = 120.0
PAGE_ADDRESS = r"http://\S+/"
OWNER = Identity.from_seed(bytes(32)).peer_id


def seen(url: str, shown: Callable[[Any], bool]) -> Any:
    """Ask a page for its picture until it shows what is wanted, and return the picture."""
    while True:
        with urlopen(f"{url}picture.json", timeout=SECONDS) as answer:
            picture = json.load(answer)
        if shown(picture):
            return picture


def test_a_run_is_seen_by_a_visitor_and_by_its_bootstrap(tmp_path: Path) -> None:
    bootstrap = Bootstrap(tmp_path / "bootstrap", "--page", "127.0.0.1:0")
    try:
        link = publish_run(TINY_RUN, (bootstrap.address(),), tmp_path / "owner")
        run = JoinLink.parse(link).run_id
        with kept(link, tmp_path / "owner"), Processes() as processes:
            show = ["page", link, "--home", str(tmp_path / "visitor"), "--page", "127.0.0.1:0"]
            visitor = processes.start("flockstep page", show, tmp_path / "visitor.log")
            list_run(link, PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0), print, listed=True)
            url = visitor.await_line(PAGE_ADDRESS, START_SECONDS)
            picture = seen(url, lambda picture: bool(picture.get("members")))
            assert (picture["name"], picture["run"]) == ("tiny", run)
            assert [member["device"] for member in picture["members"]] == ["keeper"]
            (port,) = [
                event["port"]
                for _, event in read_events(log_path(tmp_path / "bootstrap"))
                if event["event"] == "page.ready"
            ]
            of_bootstrap = f"http://127.0.0.1:{port}/"
            listing = seen(of_bootstrap, lambda listing: any(each.get("name") for each in listing["runs"]))
            assert listing["runs"][0]["run"] == run
            assert seen(f"{of_bootstrap}{run}/", lambda picture: bool(picture.get("members")))["name"] == "tiny"
    finally:
        bootstrap.kill()


def test_a_page_is_there_before_its_run_and_fills_once_there_is_a_link(bootstrap_address: str, tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path / "page", host="127.0.0.1", port=0)
    with page.EarlyPage("127.0.0.1:0", config) as early:
        assert seen(early.url, lambda _: True)["progress"]["state"] == "starting"
        link = publish_run(TINY_RUN, (bootstrap_address,), tmp_path / "owner")
        with kept(link, tmp_path / "owner"):
            early.follow(link)
            assert seen(early.url, lambda picture: bool(picture.get("members")))["name"] == "tiny"


async def test_a_bug_of_the_page_does_not_end_the_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bug(Exception):
        pass

    calls, again, ready = 0, trio.Event(), trio.Event()

    async def failing(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            again.set()
        raise Bug

    monkeypatch.setattr(runs, "serve_runs", failing)
    monkeypatch.setattr(page, "RETRY_PERIOD", 0.0)
    telemetry, events = recorded()
    config, options = PeerConfig(home=tmp_path, host="127.0.0.1", port=0), BootstrapOptions(page="127.0.0.1:0")
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            start = partial(keep_bootstrap, config, options, telemetry=telemetry, ready=lambda _: ready.set())
            nursery.start_soon(start)
            await ready.wait()
            await again.wait()
            nursery.cancel_scope.cancel()
    assert {event["reason"] for event in events if event["event"] == "page.failed"} == {"Bug()"}


@pytest.mark.parametrize(
    ("link", "place", "said"),
    [
        ("nonsense", "127.0.0.1:0", "not a whole join link"),
        (str(JoinLink("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{OWNER}",))), "here", "'here' is not HOST:PORT"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tmp_path: Path, link: str, place: str, said: str) -> None:
    with Processes() as processes:
        show = ["page", link, "--home", str(tmp_path), "--page", place]
        process = processes.start("flockstep page", show, tmp_path / "log.txt")
        process.await_line("flockstep: ", START_SECONDS)
        process.stop(START_SECONDS)
    assert process.code == 2
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert said in line
