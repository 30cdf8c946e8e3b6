"""The web server of the page, in a thread of its own: read-only, bounded, for a browser that trusts nothing.

Theory of operation. The network of a peer runs in trio, the server (uvicorn) in asyncio; all that crosses is `publish`, a
picture for a feed. A request chooses among feeds and files that are in memory; it has no body and no effect. What a
stranger could do is bounded: connections, streams in total and of one address, the time to send a request, and the time
to take what was sent. A browser is told to load nothing from elsewhere, to run no script and apply no style but these
files, and to turn no text into markup. A name in the Host header that is not this computer's is refused, since a stranger's
web site could point its own name here and read the page (DNS rebinding); an address cannot be pointed elsewhere.
"""

import asyncio
import contextlib
import gzip
import logging
import os
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...peer.base.errors import LocalError
from ...peer.log.metrics import is_own_name, split_host_port
from ...peer.log.telemetry import Telemetry
from ...peer.quota.origins import UNKNOWN, Origin, Origins
from ...peer.quota.places import GAVE_WAY, Places
from ...peer.quota.refusals import Refusals
from ...peer.quota.shares import Shares
from .assets import Asset, load_assets
from .delta import JsonValue
from .feed import Feed, Viewer

MAX_VIEWERS = 400
"""Open streams: with 200 the server takes a few percent of a core (docs/page.md)."""
MAX_VIEWERS_OF_ADDRESS = 40
MAX_VIEWERS_OF_NETWORK = 120
"""Streams of one address (of IPv6 a /64, which one host has) and of one network (/24, /48): an office behind one router, a
provider's customers. Loopback has no such limits: a proxy connects from there."""
MAX_CONNECTIONS = MAX_VIEWERS + 100
MAX_CONNECTIONS_OF_ADDRESS = MAX_VIEWERS_OF_ADDRESS + 20
MAX_CONNECTIONS_OF_NETWORK = MAX_VIEWERS_OF_NETWORK + 60
"""Connections: the rest is for the page itself and its files. Others are closed at once: each takes an open file, of which
the bootstrap's own connections need theirs."""
REQUESTS_PER_SECOND, REQUESTS_BURST_SECONDS = 16.0, 16.0
"""Requests and connections of one address: some 2 ms of the bootstrap's core each, and a page has a dozen. What is beyond
waits, for as long as a connection has to send one."""
BACKLOG = 64
"""Connections that wait to be accepted; asyncio accepts as many at once."""
PAGE_FILES = MAX_CONNECTIONS + BACKLOG
"""The open files that the page takes at most."""
REQUEST_SECONDS = 10.0
"""The time in which a connection has to send a request; more is an attack (slowloris)."""
SEND_SECONDS = 30.0
"""The time in which a viewer has to take what its socket has no room for."""
CLOSE_SECONDS = 2
"""The time that open requests have when the server ends."""
MAX_HEAD_BYTES = 16 * 1024
"""The largest head of a request: twice nginx's default."""

ORIGINS = Origins(("127.0.0.0/8", "::1/128"))

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
RAW_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
"""The headers of every answer."""


