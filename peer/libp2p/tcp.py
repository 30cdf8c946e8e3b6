"""TCP for the libp2p host: sockets that detect a dead connection, count and limit bytes; causes of failed dials."""

import contextlib
import errno
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.transport.exceptions import SecurityUpgradeFailure
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from ..address import by_turns
from ..base.errors import NetworkError
from ..base.transport import Address, PeerId
from ..base.troubles import FORBIDDEN, MUTE, NO_NAME, NO_RESOLVER, NO_ROUTE, NOT_NOISE, OFFLINE, REFUSED, WRONG_PEER
from ..strangers.frames import own_budget
from .line_rate import LineRate

TCP_USER_TIMEOUT_MS = 20_000
"""The user timeout: both sides detect a silent drop after 20 s; a shorter one ends connections at a router's restart."""

MAX_EXPANDED = 4
"""The limit of addresses of one name."""

KEEPALIVE_SECONDS = 5
"""Idle time before the first keepalive probe, and between probes; with three unanswered ones, the same 20 s."""

TCP_INFO_BYTES, ACKNOWLEDGED = 128, slice(120, 128)
"""Linux's struct tcp_info as far as tcpi_bytes_acked (tcp(7), since 4.1); a shorter one gives 0."""

FIRST_BYTE = 5.0
"""The timeout in seconds for the first byte of a peer that accepted a connection: it owes a greeting, and TCP has
retransmitted lost packets by then, twice even if a round trip takes a second. The whole handshake has the dial's."""

NAME_TIMEOUT = 5.0
"""The timeout for a host name: as long as resolvers give one name server before they ask the next."""


@dataclass(slots=True)
class TrafficMeter:
    """The bytes sent and received on sockets, and the limits of their rates."""

    sent: int = 0
    received: int = 0
    up: LineRate = field(default_factory=LineRate)
    down: LineRate = field(default_factory=LineRate)


class TunedStream(TrioTCPStream):
    """A TCP stream that detects a dead connection, does not wait for more to send, and counts its bytes."""

    kind = ConnectionType.DIRECT

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.socket = stream.socket
        self.meter = TrafficMeter()
        self.welcome: Callable[[str], None] = lambda peer: None
        """Called once the peer that connected here has proven its id."""
        self.peer: PeerId = ""
        """The peer that connected here, once it has proven its id."""
        self.spend_frames = own_budget(trio.current_time)
        """The budget of the frames that arrive here; its own unless a gate gives it that of an address."""
        self.patience = 0.0
        """The timeout of the next read in seconds; 0 is none."""
        self._received = 0
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        # Each of these is missing from some system; heartbeats alone detect a dead connection there.
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS),
        ):
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        for level, option, value in options:
            with contextlib.suppress(OSError):  # A dead socket raises at its first use.
                self.socket.setsockopt(level, option, value)

    def count_into(self, meter: TrafficMeter) -> None:
        """Count my bytes there, within its limits, from now on."""
        self.meter = meter
        if meter.down.queue_bytes:
            with contextlib.suppress(OSError):  # A dead socket raises at its first use.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, meter.down.queue_bytes)

    async def write(self, data: bytes) -> None:
        """Send all of `data`. One task writes to a socket at a time: slices of two writes must not be interleaved."""
        up = self.meter.up
        if not up.rate:
            await super().write(data)
            self.meter.sent += len(data)
            return
        with memoryview(data) as view:
            for start in range(0, len(view), up.slice_bytes):
                piece = bytes(view[start : start + up.slice_bytes])
                await up.ready(len(data))
                up.spend(len(piece))
                await super().write(piece)
                self.meter.sent += len(piece)

    async def read(self, n: int | None = None) -> bytes:
        """Read at most `n` bytes, `b""` at the end. Raises `TimeoutError` if the first of them does not arrive in time."""
        down = self.meter.down
        await down.ready()
        most = min(n or down.slice_bytes, down.slice_bytes) if down.rate else n
        data = await (self._first(most) if self.patience else super().read(most))
        self._count(len(data))
        return data

    async def receive_into(self, room: memoryview) -> int:
        """Receive at most `len(room)` bytes there; 0 at the end. Raises as `read` does."""
        down = self.meter.down
        await down.ready()
        try:
            with room[: down.slice_bytes] if down.rate else room[:] as slice_:
                received = await self.socket.recv_into(slice_)
        except trio.ClosedResourceError:
            return 0
        except OSError as error:
            raise ConnectionClosedError(f"TCP connection reset by remote peer: {error}", transport="tcp") from error
        self._count(received)
        return received

    def _count(self, received: int) -> None:
        self.meter.received += received
        self.meter.down.spend(received)
        self._received += received

    def signs_of_life(self) -> tuple[int, int]:
        """Return the bytes received, and those of mine that the remote system acknowledged (0 if mine does not report it)."""
        info = b""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # The socket is closed.
                info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        return self._received, int.from_bytes(info[ACKNOWLEDGED], sys.byteorder)

    async def _first(self, n: int | None) -> bytes:
        with trio.move_on_after(self.patience):
            data = await super().read(n)
            self.patience = 0.0
            return data
        raise TimeoutError(errno.ETIMEDOUT, MUTE.cause)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return IP and port of the other end, None if the socket is dead; the library's (`io/trio.py:101`) fails on IPv6."""
        if self._cached_remote_address is None:
            with contextlib.suppress(OSError):
                host, port, *_ = self.socket.getpeername()
                self._cached_remote_address = (str(host), int(port))
        return self._cached_remote_address


