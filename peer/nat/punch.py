"""Hole punching: upgrades a relayed connection between two peers behind NATs.

Theory of operation. The protocol is libp2p's DCUtR over TCP. Over the relay the dialled peer (the *asker*) and the
dialler exchange their observed addresses. The asker measures the round trip, sends `SYNC` and waits for half of it;
then both dial at the same moment, from their listen ports. Each NAT takes the other's packets for answers, and the two
dials meet as one connection (TCP's simultaneous open), on which the asker takes the accepting side of Noise.

If only one of two is behind a NAT, it is the one that was dialled through the relay. So the asker also dials plainly,
from any port (connection reversal): that reaches an open peer through any NAT. A pair that needs more (a symmetric NAT
against anything but an open peer) stays relayed. The library guesses "my IP address and my listen port"; this aims
where bootstraps have observed connections from the listen port, so NATs may change the port.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.dcutr import MAX_MESSAGE_SIZE
from libp2p.relay.circuit_v2.dcutr import PROTOCOL_ID as DCUTR
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from ..address import rung_of, valid_address
from ..base.errors import MalformedMessage, NetworkError
from ..base.transport import Address, PeerId, Rung
from ..libp2p.stream import CONNECTION_ERRORS
from ..log.telemetry import Telemetry

TALK_TIMEOUT = 5.0
"""The timeout of the exchange over the relay, in seconds."""

PUNCH_DIAL_TIMEOUT = 2.5
"""The timeout of the dials in seconds: the first packet, and its retransmission after one second."""

AGAIN_AFTER = (0.0, 0.2, 1.0, 60.0, 600.0)
"""The pauses before attempts in seconds: three at once, since a moment may be missed, then rarely, as networks change."""

HEAD_START = 0.03
"""The delay of the asker's dials in seconds: its packets should meet a dial in progress, not a listener."""

MAX_AIMS = 8
"""The limit of dialled addresses of the other side."""

Aims = Callable[[], tuple[Address, ...]]
PunchDial = Callable[[PeerId, Address], Awaitable[str]]
"""Dials a peer at an address; returns why that failed, or ""."""


@dataclass(frozen=True, slots=True)
class Dials:
    """The three ways to dial in a punch."""

    plainly: PunchDial
    """From any port."""

    from_listen_port: PunchDial
    """From the listen port."""

    accepting: PunchDial
    """From the listen port, taking the accepting side of Noise: one of two simultaneous diallers must."""


