"""The fast path between a socket and Yamux: the same frames for any fragmentation."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from flockstep.peer.digest import RunningDigest, digest
from flockstep.peer.libp2p import fast_pipe
from flockstep.peer.libp2p.fast_pipe import FrameWriter, Unread, next_batch, next_header, read, read_message
from flockstep.peer.libp2p.fixes import apply_fixes
from flockstep.peer.libp2p.packets import MAX_PACKET_BYTES
from flockstep.peer.strangers.frames import FrameMeter, own_budget
from flockstep.peer.telemetry import Telemetry
from hypothesis import given
from hypothesis import strategies as st
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.stream_muxer.yamux.yamux import YamuxStream
from trio.testing import MockClock

DATA, UPDATE, SYN = 0, 1, 1
WINDOW = 100


class Socket:
    """Gives `incoming` in pieces, then the end; keeps every write."""

    def __init__(self, incoming: bytes = b"", piece: int = 1 << 20, *, broken: bool = False) -> None:
        self._pieces = [incoming[start : start + piece] for start in range(0, len(incoming), piece)]
        self._broken = broken
        self.writes: list[bytes] = []

    @property
    def read_write_closer(self) -> "Socket":
        return self

    async def read(self, n: int) -> bytes:
        assert n == fast_pipe.SOCKET_BYTES
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, data: bytes) -> None:
        if self._broken:
            raise OSError("the cable is cut")
        self.writes.append(data)


class Channel:
    """In the place of the library's Noise channel; its cipher turns bytes round."""

    prefix = b""

    def __init__(self, socket: Socket) -> None:
        self.read_writer = socket

    def encrypt(self, data: bytes) -> bytes:
        return data[::-1]

    decrypt = encrypt

    async def read_msg(self) -> bytes:
        return await read_message(self)


class Session:
    def __init__(self, socket: Socket) -> None:
        self.conn = Channel(socket)
        self.closed = False

    async def read(self, n: int | None = None) -> bytes:
        return await read(self, n)

    async def close(self) -> None:
        self.closed = True


class Stream:
    recv_window = WINDOW


class Muxer:
    """What of Yamux the reading loop uses."""

    def __init__(self, session: Session, streams: Sequence[int]) -> None:
        self.secured_conn = session
        self.streams: dict[int, Stream] = {}
        self.stream_buffers: dict[int, bytearray] = {}
        self.stream_events: dict[int, trio.Event] = {}
        for number in streams:
            self.open(number)
        session.__dict__.update(muxer=self, meter=FrameMeter("peer", own_budget()))

    def open(self, number: int) -> None:
        self.streams[number], self.stream_buffers[number] = Stream(), bytearray()
        self.stream_events[number] = trio.Event()


def message(plain: bytes) -> bytes:
    return len(plain).to_bytes(2, "big") + plain[::-1]


def header(kind: int, flags: int, stream: int, length: int) -> bytes:
    return struct.pack(">BBHII", 0, kind, flags, stream, length)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_messages_arrive_whole_however_they_were_cut(piece: int) -> None:
    session: Any = Session(Socket(message(b"one") + message(b"") + message(b"three"), piece))

    async def main() -> None:
        assert [await session.conn.read_msg() for _ in range(3)] == [b"one", b"", b"three"]
        with pytest.raises(IncompleteReadError) as raised:
            await session.conn.read_msg()
        assert raised.value.is_clean_close

    trio.run(main)


def test_an_end_in_the_middle_of_a_message_is_not_a_clean_one() -> None:
    async def main() -> None:
        with pytest.raises(IncompleteReadError) as raised:
            await Session(Socket(message(b"whole")[:-1])).conn.read_msg()
        assert not raised.value.is_clean_close

    trio.run(main)


def test_reads_are_exact_over_messages_and_keep_what_is_left() -> None:
    async def main() -> None:
        session = Session(Socket(message(b"abcd") + message(b"efgh") + message(b"ij") + message(b"")))
        assert await session.read(6) == b"abcdef"
        assert await session.read(0) == b""
        assert await session.read() == b"gh"
        assert await session.read(5) == b"ij"  # The end: what there is.
        with pytest.raises(IncompleteReadError):
            await session.read(1)
        with pytest.raises(ConnectionClosedError):
            await Session(Socket(message(b""))).read(1)

    trio.run(main)


