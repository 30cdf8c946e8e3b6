"""The ways to dial one address: from any port, from the listen port, as the accepting side, as a probe.

Each returns why it failed, in words that a volunteer understands, or "". A dial *from the listen port* leaves through
the mapping that a router keeps for that port: bootstraps then observe the port from outside (`nat.reachability`), and
hole punches meet there (`nat.punch`).
"""

import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from weakref import WeakSet

import trio
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from ..address import is_ipv6, is_web
from ..base.config import PeerConfig
from ..base.errors import NetworkError
from ..base.transport import Address, PeerId, Rung
from ..base.troubles import SILENT, WRONG_PEER
from .listen import ALL_IP4, ALL_IP6
from .stream import CONNECTION_ERRORS
from .tcp import MeteredTCP, TunedStream, plain_words, resolve

LAN_DIAL_TIMEOUT = 3.0
"""A neighbour answers in milliseconds, and a private address of some other network usually does not answer at all."""


Upgrade = Callable[[RawConnection, PeerId, Address], Awaitable[None]]
"""Upgrades a socket to a connection of the swarm with that peer, or raises an error."""

WhyNot = Callable[[Address], str]
"""Returns why an address is not dialled; empty if it is."""


class WebDials(Protocol):
    """Opens WebSockets."""

    async def open(self, address: Address, resolved: Address) -> RawConnection:
        """Open one at the IP address of `resolved`. Raises `NetworkError`, or `OSError`."""

    async def open_through_proxy(self, address: Address) -> RawConnection:
        """Open one through the proxy of this computer. Raises `NetworkError`, or `OSError`."""

    def proxy_of(self, address: Address) -> str:
        """Return the proxy for an address, as a text without secrets; empty if there is none."""


class Dialler:
    """One host's dials. `port` is its listen port, once it listens."""

    def __init__(self, swarm: Any, tcp: MeteredTCP, web: WebDials, config: PeerConfig) -> None:
        self.port = 0
        self._web = web
        self._simultaneous: WeakSet[RawConnection] = WeakSet()
        self._swarm = swarm
        self._tcp = tcp
        self._config = config

    async def plainly(
        self, peer: PeerId, address: Address, rung: Rung = Rung.DIRECT, why_not: WhyNot = lambda address: "", at: Address = ""
    ) -> str:
        """Dial from any port; not if `why_not` returns a reason against the address that a name stands for.

        `at`: one of the addresses that the name stands for, if that is known.
        """
        limit = self._config.dial_timeout

        async def dial() -> None:
            resolved = await resolve(at or address)
            if reason := why_not(str(resolved)):
                raise NetworkError(reason)
            await self._upgrade(await self._open(address, resolved), peer, address, self._initiate)

        return await _tell(dial, min(limit, LAN_DIAL_TIMEOUT) if rung is Rung.LAN else limit)

    async def through_proxy(self, peer: PeerId, address: Address) -> str:
        """Dial a WebSocket through the proxy of this computer."""

        async def dial() -> None:
            await self._upgrade(await self._web.open_through_proxy(address), peer, address, self._initiate)

        return await _tell(dial, self._config.dial_timeout)

    def proxy_of(self, address: Address) -> str:
        """Return the proxy through which an address can be dialled, as a text without secrets; empty if there is none."""
        return self._web.proxy_of(address)

    async def from_listen_port(self, peer: PeerId, address: Address) -> str:
        """Dial from the port that I listen on; fails if the system or an earlier connection forbids that."""
        return await self._from_listen_port(peer, address, self._initiate)

    async def simultaneous_open(self, peer: PeerId, address: Address) -> str:
        """Dial from the listen port while the peer dials me: TCP's simultaneous open (RFC 9293, section 3.5)."""

        async def meet(raw: RawConnection, peer: PeerId, address: Address) -> None:
            self._simultaneous.add(raw)
            await self._initiate(raw, peer, address)

        return await self._from_listen_port(peer, address, meet)

    async def accepting(self, peer: PeerId, address: Address) -> str:
        """The same with the roles of the handshake changed: of two simultaneous dials one must take the accepting side."""

        async def meet(raw: RawConnection, peer: PeerId, address: Address) -> None:
            self._simultaneous.add(raw)
            muxed = await self._swarm.upgrade_inbound_raw_conn(raw, await resolve(address))
            if str(muxed.peer_id) != peer:
                await muxed.close()
                raise NetworkError(WRONG_PEER.with_details(muxed.peer_id).cause)

        return await self._from_listen_port(peer, address, meet)

    def is_simultaneous(self, connection: Any) -> bool:
        """Return True if one of the swarm's connections came of a simultaneous open."""
        return _raw(connection) in self._simultaneous

    async def drop(self, peer: PeerId) -> None:
        """Abort the connections to a peer that does not answer any more."""
        for connection in list(self._swarm.connections.get(ID.from_base58(peer), ())):
            await abort(connection)

    async def probe(self, peer: PeerId, address: Address, seconds: float, *, by_proxy: bool = False) -> str:
        """Dial from any port, or through the proxy, up to the handshake that proves the peer id; then hang up."""

        async def dial() -> None:
            if by_proxy:
                raw = await self._web.open_through_proxy(address)
            else:
                raw = await self._open(address, await resolve(address))
            try:
                await self._swarm.upgrader.upgrade_security(raw, True, ID.from_base58(peer))
            finally:
                await _hang_up(raw)

        return await _tell(dial, seconds)

    async def _open(self, address: Address, resolved: Multiaddr) -> Any:
        """Open a socket from any port. Raises the library's errors, `NetworkError`, or `OSError`."""
        return await (self._web.open(address, str(resolved)) if is_web(address) else self._tcp.dial(resolved))

    async def _from_listen_port(self, peer: PeerId, address: Address, upgrade: Upgrade) -> str:
        async def dial() -> None:
            resolved = await resolve(address)
            raw = await self._tcp.dial_from(resolved, (source_for(str(resolved), self._config.host), self.port))
            await self._upgrade(raw, peer, address, upgrade)

        return await _tell(dial, self._config.dial_timeout)

    async def _upgrade(self, raw: RawConnection, peer: PeerId, address: Address, upgrade: Upgrade) -> None:
        try:
            await upgrade(raw, peer, address)
        except BaseException:
            _skip_goodbye(raw)
            await _hang_up(raw)
            raise

    async def _initiate(self, raw: RawConnection, peer: PeerId, address: Address) -> None:
        await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(peer))


