"""Figures for Prometheus: those of events, the page, and the dashboard that reads them."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import trio
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.log.events import EVENTS
from flockstep.peer.log.metrics import (
    EVENT_COUNTS,
    METRICS,
    ROUND_ENDS,
    EventFigures,
    Figure,
    show_in_loop,
    shown_metrics,
)
from flockstep.peer.log.telemetry import Event
from flockstep.peer.log.web import MAX_HEAD_BYTES, MAX_READERS, split_host_port
from support.recorded import recorded

ROOT = Path(__file__).parents[4]
FIGURES = [
    Figure("swarm_peers", "Who is here.", 3),
    Figure("swarm_refusals_total", "Why not.", 1e15, {"reason": 'a "quoted"\nback\\slash'}),
    Figure("swarm_refusals_total", "Why not.", 0.5, {"reason": "b"}),
]
PAGE = r"""# HELP swarm_peers Who is here.
# TYPE swarm_peers gauge
swarm_peers 3.0
# HELP swarm_refusals_total Why not.
# TYPE swarm_refusals_total counter
swarm_refusals_total{reason="a \"quoted\"\nback\\slash"} 1e+15
swarm_refusals_total{reason="b"} 0.5
"""


def fetched(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        text: str = page.read().decode()
    return text


def test_the_page_is_one_that_prometheus_reads() -> None:
    with shown_metrics("127.0.0.1:0", lambda: FIGURES, list[str]().append) as port:
        assert fetched(port) == PAGE


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::1].evil.example:80", ""])
def test_a_foreign_name_that_leads_here_is_refused_where_the_page_is_for_this_computer_alone(host: str) -> None:
    def status(port: int, name: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.putrequest("GET", "/metrics", skip_host=True)
        connection.putheader("Host", name)
        connection.endheaders()
        return connection.getresponse().status

    with shown_metrics("localhost:0", lambda: FIGURES, list[str]().append) as port:
        assert status(port, host) == 421
        assert {status(port, name) for name in ("localhost:9401", "127.0.0.1", "[::1]:80")} == {200}
    with shown_metrics("0.0.0.0:0", lambda: FIGURES, list[str]().append) as port:
        assert status(port, "keeper.example:9401") == 200  # Prometheus asks others by their names.


def test_who_holds_many_connections_open_keeps_no_reader_out_and_is_closed() -> None:
    notices: list[str] = []
    with shown_metrics("127.0.0.1:0", lambda: FIGURES, notices.append) as port, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2 * MAX_READERS)]
        assert fetched(port) == PAGE
        for held in silent[: MAX_READERS + 1]:
            held.settimeout(60)
            assert held.recv(1) == b""
    assert notices == [f"more than {MAX_READERS} connections at once: the oldest was closed"]


@pytest.mark.parametrize("rest", [b".evil.example\r\n\r\n", b"", b"\r\nX: "])
def test_a_head_beyond_its_limit_is_not_read_on_and_not_taken_for_what_fits(rest: bytes) -> None:
    """Cut at the limit, the name of a stranger's web site would read as an address."""
    start, end = b"GET /", b" HTTP/1.1\r\nHost: 127.0.0.1"
    notices: list[str] = []
    with shown_metrics("127.0.0.1:0", lambda: FIGURES, notices.append) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(start + b"a" * (MAX_HEAD_BYTES - len(start + end)) + end + rest)
            assert connection.recv(1) == b""
        assert fetched(port) == PAGE
    assert notices == [f"the head of a request did not end within {MAX_HEAD_BYTES} bytes"]


async def test_figures_of_a_loop_are_read_between_its_tasks() -> None:
    telemetry, events = recorded()

    def figures() -> Iterator[Figure]:
        yield Figure("swarm_time", "Known in the loop alone.", trio.current_time() * 0 + 7)

    async with trio.open_nursery() as nursery:
        await nursery.start(show_in_loop, "127.0.0.1:0", figures, telemetry)
        assert events[0]["event"] == "metrics.ready"
        page = await trio.to_thread.run_sync(fetched, int(str(events[0]["port"])))
        assert "swarm_time 7.0" in page
        nursery.cancel_scope.cancel()


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    with (
        shown_metrics("0", lambda: FIGURES, list[str]().append) as port,
        pytest.raises(LocalError, match=f"cannot listen at 127.0.0.1:{port} for --metrics") as raised,
        shown_metrics(f"127.0.0.1:{port}", lambda: FIGURES, list[str]().append),
    ):
        pass
    assert "--metrics" in raised.value.remedy


def test_a_place_is_a_host_and_a_port_or_a_port_of_this_computer() -> None:
    assert split_host_port("[::1]:9401") == ("::1", 9401)
    assert split_host_port("9401") == ("127.0.0.1", 9401)
    for wrong in (":9401", "host:", "host:http", "host:99999", "x"):
        with pytest.raises(UsageError, match="is not HOST:PORT"):
            split_host_port(wrong)


def test_the_figures_of_a_peer_follow_from_its_events() -> None:
    figures = EventFigures()
    events: tuple[Event, ...] = (
        {"event": "run.joined", "round": 3, "peers": 2},
        {"event": "step", "step": 7, "loss": 2.5, "tokens_per_s": 100.0, "tokens": 70, "sent": 11, "received": 12},
        {"event": "round.done", "round": 4, "roster": ["a", "b", "c"], "cut": ["a", "b"], "seconds": 1.5},
        {"event": "round.void", "round": 5, "reason": "x"},
        {"event": "round.void", "round": 5, "reason": "x"},
        {"event": "peer.leave", "reason": "paused"},
        {"event": "peer.paused", "reason": "x"},
    )
    for event in events:
        figures.take(event)
    seen = {(figure.name, *figure.labels.values()): figure.value for figure in figures.figures()}
    assert seen["flockstep_round",] == 4
    assert seen["flockstep_loss",] == 2.5
    assert seen["flockstep_round_members",] == 3
    assert seen["flockstep_round_contributors",] == 2
    assert seen["flockstep_bytes_total", "received"] == 12
    assert seen["flockstep_rounds_total", "void"] == 2
    assert seen["flockstep_rounds_total", "missed"] == 0
    assert (seen["flockstep_training",], seen["flockstep_paused",]) == (0, 1)
    assert seen[EVENT_COUNTS, "step"] == 1


def test_the_table_names_events_and_fields_that_there_are() -> None:
    for metric in METRICS:
        for event, source in metric.source.items():
            assert isinstance(source, float) or source in EVENTS[event].fields, (metric.name, event)
    assert EVENTS.keys() >= set(ROUND_ENDS)


def names_written(text: str) -> set[str]:
    return set(re.findall(r"flockstep_[a-z_]+", text))


def test_the_dashboard_and_the_documents_name_figures_that_there_are() -> None:
    code = "".join((ROOT / name).read_text() for name in ("peer/log/metrics.py", "scripts/peers/bootstrap.py"))
    known = names_written(code)
    board = json.loads((ROOT / "examples/grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in names_written(target["expr"])}
    assert asked <= known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for page in ("docs/metrics.md", "docs/deploy.md"):
        assert names_written((ROOT / page).read_text()) <= known
    written = names_written((ROOT / "docs/metrics.md").read_text()) | names_written((ROOT / "docs/deploy.md").read_text())
    assert known <= written
