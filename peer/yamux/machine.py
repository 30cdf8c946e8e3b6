"""Yamux without input or output: bytes and calls go in, events and frames come out. Pure.

Theory of operation. Yamux (github.com/hashicorp/yamux, spec.md; libp2p's /yamux/1.0.0) runs many streams over one connection.
All that is sent are frames with a header of 12 bytes, big-endian:

    version  1 byte, 0        kind    1 byte: DATA, UPDATE, PING, GO_AWAY
    flags    2 bytes          stream  4 bytes: odd if the initiator of the connection opened it, 0 for PING and GO_AWAY
    length   4 bytes: of the body of DATA; of UPDATE the bytes by which a window grows; a value of the other two

SYN opens a stream, ACK accepts it, FIN ends what its sender sends, RST ends both directions. A stream's *window* is what its
sender may still send: at first `FIRST_WINDOW`, and the reader gives back by UPDATE what it has read, here in halves of the
window, which then doubles as far as `WindowBudget` allows.

Rule 1: the state of a connection is here, and nowhere else. The driver (`muxer`) passes on what `receive` returns and
what is in `outbox`, and it sleeps where a budget says so.

Rule 2: a frame is judged by its header. Its body is handed on in the pieces in which it arrives, never collected, so that a
frame may be as long as its window, and what is held are 12 bytes and what readers have not read.

Rule 3: what breaks the protocol ends the connection with one reason and one GO_AWAY. Frames for streams that are not open
break nothing: they were under way when the stream ended, and are skipped.

Every frame of a remote costs the same time, however little is in it, so `receive` handles `TURN` of them and no more until
`meter` has sent its bill.
What one connection may hold: `MAX_STREAMS` first windows and what `WindowBudget` adds to them.
"""

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from ..strangers.frames import FIRST_WINDOW, MAX_WINDOW, FrameMeter, WindowBudget

HEADER = struct.Struct(">BBHII")
DATA, UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
NORMAL, PROTOCOL_ERROR, INTERNAL_ERROR = range(3)

MAX_STREAMS = 256
"""Streams of a remote that are open, or over and not read to their end: beyond, they are reset unseen. As go-yamux's backlog;
the host serves fewer (`MAX_STREAMS_PER_CONNECTION`) and says so."""

MAX_LEFT = 64
"""Streams that this side has left and the remote has not: beyond, the oldest is reset. A remote ends them in a round trip."""

MAX_DROPPED = 1 << 20
"""Bytes of a stream that are dropped once this side has left it: what was on its way, on a line of 100 Mbit/s and 80 ms. What
nobody reads is no way to keep a peer busy: then it is reset."""

MOST = 2**32 - 1
"""The greatest number of a field: of streams, and of a window."""

JOINED_BYTES = 1 << 12
"""Unread pieces below this are joined: a remote that sends single bytes must not make an object of each."""

_GOODBYES = {
    NORMAL: "the remote has closed the connection",
    PROTOCOL_ERROR: "the remote says that this side broke the protocol",
    INTERNAL_ERROR: "the remote has failed",
}


@dataclass(frozen=True, slots=True)
class Opened:
    """The remote has opened a stream."""

    stream: "Stream"


@dataclass(frozen=True, slots=True)
class Readable:
    """Bytes of a stream have arrived, or their end."""

    stream: "Stream"


@dataclass(frozen=True, slots=True)
class Writable:
    """The window of a stream has opened, or the stream was reset."""

    stream: "Stream"


Event = Opened | Readable | Writable