class Puncher:
    """One host's hole punches. `wanted(peer)` returns True while a peer is connected through a relay only."""

    def __init__(self, host: Any, telemetry: Telemetry, aims: Aims, dials: Dials, wanted: Callable[[PeerId], bool]) -> None:
        self._host = host
        self._telemetry = telemetry
        self._aims = aims
        self._dials = dials
        self._wanted = wanted
        self._asking: dict[PeerId, trio.CancelScope] = {}
        host.set_stream_handler(DCUTR, self._answer)

    async def ask(self, peer: PeerId) -> None:
        """Retry punching until there is a direct connection, or no relayed one any more; called by the dialled peer."""
        if peer in self._asking:
            self._asking[peer].cancel()
        with trio.CancelScope() as self._asking[peer]:
            for pause in AGAIN_AFTER:
                await trio.sleep(pause)
                if not self._wanted(peer):
                    return
                began = trio.current_time()
                if cause := await self._try(peer):
                    self._telemetry.emit("dial.failed", peer=peer, step=Rung.PUNCHED, reason=cause)
                else:
                    seconds = round(trio.current_time() - began, 3)
                    self._telemetry.emit("punch.done", peer=peer, step=Rung.PUNCHED, seconds=seconds)
                    return

    def forget(self, peer: PeerId) -> None:
        """Stop the attempts for a lost peer."""
        if scope := self._asking.pop(peer, None):
            scope.cancel()

    async def _try(self, peer: PeerId) -> str:
        """Make one attempt; returns why it failed, or ""."""
        try:
            with trio.fail_after(TALK_TIMEOUT):
                stream = await self._host.new_stream(ID.from_base58(peer), [DCUTR])
                asked = trio.current_time()
                await _write(stream, HolePunch.CONNECT, self._aims())
                theirs = await _read(stream, HolePunch.CONNECT)
                trip = trio.current_time() - asked
                await _write(stream, HolePunch.SYNC)
                await stream.close()
        except trio.TooSlowError:
            return "the peer did not answer over the relay"
        except (NetworkError, MalformedMessage, DecodeError, *CONNECTION_ERRORS) as error:
            return f"no agreement over the relay: {error}"
        if not theirs:
            return "the peer's router gives each destination another port (symmetric NAT)"
        await trio.sleep(trip / 2 + HEAD_START)
        return await self._meet(peer, theirs, asker=True)

    async def _answer(self, stream: Any) -> None:
        """Serve the other side of `_try`."""
        peer = str(stream.muxed_conn.peer_id)
        try:
            with trio.fail_after(TALK_TIMEOUT):
                theirs = await _read(stream, HolePunch.CONNECT)
                await _write(stream, HolePunch.CONNECT, self._aims())
                await _read(stream, HolePunch.SYNC)
                await stream.close()
        except (trio.TooSlowError, NetworkError, MalformedMessage, DecodeError, *CONNECTION_ERRORS) as error:
            reason = f"no agreement over the relay: {error or 'timed out'}"
            self._telemetry.emit("dial.failed", peer=peer, step=Rung.PUNCHED, reason=reason)
            await stream.reset()
            return
        if theirs and self._wanted(peer) and (cause := await self._meet(peer, theirs, asker=False)):
            self._telemetry.emit("dial.failed", peer=peer, step=Rung.PUNCHED, reason=cause)

    async def _meet(self, peer: PeerId, addresses: Sequence[Address], *, asker: bool) -> str:
        """Dial all addresses at once until one dial meets; returns why none did, or ""."""
        causes: dict[str, None] = {}

        async def dial(address: Address, way: PunchDial) -> None:
            while self._wanted(peer):
                began = trio.current_time()
                cause = await way(peer, address)
                if not cause:
                    break
                causes[f"{address}: {cause}"] = None
                # A NAT that refuses instead of dropping ends a dial at once: retry, to be in time for the other side's.
                await trio.sleep_until(began + 0.2)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(PUNCH_DIAL_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(dial, address, self._dials.accepting if asker else self._dials.from_listen_port)
                    if asker:
                        nursery.start_soon(dial, address, self._dials.plainly)
        if not self._wanted(peer):
            return ""
        return "; ".join(causes) or f"the dials did not meet within {PUNCH_DIAL_TIMEOUT:g} s at {', '.join(addresses)}"


async def _write(stream: Any, kind: Any, addresses: Sequence[Address] = ()) -> None:
    message = HolePunch(type=kind, ObsAddrs=[Multiaddr(address).to_bytes() for address in addresses])
    await stream.write(encode_varint_prefixed(message.SerializeToString()))


async def _read(stream: Any, kind: Any) -> tuple[Address, ...]:
    """Read a message; returns its addresses that can be dialled. Raises `MalformedMessage`."""
    message = HolePunch()
    message.ParseFromString(await read_varint_prefixed_bytes_limited(stream, MAX_MESSAGE_SIZE))
    if message.type != kind:
        raise MalformedMessage("a message of the hole punch is out of order")
    found = [address for raw in message.ObsAddrs[: 2 * MAX_AIMS] if (address := _text(raw))]
    return tuple(dict.fromkeys(found))[:MAX_AIMS]


def _text(raw: bytes) -> Address:
    try:
        address = str(Multiaddr(raw))
    except (ValueError, LookupError):  # multiaddr's errors for bytes of no and of unknown protocols.
        return ""
    return address if valid_address(address) and rung_of(address) is not Rung.RELAYED else ""
