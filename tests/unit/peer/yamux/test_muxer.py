"""The driver of Yamux: two ends in one process, and the one task that writes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from flockstep.peer.identity import Identity
from flockstep.peer.strangers.frames import FIRST_WINDOW, UnreadBudget
from flockstep.peer.yamux import muxer
from flockstep.peer.yamux.machine import GO_AWAY, HEADER, PROTOCOL_ERROR
from flockstep.peer.yamux.muxer import FIRST_BATCH_BYTES, GOODBYE_TIMEOUT, FrameWriter, Yamux, YamuxStream, next_batch
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from support.secured import Secured, joined
from trio.testing import MockClock, wait_all_tasks_blocked

PEER = ID.from_base58(Identity.from_seed(bytes(32)).peer_id)


def yamux(secured: Secured) -> Yamux:
    return Yamux(secured, PEER)


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


run_test = run


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[Yamux, Yamux]]:
    """Both ends of a connection, which closes at the end."""
    one, other = map(yamux, joined())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        await one.event_started.wait()
        await other.event_started.wait()
        yield one, other
        await one.close()
        await other.event_closed.wait()


async def test_bytes_come_back_and_each_end_learns_that_the_other_has_finished() -> None:
    async with ends() as (one, other):
        stream = await one.open_stream()
        theirs = await other.accept_stream()
        assert (stream.number, theirs.number, one.is_initiator, other.is_initiator) == (1, 1, True, False)
        await stream.write(b"there")
        assert await theirs.read(3) == b"the"
        assert await theirs.read() == b"re"
        await theirs.write(b"back")
        await theirs.close()
        assert await stream.read() == b"back"
        with pytest.raises(MuxedStreamEOF):
            await stream.read()
        with pytest.raises(MuxedStreamError):
            await theirs.write(b"more")
        await stream.close()
        await wait_all_tasks_blocked()
        assert (one.machine.streams, other.machine.streams) == ({}, {})


async def test_a_sender_waits_for_its_window_for_as_long_as_it_takes_and_wakes_as_soon_as_it_opens() -> None:
    async with ends() as (one, other), trio.open_nursery() as nursery:
        stream = await one.open_stream()
        theirs = await other.accept_stream()
        data = bytes(range(256)) * 4096
        nursery.start_soon(stream.write, data)
        await trio.sleep(3600)
        assert other.machine.unread_bytes == FIRST_WINDOW
        received, began = b"", trio.current_time()
        while len(received) < len(data):
            received += await theirs.read(100_000)
        assert received == data
        assert trio.current_time() == began


async def test_a_message_waits_for_one_batch_of_bulk_bytes_and_not_for_all_of_them() -> None:
    async with ends() as (one, other), trio.open_nursery() as nursery:
        bulk, control = [await one.open_stream() for _ in range(2)]
        theirs = await other.accept_stream()
        line = one.secured_conn
        assert isinstance(line, Secured)
        line.seconds, one.writer.batch_bytes = 1.0, muxer.LEAST_BATCH_BYTES
        line.wrote.clear()
        nursery.start_soon(bulk.write, bytes(FIRST_WINDOW))
        await wait_all_tasks_blocked()
        await control.write(b"message")
        before, _, _ = b"".join(line.wrote).partition(b"message")
        assert muxer.LEAST_BATCH_BYTES <= len(before) < 2.1 * muxer.LEAST_BATCH_BYTES < FIRST_WINDOW
        await trio.sleep(10)
        assert len(theirs.unread) == FIRST_WINDOW


async def test_a_reset_wakes_whoever_reads_or_writes_at_either_end() -> None:
    async with ends() as (one, other), trio.open_nursery() as nursery:
        (read, written) = [await one.open_stream() for _ in range(2)]
        (theirs_read, theirs_written) = [await other.accept_stream() for _ in range(2)]
        woken: list[str] = []

        async def expect(name: str, act: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(MuxedStreamReset):
                await act()
            woken.append(name)

        too_much = bytes(2 * FIRST_WINDOW)
        nursery.start_soon(expect, "my reader", read.read)
        nursery.start_soon(expect, "my writer", lambda: written.write(too_much))
        nursery.start_soon(expect, "their reader", theirs_read.read)
        nursery.start_soon(expect, "their writer", lambda: theirs_written.write(too_much))
        await wait_all_tasks_blocked()
        assert woken == []
        await read.reset()
        await written.reset()
        await wait_all_tasks_blocked()
        assert sorted(woken) == ["my reader", "my writer", "their reader", "their writer"]


async def test_the_end_of_a_connection_ends_all_that_waits_and_tells_why() -> None:
    async with ends() as (one, other):
        stream = await one.open_stream()
        theirs = await other.accept_stream()
        await theirs.write(b"last words")
        await wait_all_tasks_blocked()
        await other.close()
        await one.event_closed.wait()
        assert await stream.read() == b"last words"
        with pytest.raises(MuxedStreamReset, match="the remote has closed the connection"):
            await stream.read()
        with pytest.raises(MuxedStreamError):
            await stream.write(b"anybody?")
        with pytest.raises(ConnectionClosedError):
            await one.open_stream()
        with pytest.raises(ConnectionClosedError):
            await one.ping()
        with pytest.raises(MuxedConnUnavailable):
            await one.accept_stream()
        assert (one.is_established, one.is_closed) == (False, True)


async def test_a_frame_that_breaks_the_protocol_is_answered_with_a_goodbye() -> None:
    secured = Secured()
    end, closed = yamux(secured), trio.Event()

    async def on_close() -> None:
        closed.set()

    end.on_close = on_close
    secured.arriving.send_nowait(bytes((9,)) * HEADER.size)
    await end.start()
    assert secured.wrote == [HEADER.pack(0, GO_AWAY, 0, 0, PROTOCOL_ERROR)]
    assert secured.closed
    assert closed.is_set()
    assert end.machine.violation == "a frame of version 9 and kind 9"


async def test_beyond_a_limit_in_all_the_connection_with_most_unread_bytes_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(muxer, "ALL_UNREAD", UnreadBudget(FIRST_WINDOW + 100_000))
    monkeypatch.setattr("flockstep.peer.strangers.frames.LOOK_BYTES", 1000)

    async with ends() as (one, other), ends() as (another, _), trio.open_nursery() as nursery:
        little = await another.open_stream()
        await little.write(bytes(50_000))
        streams = [await one.open_stream() for _ in range(2)]
        theirs = [await other.accept_stream() for _ in streams]
        for stream in streams:
            nursery.start_soon(_fill, stream)
        await other.event_closed.wait()
        assert (other.gave_way, other.unread_bytes) == (True, 0)
        for stream in theirs:
            with pytest.raises(MuxedStreamReset, match="too many bytes are unread"):
                await stream.read()
        await little.write(b"still here")


async def test_a_connection_that_gives_way_does_not_wait_for_its_remote() -> None:
    end = yamux(Secured())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.start)
        await end.event_started.wait()
        end.give_way()
        with pytest.raises(ConnectionClosedError):
            await end.open_stream()
        with trio.fail_after(10):
            await end.event_closed.wait()


async def _fill(stream: YamuxStream) -> None:
    with pytest.raises(MuxedStreamError):
        await stream.write(bytes(2 * FIRST_WINDOW))


async def test_a_goodbye_does_not_wait_long_for_a_socket_that_takes_nothing() -> None:
    class Full(Secured):
        async def write(self, data: bytes) -> None:
            await trio.sleep_forever()

    end = yamux(Full())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.start)
        await end.event_started.wait()
        began = trio.current_time()
        await end.close()
        assert trio.current_time() == began + GOODBYE_TIMEOUT


async def test_a_cipher_that_fails_ends_its_connection_only() -> None:
    class Failing(Secured):
        async def read(self) -> bytes:
            raise ZeroDivisionError("not what the other side sealed")

    end = yamux(Failing())
    await end.start()
    assert (end.is_closed, end.machine.end) == (True, "not what the other side sealed")


async def test_a_remote_that_asks_and_reads_no_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muxer, "MAX_PIECES_WAITING", 100)

    class Full(Secured):
        async def write(self, data: bytes) -> None:
            await trio.sleep_forever()

    secured = Full()
    secured.arriving.send_nowait(200 * HEADER.pack(0, 2, 1, 0, 0))
    end = yamux(secured)
    await end.start()
    assert end.machine.violation == "it asks and does not read the answers"


async def test_frames_that_wait_go_to_the_socket_together_and_in_order() -> None:
    secured = Secured()
    writer = FrameWriter(secured)
    events = [writer.post([b"first", b"second"]), writer.post([b"third"])]
    assert writer.num_waiting == 3
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for event in events:
            await event.wait()
        assert (secured.wrote, writer.num_waiting) == ([b"firstsecondthird"], 0)
        await writer.post([b"alone"]).wait()
        await writer.post([]).wait()
        assert secured.wrote[1:] == [b"alone"]
        nursery.cancel_scope.cancel()
    assert writer.ended
    assert writer.post([b"late"]).is_set()


async def test_a_broken_socket_ends_the_session_and_leaves_nobody_waiting() -> None:
    secured = Secured()
    secured.broken = True
    writer = FrameWriter(secured)
    events = [writer.post([bytes(FIRST_BATCH_BYTES)]), writer.post([b"never tried"])]
    await writer.run()
    assert secured.closed
    assert writer.ended
    assert all(event.is_set() for event in events)


def test_a_batch_follows_the_line_within_its_limits() -> None:
    batch = FIRST_BATCH_BYTES
    assert next_batch(batch, batch - 1, 0.0) == batch  # Nothing was to be learned from so few.
    assert next_batch(batch, batch, 0.03) == batch
    for _ in range(9):
        batch = next_batch(batch, batch, 0.02)
    assert batch == muxer.MOST_BATCH_BYTES
    for _ in range(9):
        batch = next_batch(batch, 1, 0.06)
    assert batch == muxer.LEAST_BATCH_BYTES


async def test_the_writer_measures_its_line() -> None:
    line = Secured()
    writer = FrameWriter(line)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        await writer.post([bytes(writer.batch_bytes)]).wait()
        assert writer.batch_bytes == 2 * FIRST_BATCH_BYTES
        line.seconds = 1.0
        await writer.post([b"little"]).wait()
        assert writer.batch_bytes == FIRST_BATCH_BYTES
        nursery.cancel_scope.cancel()
