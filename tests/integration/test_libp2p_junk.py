"""Malformed bytes to the handlers of relays and hole punches: each ends only its stream."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.packets import PACKETS
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.dcutr import PROTOCOL_ID as DCUTR
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr
from support.loopback import LOOPBACK

SOMEBODY = Identity.from_seed(bytes(32)).peer_id
LIE = b"\xff" * 12
"""A length that has no end."""
STORMS = 4
"""Each is a dozen streams at once: the relay takes half a second to give one up."""

ids = st.none() | st.binary(max_size=64) | st.just(ID.from_base58(SOMEBODY).to_bytes())
addresses = st.lists(st.binary(max_size=64) | st.just(Multiaddr("/ip4/8.8.8.8/tcp/4001").to_bytes()), max_size=20)


def circuit(kind: Any, *, reserve: int) -> st.SearchStrategy[bytes]:
    """Messages of the relay's protocols that fit together or not."""

    def make(number: int, peer: bytes | None, status: int | None) -> bytes:
        message = kind(type=number, status=status, peer=None if peer is None else PeerId(id=peer))
        return bytes(encode_varint_prefixed(message.SerializeToString()))

    statuses = st.none() | st.sampled_from([100, 200, 400])
    return st.builds(make, st.sampled_from([0, 1, reserve]), ids, statuses)


def punch(kind: Any, found: list[bytes]) -> bytes:
    return bytes(encode_varint_prefixed(HolePunch(type=kind, ObsAddrs=found).SerializeToString()))


MESSAGES = {
    HOP: circuit(HopMessage, reserve=2),
    STOP: circuit(StopMessage, reserve=1),
    DCUTR: st.builds(punch, st.sampled_from([100, 300]), addresses),
}


def streams(protocol: Any) -> st.SearchStrategy[bytes]:
    """What comes on one stream: sense, half of it, lengths that nobody should believe, noise."""
    whole = st.lists(MESSAGES[protocol], min_size=1, max_size=3).map(b"".join)
    cut = st.builds(lambda data, end: data[: end % (len(data) + 1)], whole, st.integers(0, 500))
    lies = st.builds(lambda size, data: size + data, st.sampled_from([b"\xff" * 9 + b"\x01", LIE]), whole)
    noise = st.binary(max_size=300)
    return st.one_of(cut, lies, noise, noise.map(lambda data: bytes(encode_varint_prefixed(data))), whole)


async def throw(thrower: Libp2pHost, target: Libp2pHost, protocol: str, junk: bytes) -> None:
    """Send it on a stream of its own, and stay until the other side has ended that."""
    stream = await thrower.open_stream(target.peer_id, protocol)
    try:
        await stream.send_all(junk)
        await stream._raw.close()  # type: ignore[attr-defined]  # Its writing half: there is no more to come.
        while await stream.receive_some(1 << 16):
            pass
    except StreamClosed:
        pass


theft = bytes(
    encode_varint_prefixed(
        HopMessage(type=HopMessage.RESERVE, peer=PeerId(id=ID.from_base58(SOMEBODY).to_bytes())).SerializeToString()
    )
)


def storm(protocol: Any, check: Callable[[Libp2pHost, Libp2pHost, list[Event]], Awaitable[None]]) -> None:
    """Many streams of junk between two hosts, then `check(thrower, target, events of the target)`."""

    async def main() -> None:
        telemetry, limits = Telemetry(), BootstrapLimits() if protocol == HOP else None
        events: list[Event] = []
        telemetry.subscribe(events.append)
        with trio.fail_after(120):  # A safety net against a hang.
            async with (
                open_host(Identity.generate(), LOOPBACK, telemetry, bootstrap=limits) as target,
                open_host(Identity.generate(), LOOPBACK, Telemetry()) as thrower,
            ):
                await thrower.connect(target.peer_id, target.addresses())
                (connection,) = target._connections(thrower.peer_id)

                async def throw_all(pieces: list[bytes]) -> None:
                    events.clear()
                    async with trio.open_nursery() as nursery:
                        for piece in pieces:
                            nursery.start_soon(throw, thrower, target, str(protocol), piece)
                    while connection.get_streams():  # noqa: ASYNC110  The library tells of the end before it.
                        await trio.sleep(0.01)
                    assert target.peer_id in thrower.connected()
                    broken = ("host.died", "task.broken", "handler.failed", "stream.lost")
                    assert not [event for event in events if event["event"] in broken]
                    await check(thrower, target, events)

                # Not shrunk: over sockets that takes minutes.
                @settings(max_examples=STORMS, deadline=None, phases=[Phase.generate])
                @given(st.lists(streams(protocol), min_size=12, max_size=12))
                def storms(pieces: list[bytes]) -> None:
                    trio.from_thread.run(throw_all, [*pieces, LIE, theft])

                await trio.to_thread.run_sync(storms)

    trio.run(main)


def test_a_relay_serves_on_and_reserves_for_nobody_but_who_asks() -> None:
    async def check(thrower: Libp2pHost, target: Libp2pHost, events: list[Event]) -> None:
        relays: Any = thrower.bootstraps._relays
        assert await relays.reserve(target.peer_id) > 0
        assert target.bootstrap_server is not None
        assert set(target.bootstrap_server.relay._places) == {thrower.peer_id}

    storm(HOP, check)


@pytest.mark.parametrize(("protocol", "event"), [(STOP, "relay.not_accepted"), (DCUTR, "dial.failed")])
def test_whoever_is_called_by_mistake_says_so_and_goes_on(protocol: Any, event: str) -> None:
    async def check(thrower: Libp2pHost, target: Libp2pHost, events: list[Event]) -> None:
        assert all(told["reason"] for told in events if told["event"] == event)
        assert {told["event"] for told in events} == {event}

    storm(protocol, check)


@pytest.mark.parametrize("message", [b"abc", bytes(200), b""])
def test_whoever_answers_a_punch_with_no_handshake_ends_the_dial_alone(message: bytes) -> None:
    """Of two that dial each other at once one takes the accepting side: there the other chooses the first bytes."""

    def line(text: str) -> bytes:
        return bytes([len(text) + 1]) + text.encode() + b"\n"

    async def pretend(stream: trio.SocketStream) -> None:
        await stream.send_all(line("/multistream/1.0.0") + line(PACKETS) + len(message).to_bytes(2, "big") + message)
        async for _ in stream:
            pass

    async def main() -> None:
        async with trio.open_nursery() as nursery, open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
            listeners = await nursery.start(trio.serve_tcp, pretend, 0)
            address = f"/ip4/127.0.0.1/tcp/{listeners[0].socket.getsockname()[1]}"
            assert await host._puncher._dials.accepting(SOMEBODY, address)
            nursery.cancel_scope.cancel()

    trio.run(main)
