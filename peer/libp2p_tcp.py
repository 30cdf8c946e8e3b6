"""TCP for the libp2p host: sockets that notice a dead road and count their bytes, and why a dial failed in plain words."""

import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.transport.exceptions import SecurityUpgradeFailure
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from .transport import Address

TCP_USER_TIMEOUT_MS = 20_000
"""A silent drop is seen by both sides after 20 s; shorter, and a home router's restart ends connections."""

KEEPALIVE_SECONDS = 5
"""Idle time before the first keepalive probe, and between probes; with three unanswered ones, the same 20 s."""


@dataclass(slots=True)
class Meter:
    """Bytes that went over sockets."""

    sent: int = 0
    received: int = 0


class TunedStream(TrioTCPStream):
    """A TCP stream that notices a dead road, does not wait for more to send, and counts its bytes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.meter = Meter()
        self.upgraded = False
        """Whether who has connected here has proven who it is."""
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        # Each of these is missing from some system, where heartbeats alone notice the death of the road.
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS),
        ):
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        for level, option, value in options:
            with contextlib.suppress(OSError):  # A socket that is dead already says so at its first use.
                stream.socket.setsockopt(level, option, value)

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        await super().write(data)
        self.meter.sent += len(data)

    async def read(self, n: int | None = None) -> bytes:
        """At most `n` bytes, `b""` at the end."""
        data = await super().read(n)
        self.meter.received += len(data)
        return data


Serve = Callable[[ReadWriteCloser], Awaitable[None]]
"""What is done with an accepted socket until its end."""


class MeteredTCP(TCP):
    """The library's TCP transport, all sockets of which count into one meter; `admit` decides about each accepted one."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.admit: Callable[[Any, Serve], Awaitable[None]] = _admit_all
        self._meter = meter

    async def _dial_resolved(self, maddr: Multiaddr, source: tuple[str, int] | None = None) -> Any:
        raw: Any = await super()._dial_resolved(maddr, source)
        raw.stream.meter = self._meter
        return raw

    async def dial_from(self, maddr: Multiaddr, source: tuple[str, int]) -> RawConnection:
        """A connection that leaves from `source`, which may be a port that is listened on. Raises `OSError`.

        Not the library's `dial_with_source`: that leaves the socket open when it is cancelled, and another port than the
        one that was asked for without a word.
        """
        host, port = str(maddr.value_for_protocol(maddr.protocols()[0].code)), int(maddr.value_for_protocol("tcp"))
        connecting = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                connecting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            await connecting.bind(source)
            await connecting.connect((host, port))
        except BaseException:
            connecting.close()
            raise
        stream = TunedStream(trio.SocketStream(connecting))
        stream.meter = self._meter
        return RawConnection(stream, True)

    def create_listener(self, handler_function: Serve) -> Any:
        """A listener whose accepted sockets count, too."""

        async def metered(stream: Any) -> None:
            stream.meter = self._meter
            await self.admit(stream, handler_function)

        return super().create_listener(metered)


async def _admit_all(stream: Any, serve: Serve) -> None:
    await serve(stream)


async def resolve(address: Address) -> Multiaddr:
    """The address with an IP in the place of a name, by the system's resolver: the library's own skips /etc/hosts.

    Raises `socket.gaierror`.
    """
    _, kind, host, *rest = address.split("/")
    if kind.startswith("dns"):
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
        found = await trio.socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
        kind, host = "ip6" if found[0][0] == socket.AF_INET6 else "ip4", str(found[0][4][0])
    return Multiaddr("/".join(["", kind, host, *rest]))


def plain_words(error: BaseException) -> str:
    """What the failure of a dial means."""
    chain = [error]
    while cause := chain[-1].__cause__ or next(iter(getattr(chain[-1], "exceptions", ())), None):
        chain.append(cause)
    for link in chain:
        if isinstance(link, PeerIDMismatchesPubkey):
            return f"another peer id answered: {str(link).rpartition('=')[2]}"
        if isinstance(link, socket.gaierror):
            return f"no such host name: {link.strerror}"
        if isinstance(link, ConnectionRefusedError):
            return "connection refused: nothing listens there"
        if isinstance(link, OSError) and link.strerror:
            return link.strerror.lower()
    if any(isinstance(link, SecurityUpgradeFailure) for link in chain):
        return "something listens there that does not speak libp2p with Noise"
    return str(error)
