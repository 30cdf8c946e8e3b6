"""A small web server on threads of its own, for pages that are only read: figures, and the pages of runs.

Theory of operation. A connection has a thread, sends one request without a body, and takes one answer. All of it is bounded:
the connections at once, the bytes of a request's head, and the seconds in which a connection sends or takes something. The
server is for this computer and for a proxy on it: a crowd of viewers, TLS and limits of an address are the proxy's work
(docs/deploy.md).
"""

import contextlib
import io
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from ..base.errors import LocalError, UsageError

LOCAL_HOST = "127.0.0.1"
"""Where a page is shown if no host is named: it has no password."""

MAX_READERS = 16
"""Connections to a page at once, each of which takes a thread and an open file; an answer takes some milliseconds."""
READER_SECONDS = 10.0
"""Seconds in which a reader must send or take something: Prometheus' own timeout."""
MAX_HEAD_BYTES = 16 * 1024
"""The largest head of a request: twice nginx's default."""
STOP_SECONDS = 0.1
"""Seconds between two looks at whether the server is to end."""

_HOST_PORT = re.compile(r"^(?:\[([0-9a-f:.]+)\]|([^:]*))(?::[0-9]*)?$", re.ASCII | re.IGNORECASE)
"""A Host header (RFC 9110, 7.2): an IPv6 address in brackets, or another name, and a port."""


class _Reader(WSGIRequestHandler):
    """One connection of a reader."""

    timeout = READER_SECONDS
    server: "_Server"

    def setup(self) -> None:
        """Read the head of the request before anything parses it: the base class takes 6 MiB of header lines."""
        super().setup()
        head, end = b"", b"\n\r\n"
        while end not in head and (more := self.connection.recv(MAX_HEAD_BYTES - len(head))):
            head += more
        if end not in head:  # Cut where its sender chooses, 127.0.0.1.example.org would read as an address.
            if len(head) == MAX_HEAD_BYTES:
                self.server.notice(f"the head of a request did not end within {MAX_HEAD_BYTES} bytes")
            head = b""
        self.rfile = io.BufferedReader(io.BytesIO(head))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  The base class names it.
        """Log no requests."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves `MAX_READERS` connections; the oldest is closed for a newer one, so that who holds many keeps nobody out."""

    daemon_threads = True

    def __init__(self, host: str, port: int, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._readers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._noticed: set[str] = set()
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Reader)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        with self._lock:
            self._readers[request] = None
            is_crowded = len(self._readers) > MAX_READERS
            if is_crowded:
                oldest = next(iter(self._readers))
                del self._readers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # Its thread ends, and closes it.
        if is_crowded:
            self.notice(f"more than {MAX_READERS} connections at once: the oldest was closed")
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection that was served."""
        with self._lock:
            self._readers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that broke, in place of the traceback that the base class prints."""
        self.notice(f"a connection broke, or was silent for {READER_SECONDS:g} s")

    def notice(self, reason: str) -> None:
        """Tell a reason the first time that it occurs."""
        with self._lock:
            is_new = reason not in self._noticed
            self._noticed.add(reason)
        if is_new:
            self._notice(reason)


class WebServer:
    """A context: serves an application at `HOST:PORT` or, on this computer alone, at `PORT`, until it is left.

    `notice` is called from a thread with the reason why something was refused, once for each; so reasons are few. At an
    address of this computer alone requests for a foreign name are refused. Raises `UsageError`, or `LocalError` for a taken
    port: `option` is what its user has set.
    """

    def __init__(self, place: str, app: WSGIApplication, notice: Callable[[str], None], *, option: str) -> None:
        self.host, port = split_host_port(place, option)
        try:
            self._server = _Server(self.host, port, notice)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            remedy = f"choose another port for {option}; port 0 takes any"
            raise LocalError(f"cannot listen at {place} for {option}: {reason}", remedy=remedy) from error
        self.port: int = self._server.server_port
        is_private = ipaddress.ip_address(str(self._server.server_address[0])).is_loopback  # Else others read it anyway.
        self._server.set_app(self._for_own_names(app) if is_private else app)
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(STOP_SECONDS,), name=f"web {self.port}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def refuse(self, reason: str) -> None:
        """Tell why a request is refused, the first time; from any thread."""
        self._server.notice(reason)

    def _for_own_names(self, app: WSGIApplication) -> WSGIApplication:
        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if is_own_name(environ.get("HTTP_HOST", ""), self.host):
                return app(environ, start_response)
            reason = "this is not the name of this page: use its address"
            self.refuse(reason)
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [reason.encode()]

        return answer


def split_host_port(text: str, option: str = "--metrics") -> tuple[str, int]:
    """Split `HOST:PORT`, or `PORT` of this computer, as an option gives it. Raises `UsageError`."""
    host, _, port = text.rpartition(":") if ":" in text else (LOCAL_HOST, "", text)
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise UsageError(f"{option} {text!r} is not HOST:PORT", remedy="such as 127.0.0.1:9401")
    return host.strip("[]"), int(port)


def is_own_name(stated: str, host: str) -> bool:
    """Return True for a Host header that is an IP address, localhost or `host`, with any port.

    A stranger's web site could point its own name here and read what is served (DNS rebinding), but no address.
    """
    name = _HOST_PORT.sub(r"\1\2", stated)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name.lower() in ("localhost", host.lower())
