"""The frames of a stranger, read by the loop that reads real ones, under virtual time."""

import struct
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.peer.libp2p import fast_pipe
from flockstep.peer.libp2p.fast_pipe import next_header
from flockstep.peer.quota.origins import Origin, Rates
from flockstep.peer.strangers import frames
from flockstep.peer.strangers.frames import (
    FRAMES_BURST_SECONDS,
    FRAMES_PER_SECOND,
    TURN,
    WINDOWS_OF_ONE,
    FrameMeter,
    own_budget,
    window_room,
)
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    HEADER_SIZE,
    MAX_WINDOW_SIZE,
    TYPE_DATA,
    YAMUX_HEADER_FORMAT,
)

UNKNOWN_KIND = struct.pack(YAMUX_HEADER_FORMAT, 0, 7, 0, 0, 0)
STREAM = 5
HERE, THERE = Origin("192.0.2.1", "192.0.2.0/24", exempt=False), Origin("192.0.2.2", "192.0.2.0/24", exempt=False)


def session_of(messages: list[bytes], meter: FrameMeter) -> Any:
    """A secured connection on which these messages arrive, and Yamux with one open stream."""
    arriving = deque(messages)
    stream, event = SimpleNamespace(recv_window=1 << 40), trio.Event()
    muxer = SimpleNamespace(streams={STREAM: stream}, stream_buffers={STREAM: bytearray()}, stream_events={STREAM: event})

    async def read_msg() -> bytes:
        return arriving.popleft()

    session = SimpleNamespace(muxer=muxer, meter=meter, conn=SimpleNamespace(read_msg=read_msg))
    session.read = partial(fast_pipe.read, session)
    return session


async def seconds_for(session: Any, num_frames: int) -> float:
    began = trio.current_time()
    for _ in range(num_frames):
        assert await next_header(session, HEADER_SIZE) == UNKNOWN_KIND
    return trio.current_time() - began


def test_others_have_a_turn_between_frames_of_one_packet() -> None:
    async def main() -> None:
        turns = 0
        async with trio.open_nursery() as nursery:

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(count)
            number = 100 * TURN
            await seconds_for(session_of([number * UNKNOWN_KIND], FrameMeter("peer", lambda peer, frames: 0.0)), number)
            nursery.cancel_scope.cancel()
        assert turns >= 99

    trio.run(main)


def test_frames_that_no_bytes_pay_for_come_at_a_rate() -> None:
    async def main() -> None:
        burst = int(FRAMES_PER_SECOND * FRAMES_BURST_SECONDS)
        session = session_of([2 * burst * UNKNOWN_KIND], FrameMeter("peer", own_budget()))
        assert await seconds_for(session, burst) < 0.1
        assert await seconds_for(session, burst) == pytest.approx(FRAMES_BURST_SECONDS, rel=0.02)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_bytes_pay_for_their_frames() -> None:
    async def main() -> None:
        number = int(2 * FRAMES_PER_SECOND * FRAMES_BURST_SECONDS)
        bulk = struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, STREAM, 1024) + bytes(1024)
        session = session_of([*(number // 64) * [64 * bulk], UNKNOWN_KIND], FrameMeter("peer", own_budget()))
        assert await seconds_for(session, 1) == 0
        assert len(session.muxer.stream_buffers[STREAM]) == number * 1024

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_connections_of_one_address_share_a_budget() -> None:
    rates = Rates(10.0, 2.0)
    assert rates.spend(HERE, 0.0, 15) == 0
    assert rates.spend(HERE, 0.0, 15) == 1
    assert rates.spend(THERE, 0.0, 15) == 0
    assert rates.spend(HERE, 100.0, 20) == 0


class Stream:
    """A stream of a connection whose window grows as far as it may."""

    def __init__(self, conn: Any) -> None:
        self.conn, self.closed, self.target_recv_window = conn, False, DEFAULT_WINDOW_SIZE
        conn.streams[len(conn.streams)] = self

    def grow(self) -> int:
        for _ in range(20):
            self.target_recv_window += window_room(self)
        return self.target_recv_window


def connection(inside_of: Any = None) -> Any:
    """What of a connection tells in which other one it runs."""
    stream = SimpleNamespace(muxed_conn=inside_of) if inside_of else SimpleNamespace()
    below = SimpleNamespace(read_writer=SimpleNamespace(read_write_closer=SimpleNamespace(stream=stream)))
    return SimpleNamespace(streams={}, secured_conn=SimpleNamespace(conn=below))


def test_circuits_in_one_connection_have_together_the_windows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_grown", type(frames._grown)())
    outer = connection()
    inside = [Stream(connection(outer)) for _ in range(9)]
    assert sum(stream.grow() - DEFAULT_WINDOW_SIZE for stream in inside) == WINDOWS_OF_ONE
    assert Stream(connection(connection())).grow() == Stream(outer).grow() == MAX_WINDOW_SIZE


def test_windows_grow_within_the_limits_of_one_connection_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "WINDOWS_IN_ALL", WINDOWS_OF_ONE + (4 << 20))
    monkeypatch.setattr(frames, "_grown", type(frames._grown)())
    one, other = connection(), connection()
    first = Stream(one)
    assert first.grow() == MAX_WINDOW_SIZE
    others = [Stream(one) for _ in range(9)]
    assert sum(stream.grow() - DEFAULT_WINDOW_SIZE for stream in (first, *others)) == WINDOWS_OF_ONE
    more = Stream(other)
    assert more.grow() == DEFAULT_WINDOW_SIZE + (4 << 20)
    first.closed = True
    assert more.grow() == MAX_WINDOW_SIZE
