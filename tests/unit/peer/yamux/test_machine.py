"""Yamux without a network: what any bytes make of one end, and what two ends make of any order of delivery."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from flockstep.peer.strangers.frames import FIRST_WINDOW, MAX_WINDOW, TURN, WINDOWS_OF_ONE, WindowBudget
from flockstep.peer.yamux.machine import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INTERNAL_ERROR,
    JOINED_BYTES,
    MAX_DROPPED,
    MAX_LEFT,
    MAX_STREAMS,
    MOST,
    NORMAL,
    PING,
    PROTOCOL_ERROR,
    RST,
    SYN,
    UPDATE,
    Event,
    Machine,
    Opened,
    Readable,
    Stream,
    Unread,
    Writable,
)
from hypothesis import given
from hypothesis import strategies as st

FRAME_BYTES = 1 << 20


def machine(*, is_initiator: bool = False) -> Machine:
    return Machine(is_initiator=is_initiator, budget=WindowBudget(WINDOWS_OF_ONE))


def frame(kind: int, flags: int, number: int, length: int = 0, body: bytes = b"") -> bytes:
    return HEADER.pack(0, kind, flags, number, length or len(body)) + body


def feed(end: Machine, data: bytes) -> list[Event]:
    """Let bytes arrive, and pay every bill."""
    events = end.receive(data)
    while end.meter.is_due:
        end.meter.bill()
        events += end.receive()
    return events


def sent(end: Machine) -> bytes:
    data = b"".join(end.outbox)
    end.outbox = []
    return data


def headers(data: bytes) -> list[tuple[int, int, int, int]]:
    """Kind, flags, stream and length of frames without a body."""
    assert len(data) % HEADER.size == 0
    return [HEADER.unpack_from(data, start)[1:] for start in range(0, len(data), HEADER.size)]


def opened(end: Machine, number: int = 1) -> Stream:
    """A stream of the remote, whose ACK is taken."""
    (event,) = feed(end, frame(UPDATE, SYN, number))
    assert isinstance(event, Opened)
    assert sent(end) == frame(UPDATE, ACK, number)
    return event.stream


def read_all(end: Machine, stream: Stream) -> bytes:
    return b"".join(iter(lambda: end.read(stream, 1 << 30), b""))


numbers = st.sampled_from([0, 1, 2, 3, 5, 9001, MOST])
lengths = st.sampled_from([0, 1, 200, FIRST_WINDOW, FIRST_WINDOW + 1, MAX_WINDOW, MAX_WINDOW + 1, MOST])


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame, most often a legal one."""
    kind = draw(st.sampled_from([DATA, DATA, UPDATE, UPDATE, PING]))
    flags = draw(st.sampled_from([0, 0, SYN, ACK, FIN, RST, SYN | FIN]))
    body = draw(st.binary(max_size=40)) if kind == DATA else b""
    if draw(st.integers(0, 30)):
        return frame(kind, flags, draw(numbers), draw(st.integers(0, 1000)) if kind == UPDATE else 0, body)
    version, any_kind, any_flags = draw(st.integers(0, 1)), draw(st.integers(0, 5)), draw(st.integers(0, 0xFFFF))
    return HEADER.pack(version, any_kind, any_flags, draw(numbers), draw(lengths)) + body


def outcome(data: bytes, cuts: Sequence[int]) -> object:
    """All that one end makes of bytes that arrive in such pieces."""
    end = machine()
    mine = [end.open(), end.open()]
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    events = [event for start, stop in pairwise(edges) for event in feed(end, data[start:stop])]
    seen = [(type(event), event.stream.number, id(event.stream)) for event in events]
    streams = {id(stream): stream for stream in (*mine, *(event.stream for event in events))}
    order = {key: place for place, key in enumerate(streams)}
    windows = [(stream.number, stream.send_window, stream.receive_window) for stream in streams.values()]
    ends = [(stream.received_all, stream.is_reset, stream.unread.take(1 << 30)) for stream in streams.values()]
    told = [(kind, number, order[key]) for kind, number, key in seen]
    once = [one for place, one in enumerate(told) if not place or told[place - 1] != one]  # Of a body each piece is told.
    return once, windows, ends, sent(end), end.end, end.violation


@given(st.lists(frames(), max_size=12), st.lists(st.integers(0, 10**6), max_size=9))
def test_any_splitting_of_the_bytes_gives_the_same_events(made: list[bytes], cuts: list[int]) -> None:
    data = b"".join(made)
    assert outcome(data, cuts) == outcome(data, [])
    assert outcome(data, range(len(data))) == outcome(data, [])