class Unread:
    """A stream's unread bytes, in the pieces in which they came; short ones are joined."""

    def __init__(self) -> None:
        self._pieces = deque[bytes]()
        self._start = 0
        """Bytes of the first piece that were taken."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, piece: bytes) -> None:
        """Append bytes."""
        if len(piece) < JOINED_BYTES and self._pieces and len(self._pieces[-1]) < JOINED_BYTES:
            self._pieces[-1] += piece
        elif piece:
            self._pieces.append(piece)
        self._size += len(piece)

    def take(self, most: int) -> bytes:
        """Remove and return some of the bytes, in order: at least one if there are any, and at most `most`."""
        if not self._pieces or most <= 0:
            return b""
        piece = self._pieces[0][self._start : self._start + most]
        self._start += len(piece)
        if self._start == len(self._pieces[0]):
            self._pieces.popleft()
            self._start = 0
        self._size -= len(piece)
        return piece


class Stream:
    """The state of one stream; only `Machine` changes it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.send_window = FIRST_WINDOW
        """The bytes that may still be sent."""
        self.window = FIRST_WINDOW
        """The bytes that the remote may have under way and unread."""
        self.receive_window = FIRST_WINDOW
        """The bytes that it may still send."""
        self.read_bytes = 0
        """Bytes that were read and not given back yet."""
        self.unread = Unread()
        self.most_unread = MOST
        """Beyond so many unread bytes the stream is reset (`Machine.hold`)."""
        self.received_all = False
        """True once the end of what the remote sends has arrived."""
        self.sent_all = False
        """True once this side has sent the end."""
        self.is_reset = False
        self.left: int | None = None
        """Once this side has left the stream: the bytes that are still dropped before it is reset."""

    @property
    def is_over(self) -> bool:
        """True if nothing more is sent in either direction."""
        return self.is_reset or (self.received_all and self.sent_all)