ConnectionHandler = Callable[[ReadWriteCloser], Awaitable[None]]
"""Serves an accepted socket until its end."""


class MeteredTCP(TCP):
    """The library's TCP transport, whose sockets all count into one meter; `admit` decides about each accepted one."""

    def __init__(self, meter: TrafficMeter) -> None:
        super().__init__()
        self.admit: Callable[[Any, ConnectionHandler], Awaitable[None]]
        """The gate's: set before anything listens."""
        self._meter = meter

    async def _dial_resolved(self, maddr: Multiaddr, source: tuple[str, int] | None = None) -> Any:
        return self._dialled(await super()._dial_resolved(maddr, source))

    async def dial_from(self, maddr: Multiaddr, source: tuple[str, int]) -> RawConnection:
        """Open a connection that leaves from `source`, which may be a port that is listened on. Raises `OSError`.

        The library's `dial_with_source` is not used: it leaves the socket open when it is cancelled, and silently takes
        another port than the requested one.
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
        raw: RawConnection = self._dialled(RawConnection(TunedStream(trio.SocketStream(connecting)), True))
        return raw

    def _dialled(self, raw: Any) -> Any:
        raw.stream.count_into(self._meter)
        raw.stream.patience = FIRST_BYTE
        return raw

    def create_listener(self, handler_function: ConnectionHandler) -> Any:
        """Return a listener whose accepted sockets count, too."""

        async def metered(stream: Any) -> None:
            stream.count_into(self._meter)
            await self.admit(stream, handler_function)

        return super().create_listener(metered)


async def resolve(address: Address) -> Multiaddr:
    """Replace a name in the address by an IP. Raises as `expand` does."""
    return Multiaddr((await expand(address))[0])


async def expand(address: Address) -> tuple[Address, ...]:
    """Resolve a name to its addresses, IPv4 and IPv6 by turns; return any other address as it is.

    The order is that of the system's resolver (RFC 6724), which knows whether this computer has IPv6; the library's own
    skips /etc/hosts. Raises `socket.gaierror`, or `NetworkError` if no name server answers.
    """
    _, kind, host, *rest = address.split("/")
    if not kind.startswith("dns"):
        return (address,)
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
    with trio.move_on_after(NAME_TIMEOUT) as scope:
        found = await trio.socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    if scope.cancelled_caught:
        raise NetworkError(NO_RESOLVER.with_details(f"silent for {NAME_TIMEOUT:g} s").cause)
    ips = [str(entry[4][0]) for entry in found]
    kinds = ["ip6" if ":" in ip else "ip4" for ip in ips]
    addresses = ["/".join(["", kind, ip, *rest]) for kind, ip in zip(kinds, ips, strict=True)]
    return by_turns(addresses)[:MAX_EXPANDED]


_BY_NUMBER = {
    errno.EPERM: FORBIDDEN,
    errno.EACCES: FORBIDDEN,
    errno.ENETUNREACH: OFFLINE,
    errno.EHOSTUNREACH: NO_ROUTE,
}


def plain_words(error: BaseException) -> str:
    """Return what the failure of a dial means, in words that a volunteer understands."""
    chain = [error]
    while cause := chain[-1].__cause__ or next(iter(getattr(chain[-1], "exceptions", ())), None):
        chain.append(cause)
    for link in chain:
        if isinstance(link, PeerIDMismatchesPubkey):
            return WRONG_PEER.with_details(str(link).rpartition("=")[2]).cause
        if isinstance(link, socket.gaierror):
            trouble = NO_RESOLVER if link.errno == socket.EAI_AGAIN else NO_NAME
            return trouble.with_details(str(link.strerror)).cause
        if isinstance(link, ConnectionRefusedError):
            return REFUSED.cause
        if isinstance(link, OSError) and link.errno in _BY_NUMBER:
            return _BY_NUMBER[link.errno].cause
        if isinstance(link, OSError) and link.strerror:
            return link.strerror.lower()
    if any(isinstance(link, SecurityUpgradeFailure) for link in chain):
        return NOT_NOISE.cause
    return str(error)
