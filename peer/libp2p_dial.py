"""The ways to dial one address: plainly, from the listen port, as the accepting side, and only to see whether it works.

Each returns why it failed, in words that a volunteer understands, and an empty text if it did not. A dial *from the listen
port* leaves through the mapping that a router keeps for that port: bootstraps then see where that port is from outside
(`reachability`), and hole punches meet there (`libp2p_punch`).
"""

import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakSet

import trio
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from .config import DEFAULT_PORT, PeerConfig
from .errors import NetworkError
from .libp2p_stream import ROAD_ERRORS
from .libp2p_tcp import MeteredTCP, plain_words, resolve
from .transport import Address, PeerId, Rung
from .troubles import BLOCKED, DOWN, GONE, NO_RESOLVER, NOT_NOISE, REFUSED, SILENT, STUCK, WRONG_PEER, WRONG_PORT

LAN_DIAL_TIMEOUT = 3.0
"""A neighbour answers in milliseconds, and a private address of some other network usually does not answer at all."""

NAME_TIMEOUT = 5.0
"""Seconds for a host name: what resolvers give one name server before they ask the next."""

SECOND_LOOK = 2.0
"""Seconds for another port of a host to tell why the right one does not answer."""

OTHER_PORTS = (443, 80)
"""What hosts and firewalls leave open if anything: whoever refuses a connection there has been reached, too."""

Upgrade = Callable[[RawConnection, PeerId, Address], Awaitable[None]]
"""From a socket to a connection of the swarm with that peer, or an error."""


class Dialler:
    """One host's dials. `port` is where it listens, once it does."""

    def __init__(self, swarm: Any, tcp: MeteredTCP, config: PeerConfig) -> None:
        self.port = 0
        self._meetings: WeakSet[RawConnection] = WeakSet()
        self._swarm = swarm
        self._tcp = tcp
        self._config = config

    async def plainly(self, peer: PeerId, address: Address, rung: Rung = Rung.DIRECT) -> str:
        """From any port."""

        async def dial(resolved: Multiaddr) -> None:
            await self._swarm.dial_addr(resolved, ID.from_base58(peer))

        return await _tell(dial, address, self.patience(rung))

    def patience(self, rung: Rung) -> float:
        """Seconds for a plain dial on a rung."""
        limit = self._config.dial_timeout
        return min(limit, LAN_DIAL_TIMEOUT) if rung is Rung.LAN else limit

    async def from_listen_port(self, peer: PeerId, address: Address) -> str:
        """From the port that I listen on; fails where the system or an earlier connection forbids that."""
        return await self._from_listen_port(peer, address, self._initiate)

    async def meeting(self, peer: PeerId, address: Address) -> str:
        """From the listen port, to meet a peer's own dial."""

        async def meet(raw: RawConnection, peer: PeerId, address: Address) -> None:
            self._meetings.add(raw)
            await self._initiate(raw, peer, address)

        return await self._from_listen_port(peer, address, meet)

    async def accepting(self, peer: PeerId, address: Address) -> str:
        """The same with the roles of the handshake changed: of two dials that meet, one must be the accepting one."""

        async def meet(raw: RawConnection, peer: PeerId, address: Address) -> None:
            self._meetings.add(raw)
            muxed = await self._swarm.upgrade_inbound_raw_conn(raw, await resolve(address))
            if str(muxed.peer_id) != peer:
                await muxed.close()
                raise NetworkError(WRONG_PEER.with_details(muxed.peer_id).cause)

        return await self._from_listen_port(peer, address, meet)

    def has_met(self, connection: Any) -> bool:
        """Whether one of the swarm's connections is one where two dials have met."""
        return _raw(connection) in self._meetings

    async def drop(self, peer: PeerId) -> None:
        """Abort what is open to a peer that answers no more."""
        for connection in list(self._swarm.connections.get(ID.from_base58(peer), ())):
            await abort(connection)

    async def probe(self, peer: PeerId, address: Address, seconds: float) -> str:
        """From any port, up to the handshake that proves who is there; then hang up."""

        async def dial(resolved: Multiaddr) -> None:
            raw: Any = await self._tcp.dial(resolved)
            try:
                await self._swarm.upgrader.upgrade_security(raw, True, ID.from_base58(peer))
            finally:
                await _hang_up(raw)

        return await _tell(dial, address, seconds)

    async def second_look(self, peer: PeerId, address: Address, cause: str) -> str:
        """Why a bootstrap did not answer at its address, in words that tell more than the failure of the dial did.

        Other ports of its host tell a bootstrap that is down from a wrong port, and a firewall from a host that is away.
        """
        start, _, port = address.rpartition("/tcp/")
        if cause.startswith((REFUSED.cause, NOT_NOISE.cause)):
            if port != str(DEFAULT_PORT) and not await self.probe(peer, f"{start}/tcp/{DEFAULT_PORT}", SECOND_LOOK):
                return WRONG_PORT.with_details(f"it is {port}, the bootstrap listens on {DEFAULT_PORT}").cause
            if cause.startswith(REFUSED.cause):
                return DOWN.with_details(f"its computer answers, but nothing listens on port {port}").cause
        if cause.startswith(SILENT.cause):
            answers = await _knock(start, (int(port), *OTHER_PORTS))
            if answers.get(int(port)):
                return STUCK.with_details(f"port {port} takes connections, and nothing comes over them").cause
            answering = next(iter(answers), None)
            if answering is None:
                return GONE.with_details(f"neither from port {port} nor from others").cause
            return BLOCKED.with_details(f"{port} is silent, though the host answers on port {answering}").cause
        return cause

    async def _from_listen_port(self, peer: PeerId, address: Address, upgrade: Upgrade) -> str:
        async def dial(resolved: Multiaddr) -> None:
            host = self._config.host if str(resolved).startswith("/ip4") else "::"
            raw = await self._tcp.dial_from(resolved, (host, self.port))
            try:
                await upgrade(raw, peer, address)
            except BaseException:
                _skip_goodbye(raw)
                await _hang_up(raw)
                raise

        return await _tell(dial, address, self._config.dial_timeout)

    async def _initiate(self, raw: RawConnection, peer: PeerId, address: Address) -> None:
        await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(peer))


