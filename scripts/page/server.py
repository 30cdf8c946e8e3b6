"""The web server of the page: the newest picture and the files, found by their names in memory.

Theory of operation. Whoever has a picture publishes it; a browser asks for `picture.json` every two seconds with the entity
tag of the one that it has, and gets a 304 where that is the newest. JSON is encoded and compressed once for each picture,
when the first one asks for it, so a page that nobody reads costs nothing. A request chooses among what is in memory; it has
no body and no effect. A browser is told to load nothing from elsewhere, to run no script and apply no style but these files,
and to turn no text into markup. Crowds, TLS and limits are the work of a proxy in front (docs/deploy.md): answers say how
long it may keep them.
"""

import gzip
import threading
from collections.abc import Iterable
from typing import Self
from wsgiref.types import StartResponse, WSGIEnvironment

from ...peer.log.telemetry import Telemetry
from ...peer.log.web import WebServer
from .assets import Asset, load_assets
from .shown import JsonValue, Page, packed

MOMENT = "max-age=1"
"""How long a proxy may show a picture or a page: so many viewers cost what one does."""
FOR_EVER = "max-age=31536000, immutable"
"""How long what is named by a hash may be kept."""

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
HEADERS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("vary", "accept-encoding"),
)
"""The headers of every answer."""
PLAIN = [*HEADERS, ("content-type", "text/plain")]


class PageServer:
    """A context: serves the page at `HOST:PORT` until it is left. Raises `UsageError`, or `LocalError` for no port."""

    def __init__(self, place: str, telemetry: Telemetry, *, root: JsonValue) -> None:
        self._telemetry = telemetry
        self._assets = load_assets()
        self._page = Page(root)
        self._picture: Asset | None = None
        """The page's picture, once somebody has asked for it."""
        self._lock = threading.Lock()
        self._web = WebServer(place, self._answer, self._refused, option="--page")
        self.port = self._web.port

    @property
    def url(self) -> str:
        """The address to open in a browser on this computer."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._web.host, self._web.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    def __enter__(self) -> Self:
        self._web.__enter__()
        self._telemetry.emit("page.ready", port=self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._web.__exit__()

    def publish(self, page: Page) -> None:
        """Show the newest picture of the run; from any thread."""
        with self._lock:
            if not _says_the_same(self._page, page):
                self._page, self._picture = page, None

    def _refused(self, reason: str) -> None:
        self._telemetry.emit("page.refused", step="request", reason=reason)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            self._web.refuse("this page can only be read")
            start_response("405 Method Not Allowed", [*PLAIN, ("allow", "GET, HEAD")])
            return [b"this page can only be read"]
        found = self._found(environ["PATH_INFO"])
        if found is None:
            start_response("404 Not Found", PLAIN)
            return [b"there is no such page"]
        asset, kept = found
        headers = [*HEADERS, ("etag", f'"{asset.digest}"'), ("cache-control", kept)]
        if environ.get("HTTP_IF_NONE_MATCH") == f'"{asset.digest}"':
            start_response("304 Not Modified", headers)
            return []
        body = asset.body
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            headers.append(("content-encoding", "gzip"))
        else:
            body = gzip.decompress(body)
        headers += [("content-type", asset.media_type), ("content-length", str(len(body)))]
        start_response("200 OK", headers)
        return [body] if environ["REQUEST_METHOD"] == "GET" else []

    def _found(self, path: str) -> tuple[Asset, str] | None:
        """Return what a path names, and how long it may be kept."""
        with self._lock:
            match path.removeprefix("/").split("/"):
                case [""]:
                    return self._assets.html, MOMENT
                case ["picture.json"]:
                    if self._picture is None:
                        self._picture = packed({**self._page.picture, "older": self._page.older_name})
                    return self._picture, MOMENT
                case [name] if self._page.older is not None and name == self._page.older_name:
                    return self._page.older, FOR_EVER
                case [self._assets.folder, name] if name in self._assets.files:
                    return self._assets.files[name], FOR_EVER
        return None


def _says_the_same(before: Page, page: Page) -> bool:
    """Return True if two pages differ in nothing but when they were taken."""
    untimed = [{**one.picture, "taken_at": 0} for one in (before, page)]
    return before.older == page.older and untimed[0] == untimed[1]