class PageServer:
    """A context: serves its feeds at `HOST:PORT` until it is left. Raises `UsageError`, or `LocalError` for a taken port.

    The feed of the empty name is at the root: of one run, or, with `listing`, the list of those that have feeds.
    """

    def __init__(self, place: str, telemetry: Telemetry, *, root: JsonValue, listing: bool = False) -> None:
        self.host, port = split_host_port(place)
        self._socket = bound_socket(place, self.host, port)
        self.port: int = self._socket.getsockname()[1]
        self.feeds = {"": Feed(root)}
        self.viewers = Places[Viewer](MAX_VIEWERS, MAX_VIEWERS_OF_ADDRESS, MAX_VIEWERS_OF_NETWORK)
        """Those with an open stream."""
        self._listing = listing
        self._telemetry = telemetry
        self._refusals = Refusals(telemetry, time.monotonic, "page.refused")
        self._assets = load_assets()
        self.guard = PageGuard(self._app(), self.host, self._refusals)
        self._loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.guard,
                loop="asyncio",
                http=CountedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    @property
    def url(self) -> str:
        """The address to open in a browser on this computer."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    def __enter__(self) -> "PageServer":
        self._thread.start()
        self._telemetry.emit("page.ready", port=self.port)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended by itself.
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(3 * CLOSE_SECONDS)
        self._refusals.report()

    def publish(self, picture: JsonValue, run: str = "") -> None:
        """Show the next picture of a run, or the next list of runs; from any thread."""
        with contextlib.suppress(RuntimeError):  # The loop has ended by itself.
            self._loop.call_soon_threadsafe(self._publish, picture, run)

    def forget(self, run: str) -> None:
        """Serve a run no more; from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self.feeds.pop(run).end() if run in self.feeds else None)

    def _publish(self, picture: JsonValue, run: str) -> None:
        if run in self.feeds:
            self.feeds[run].update(picture)
        else:
            self.feeds[run] = Feed(picture)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        log = logging.getLogger("uvicorn.error")
        log.propagate, log.handlers = False, [Failures(logging.ERROR, self._refusals)]
        sweep = asyncio.create_task(self._sweep())
        await self._server.serve(sockets=[self._socket])
        # Streams that were about to end must do so before the loop is closed under them.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in (sweep, *rest):
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _stop(self) -> None:
        for feed in self.feeds.values():
            feed.end()
        self._server.should_exit = True

    async def _sweep(self) -> None:
        """Close connections that do not send a whole request in time; uvicorn times only those that had an answer."""
        waiting: dict[H11Protocol, object] = {}
        while True:
            await asyncio.sleep(REQUEST_SECONDS)
            connections = [each for each in self._server.server_state.connections if isinstance(each, H11Protocol)]
            idle = {each: each.cycle for each in connections if each.cycle is None or each.cycle.response_complete}
            for connection in [each for each, cycle in idle.items() if each in waiting and waiting[each] is cycle]:
                self._refusals.add("request", "it was not sent in time", _origin_of(connection.client))
                connection.transport.abort()
            waiting = dict(idle)

    def _app(self) -> Starlette:
        run = [
            Route("/", self._page),
            Route("/picture.json", self._picture),
            Route("/events", self._events),
            Route("/static/{name}", self._static),
        ]
        app = Starlette(routes=[*run, Mount("/{run}", routes=run)], exception_handlers={404: _not_found})
        app.router.redirect_slashes = False  # A redirection would repeat what was asked.
        return app

    async def _page(self, request: Request) -> Response:
        self._feed(request)
        listing = self._listing and "run" not in request.path_params
        return _packed(request, self._assets["runs.html" if listing else "run.html"])

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            raise HTTPException(404)
        return _packed(request, self._assets[name])

    async def _picture(self, request: Request) -> Response:
        whole = self._feed(request).whole()
        return _packed(request, Asset("application/json", whole.etag, whole.body))

    async def _events(self, request: Request) -> Response:
        feed = self._feed(request)
        mark = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return EventStream(self, feed, mark)

    def _feed(self, request: Request) -> Feed:
        name = request.path_params.get("run", "")
        if name not in self.feeds:
            raise HTTPException(404)
        return self.feeds[name]

    def welcome(self, viewer: Viewer, origin: Origin) -> None:
        """Give a viewer a place; whose place it was comes back in half a minute."""
        if (oldest := self.viewers.enter(viewer, origin)) is not None:
            self._refusals.add("viewer", GAVE_WAY, origin)
            oldest.put(b"retry: 30000\n\n")
            oldest.end()

    def abort(self, client: tuple[str, int], reason: str) -> None:
        """Close a viewer's connection with what its socket has not taken."""
        self._refusals.add("viewer", reason, _origin_of(client))
        for connection in self._server.server_state.connections:
            if isinstance(connection, H11Protocol) and connection.client == client:
                connection.transport.abort()


class Failures(logging.Handler):
    """Makes events of the errors that uvicorn logs: each is a bug in a request's handler."""

    def __init__(self, level: int, refusals: Refusals) -> None:
        super().__init__(level)
        self._refusals = refusals

    def emit(self, record: logging.LogRecord) -> None:
        """Count it by the kind of the exception: its text may hold what a stranger chose."""
        kind = record.exc_info[0] if record.exc_info else None
        self._refusals.add("answer", kind.__name__ if kind else str(record.msg))