def source_for(address: Address, host: str) -> str:
    """Return the source IP of a dial of `address` when I listen on `host`. Raises `NetworkError` if there is none."""
    if host == ALL_IP4:
        return ALL_IP6 if is_ipv6(address) else ALL_IP4
    if is_ipv6(address) != (":" in host):
        raise NetworkError(f"nothing leaves from {host} for the other version of IP")
    return host


async def _tell(dial: Callable[[], Awaitable[None]], seconds: float) -> str:
    try:
        with trio.fail_after(seconds):
            await dial()
    except trio.TooSlowError:
        return f"{SILENT.cause} after {seconds:g} s: host down or port blocked by a firewall"
    except NetworkError as error:
        return str(error)
    except CONNECTION_ERRORS as error:
        return plain_words(error)
    except Exception as error:  # noqa: BLE001  The boundary of one peer: a handshake fails as the cipher's library likes.
        return plain_words(error)
    return ""


async def abort(connection: Any) -> None:
    """Close one of the swarm's connections whose other end does not answer.

    The socket first: the library's goodbye would wait behind all that TCP still tries to send, for its user timeout.
    """
    raw = _raw(connection)
    _skip_goodbye(raw)
    await _hang_up(raw)
    await connection.close()


def _skip_goodbye(raw: RawConnection) -> None:
    """Make a socket close at once: TCP's goodbye holds its ports for a minute, and the next dial from them would fail."""
    sock = getattr(raw.stream, "socket", None)
    if sock is not None:
        with contextlib.suppress(OSError):  # It is closed already.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tcp_stream(connection: Any) -> TunedStream:
    """Return the socket of one of the swarm's direct connections."""
    stream: TunedStream = _raw(connection).stream
    return stream


def _raw(connection: Any) -> Any:
    """Return the raw connection below Noise and Yamux."""
    return connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer


async def _hang_up(raw: RawConnection) -> None:
    with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
        await raw.close()
