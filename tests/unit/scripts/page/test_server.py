"""The web server of the page over real sockets: what it answers, and what it refuses."""

import contextlib
import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.log.metrics import is_own_name
from flockstep.peer.log.telemetry import Telemetry, read_events
from flockstep.peer.quota.origins import Origins
from flockstep.peer.quota.places import GAVE_WAY
from flockstep.scripts.page import server as servers
from flockstep.scripts.page.server import PageServer
from support.fake_runs import FakeRun

SECONDS = 20.0


@contextlib.contextmanager
def serving(log: Path, *, listing: bool = False) -> Iterator[PageServer]:
    with contextlib.closing(Telemetry(log)) as telemetry:
        root = {"runs": []} if listing else FakeRun().picture
        with PageServer("127.0.0.1:0", telemetry, root=root, listing=listing) as server:
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


class Stream:
    """A viewer's open stream."""

    def __init__(self, page: PageServer, after: str = "", prefix: str = "/") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=SECONDS)
        self._connection.request("GET", f"{prefix}events?after={after}")
        self.answer = self._connection.getresponse()

    def next(self) -> dict[str, str]:
        """The next event; of each field its value."""
        fields: dict[str, str] = {}
        while line := self.answer.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def test_the_page_its_files_and_its_picture_are_served_with_strict_headers(page: PageServer) -> None:
    kinds = {"/": "text/html", "/static/run.js": "text/javascript", "/static/uPlot.LICENSE.txt": "text/plain"}
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
    answer, packed = asked(page, "/picture.json", accept_encoding="gzip")
    assert json.loads(gzip.decompress(packed))["picture"] == FakeRun().picture
    assert json.loads(asked(page, "/picture.json")[1])["picture"] == FakeRun().picture
    etag = answer.headers["etag"] or ""
    assert asked(page, "/picture.json", if_none_match=etag)[0].status == 304


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/..%2fserver.py", "/static/"),
        *("/favicon.ico", "/unknown/", "/unknown/picture.json", "/%00", "/static/run.js%00.txt", "//"),
    ],
)
def test_no_path_leads_to_the_disk(page: PageServer, path: str) -> None:
    answer, body = asked(page, path)
    assert (answer.status, body) == (404, b"there is no such page")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_the_page_can_only_be_read(page: PageServer, method: str) -> None:
    assert asked(page, "/", method)[0].status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil.example"])
def test_a_foreign_name_is_refused_and_leaves_an_event(tmp_path: Path, host: str) -> None:
    with serving(tmp_path / "events.jsonl") as page:
        answer, body = asked(page, "/picture.json", host=host)
        assert (answer.status, body) == (421, b"this is not the name of this page: use its address")
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    assert [(event["origin"], event["reason"]) for event in refused] == [("127.0.0.1", body.decode())]


def test_addresses_localhost_and_the_given_name_are_mine(tmp_path: Path) -> None:
    with serving(tmp_path / "events.jsonl") as page:
        assert asked(page, "/", host="localhost:8000")[0].status == 200
        assert asked(page, "/", host="[::1]:80")[0].status == 200
        assert asked(page, "/", host="192.0.2.1")[0].status == 200
    assert is_own_name("Runs.example.org:443", "runs.example.org")
    assert not is_own_name("example.org", "runs.example.org")


def test_a_viewer_gets_each_change_and_continues_where_its_connection_broke(page: PageServer) -> None:
    run = FakeRun()
    mark = json.loads(asked(page, "/picture.json")[1])["mark"]
    stream = Stream(page, mark)
    assert stream.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.next() == {"retry": "3000"}
    run.advance()
    page.publish(run.picture)
    first = stream.next()
    assert ["set", ["progress", "round"], 1] in json.loads(first["data"])
    stream.close()
    run.advance()
    page.publish(run.picture)
    later = Stream(page, first["id"])
    later.next()
    assert ["set", ["progress", "round"], 2] in json.loads(later.next()["data"])
    later.close()


def test_a_bootstrap_shows_the_list_of_its_runs_and_each_run(tmp_path: Path) -> None:
    with serving(tmp_path / "events.jsonl", listing=True) as page:
        page.publish(FakeRun().picture, "bafyone")
        stream = Stream(page, prefix="/bafyone/")
        assert stream.answer.status == 200
        assert b"runs.js" in asked(page, "/")[1]
        assert b"run.js" in asked(page, "/bafyone/")[1]
        assert asked(page, "/bafyone/static/run.js")[0].status == 200
        page.forget("bafyone")
        while stream.next():
            pass
        stream.close()
        assert asked(page, "/bafyone/picture.json")[0].status == 404


