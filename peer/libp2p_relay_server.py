"""Relaying for others: Circuit Relay v2's serving side, within stated limits.

The library serves the protocol; what is passed on is passed on here. Its own loop gives up a reader that pauses for more
than 15 s, reads as much as has arrived at a time (16 MB of memory for each direction of each circuit), knows no limit of
bytes per second, and keeps circuits by peer, so that the end of one ends another to the same peer
(`relay/circuit_v2/protocol.py:672,722,929`).
"""

from typing import Any

import trio
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits

from .libp2p_stream import ROAD_ERRORS

LIMITS = RelayLimits(duration=0, data=1 << 50, max_circuit_conns=64, max_reservations=512)
"""No time limit; in bytes 0 would not mean unlimited but end every circuit. The library's default is 4 reservations."""

PIECE = 1 << 17
"""Bytes passed on at a time: two frames."""


class _Forgetful(dict[Any, Any]):
    """A mapping that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget it."""


class RelayServer(CircuitV2Protocol):
    """The library's relay with a way to pass bytes on of our own."""

    def __init__(self, host: Any) -> None:
        super().__init__(host, LIMITS, allow_hop=True)
        self._active_relays = _Forgetful()

    async def _handle_hop_stream(self, stream: Any) -> None:
        """One stream of questions; the library leaves it open where it has understood nothing."""
        try:
            await super()._handle_hop_stream(stream)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await stream.reset()

    async def _handle_reserve(self, stream: Any, msg: Any) -> None:
        """For who asks: the library also reserves for whomever a stranger names, so that one could take all places."""
        msg.ClearField("peer")
        await super()._handle_reserve(stream, msg)

    async def _relay_data(self, source: Any, target: Any, *_: Any) -> None:
        """One direction of a circuit, until it ends; then both are over."""
        try:
            while data := await source.read(PIECE):
                await target.write(data)
        except ROAD_ERRORS:
            return
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await source.reset()
                await target.reset()