class Pair:
    """Two ends, the bytes on their way, and what was sent and read on each stream in each direction."""

    def __init__(self) -> None:
        self.ends = machine(is_initiator=True), machine()
        self.wire = bytearray(), bytearray()
        """What each has sent and the other has not received."""
        self.streams: list[dict[int, Stream]] = [{}, {}]
        self.sent: dict[tuple[int, int], bytearray] = {}
        self.read: dict[tuple[int, int], bytearray] = {}

    def settle(self, who: int, events: Sequence[Event] = ()) -> None:
        for event in events:
            if isinstance(event, Opened):
                self.streams[who][event.stream.number] = event.stream
        self.wire[who].extend(sent(self.ends[who]))

    def deliver(self, to: int, most: int) -> None:
        data = bytes(self.wire[1 - to][:most])
        del self.wire[1 - to][:most]
        self.settle(to, feed(self.ends[to], data))
        assert all(len(stream.unread) <= stream.window for stream in self.streams[to].values())

    def act(self, who: int, action: int, which: int, size: int) -> None:
        end, mine = self.ends[who], self.streams[who]
        if action == 0 and len(mine) < 5:
            stream = end.open()
            mine[stream.number] = stream
        elif action == 1:
            self.deliver(who, size)
        elif mine:
            stream = mine[sorted(mine)[which % len(mine)]]
            if action == 2 and not (stream.sent_all or stream.is_reset):
                piece = (bytes((stream.number, who)) + size.to_bytes(4, "big")) * (size // 6 + 1)
                piece = piece[: stream.send_window]
                end.send(stream, memoryview(piece), 1 + size // 3)
                self.sent.setdefault((who, stream.number), bytearray()).extend(piece)
            elif action == 3:
                self.read.setdefault((who, stream.number), bytearray()).extend(end.read(stream, size))
            elif action == 4 and size > 150_000:
                end.finish(stream)
        self.settle(who)


steps = st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 9), st.sampled_from([1, 7, 12, 1000, 90_000, 200_000]))


@given(st.lists(steps, max_size=80))
def test_two_ends_deliver_all_bytes_in_order_however_they_are_interleaved(actions: list[tuple[int, int, int, int]]) -> None:
    pair = Pair()
    pair.act(0, 0, 0, 0)
    for action in actions:
        pair.act(*action)
    for _ in range(9):  # Until all is delivered and read: each may be answered by an update.
        for who in (0, 1):
            pair.deliver(who, 1 << 30)
            for number, stream in pair.streams[who].items():
                pair.read.setdefault((who, number), bytearray()).extend(read_all(pair.ends[who], stream))
            pair.settle(who)
    assert [end.end for end in pair.ends] == ["", ""]
    for who in (0, 1):
        for number, stream in pair.streams[who].items():
            other = pair.streams[1 - who][number]
            assert pair.read[who, number] == pair.sent.get((1 - who, number), b"")
            assert stream.received_all == other.sent_all
            assert stream.send_window == other.receive_window  # Nothing is on its way, so both count the same.


@given(st.lists(frames(), max_size=100))
def test_whatever_comes_few_streams_of_a_remote_hold_anything(made: list[bytes]) -> None:
    end, held = machine(), list[Stream]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flockstep.peer.yamux.machine.MAX_STREAMS", 2)
        for one in made:
            held += [event.stream for event in feed(end, one) if isinstance(event, Opened)]
            assert sum(bool(stream.unread) or not stream.is_over for stream in held) <= 2


def test_streams_that_are_filled_and_reset_hold_no_more_than_those_that_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.peer.yamux.machine.MAX_STREAMS", 3)
    end, held = machine(), list[Event]()
    for number in range(1, 21, 2):
        held += feed(end, frame(DATA, SYN | RST, number, body=bytes(FIRST_WINDOW)))
    assert end.unread_bytes == 3 * FIRST_WINDOW
    for event in held:
        read_all(end, event.stream)
    held.clear()
    assert isinstance(feed(end, frame(UPDATE, SYN, 21))[0], Opened)


