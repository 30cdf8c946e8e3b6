"""`flockstep page` as a process: a run that is kept, seen by a visitor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from flockstep.dht.run.link import JoinLink
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.scripts.demo.local_run import START_SECONDS
from flockstep.scripts.demo.processes import Processes
from flockstep.scripts.page import page
from support.bootstraps import TINY_RUN, kept, publish_run

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


def test_a_run_is_seen_by_a_visitor(bootstrap_address: str, tmp_path: Path) -> None:
    link = publish_run(TINY_RUN, (bootstrap_address,), tmp_path / "owner")
    with kept(link, tmp_path / "owner"), Processes() as processes:
        show = ["page", link, "--home", str(tmp_path / "visitor"), "--page", "127.0.0.1:0"]
        visitor = processes.start("flockstep page", show, tmp_path / "visitor.log")
        url = visitor.await_line(PAGE_ADDRESS, START_SECONDS)
        picture = seen(url, lambda picture: bool(picture.get("members")))
        assert (picture["name"], picture["run"]) == ("tiny", JoinLink.parse(link).run_id)
        assert [member["device"] for member in picture["members"]] == ["keeper"]


def test_a_page_is_there_before_its_run_and_fills_once_there_is_a_link(bootstrap_address: str, tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path / "page", host="127.0.0.1", port=0)
    with page.EarlyPage("127.0.0.1:0", config) as early:
        assert seen(early.url, lambda _: True)["progress"]["state"] == "starting"
        link = publish_run(TINY_RUN, (bootstrap_address,), tmp_path / "owner")
        with kept(link, tmp_path / "owner"):
            early.follow(link)
            assert seen(early.url, lambda picture: bool(picture.get("members")))["name"] == "tiny"


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