@pytest.mark.parametrize("most", ["MAX_VIEWERS", "MAX_VIEWERS_OF_ADDRESS"])
def test_a_newcomer_gets_the_place_of_the_oldest_viewer_who_is_told_to_come_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    """Whoever held 40 streams kept all others of its address out, and through a proxy 400 of them everybody."""
    monkeypatch.setattr(servers, most, 2)
    monkeypatch.setattr(servers, "ORIGINS", Origins(("127.0.0.0/8",) if most == "MAX_VIEWERS" else ()))
    with serving(tmp_path / "events.jsonl") as page:
        streams = [Stream(page) for _ in range(3)]
        assert [stream.answer.status for stream in streams] == [200] * 3
        told = [list(iter(stream.next, {})) for stream in streams[:1]]
        assert [fields.get("retry") for fields in told[0]] == ["3000", None, "30000"]
        page.publish({"n": 1})
        assert [stream.next().get("retry") for stream in streams[1:] for _ in range(3)] == ["3000", None, None] * 2
        for stream in streams:
            stream.close()
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    assert {(event["step"], event["reason"]) for event in refused} == {("viewer", GAVE_WAY)}


def is_open(connection: socket.socket) -> bool:
    """Whether a page is answered on it."""
    try:
        connection.sendall(b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        return bool(connection.recv(1))
    except ConnectionError:
        return False


def test_connections_that_send_nothing_take_a_bounded_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MAX_CONNECTIONS", 5)
    monkeypatch.setattr(servers, "MAX_CONNECTIONS_OF_ADDRESS", 3)
    for exempt, most in (("127.0.0.0/8", 5), ("192.0.2.0/24", 3)):
        monkeypatch.setattr(servers, "ORIGINS", Origins((exempt,)))
        with serving(tmp_path / "events.jsonl") as page:
            connections = [socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) for _ in range(8)]
            assert [is_open(connection) for connection in connections] == [False] * (8 - most) + [True] * most
            for connection in connections:
                connection.close()
            while len(page.guard.connections):
                pass
            assert asked(page, "/")[0].status == 200
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    assert {event["reason"] for event in refused} == {GAVE_WAY}


def test_requests_and_connections_of_an_address_have_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for one page after the other took the whole core of a bootstrap."""
    monkeypatch.setattr(servers, "ORIGINS", Origins(()))
    monkeypatch.setattr(servers, "REQUESTS_PER_SECOND", 0.001)
    monkeypatch.setattr(servers, "REQUESTS_BURST_SECONDS", 3000.0)
    monkeypatch.setattr(servers, "REQUEST_SECONDS", 1.0)
    with serving(tmp_path / "events.jsonl") as page:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=SECONDS)
        answers: list[int] = []
        for _ in range(4):
            connection.request("GET", "/picture.json")
            answer = connection.getresponse()
            answer.read()
            answers.append(answer.status)
        assert answers == [200, 200, 200, 429]
        connection.close()
        others = [socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) for _ in range(3)]
        assert [is_open(other) for other in others] == [True, True, False]
        for other in others:
            other.close()
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    reasons = {event["reason"] for event in refused}
    assert reasons == {"too many requests: try again in a minute", "too many a second from one address"}


def test_a_viewer_that_takes_nothing_is_cut_off_with_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SEND_SECONDS", 0.2)
    with serving(tmp_path / "events.jsonl") as page:
        sleeper = socket.create_connection(("127.0.0.1", page.port))
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        other = Stream(page)
        while len(page.feeds[""].viewers) < 2:
            other.answer.peek()
        number = 0
        while len(page.feeds[""].viewers) == 2:
            page.publish({"n": "x" * 100_000 + str(number := number + 1)})
            other.next()
        other.close()
        sleeper.close()
    refused = [event for _, event in read_events(tmp_path / "events.jsonl") if event["event"] == "page.refused"]
    assert [event["reason"] for event in refused] == ["it takes no updates"]


def test_connections_that_send_no_request_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "REQUEST_SECONDS", 0.1)
    with serving(tmp_path / "events.jsonl") as page:
        silent = socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS)
        halting = socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS)
        halting.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        for connection in (silent, halting):
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            connection.close()


@pytest.mark.parametrize("junk", [b"\xff" * 40_000, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000, b"\r\n" * 9])
def test_junk_breaks_nothing(page: PageServer, junk: bytes) -> None:
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) as stream:
        stream.sendall(junk)
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(4096):
            pass
    assert asked(page, "/")[0].status == 200


def test_a_taken_port_and_a_wrong_place_are_one_line(page: PageServer) -> None:
    with pytest.raises(LocalError, match=f"cannot serve the page at 127.0.0.1:{page.port}") as caught:
        PageServer(f"127.0.0.1:{page.port}", Telemetry(), root={})
    assert "--page" in caught.value.remedy
    for place in ("nonsense", "127.0.0.1:99999", "127.0.0.1:", ":80"):
        with pytest.raises(UsageError):
            PageServer(place, Telemetry(), root={})
    with pytest.raises(LocalError):
        PageServer("no.such.name.invalid:80", Telemetry(), root={})
