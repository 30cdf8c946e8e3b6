"""Files of a web server, by range, from public addresses alone where a stranger has named it.

Theory of operation. A manifest that names a web server makes requests start in its volunteers' networks (SSRF). So unless
the user has named it too: https alone, a name and no number, the usual port; every address that the name resolves to must be
of the public internet, and the connection goes to the address that was checked, so that no second answer of the name server
counts (DNS rebinding). Nothing is redirected. No cookie, no credential and no proxy of this computer's is used. Every answer
is read up to the length that was asked for. The standard library suffices for that: a client that resolves names itself
would have to be told not to.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from urllib.parse import quote, urlsplit

from ...peer.address import is_public_ip
from ...peer.base.errors import UsageError
from ..consent import PUBLIC_URL
from ..data.hub import steadily

TIMEOUT = 30.0
"""Seconds without a byte."""
PIECE = 1 << 20

class NotThere(OSError):
    """What asking again does not change."""


class Web:
    """A folder of a web server; with `public` only one that a stranger may name. Raises `UsageError` for no such address."""

    def __init__(self, url: str, *, public: bool) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"{url} is no address: {error}", remedy="write https://host/folder") from error
        if parts.scheme not in ("http", "https") or not self._host or "@" in parts.netloc or parts.query or parts.fragment:
            raise UsageError(f"{url} is no folder of a web server", remedy="write https://host/folder")
        if public and not PUBLIC_URL.fullmatch(url):
            raise UsageError(f"{url} may not be named by a run alone", remedy="write https://host.example/folder")
        self.name = url
        self._tls, self._public = parts.scheme == "https", public
        self._path = quote(parts.path.rstrip("/"), safe="/%~+=")

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
        where = f"{self.name}/{file}"
        connection = self._connection()
        try:
            headers = {"Accept-Encoding": "identity", "User-Agent": "flockstep"}
            with _hung_up_after(2 * TIMEOUT, connection.sock):
                connection.request("GET", f"{self._path}/{file}", headers=headers | _range(start))
                response = connection.getresponse()
            if 300 <= response.status < 400:
                raise NotThere(f"{where} is redirected to {str(response.getheader('location'))[:200]}: name that instead")
            if 400 <= response.status < 500 and response.status not in (408, 429):
                raise NotThere(f"{where}: {response.status} {response.reason[:100]}")
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

    def _connection(self) -> http.client.HTTPConnection:
        """Connect to an address that was checked. Raises `OSError`."""
        last: OSError | None = None
        for address in self._addresses():
            try:
                plain = socket.create_connection((address, self._port), timeout=TIMEOUT)
            except OSError as error:
                last = error
                continue
            made = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
            connection = made(self._host, self._port, timeout=TIMEOUT)
            try:
                encrypted = ssl.create_default_context() if self._tls else None
                connection.sock = plain if encrypted is None else encrypted.wrap_socket(plain, server_hostname=self._host)
            except BaseException:
                plain.close()
                raise
            return connection
        raise OSError(f"{self._host} is not reached: {last}")

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise OSError(f"{self._host} has no address: {error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if self._public:
            for address in addresses:
                if not is_public_ip(address):
                    raise NotThere(f"{self._host} is {ipaddress.ip_address(address)}, no address of the public internet")
        return addresses


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
