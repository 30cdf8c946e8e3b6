"""The web server of the page over real sockets: what it answers, and what it refuses."""

import contextlib
import gzip
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.log.telemetry import Telemetry, read_events
from flockstep.peer.log.web import is_own_name
from flockstep.scripts.page.assets import load_assets
from flockstep.scripts.page.server import PageServer
from flockstep.scripts.page.shown import Page, packed
from support.fake_runs import FakeRun

SECONDS = 20.0


@contextlib.contextmanager
def serving(log: Path) -> Iterator[PageServer]:
    with (
        contextlib.closing(Telemetry(log)) as telemetry,
        PageServer("127.0.0.1:0", telemetry, root=FakeRun().picture) as server,
    ):
        yield server


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    with serving(tmp_path / "events.jsonl") as server:
        yield server


def asked(page: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=SECONDS)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_its_files_and_its_picture_are_served_with_strict_headers(page: PageServer) -> None:
    folder = load_assets().folder
    kinds = {"/": "text/html", f"/{folder}/run.js": "text/javascript", f"/{folder}/uPlot.LICENSE.txt": "text/plain"}
    for path, kind in kinds.items():
        answer, body = asked(page, path)
        assert answer.status == 200
        assert (answer.headers["content-type"] or "").startswith(kind)
        assert body
        policy = answer.headers["content-security-policy"] or ""
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers
    answer, compressed = asked(page, "/picture.json", accept_encoding="gzip")
    assert json.loads(gzip.decompress(compressed)) == json.loads(asked(page, "/picture.json")[1])
    assert json.loads(gzip.decompress(compressed)) == {**FakeRun().picture, "older": ""}
    assert asked(page, "/picture.json", "HEAD")[1] == b""


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/..%2fserver.py", "/static/"),
        *("/favicon.ico", "/unknown/", "/unknown/picture.json", "/%00", "/static/run.js%00.txt"),
    ],
)
def test_no_path_leads_to_the_disk(page: PageServer, path: str) -> None:
    answer, body = asked(page, path)
    assert (answer.status, body) == (404, b"there is no such page")


def test_the_page_can_only_be_read_and_many_refusals_are_one_event(tmp_path: Path) -> None:
    with serving(tmp_path / "events.jsonl") as page:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
            assert asked(page, "/", method)[0].status == 405
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    assert [event["reason"] for event in refused] == ["this page can only be read"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil.example"])
def test_a_foreign_name_is_refused_and_leaves_an_event(tmp_path: Path, host: str) -> None:
    with serving(tmp_path / "events.jsonl") as page:
        answer, body = asked(page, "/picture.json", host=host)
        assert (answer.status, body) == (421, b"this is not the name of this page: use its address")
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    assert [event["reason"] for event in refused] == [body.decode()]


def test_addresses_localhost_and_the_given_name_are_mine(tmp_path: Path) -> None:
    with serving(tmp_path / "events.jsonl") as page:
        assert asked(page, "/", host="localhost:8000")[0].status == 200
        assert asked(page, "/", host="[::1]:80")[0].status == 200
        assert asked(page, "/", host="192.0.2.1")[0].status == 200
    assert is_own_name("Runs.example.org:443", "runs.example.org")
    assert not is_own_name("example.org", "runs.example.org")


def test_a_picture_is_encoded_anew_only_where_it_says_something_new(page: PageServer) -> None:
    run = FakeRun()

    def tag() -> str:
        return asked(page, "/picture.json")[0].headers["etag"] or ""

    before = tag()
    page.publish(Page({**run.picture, "taken_at": 1.0}))
    assert tag() == before
    assert asked(page, "/picture.json", if_none_match=before)[0].status == 304
    run.advance()
    page.publish(Page(run.picture))
    answer, body = asked(page, "/picture.json", if_none_match=before)
    assert (answer.status, json.loads(body)["progress"]["round"]) == (200, 1)
    assert tag() != before


def test_what_is_named_by_a_hash_may_be_kept_and_a_picture_for_a_moment(page: PageServer) -> None:
    older = [packed({"rounds": {"round": [number]}, "peers": [], "recent": []}) for number in range(2)]
    names = []
    for each in older:
        page.publish(Page(FakeRun().picture, each))
        answer, body = asked(page, "/picture.json")
        assert answer.headers["cache-control"] == "max-age=1"
        names.append(json.loads(body)["older"])
    assert asked(page, f"/{names[0]}")[0].status == 404  # Another content never has its name.
    (script,) = re.findall(rb'src="(static-[0-9a-f]{16}/run.js)"', asked(page, "/")[1])
    for path in (names[1], script.decode()):
        answer, body = asked(page, f"/{path}")
        assert (answer.status, answer.headers["cache-control"]) == (200, "max-age=31536000, immutable")
        assert body


@pytest.mark.parametrize("junk", [b"\xff" * 40_000, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000, b"\r\n" * 9])
def test_junk_breaks_nothing(page: PageServer, junk: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) as stream:
        stream.sendall(junk)
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(4096):
            pass
    assert asked(page, "/")[0].status == 200


def test_a_taken_port_and_a_wrong_place_are_one_line(page: PageServer) -> None:
    with pytest.raises(LocalError, match=f"cannot listen at 127.0.0.1:{page.port} for --page") as caught:
        PageServer(f"127.0.0.1:{page.port}", Telemetry(), root={})
    assert "--page" in caught.value.remedy
    for place in ("nonsense", "127.0.0.1:99999", "127.0.0.1:", ":80"):
        with pytest.raises(UsageError):
            PageServer(place, Telemetry(), root={})
    with pytest.raises(LocalError):
        PageServer("no.such.name.invalid:80", Telemetry(), root={})