@pytest.mark.parametrize("size", [1, 5, 13, 64])
def test_plain_data_goes_to_its_stream_and_all_other_frames_to_the_library(size: int) -> None:
    others = [
        header(UPDATE, 0, 1, 12),
        header(DATA, SYN, 3, 0),
        header(DATA, 0, 9, 4),  # No such stream.
        header(DATA, 0, 1, WINDOW),  # More than its window, of which 30 are taken.
    ]
    frames = [header(DATA, 0, 1, 12) + b"x" * 12, others[0], header(DATA, 0, 1, 18) + b"y" * 18, *others[1:]]
    stream = b"".join(frames)
    wire = b"".join(message(stream[start : start + size]) for start in range(0, len(stream), size))

    async def main() -> None:
        session = Session(Socket(wire))
        muxer: Any = Muxer(session, [1])
        assert await next_header(session, 12) == others[0]
        assert muxer.streams[1].recv_window == WINDOW - 12
        assert muxer.stream_buffers[1].take(WINDOW) == b"x" * 12
        assert muxer.stream_events[1].is_set()
        assert [await next_header(session, 12) for _ in others[1:]] == others[1:]
        assert muxer.stream_buffers[1].take(WINDOW) == b"y" * 18

    trio.run(main)


@pytest.mark.parametrize("flags", [0, SYN])
@pytest.mark.parametrize("stream", [1, 9])
def test_a_data_frame_above_the_limit_ends_the_connection_before_its_body_is_read(stream: int, flags: int) -> None:
    async def main() -> None:
        at_most, above = (header(DATA, flags, stream, MAX_PACKET_BYTES + more) for more in (0, 1))
        session = Session(Socket(message(at_most) + message(above)))
        Muxer(session, [1])
        assert await next_header(session, 12) == at_most
        with pytest.raises(ConnectionClosedError, match=f"{MAX_PACKET_BYTES + 1} bytes"):
            await next_header(session, 12)

    trio.run(main)


@pytest.mark.parametrize("opened_again", [False, True])
def test_a_body_whose_stream_was_reset_meanwhile_goes_to_no_stream(opened_again: bool) -> None:
    class Resetting(Socket):
        async def read(self, n: int) -> bytes:
            if len(self._pieces) == 1:  # The frame's header and half of its body were taken.
                for of_stream in (muxer.streams, muxer.stream_buffers, muxer.stream_events):
                    del of_stream[1]
                if opened_again:
                    muxer.open(1)
            return await super().read(n)

    after = header(UPDATE, 0, 1, 12)
    wire = message(header(DATA, 0, 1, 12) + b"x" * 6) + message(b"x" * 6 + after)
    session = Session(Resetting(wire, 2 + 12 + 6))
    muxer: Any = Muxer(session, [1])

    async def main() -> None:
        assert await next_header(session, 12) == after
        assert [len(buffer) for buffer in muxer.stream_buffers.values()] == [0] * opened_again
        assert [stream.recv_window for stream in muxer.streams.values()] == [WINDOW] * opened_again

    trio.run(main)


def test_before_there_is_a_muxer_nothing_is_taken_for_a_frame() -> None:
    async def main() -> None:
        plain = header(DATA, 0, 1, 0)
        assert await next_header(Session(Socket(message(plain))), 12) == plain

    trio.run(main)


def test_frames_that_wait_go_to_the_socket_together_and_in_order() -> None:
    async def main() -> None:
        socket = Socket()
        writer = FrameWriter(Session(socket))
        events = [writer.post([b"first", b"second"]), writer.post([b"third"])]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            for event in events:
                await event.wait()
            assert socket.writes == [message(b"firstsecondthird")]
            await writer.post([b"alone"]).wait()
            assert socket.writes[1:] == [message(b"alone")]
            nursery.cancel_scope.cancel()
        assert writer.ended

    trio.run(main)


