"""Accepts WebSockets at a bootstrap, over TLS or from a reverse proxy.

Theory of operation. A socket goes through the gate before a byte is read, as at any other listener, and has the time of an
unfinished handshake for TLS and the HTTP request, too. A reverse proxy of this computer (Caddy, nginx) connects from
loopback: so its request is read first, of `MAX_UNREAD` at a time, and the socket counts for the client that the proxy names
in X-Forwarded-For. Nobody else's header is believed. All clients of a proxy that names none count as one address.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import trio
from libp2p.io.exceptions import IOException

from ..base.errors import LocalError
from ..base.transport import Address
from ..libp2p.gate import Gate
from ..libp2p.listen import ACCEPT_QUEUE, SelectiveListener
from ..libp2p.tcp import ConnectionHandler, TrafficMeter
from ..log.telemetry import Telemetry
from ..quota.origins import UNKNOWN
from ..quota.places import Places
from .certificate import TlsCertificate
from .websocket import WebStream

GREETING_TIMEOUT = 10.0
"""Seconds for TLS and the HTTP request, as for the rest of a handshake."""
MAX_UNREAD = 64
"""Requests of the reverse proxy that have not arrived whole, as many as handshakes; beyond, the oldest gives way."""
NO_REQUEST = "it asked for no WebSocket"


@dataclass(frozen=True, slots=True)
class WebPlace:
    """Where a bootstrap accepts WebSockets."""

    host: str
    port: int
    certificate: TlsCertificate | None = None
    """None: plain, behind a reverse proxy that has one."""


class WebServer:
    """The WebSockets of one host at one place; `handle` serves each that the gate admits to its end."""

    def __init__(
        self, place: WebPlace, gate: Gate, meter: TrafficMeter, telemetry: Telemetry, handle: ConnectionHandler
    ) -> None:
        self.listeners: Sequence[SelectiveListener] = ()
        self._place = place
        self._gate = gate
        self._meter = meter
        self._telemetry = telemetry
        self._handle = handle
        self._unread = Places[trio.CancelScope](MAX_UNREAD)

    async def listen(self) -> None:
        """Open the listening sockets. Raises `LocalError`."""
        where = f"{self._place.host} port {self._place.port}"
        try:
            opened = await trio.open_tcp_listeners(self._place.port, host=self._place.host, backlog=ACCEPT_QUEUE)
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = "choose another HOST:PORT; ports below 1024 need root, or CAP_NET_BIND_SERVICE"
            raise LocalError(f"cannot listen for WebSockets on {where}: {reason}", remedy=remedy) from None
        spares = _is_proxy if self._place.certificate is None else lambda where: False
        self.listeners = [SelectiveListener(one.socket, spares) for one in opened]
        self._telemetry.emit("websocket.ready", step="wss" if self._place.certificate else "ws", port=self.port)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """What others may dial, as far as the certificate says; behind a reverse proxy only its operator knows."""
        if self._place.certificate is None:
            return ()
        return tuple(f"{host}/tcp/{self.port}/tls/ws" for host in self._place.certificate.hosts)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.listeners[0].socket.getsockname()[1])

    async def run(self) -> None:
        """Accept until cancelled."""
        await trio.serve_listeners(self._serve, list(self.listeners))

    async def _serve(self, below: trio.SocketStream) -> None:
        carrier: trio.abc.Stream = below
        if (certificate := self._place.certificate) is not None:
            context = certificate.context(self._telemetry)
            carrier = trio.SSLStream(below, context, server_side=True, https_compatible=True)
        stream = WebStream(below, carrier, is_client=False)
        stream.count_into(self._meter)
        try:
            if certificate is None and _is_proxy(_ip_of(stream)):
                if await self._greet(stream, from_proxy=True) and not self.listeners[0].refuses(_ip_of(stream)):
                    await self._gate.admit(stream, self._handle)
            else:
                await self._gate.admit(stream, self._greeted)
        except Exception as error:  # noqa: BLE001  The boundary of one peer: a handshake fails as its library likes.
            logging.getLogger(__name__).debug("connection ends: %r", error)
        finally:
            await trio.aclose_forcefully(below)

    async def _greeted(self, stream: WebStream) -> None:
        if await self._greet(stream):
            await self._handle(stream)

    async def _greet(self, stream: WebStream, *, from_proxy: bool = False) -> bool:
        """Shake hands over TLS and HTTP; returns whether a WebSocket came of it."""
        with trio.move_on_after(GREETING_TIMEOUT) as scope:
            if from_proxy and (oldest := self._unread.enter(scope, UNKNOWN)) is not None:
                oldest.cancel()
            try:
                await stream.answer(from_proxy=from_proxy)
                return True
            except (IOException, OSError):
                pass
            finally:
                self._unread.leave(scope)
        self._gate.refusals.add("handshake", NO_REQUEST, self._gate.origins.of(_ip_of(stream)))
        return False


def _is_proxy(where: str) -> bool:
    """Return True for an address or a network of loopback."""
    return where.startswith(("127.", "::1", "::/"))


def _ip_of(stream: WebStream) -> str:
    """Return where a socket comes from; if it is dead already, from nowhere."""
    remote = stream.get_remote_address()
    return remote[0] if remote is not None else "0.0.0.0"