MALFORMED = {
    "version": HEADER.pack(1, DATA, 0, 1, 0),
    "kind": HEADER.pack(0, 4, 0, 1, 0),
    "beyond its window": frame(DATA, 0, 1, FIRST_WINDOW + 1),
    "for no stream, longer than any window": frame(DATA, 0, 77, MAX_WINDOW + 1),
    "opened as 1": frame(UPDATE, SYN, 1),
    "opened as 0": frame(UPDATE, SYN, 0),
    "opened as mine": frame(UPDATE, SYN, 2),
    "window of 4 GiB": frame(UPDATE, 0, 1, MOST),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_breaks_the_protocol_ends_the_connection_with_one_goodbye_and_one_reason(name: str) -> None:
    end = machine()
    stream = opened(end)
    feed(end, frame(DATA, 0, 1, body=b"before"))
    events = feed(end, MALFORMED[name] + frame(DATA, 0, 1, body=b"after"))
    reason = end.violation
    assert reason
    assert end.end == reason
    assert headers(sent(end)) == [(GO_AWAY, 0, 0, PROTOCOL_ERROR)]
    assert [event for event in events if event != Writable(stream)] == [Readable(stream)]
    assert feed(end, frame(PING, SYN, 0, 1)) == end.close() == end.refuse("again") == []
    assert (end.violation, end.end, sent(end)) == (reason, reason, b"")
    assert (stream.is_reset, read_all(end, stream)) == (True, b"before")


def test_a_frame_as_long_as_its_window_is_handed_on_as_it_comes() -> None:
    end = machine()
    stream = opened(end)
    while stream.window < MAX_WINDOW:  # Half a window at a time, which doubles it.
        feed(end, frame(DATA, 0, 1, body=bytes(stream.receive_window)))
        read_all(end, stream)
    assert stream.receive_window == MAX_WINDOW
    feed(end, frame(DATA, FIN, 1, MAX_WINDOW))
    for left in range(MAX_WINDOW, 0, -(1 << 18)):
        assert not stream.received_all
        feed(end, bytes(1 << 18))
        assert len(read_all(end, stream)) == 1 << 18
        assert stream.receive_window <= MAX_WINDOW - (left - (1 << 18))
    assert stream.received_all


def test_a_window_is_given_back_by_halves_and_doubles_within_the_budget() -> None:
    end = Machine(is_initiator=False, budget=WindowBudget(FIRST_WINDOW + 1))
    stream, half = opened(end), FIRST_WINDOW // 2
    feed(end, frame(DATA, 0, 1, body=bytes(FIRST_WINDOW)))
    assert (len(end.read(stream, half - 1)), sent(end)) == (half - 1, b"")
    assert len(end.read(stream, 1)) == 1
    assert headers(sent(end)) == [(UPDATE, 0, 1, half + FIRST_WINDOW)]
    assert len(end.read(stream, half)) == half
    assert sent(end) == b""  # Half of the window is more by now.
    feed(end, frame(DATA, 0, 1, body=bytes(half)))
    end.read(stream, half)
    assert headers(sent(end)) == [(UPDATE, 0, 1, FIRST_WINDOW + 1)]


def test_frames_for_streams_that_are_not_open_are_skipped() -> None:
    end = machine()
    stream = opened(end)
    end.reset(stream)
    sent(end)
    late = [frame(DATA, 0, 1, body=b"late"), frame(UPDATE, 0, 1, 7), frame(UPDATE, RST, 1), frame(DATA, FIN, 9, body=b"x")]
    assert feed(end, b"".join(late)) == []
    finished = opened(end, 3)
    feed(end, frame(DATA, FIN, 3, body=b"all"))
    assert feed(end, frame(DATA, 0, 3, body=b"more")) == []
    assert read_all(end, finished) == b"all"
    assert (end.end, sent(end)) == ("", b"")


def test_a_stream_that_is_reset_amid_a_body_takes_none_of_the_rest_nor_does_its_successor() -> None:
    end = machine()
    stream = opened(end)
    feed(end, frame(DATA, 0, 1, 6, b"abc"))
    end.reset(stream)
    sent(end)
    assert feed(end, b"def") == []
    assert (end.unread_bytes, opened(end).receive_window) == (0, FIRST_WINDOW)


def test_one_frame_may_open_fill_and_finish_a_stream() -> None:
    end = machine()
    opening, *rest = feed(end, frame(DATA, SYN | FIN, 1, body=b"all of it"))
    assert isinstance(opening, Opened)
    assert rest == [Readable(opening.stream)] * 2
    assert (read_all(end, opening.stream), opening.stream.received_all) == (b"all of it", True)


def test_a_reset_leaves_what_has_arrived_to_its_reader_and_a_reset_of_mine_drops_it() -> None:
    end = machine()
    theirs, mine = opened(end, 1), opened(end, 3)
    feed(end, frame(DATA, 0, 1, body=b"kept") + frame(DATA, 0, 3, body=b"gone"))
    assert feed(end, frame(UPDATE, RST, 1)) == [Readable(theirs), Writable(theirs)]
    assert end.reset(mine) == [Readable(mine), Writable(mine)]
    assert headers(sent(end)) == [(UPDATE, RST, 3, 0)]
    assert (end.unread_bytes, end.streams) == (4, {})
    assert (read_all(end, theirs), theirs.received_all, mine.received_all) == (b"kept", False, False)
    assert end.reset(theirs) == []
    assert sent(end) == b""


def test_a_reset_of_mine_is_no_end_though_the_remote_has_finished() -> None:
    end = machine()
    stream = opened(end)
    feed(end, frame(DATA, FIN, 1, body=b"all of it"))
    end.reset(stream)
    assert (stream.received_all, read_all(end, stream)) == (False, b"")


def test_nothing_is_given_back_of_a_window_that_nobody_will_use() -> None:
    end = machine()
    stream = opened(end)
    feed(end, frame(DATA, FIN, 1, body=bytes(FIRST_WINDOW)))
    assert len(read_all(end, stream)) == FIRST_WINDOW
    assert sent(end) == b""


def test_a_stream_is_reset_once_more_of_it_is_unread_than_its_reader_holds() -> None:
    end = machine()
    stream, full = opened(end), opened(end, 3)
    feed(end, frame(DATA, 0, 1, body=bytes(60)) + frame(DATA, 0, 3, body=bytes(101)))
    assert end.hold(stream, 100) == []
    assert end.hold(full, 100) == [Readable(full), Writable(full)]
    assert headers(sent(end)) == [(UPDATE, RST, 3, 0)]
    assert feed(end, frame(DATA, 0, 1, body=bytes(40))) == [Readable(stream)]
    end.read(stream, 1)
    feed(end, frame(DATA, FIN, 1, body=bytes(2)) + frame(PING, SYN, 0, 7))
    assert headers(sent(end)) == [(UPDATE, RST, 1, 0), (PING, ACK, 0, 7)]
    assert (end.end, end.unread_bytes, end.streams) == ("", 0, {})


def test_of_a_stream_that_was_left_nothing_is_kept_and_its_sender_gets_the_window_back_for_a_megabyte() -> None:
    end, half = machine(), FIRST_WINDOW // 2
    stream = opened(end)
    feed(end, frame(DATA, 0, 1, body=bytes(half)))
    assert end.leave(stream) == end.leave(stream) == []
    assert headers(sent(end)) == [(UPDATE, FIN, 1, 0), (UPDATE, 0, 1, half)]
    for _ in range(MAX_DROPPED // half - 1):
        assert feed(end, frame(DATA, 0, 1, body=bytes(half))) == []
        assert headers(sent(end)) == [(UPDATE, 0, 1, half)]
    assert (end.unread_bytes, stream.window) == (0, FIRST_WINDOW)
    feed(end, frame(DATA, 0, 1, body=b"x"))
    assert headers(sent(end)) == [(UPDATE, RST, 1, 0)]
    assert (end.end, end.streams) == ("", {})


def test_what_arrived_before_the_remote_finished_is_left_to_a_late_reader() -> None:
    end = machine()
    stream = opened(end)
    feed(end, frame(DATA, FIN, 1, body=b"all of it"))
    end.leave(stream)
    assert (end.streams, read_all(end, stream)) == ({}, b"all of it")


def test_of_many_streams_that_a_remote_never_ends_the_oldest_that_was_left_is_reset() -> None:
    end = machine()
    streams = [opened(end, 2 * number + 1) for number in range(MAX_LEFT + 2)]
    for stream in streams[1:]:
        end.leave(stream)
    assert [stream.is_reset for stream in streams] == [False, True] + MAX_LEFT * [False]


def test_no_end_takes_a_stream_of_number_0() -> None:
    for is_initiator in (True, False):
        end = machine(is_initiator=is_initiator)
        assert feed(end, frame(UPDATE, SYN, 0)) == []
        assert end.violation


def test_what_a_remote_has_finished_is_complete_though_it_resets_the_stream_afterwards() -> None:
    end = machine()
    stream = opened(end)
    feed(end, frame(DATA, FIN, 1, body=b"all of it") + frame(UPDATE, RST, 1))
    assert (read_all(end, stream), stream.received_all, stream.is_reset) == (b"all of it", True, True)


GOODBYES = [(NORMAL, "closed"), (PROTOCOL_ERROR, "protocol"), (INTERNAL_ERROR, "failed"), (9, "code 9")]


@pytest.mark.parametrize(("code", "reason"), GOODBYES)
def test_a_goodbye_ends_the_connection_with_its_reason(code: int, reason: str) -> None:
    end = machine()
    stream, other = opened(end), opened(end, 3)
    feed(end, frame(DATA, FIN, 1, body=b"last") + frame(GO_AWAY, 0, 0, code) + frame(UPDATE, SYN, 5))
    assert reason in end.end
    assert (end.violation, sent(end)) == ("", b"")
    assert end.reset(stream) == end.reset(other) == []  # As py-libp2p does to all streams of a connection that has ended.
    assert (read_all(end, stream), stream.received_all, other.received_all) == (b"last", True, False)


def test_a_ping_is_answered_and_an_answer_is_not() -> None:
    end = machine()
    feed(end, frame(PING, SYN, 0, 7) + frame(PING, ACK, 0, 8))
    assert headers(sent(end)) == [(PING, ACK, 0, 7)]
    end.ping(9)
    assert headers(sent(end)) == [(PING, SYN, 0, 9)]


def test_more_streams_than_a_remote_may_have_are_reset_unseen() -> None:
    end = machine()
    mine = [end.open() for _ in range(3)]
    sent(end)
    streams = [opened(end, 2 * number + 1) for number in range(MAX_STREAMS)]
    assert feed(end, frame(DATA, SYN, 9999, body=b"too many")) == []
    assert headers(sent(end)) == [(UPDATE, RST, 9999, 0)]
    end.finish(streams[0])
    feed(end, frame(UPDATE, FIN, 1))
    sent(end)
    opened(end, 10001)
    assert [stream.number for stream in mine] == [2, 4, 6]


def test_frames_are_handled_up_to_a_turn_until_the_bill_is_sent() -> None:
    end = machine()
    end.receive(3 * TURN * frame(PING, SYN, 0, 1))
    for turn in (1, 2, 3):
        assert len(sent(end)) == TURN * HEADER.size
        assert end.meter.is_due
        assert end.meter.bill() == TURN
        assert end.meter.is_due is False
        end.receive()
        assert bool(end.outbox) is (turn < 3)


def test_a_frame_that_comes_in_single_bytes_is_billed_like_as_many_frames() -> None:
    end = machine()
    opened(end)
    end.meter.bill()
    for byte in frame(DATA, 0, 1, body=bytes(1000)):
        end.receive(bytes((byte,)))
    assert end.meter.bill() > 1000


def test_frames_are_cut_and_a_buffer_may_change_once_its_frame_waits() -> None:
    end = machine()
    stream, data, kept = opened(end), bytearray(b"mine"), b"not copied"
    end.send(stream, memoryview(data), 3)
    end.send(stream, memoryview(kept), FRAME_BYTES)
    data[:] = b"gone"
    _, first, _, second, _, third = end.outbox
    assert (first, second, third) == (b"min", b"e", kept)
    assert isinstance(third, memoryview)
    assert stream.send_window == FIRST_WINDOW - 14


@given(st.lists(st.binary(max_size=9) | st.integers(0, 3 * JOINED_BYTES).map(bytes) | st.integers(-1, 9000)))
def test_unread_bytes_come_in_order_whole_and_at_most_as_many_as_asked(actions: list[bytes | int]) -> None:
    model, unread = bytearray(), Unread()
    for action in actions:
        if isinstance(action, bytes):
            unread.extend(action)
            model += action
        else:
            taken = unread.take(action)
            assert len(taken) <= max(action, 0)
            assert bool(taken) == (action > 0 and len(model) > 0)
            assert taken == model[: len(taken)]
            del model[: len(taken)]
        assert len(unread) == len(model)


def test_single_bytes_are_joined_and_a_large_piece_is_not_copied() -> None:
    unread, large = Unread(), bytes(JOINED_BYTES)
    for _ in range(JOINED_BYTES):
        unread.extend(b"x")
    unread.extend(large)
    assert unread.take(10**6) == b"x" * JOINED_BYTES
    assert unread.take(10**6) is large
