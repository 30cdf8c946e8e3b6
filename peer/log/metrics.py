"""Figures for Prometheus: those that follow from a peer's events, in one table, and the page that shows them.

A figure is a counter if its name ends in `_total`, else a gauge. `METRICS` says from which field of which event a figure of a
peer follows; a bootstrap adds figures of its own. The page is that of `prometheus_client`, on a thread of its own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..base.transport import Traffic
from .telemetry import Event, Telemetry
from .web import WebServer

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class Figure:
    """One number; `labels` distinguish those of one name."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


Figures = Callable[[], Iterable[Figure]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table: the figure that the newest of these events sets."""

    name: str
    help: str
    source: Mapping[str, str | float]
    """By the name of an event: its field that holds the value (of a list: its length), or the value itself."""
    labels: Mapping[str, str] = field(default_factory=dict)


METRICS: tuple[Metric, ...] = (
    Metric("flockstep_training", "1 while the peer is a member that trains or keeps, 0 while it is away.",
           {"run.joined": 1.0, "state.synced": 1.0, "peer.paused": 0.0, "peer.leave": 0.0, "run.finished": 0.0}),
    Metric("flockstep_paused", "1 while the peer may not train: its user, the hours, other programs.",
           {"peer.paused": 1.0, "peer.resumed": 0.0}),
    Metric("flockstep_round", "Rounds that the peer's state has behind it.",
           {"round.done": "round", "state.synced": "round", "state.restored": "round", "round.replayed": "round"}),
    Metric("flockstep_round_seconds", "Duration of the last certified round.", {"round.done": "seconds"}),
    Metric("flockstep_round_members", "Members of the last certified round.", {"round.done": "roster"}),
    Metric("flockstep_round_contributors", "Contributors that counted in it.", {"round.done": "cut"}),
    Metric("flockstep_loss", "Training loss, nats per token.", {"step": "loss"}),
    Metric("flockstep_inner_steps", "Inner steps since the peer joined.", {"step": "step"}),
    Metric("flockstep_tokens_per_second", "Tokens that the peer trains in a second.", {"step": "tokens_per_s"}),
    Metric("flockstep_run_tokens", "Tokens of the run and of this phase.", {"step": "tokens"}),
    Metric("flockstep_phase_steps", "Inner steps of the last phase.", {"phase.end": "steps"}),
    Metric("flockstep_checkpoint_round", "Round of the newest checkpoint on the disk.", {"checkpoint.written": "round"}),
    Metric("flockstep_votes", "Votes of the voters that are here, as a keeper sees it.", {"run.votes": "votes"}),
    Metric("flockstep_quorum_votes", "Votes that decide.", {"run.votes": "quorum"}),
    Metric("flockstep_members", "Members that are here.", {"run.votes": "peers", "run.joined": "peers"}),
    Metric("flockstep_bytes_total", "Bytes on all sockets.", {"step": "sent"}, {"direction": "sent"}),
    Metric("flockstep_bytes_total", "Bytes on all sockets.", {"step": "received"}, {"direction": "received"}),
)
"""The figures of a peer, in the order of the page; those of one name follow each other."""

ROUNDS, EVENT_COUNTS, TRAFFIC_BYTES = "flockstep_rounds_total", "flockstep_events_total", "flockstep_bytes_total"
ROUND_ENDS = ("round.done", "round.void", "round.missed", "round.behind", "round.abstained")


class EventFigures:
    """The figures that follow from a peer's events: `take` every event, then `figures` at any time, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, float] = {}
        """By the place of a row in the table."""
        self._counts: dict[str, int] = dict.fromkeys(ROUND_ENDS, 0)
        self._by_event: dict[str, list[int]] = {}
        for place, metric in enumerate(METRICS):
            for event in metric.source:
                self._by_event.setdefault(event, []).append(place)

    def take(self, event: Event) -> None:
        """Count the next event."""
        name = str(event["event"])
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + 1
            for place in self._by_event.get(name, ()):
                source = METRICS[place].source[name]
                value = event.get(source) if isinstance(source, str) else source
                number = float(len(value)) if isinstance(value, list) else value
                if isinstance(number, int | float):
                    self._values[place] = float(number)

    def figures(self) -> Iterator[Figure]:
        """Yield what is known."""
        with self._lock:
            values, counts = dict(self._values), dict(self._counts)
        for place, metric in enumerate(METRICS):
            if place in values:
                yield Figure(metric.name, metric.help, values[place], metric.labels)
        for name in ROUND_ENDS:
            outcome = name.partition(".")[2]
            yield Figure(ROUNDS, "Attempts of rounds, by how they ended.", counts[name], {"outcome": outcome})
        for name, count in sorted(counts.items()):
            if count:
                yield Figure(EVENT_COUNTS, "Events in the log.", count, {"event": name})


def traffic_figures(traffic: Traffic) -> Iterator[Figure]:
    """Yield the bytes of a host."""
    for direction, num_bytes in (("sent", traffic.sent), ("received", traffic.received)):
        yield Figure(TRAFFIC_BYTES, "Bytes on all sockets.", num_bytes, {"direction": direction})


class _Source(Collector):
    """What the library asks for figures, at each request."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> list[Family]:
        """Return nothing: the names are known once there are figures."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield the figures by name."""
        families: dict[str, Family] = {}
        for figure in self._figures():
            if figure.name not in families:
                families[figure.name] = _family_of(figure)
            families[figure.name].add_metric(list(figure.labels.values()), figure.value)
        yield from families.values()


def _family_of(figure: Figure) -> Family:
    """The family of all figures of this name, still empty."""
    if figure.name.endswith("_total"):
        return CounterMetricFamily(figure.name, figure.help, labels=list(figure.labels))
    return GaugeMetricFamily(figure.name, figure.help, labels=list(figure.labels))


@contextlib.contextmanager
def shown_metrics(place: str, figures: Figures, notice: Callable[[str], None]) -> Iterator[int]:
    """Show the figures at a place as `WebServer` takes it; yields the port. Raises `UsageError` or `LocalError`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Source(figures))
    with WebServer(place, make_wsgi_app(registry), notice, option="--metrics") as server:
        yield server.port


async def show_in_loop(place: str, figures: Figures, telemetry: Telemetry, *, task_status: Any) -> None:
    """Show figures at `HOST:PORT` until cancelled; they are read between two tasks of this loop. Raises `LocalError`."""
    token = trio.lowlevel.current_trio_token()

    def read() -> list[Figure]:
        return trio.from_thread.run_sync(lambda: list(figures()), trio_token=token)

    def notice(reason: str) -> None:
        telemetry.emit("metrics.refused", step="metrics", reason=reason)

    with shown_metrics(place, read, notice) as port:
        telemetry.emit("metrics.ready", port=port)
        task_status.started()
        await trio.sleep_forever()