class Machine:
    """One end of a connection. `budget` bounds what its windows grow by, `make` makes the state of a stream."""

    def __init__(
        self, *, is_initiator: bool, budget: WindowBudget, make: Callable[[int], Stream] = Stream
    ) -> None:
        self.outbox: list[bytes | memoryview] = []
        """What is to be sent, in order; the driver takes it after every call. A header is a piece of its own."""
        self.meter = FrameMeter()
        self.end = ""
        """Why the connection has ended; empty while it has not."""
        self.violation = ""
        """The same if the remote broke the protocol."""
        self.streams: dict[int, Stream] = {}
        """Those in which something is still to be sent or to come."""
        self._all: WeakSet[Stream] = WeakSet()
        """Those and the ones with bytes that arrived and were not read."""
        self._budget = budget
        self._make = make
        self._next = 1 if is_initiator else 2
        self._of_remote = 0 if is_initiator else 1
        """The remainder by 2 of the numbers that the remote gives."""
        self._arrived = b""
        self._place = 0
        """Bytes of `_arrived` that were handled."""
        self._stream: Stream | None = None
        """The stream of the body that is arriving; None if it is skipped."""
        self._missing = 0
        """Its bytes that have not arrived."""
        self._flags = 0
        """The flags of its frame, which count once it is complete."""

    @property
    def _num_of_remote(self) -> int:
        """Its streams that are not over, or not read to their end."""
        held = [stream for stream in self._all if not stream.is_over or stream.unread]
        return sum(stream.number % 2 == self._of_remote for stream in held)

    @property
    def unread_bytes(self) -> int:
        """The bytes that arrived and were not read."""
        return sum(len(stream.unread) for stream in self._all)

    def receive(self, data: bytes = b"") -> list[Event]:
        """Handle what has arrived. While `meter.is_due`, some of it may be left: then send the bill and call without data."""
        events: list[Event] = []
        if data:
            self._arrived, self._place = self._arrived[self._place :] + data, 0
        num_frames = 0
        while not self.end and (not self._missing or self._take_body(events)):
            if self.meter.is_due or len(self._arrived) - self._place < HEADER.size:
                break
            header = HEADER.unpack_from(self._arrived, self._place)
            self._place += HEADER.size
            num_frames += 1
            self.meter.count(header[4] if header[1] == DATA else 0)
            self._take_header(header, events)
        if data and not num_frames:
            self.meter.count(0)  # A frame in pieces of a byte costs as much as many frames.
        return events

    def lose(self, reason: str) -> list[Event]:
        """The connection has broken, or ended without a goodbye."""
        if self.end:
            return []
        self.end, self._arrived = reason, b""
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.is_reset = True
        return [kind(stream) for stream in streams for kind in (Readable, Writable)]

    def close(self, code: int = NORMAL, reason: str = "the connection is closed") -> list[Event]:
        """End the connection, with a goodbye. What has arrived can still be read."""
        if not self.end:
            self.outbox.append(HEADER.pack(0, GO_AWAY, 0, 0, code))
        return self.lose(reason)

    def refuse(self, reason: str) -> list[Event]:
        """End the connection because the remote broke the protocol."""
        self.violation = self.violation or reason
        return self.close(PROTOCOL_ERROR, reason)

    def give_way(self, reason: str) -> list[Event]:
        """End the connection, and drop what was not read."""
        for stream in self._all:
            stream.unread = Unread()
        return self.close(INTERNAL_ERROR, reason)

    def open(self) -> Stream:
        """Open a stream. Raises `ValueError` after two billion of them."""
        number = self._next
        if number > MOST:
            raise ValueError("a connection has numbers for two billion streams")
        self._next += 2
        self._say(UPDATE, SYN, number, 0)
        return self._add(number)

    def send(self, stream: Stream, data: memoryview, frame_bytes: int) -> None:
        """Send bytes in frames of at most `frame_bytes`; no more of them than its window holds."""
        assert len(data) <= stream.send_window
        assert not stream.sent_all
        assert not stream.is_reset
        stream.send_window -= len(data)
        for start in range(0, len(data), frame_bytes):
            piece = data[start : start + frame_bytes]
            # The frame waits, also for longer than its sender does: its bytes must not change meanwhile.
            self.outbox += (HEADER.pack(0, DATA, 0, stream.number, len(piece)), piece if piece.readonly else bytes(piece))

    def read(self, stream: Stream, most: int) -> bytes:
        """Take bytes that have arrived, at most `most`, and give them back to the window; b"" if there are none."""
        data = stream.unread.take(most)
        self._give_back(stream, len(data))
        return data

    def finish(self, stream: Stream) -> None:
        """Send the end of what this side sends; what comes can still be read."""
        if not (stream.sent_all or stream.is_reset):
            self._say(UPDATE, FIN, stream.number, 0)
            stream.sent_all = True
            self._forget_if_over(stream)

    def hold(self, stream: Stream, most: int) -> list[Event]:
        """Reset a stream once it has more than `most` unread bytes; there may be as many as its window holds until then."""
        stream.most_unread = most
        return self.reset(stream) if len(stream.unread) > most else []

    def leave(self, stream: Stream) -> list[Event]:
        """Send the end of what this side sends, and drop what comes, as TCP does in FIN-WAIT-2: what was sent still arrives.

        A remote that goes on sending gets its window back, for else it would wait for ever.
        """
        self.finish(stream)
        if stream.is_over or stream.left is not None:
            return []
        stream.left = MAX_DROPPED
        dropped, stream.unread = len(stream.unread), Unread()
        left = [one for one in self.streams.values() if one.left is not None]
        return self._drop(stream, dropped) + (self.reset(left[0]) if len(left) > MAX_LEFT else [])

    def reset(self, stream: Stream) -> list[Event]:
        """End both directions at once, and drop what was not read; after the end of the connection that can still be read."""
        if self.end:
            return []
        stream.unread = Unread()
        if stream.is_over:
            return []
        self._say(UPDATE, RST, stream.number, 0)
        stream.received_all = False
        return self._reset(stream)

    def ping(self, value: int) -> None:
        """Ask the remote to send a value back. Its answer is not looked at: any byte shows that it lives (`liveness`)."""
        self._say(PING, SYN, 0, value)

    def _take_header(self, header: tuple[int, int, int, int, int], events: list[Event]) -> None:
        version, kind, flags, number, length = header
        if version or kind > GO_AWAY:
            self._refuse(f"a frame of version {version} and kind {kind}", events)
        elif kind == GO_AWAY:
            events += self.lose(_GOODBYES.get(length, f"the remote has closed the connection, with code {length}"))
        elif kind == PING:
            if flags & SYN:
                self._say(PING, ACK, 0, length)
        else:
            if flags & SYN and not self._accept(number, events):
                return
            self._stream, self._flags = self.streams.get(number), flags
            if kind == UPDATE:
                self._widen(length, events)
                self._take_flags(events)
            else:
                self._expect(number, length, events)

    def _accept(self, number: int, events: list[Event]) -> bool:
        """Take a new stream of the remote; returns False if that ended the connection."""
        if not number or number % 2 != self._of_remote or number in self.streams:
            self._refuse(f"a stream was opened as number {number}, which it cannot have", events)
        elif self._num_of_remote >= MAX_STREAMS:
            self._say(UPDATE, RST, number, 0)
        else:
            self._say(UPDATE, ACK, number, 0)
            events.append(Opened(self._add(number)))
        return not self.end

    def _widen(self, length: int, events: list[Event]) -> None:
        if self._stream is not None and length:
            self._stream.send_window += length
            events.append(Writable(self._stream))
            if self._stream.send_window > MOST:
                self._refuse(f"the window of stream {self._stream.number} was opened to more than {MOST} bytes", events)

    def _expect(self, number: int, length: int, events: list[Event]) -> None:
        """Begin the body of a frame."""
        if self._stream is not None and self._stream.received_all:
            self._stream = None
        window = self._stream.receive_window if self._stream is not None else MAX_WINDOW
        if length > window:
            self._refuse(f"a frame of {length} bytes for stream {number}, whose window has {window}", events)
            return
        if self._stream is not None:
            self._stream.receive_window -= length
            if len(self._stream.unread) + length > self._stream.most_unread:
                events += self.reset(self._stream)
        self._missing = length
        if not length:
            self._take_flags(events)

    def _take_body(self, events: list[Event]) -> bool:
        """Hand on what has come of the body; returns True if that is all of it."""
        piece = self._arrived[self._place : self._place + self._missing]
        self._place += len(piece)
        self._missing -= len(piece)
        if piece and self._stream is not None and not self._stream.is_reset:
            if self._stream.left is None:
                self._stream.unread.extend(piece)
                events.append(Readable(self._stream))
            else:
                events += self._drop(self._stream, len(piece))
        if not self._missing:
            self._take_flags(events)
        return not self._missing

    def _take_flags(self, events: list[Event]) -> None:
        """End a frame: what its flags say comes after its body."""
        stream, self._stream = self._stream, None
        if stream is None or stream.is_reset:
            return
        if self._flags & FIN and not stream.received_all:
            stream.received_all = True
            events.append(Readable(stream))
            self._forget_if_over(stream)
        if self._flags & RST:
            events += self._reset(stream)

    def _give_back(self, stream: Stream, num_bytes: int) -> None:
        """Add bytes that were taken to the window of their sender, in halves of it."""
        stream.read_bytes += num_bytes
        if stream.read_bytes >= stream.window // 2 and not (stream.received_all or stream.is_reset):
            growth = self._budget.grow(stream) if stream.left is None else 0
            stream.receive_window += stream.read_bytes + growth
            self._say(UPDATE, 0, stream.number, stream.read_bytes + growth)
            stream.read_bytes = 0

    def _drop(self, stream: Stream, num_bytes: int) -> list[Event]:
        """Count bytes of a stream that this side has left."""
        assert stream.left is not None
        stream.left -= num_bytes
        if stream.left < 0:
            return self.reset(stream)
        self._give_back(stream, num_bytes)
        return []

    def _refuse(self, reason: str, events: list[Event]) -> None:
        events += self.refuse(reason)

    def _add(self, number: int) -> Stream:
        stream = self.streams[number] = self._make(number)
        self._all.add(stream)
        return stream

    def _reset(self, stream: Stream) -> list[Event]:
        stream.is_reset = True
        self.streams.pop(stream.number, None)
        return [Readable(stream), Writable(stream)]

    def _forget_if_over(self, stream: Stream) -> None:
        if stream.is_over:
            self.streams.pop(stream.number, None)

    def _say(self, kind: int, flags: int, number: int, length: int) -> None:
        self.outbox.append(HEADER.pack(0, kind, flags, number, length))