class EventStream(Response):
    """Server-sent events for one viewer: the frames after its mark, then each new one."""

    media_type = "text/event-stream"

    def __init__(self, server: PageServer, feed: Feed, mark: str) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})  # nginx would hold the frames back.
        del self.headers["content-length"]
        self._server, self._feed, self._mark = server, feed, mark

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until the viewer leaves or is dropped, or the feed ends."""
        client: tuple[str, int] = tuple(scope.get("client") or ("", 0))
        task = asyncio.current_task()
        assert task is not None

        def drop(reason: str) -> None:
            self._server.abort(client, reason)
            task.cancel()

        viewer = Viewer(drop)
        frames = self._feed.after(self._mark)
        self._feed.viewers.add(viewer)
        origin = _origin_of(client)
        self._server.welcome(viewer, origin)
        left = asyncio.create_task(_until_left(receive, task))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, b"retry: 3000\n\n" + b"".join(frames))
            while frame := await viewer.next():
                await self._send(send, frame)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self._server.abort(client, "it takes no updates")
        except asyncio.CancelledError:
            return  # It was dropped, or has left.
        finally:
            left.cancel()
            self._feed.viewers.discard(viewer)
            self._server.viewers.leave(viewer)

    async def _send(self, send: Send, frame: bytes) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": frame, "more_body": True})


async def _until_left(receive: Receive, stream: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


class CountedProtocol(H11Protocol):
    """A connection, which may be closed before anything is read, and ends where it has to give way."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give it a place, or close it."""
        super().connection_made(transport)
        if not self._guard.admits(self, _origin_of(self.client)):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give its place back."""
        super().connection_lost(exc)
        self._guard.connections.leave(self)

    @property
    def _guard(self) -> "PageGuard":
        assert isinstance(self.config.app, PageGuard)
        return self.config.app


class PageGuard:
    """The first to see a connection and a request: refuses what is too much, no reading, or for a foreign name.

    It adds the headers of every answer.
    """

    def __init__(self, app: ASGIApp, host: str, refusals: Refusals) -> None:
        self._app, self._host, self._refusals = app, host, refusals
        self.connections = Places[CountedProtocol](MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ADDRESS, MAX_CONNECTIONS_OF_NETWORK)
        """The open ones."""
        self._connects, self._requests = [Shares(REQUESTS_PER_SECOND, REQUESTS_BURST_SECONDS) for _ in range(2)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application do it."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *RAW_HEADERS]
            await send(message)

        answer: ASGIApp = self._app
        origin = _origin_of(scope.get("client"))
        refusal = self._why_not(scope)
        if wait := self._requests.spend(origin, time.monotonic(), 1.0):
            await asyncio.sleep(min(wait, REQUEST_SECONDS))
            if wait > REQUEST_SECONDS:
                reason = "too many requests: try again in a minute"
                refusal = reason, Response(reason, 429, {"connection": "close"}, "text/plain")
        if refusal:
            reason, answer = refusal
            self._refusals.add("request", reason, origin)
        await answer(scope, receive, send_guarded)

    def admits(self, connection: CountedProtocol, origin: Origin) -> bool:
        """Give a connection from there a place; returns False for one too many a second."""
        if whose := self._connects.exceeded(origin, time.monotonic()):
            self._refusals.add("connect", f"too many a second from {whose}", origin)
        elif (oldest := self.connections.enter(connection, origin)) is not None:
            self._refusals.add("connect", GAVE_WAY, origin)
            oldest.transport.abort()
        return not whose

    def _why_not(self, scope: Scope) -> tuple[str, Response] | None:
        """Return why a request is refused, and the answer; None if it is not."""
        if scope["method"] not in ("GET", "HEAD"):
            reason = "this page can only be read"
            return reason, Response(reason, 405, {"allow": "GET, HEAD"}, "text/plain")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not is_own_name(hosts[0].decode("latin-1"), self._host):
            reason = "this is not the name of this page: use its address"
            return reason, Response(reason, 421, media_type="text/plain")
        return None


def bound_socket(place: str, host: str, port: int) -> socket.socket:
    """Listen at `HOST:PORT`. Raises `LocalError`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind)
        try:
            if os.name == "posix":  # On Windows it would let another process take the port over.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        remedy = "choose another --page, such as 127.0.0.1:0 for any free port"
        raise LocalError(f"cannot serve the page at {place}: {error}", remedy=remedy) from error
    return listener


def _origin_of(client: tuple[str, int] | None) -> Origin:
    """Return where a connection comes from."""
    return ORIGINS.of(client[0].partition("%")[0]) if client else UNKNOWN  # Link-local ones have a zone.


def _packed(request: Request, asset: Asset) -> Response:
    """Answer with an asset as the browser takes it, or that it has it already."""
    headers = {"etag": asset.etag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(asset.body), headers=headers, media_type=asset.media_type)
    return Response(asset.body, headers={**headers, "content-encoding": "gzip"}, media_type=asset.media_type)


async def _not_found(_request: Request, _error: Exception) -> Response:
    return Response("there is no such page", 404, media_type="text/plain")
