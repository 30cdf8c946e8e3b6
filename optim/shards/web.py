"""Files of a web server, by range, from public addresses alone where a stranger has named it.

Theory of operation. A manifest that names a web server makes requests start in its volunteers' networks (SSRF). So unless
the user has named it (`HF_ENDPOINT`): https alone, a name and no number, the usual port; every address that the name
resolves to must be of the public internet, and the connection goes to the address that was checked, so that no second answer
of the name server counts (DNS rebinding). Nothing is redirected, but files of the Hugging Face hub to where it keeps them
(`STORE`). No cookie, no credential and no proxy of this computer's is used. Every answer is read up to the length that was
asked for. The standard library suffices for that: a client that resolves names itself would have to be told not to.
"""

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from urllib.parse import quote, urljoin, urlsplit

from ...peer.address import is_public_ip
from ...peer.base.errors import UsageError
from ..consent import HUB_DATASET, HUB_DATASETS, HUB_HOST, PUBLIC_URL

TIMEOUT = 30.0
"""Seconds without a byte."""
PIECE = 1 << 20

MAX_REDIRECTS = 3
STORE = re.compile(r"https://(?:[a-z0-9-]+\.)*(?:hf\.co|huggingface\.co)/.*", re.ASCII)
"""Where files of the hub may be, besides the hub itself."""
LEAST_RATE = 4e3
"""Bytes/s on average after a minute, as of a state from a peer: a byte now and then must not hold a reader for ever."""


class NotThere(OSError):
    """What asking again does not change."""


