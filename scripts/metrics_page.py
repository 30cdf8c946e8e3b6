"""Figures for Prometheus: their text format, and one page on a port of its own that shows them.

The format is the text-based exposition format 0.0.4 of prometheus.io; a figure is a counter if its name ends in
`_total`, else a gauge. The page is the minimum of HTTP: any request is answered with the figures.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from ..peer.errors import LocalError, UsageError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT = 5.0
MAX_READERS = 8
"""The limit of concurrent connections: a Prometheus or two, and a person."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number; `labels` distinguish those of one name."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition(figures: Iterable[Figure]) -> str:
    """Return the page; figures of one name must follow each other."""
    lines: list[str] = []
    last = ""
    for figure in figures:
        if figure.name != last:
            kind = "counter" if figure.name.endswith("_total") else "gauge"
            lines += [f"# HELP {figure.name} {figure.help}", f"# TYPE {figure.name} {kind}"]
            last = figure.name
        labels = ",".join(f'{key}="{_escaped(text)}"' for key, text in figure.labels.items())
        lines.append(f"{figure.name}{{{labels}}} {figure.value:.15g}" if labels else f"{figure.name} {figure.value:.15g}")
    return "\n".join(lines) + "\n"


def split_host_port(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`. Raises `UsageError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not HOST:PORT", remedy="such as 127.0.0.1:9401")
    return host.strip("[]"), int(port)


async def serve_figures(place: str, figures: Callable[[], Iterable[Figure]], *, task_status: Any) -> None:
    """Show the figures at `HOST:PORT` until cancelled; starts with the port that was bound. Raises `LocalError`."""
    host, port = split_host_port(place)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise LocalError(f"cannot show metrics at {place}: {error}", remedy="choose another --metrics") from error
    readers = trio.CapacityLimiter(MAX_READERS)

    async def serve(stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(REQUEST_TIMEOUT):
                async with stream, readers:
                    await _read_request(stream)
                    page = exposition(figures()).encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(page)}\r\n"
                    await stream.send_all(f"{head}Connection: close\r\n\r\n".encode() + page)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(serve, listeners)


async def _read_request(stream: trio.SocketStream) -> None:
    """Read a request up to its empty line, its end, or too many bytes."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST_BYTES:
        if not (data := await stream.receive_some(MAX_REQUEST_BYTES)):
            return
        request += data


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
