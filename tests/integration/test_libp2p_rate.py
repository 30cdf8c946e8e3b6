"""The speed test against a bootstrap, over loopback sockets, and malformed answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from flockstep.peer.base.errors import MalformedMessage, NetworkError, StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat import speed
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.schema import decode, encode
from hypothesis import given
from hypothesis import strategies as st
from support.loopback import LOOPBACK


@asynccontextmanager
async def pair(events: list[Event] | None = None) -> AsyncIterator[tuple[Libp2pHost, Libp2pHost]]:
    """A bootstrap and a peer that is connected to it."""
    telemetry = Telemetry()
    telemetry.subscribe((events if events is not None else []).append)
    with trio.fail_after(120):  # A safety net against a hang.
        async with (
            open_host(Identity.generate(), LOOPBACK, telemetry, bootstrap=BootstrapLimits()) as server,
            open_host(Identity.generate(), LOOPBACK, Telemetry()) as client,
        ):
            await client.connect(server.peer_id, server.addresses())
            yield server, client


async def test_both_ways_are_measured_on_one_stream() -> None:
    async with pair() as (server, client):
        stream = await client.open_stream(server.peer_id, speed.SPEED_PROTOCOL)
        before = client.traffic()
        for up in (True, False):
            assert await speed.measure_speed(stream, up=up) > 0
        traffic = client.traffic()
        for moved in (traffic.sent - before.sent, traffic.received - before.received):
            assert speed.FIRST_PIECE < moved < 2 * speed.MAX_PIECE


async def test_an_address_that_has_had_its_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ALLOWANCE_BYTES", speed.FIRST_PIECE)

    async with pair() as (server, client):
        stream = await client.open_stream(server.peer_id, speed.SPEED_PROTOCOL)
        with pytest.raises(NetworkError, match="rate limits measurements"):
            await speed.measure_speed(stream, up=False)


async def test_a_short_piece_takes_as_much_of_the_allowance_as_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ALLOWANCE_BYTES", 3 * speed.LEAST_COST)

    async with pair() as (server, client):
        stream = await client.open_stream(server.peer_id, speed.SPEED_PROTOCOL)
        await stream.send_all(frame(encode(speed.Piece(False, 1))) * 9)
        answers = b""
        with suppress(StreamClosed):
            while data := await stream.receive_some(1 << 16):
                answers += data
        granted = frame(encode(speed.PieceAnswer(True))) + b"\0"
        assert answers == granted * 3 + frame(encode(speed.PieceAnswer(False)))


@pytest.mark.parametrize(
    "junk", [b"\xff" * 2000, frame(b"hello"), frame(b""), frame(b"\x92\xc3\xce\x7f\xff\xff\xff"), frame(b"\x92\xc3\x00")]
)
async def test_what_is_no_question_is_charged(junk: bytes) -> None:
    events: list[Event] = []
    async with pair(events) as (server, client):
        stream = await client.open_stream(server.peer_id, speed.SPEED_PROTOCOL)
        await stream.send_all(junk)
        with pytest.raises(StreamClosed):
            await stream.receive_some(1)
        assert [event["peer"] for event in events if event["event"] == "peer.charged"] == [client.peer_id]


async def test_a_bootstrap_that_breaks_off_or_talks_nonsense_is_told() -> None:
    async with pair() as (server, client):

        async def leave(stream: Stream) -> None:
            await stream.receive_some(64)
            await stream.send_all(frame(encode(speed.PieceAnswer(True))))

        async def rave(stream: Stream) -> None:
            await stream.send_all(b"\xff" * 100)
            await trio.sleep_forever()

        for serve, error in ((leave, StreamClosed), (rave, MalformedMessage)):
            server.handle(speed.SPEED_PROTOCOL, serve)
            stream = await client.open_stream(server.peer_id, speed.SPEED_PROTOCOL)
            with pytest.raises(error):
                await speed.measure_speed(stream, up=False)


@given(st.binary(max_size=80))
def test_no_bytes_make_another_error_than_malformed(data: bytes) -> None:
    for kind in (speed.Piece, speed.PieceAnswer):
        try:
            assert encode(decode(kind, data, max_bytes=speed.MAX_SPEED_MESSAGE_BYTES)) == data
        except MalformedMessage:
            continue