@given(st.lists(st.binary(max_size=9) | st.integers(0, 3 * fast_pipe.JOINED_BYTES).map(bytes) | st.integers(-1, 9000)))
def test_unread_bytes_come_in_order_whole_and_at_most_as_many_as_asked(steps: list[bytes | int]) -> None:
    model = bytearray(b"first")
    unread = Unread(model)
    for step in steps:
        if isinstance(step, bytes):
            unread.extend(step)
            model += step
        else:
            taken = unread.take(step)
            assert len(taken) <= max(step, 0)
            assert bool(taken) == (step > 0 and len(model) > 0)
            assert taken == model[: len(taken)]
            del model[: len(taken)]
        assert len(unread) == len(model)


def test_single_bytes_are_joined_and_a_large_piece_is_not_copied() -> None:
    unread, large = Unread(), bytes(fast_pipe.JOINED_BYTES)
    for _ in range(fast_pipe.JOINED_BYTES):
        unread.extend(b"x")
    unread.extend(large)
    assert unread.take(10**6) == b"x" * fast_pipe.JOINED_BYTES
    assert unread.take(10**6) is large


def test_a_batch_follows_the_line_within_its_limits() -> None:
    batch = fast_pipe.FIRST_BATCH_BYTES
    assert next_batch(batch, batch - 1, 0.0) == batch  # Nothing was to be learned from so few.
    assert next_batch(batch, batch, 0.03) == batch
    for _ in range(9):
        batch = next_batch(batch, batch, 0.02)
    assert batch == fast_pipe.MOST_BATCH_BYTES
    for _ in range(9):
        batch = next_batch(batch, 1, 0.06)
    assert batch == fast_pipe.LEAST_BATCH_BYTES


def test_the_writer_measures_its_line() -> None:
    class Line(Socket):
        seconds = 0.0

        async def write(self, data: bytes) -> None:
            await trio.sleep(self.seconds)

    async def main() -> None:
        line = Line()
        writer = FrameWriter(Session(line))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await writer.post([bytes(writer.batch_bytes)]).wait()
            assert writer.batch_bytes == 2 * fast_pipe.FIRST_BATCH_BYTES
            line.seconds = 1.0
            await writer.post([b"little"]).wait()
            assert writer.batch_bytes == fast_pipe.FIRST_BATCH_BYTES
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_sender_wakes_as_soon_as_its_window_opens() -> None:
    async def main() -> None:
        apply_fixes(Telemetry())
        stream: Any = object.__new__(YamuxStream)
        stream.send_window = 0
        stream.window_opened = opened = trio.Event()
        stream.send_window += 0
        assert not opened.is_set()
        stream.send_window += 5
        assert (stream.send_window, opened.is_set()) == (5, True)

    trio.run(main)


def test_a_buffer_may_change_once_its_frame_waits() -> None:
    class Connection:
        def __init__(self) -> None:
            self.secured_conn = Session(Socket())
            self.writer = FrameWriter(self.secured_conn)
            self.frames: list[Any] = []

        async def _write_frames(self, frames: Sequence[Any]) -> None:
            self.frames += frames

    class Sender:
        send_closed = closed = False
        send_window, stream_id = 1000, 1
        conn = Connection()

    async def main() -> None:
        apply_fixes(Telemetry())
        data, kept = bytearray(b"mine"), b"not copied"
        write: Any = YamuxStream.write
        await write(Sender(), data)
        await write(Sender(), kept)
        data[:] = b"gone"
        (_, first, _, second) = Sender.conn.frames
        assert (first, second.obj) == (b"mine", kept)

    trio.run(main)


def test_a_broken_socket_ends_the_session_and_leaves_nobody_waiting() -> None:
    async def main() -> None:
        session = Session(Socket(broken=True))
        writer = FrameWriter(session)
        large = bytes(fast_pipe.SOCKET_BYTES)
        events = [writer.post([large]), writer.post([b"never tried"])]
        await writer.run()
        assert session.closed
        assert writer.ended
        assert all(event.is_set() for event in events)

    trio.run(main)


def test_a_hash_in_pieces_is_the_hash_of_the_whole() -> None:
    running = RunningDigest()
    for piece in (b"ab", b"", memoryview(b"cde")):
        running.add(piece)
    assert running.value() == digest(b"abcde")