async def _tell(dial: Callable[[Multiaddr], Awaitable[None]], address: Address, seconds: float) -> str:
    resolved: Multiaddr | None = None
    try:
        with trio.fail_after(NAME_TIMEOUT):
            resolved = await resolve(address)
        with trio.fail_after(seconds):
            await dial(resolved)
    except trio.TooSlowError:
        if resolved is None:
            return NO_RESOLVER.with_details(f"silent for {NAME_TIMEOUT:g} s").cause
        return f"{SILENT.cause} after {seconds:g} s: host down or port blocked by a firewall"
    except NetworkError as error:
        return str(error)
    except ROAD_ERRORS as error:
        return plain_words(error)
    return ""


async def _knock(start: Address, ports: Sequence[int]) -> dict[int, bool]:
    """The ports on which the host at `/ip4/…` or `/dns/…` gives any answer, and whether each takes connections."""
    answers: dict[int, bool] = {}

    async def knock(port: int) -> None:
        try:
            resolved = await resolve(f"{start}/tcp/{port}")
            ip = str(resolved.value_for_protocol(resolved.protocols()[0].code))
            with trio.socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM) as knocking:
                await knocking.connect((ip, port))
            answers[port] = True
        except ConnectionRefusedError:
            answers[port] = False
        except OSError:
            return

    with trio.move_on_after(SECOND_LOOK):
        async with trio.open_nursery() as nursery:
            for port in ports:
                nursery.start_soon(knock, port)
    return answers


async def abort(connection: Any) -> None:
    """Close one of the swarm's connections whose other end does not answer."""
    _skip_goodbye(_raw(connection))
    await connection.close()


def _skip_goodbye(raw: RawConnection) -> None:
    """Let a socket go at once: TCP's goodbye holds its ports for a minute, and the next dial from the listen port fails."""
    sock = getattr(getattr(raw.stream, "stream", None), "socket", None)
    if sock is not None:
        with contextlib.suppress(OSError):  # It is closed already.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _raw(connection: Any) -> Any:
    """What is below Noise and Yamux."""
    return connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer


async def _hang_up(raw: RawConnection) -> None:
    with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
        await raw.close()
