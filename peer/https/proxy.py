"""An HTTP proxy (CONNECT, RFC 9110, section 9.3.6): in some networks the only way out.

It is that of `HTTPS_PROXY`, as curl and browsers take it, unless `NO_PROXY` names the host; on Windows and macOS also that of
the system's settings. What it refuses becomes one line with its own reason.
"""

from base64 import b64encode
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import h11
import trio

from ..base.errors import NetworkError
from ..base.plain import shortened
from ..base.troubles import BAD_PROXY, PROXY_GONE, PROXY_REFUSES, PROXY_WANTS_LOGIN
from ..libp2p.tcp import plain_words

PROXY_TIMEOUT = 5.0
"""Seconds to connect to the proxy, and for its answer, for which it connects to the host."""
MAX_REASON = 60
"""Characters of the proxy's own words that are shown."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, without the secret in its text."""

    host: str
    port: int
    credentials: str
    """`name:password`; empty if it wants none."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def proxy_url(host: str) -> str:
    """Return the URL of the proxy through which HTTPS to a host goes on this computer; empty if it goes through none."""
    url = getproxies().get("https", "")
    return url if url and not proxy_bypass(host) else ""


def parse_proxy(url: str) -> Proxy:
    """Parse `http://name:password@host:port`. Raises `NetworkError`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise NetworkError(BAD_PROXY.with_details(str(error)).cause) from None
    if parts.scheme != "http" or not parts.hostname:
        raise NetworkError(BAD_PROXY.with_details(f"it begins with {parts.scheme}:// and has to be http://HOST:PORT").cause)
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Proxy(parts.hostname, port or 80, credentials)


async def tunnel(proxy: Proxy, host: str, port: str) -> trio.SocketStream:
    """Let a proxy connect to a host. Raises `NetworkError`."""
    with trio.move_on_after(PROXY_TIMEOUT):
        try:
            stream = await trio.open_tcp_stream(proxy.host, proxy.port)
        except OSError as error:
            raise NetworkError(PROXY_GONE.with_details(f"{proxy}: {plain_words(error)}").cause) from error
        try:
            await _connect(stream, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            return stream
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
    raise NetworkError(PROXY_GONE.with_details(f"{proxy} has not answered within {PROXY_TIMEOUT:g} s").cause)


async def _connect(stream: trio.SocketStream, proxy: Proxy, target: str) -> None:
    machine = h11.Connection(h11.CLIENT)
    headers = [("Host", target)]
    if proxy.credentials:
        headers.append(("Proxy-Authorization", f"Basic {b64encode(proxy.credentials.encode()).decode()}"))
    try:
        await stream.send_all(machine.send(h11.Request(method="CONNECT", target=target, headers=headers)) or b"")
        while not isinstance(event := machine.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                machine.receive_data(await stream.receive_some())  # Nothing of the host's: in TLS the client begins.
    except (h11.RemoteProtocolError, trio.BrokenResourceError) as error:
        raise NetworkError(PROXY_GONE.with_details(f"{proxy} does not speak HTTP: {error}").cause) from error
    if 200 <= event.status_code < 300:
        return
    reason = shortened(event.reason.decode("ascii", "replace"), MAX_REASON)
    answer = f"{proxy} answered {event.status_code} {reason}".rstrip()
    if event.status_code == 407:
        raise NetworkError(PROXY_WANTS_LOGIN.with_details(answer).cause)
    raise NetworkError(PROXY_REFUSES.with_details(f"{answer} to CONNECT {target}").cause)