class Web:
    """A folder of a web server; with `public` only one that a stranger may name. Raises `UsageError` for no such address.

    From it a file is redirected to addresses that match `redirects` alone; `name` is for people, the address by default.
    """

    def __init__(self, url: str, *, public: bool, redirects: re.Pattern[str] | None = None, name: str = "") -> None:
        if public and not PUBLIC_URL.fullmatch(url):
            raise UsageError(f"{url} may not be named by a run", remedy="write https://host.example/folder")
        self.name = name or url
        self._url, self._public, self._redirects = url, public, redirects

    def open(self, file: str, start: int, end: int) -> tuple[int, Iterator[bytes]]:
        """See `Place`."""
        connection, response = self._ask(file, start)
        begun = start if response.status == 206 else 0
        return begun, _pieces(connection, response, end - begun, self.name)

    def whole(self, file: str, most: int) -> bytes:
        """See `Place`."""
        connection, response = self._ask(file, 0)
        return b"".join(_pieces(connection, response, most + 1, self.name))

    def _ask(self, file: str, start: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url = f"{self._url}/{file}"
        for _ in range(MAX_REDIRECTS + 1):
            connection, response = self._ask_once(url, start)
            if not 300 <= response.status < 400:
                return connection, response
            connection.close()
            told = urljoin(url, response.getheader("location") or "")
            if self._redirects is None or not self._redirects.fullmatch(told):
                raise NotThere(f"{url} is redirected to {told[:200]}, where none of its files may be")
            url = told
        raise NotThere(f"{self._url}/{file} is redirected more than {MAX_REDIRECTS} times")

    def _ask_once(self, where: str, start: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(where)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = self._connection(parts.hostname or "", port, parts.scheme)
        try:
            headers = {"Accept-Encoding": "identity", "User-Agent": "flockstep"}
            with _hung_up_after(2 * TIMEOUT, connection.sock):
                path = quote(parts.path, safe="/%~+=") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers=headers | _range(start))
                response = connection.getresponse()
            if 400 <= response.status < 500 and response.status not in (408, 429):
                raise NotThere(f"{where}: {response.status} {response.reason[:100]}")
            if 300 <= response.status < 400:
                return connection, response
            if response.status not in (200, 206) or (response.status == 206 and not _begins_at(response, start)):
                raise OSError(f"{where}: {response.status} {response.reason[:100]}")
            if response.chunked:  # Its framing has no end of its own, and is read inside of the library.
                raise NotThere(f"{where} is sent in chunks: serve it as a file, with its length")
        except http.client.HTTPException as error:
            connection.close()
            raise OSError(f"{where}: no answer of a web server: {type(error).__name__}") from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _connection(self, host: str, port: int, scheme: str) -> http.client.HTTPConnection:
        """Connect to an address that was checked. Raises `OSError`."""
        last: OSError | None = None
        for address in self._addresses(host, port):
            try:
                plain = socket.create_connection((address, port), timeout=TIMEOUT)
            except OSError as error:
                last = error
                continue
            made = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            connection = made(host, port, timeout=TIMEOUT)
            try:
                encrypted = ssl.create_default_context() if scheme == "https" else None
                connection.sock = plain if encrypted is None else encrypted.wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
            return connection
        raise OSError(f"{host} is not reached: {last}")

    def _addresses(self, host: str, port: int) -> list[str]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise OSError(f"{host} has no address: {error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if self._public:
            for address in addresses:
                if not is_public_ip(address):
                    raise NotThere(f"{host} is {ipaddress.ip_address(address)}, no address of the public internet")
        return addresses


def hub_folder(dataset: str) -> Web:
    """Return a folder of a dataset of the hub at a commit, `org/name@commit[/folder]`. Raises `UsageError`."""
    match, own = HUB_DATASET.fullmatch(dataset), os.environ.get("HF_ENDPOINT", "").rstrip("/")
    if match is None or not match["commit"]:
        remedy = f"write {HUB_DATASETS}org/name@commit/folder"
        raise UsageError(f"{HUB_DATASETS}{dataset} is no folder of the hub at a commit", remedy=remedy)
    folder = f"/{match['folder']}" if match["folder"] else ""
    url = f"{own or f'https://{HUB_HOST}'}/datasets/{match['repository']}/resolve/{match['commit']}{folder}"
    redirects = re.compile(f"{STORE.pattern}|{re.escape(own)}/.*") if own else STORE
    return Web(url, public=not own, redirects=redirects, name=f"{HUB_DATASETS}{dataset}")


def steadily(pieces: Iterator[bytes], most: int, name: str, patience: float) -> Iterator[bytes]:
    """Yield an answer, and no more of it than `most` bytes. Raises `ConnectionError` where it is too slow."""
    deadline, done = time.monotonic() + patience, 0
    for piece in pieces:
        kept = piece[: most - done]
        done += len(kept)
        if time.monotonic() > deadline + done / LEAST_RATE:
            raise ConnectionError(f"{name} sends less than {LEAST_RATE / 1e3:g} kB/s")
        yield kept
        if done == most:
            return


@contextlib.contextmanager
def _hung_up_after(seconds: float, connected: socket.socket) -> Iterator[None]:
    """Shut a socket down after so many seconds: each byte of a head, and each `100 Continue`, begins its timeout anew.

    Raises `OSError` then.
    """
    has_hung_up = False

    def hang_up() -> None:
        nonlocal has_hung_up
        has_hung_up = True
        with contextlib.suppress(OSError):  # It is closed.
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if has_hung_up:
            raise TimeoutError(f"no whole answer of a web server within {seconds:g} s")


def _range(start: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-"} if start else {}


def _begins_at(response: http.client.HTTPResponse, start: int) -> bool:
    return (response.getheader("content-range") or "").startswith(f"bytes {start}-")


def _pieces(
    connection: http.client.HTTPConnection, response: http.client.HTTPResponse, most: int, name: str
) -> Iterator[bytes]:
    """Yield a body, and no more of it than `most` bytes. Raises `OSError` where it is too slow, and where it breaks."""
    try:
        yield from steadily(iter(partial(response.read1, PIECE), b""), most, name, 2 * TIMEOUT)
    except http.client.HTTPException as error:
        raise OSError(f"{name}: the answer broke off: {type(error).__name__}") from error
    finally:
        connection.close()
