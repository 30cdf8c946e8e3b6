"""Opens a WebSocket to an address, directly or through a proxy.

TLS checks the host's certificate alone, by the roots of this system or those in SSL_CERT_FILE (a company's own, where its
proxy opens TLS). Who the peer is, Noise proves inside.
"""

import ssl

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from ..address import is_secure
from ..base.errors import NetworkError
from ..base.transport import Address
from ..base.troubles import NO_TLS, NO_WEBSOCKET, UNTRUSTED
from ..libp2p.tcp import FIRST_BYTE, TrafficMeter
from .proxy import parse_proxy, proxy_url, tunnel
from .websocket import WebStream


class WebDialler:
    """One host's dials of WebSockets; their bytes count into `meter`."""

    def __init__(self, meter: TrafficMeter) -> None:
        self._meter = meter

    async def open(self, address: Address, resolved: Address) -> RawConnection:
        """Open a WebSocket at the IP address of `resolved`. Raises `NetworkError`, or `OSError`."""
        _, _, ip, _, port, *_ = resolved.split("/")
        return await self._upgrade(await trio.open_tcp_stream(ip, int(port)), address)

    async def open_through_proxy(self, address: Address) -> RawConnection:
        """Open a WebSocket through the proxy of this computer, which also resolves a name. Raises `NetworkError`."""
        _, _, name, _, port, *_ = address.split("/")
        return await self._upgrade(await tunnel(parse_proxy(proxy_url(name)), name, port), address)

    def proxy_of(self, address: Address) -> str:
        """Return the proxy for an address, as a text without secrets; empty if there is none, as for plain WebSockets."""
        url = proxy_url(address.split("/")[2]) if is_secure(address) else ""
        try:
            return str(parse_proxy(url)) if url else ""
        except NetworkError:  # Why it is none is said when it is dialled.
            return "HTTPS_PROXY"

    async def _upgrade(self, below: trio.SocketStream, address: Address) -> RawConnection:
        _, _, name, _, port, *_ = address.split("/")
        try:
            places = [Multiaddr(address)]
            carrier = await _tls(below, name) if is_secure(address) else below
            stream = WebStream(below, carrier, is_client=True)
            stream.count_into(self._meter)
            stream.patience = FIRST_BYTE
            await stream.ask(f"[{name}]:{port}" if ":" in name else f"{name}:{port}")
        except BaseException as error:
            await trio.aclose_forcefully(below)
            if isinstance(error, ConnectionClosedError):
                raise NetworkError(NO_WEBSOCKET.with_details(str(error)).cause) from error
            if isinstance(error, ValueError):  # Of multiaddr, which knows names by IDNA.
                raise NetworkError(f"{name!r} is no name of a host") from error
            raise
        stream.patience = FIRST_BYTE
        return RawConnection(stream, True, stream.kind, places)


async def _tls(below: trio.SocketStream, name: str) -> trio.SSLStream:
    """Shake hands with a server of that name. Raises `NetworkError`."""
    secured = trio.SSLStream(below, ssl.create_default_context(), server_hostname=name, https_compatible=True)
    try:
        await secured.do_handshake()
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise NetworkError(UNTRUSTED.with_details(f"{name}: {cause.verify_message}").cause) from error
        details = cause.reason if isinstance(cause, ssl.SSLError) and cause.reason else "the connection was closed"
        raise NetworkError(NO_TLS.with_details(details.replace("_", " ").lower()).cause) from error
    return secured
