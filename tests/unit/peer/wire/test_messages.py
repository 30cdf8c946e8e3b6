"""Frames, packed messages and signed ones."""

import pytest
from flockstep.peer import wire
from flockstep.peer.errors import LocalError, MalformedMessage
from flockstep.peer.wire import Accusations, Claim
from flockstep.peer.wire.framing import FrameBuffer, frame
from flockstep.peer.wire.schema import encode
from hypothesis import given
from hypothesis import strategies as st

SLOT = wire.Slot("run", 3, 1)
PEER = "12D3KooW" + "a" * 44
MESSAGES = [
    wire.Beat(False),
    wire.Goodbye("done"),
    wire.MembersAsk("run", ((PEER, 4),)),
    wire.Members((b"record",)),
    wire.StateAsk("run"),
    wire.StateOffer(((1, bytes(32), b"certificate"),)),
    wire.LeavesAsk("run", bytes(32)),
    wire.Leaves((bytes(32),)),
    wire.Fetch(bytes(32), 7),
    wire.Serve(5, ""),
    wire.Signed(PEER, 20, b"payload", bytes(64)),
    wire.Certificate(SLOT, b"roster", b"cut", (b"ack",)),
    wire.LedgerAsk("run", 1, 4),
    wire.LedgerPage((b"certificate",)),
    wire.Ready(SLOT, bytes(32), 1, 1e6, 2e6, bytes(32)),
    wire.Roster(SLOT, bytes(32), (PEER,), (0, 8), (wire.Seat(0.2, 3, "192.0.2.0", b"invite"),)),
    wire.RosterAck(SLOT, bytes(32)),
    wire.Commit(SLOT, bytes(32), 1, 2, 0.5, (bytes(32),)),
    wire.Have(SLOT, bytes(32), ((0, (0, 1)), (2, ())), bytes(32)),
    wire.Cut(SLOT, bytes(32), 1, (0,), bytes(32), ((0, bytes(32)),)),
    wire.Sketch(SLOT, bytes(32), (b"o" * 32,), bytes(3 * 32 * 4)),
    wire.CutAck(SLOT, bytes(32)),
    wire.Result(SLOT, bytes(32), 0, (1.0,), bytes(32)),
    wire.ResultAck(SLOT, bytes(32), (bytes(32),), bytes(32), bytes(32), 9),
    wire.Void(SLOT, "why", (b"ack",)),
    Claim("run", (b"one", b"another"), 3),
    Accusations((b"claim",)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: object) -> None:
    assert wire.unpack(wire.pack(message)) == message


def test_every_number_has_its_message_here() -> None:
    assert {type(message) for message in MESSAGES} == set(wire.CODES.values())


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_malformed_or_a_message(data: bytes) -> None:
    try:
        message = wire.unpack(data)
    except MalformedMessage:
        return
    assert wire.pack(message) == data


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@given(position=st.integers(0, 400), change=st.integers(1, 255))
def test_a_damaged_message_is_malformed_or_another_one(message: object, position: int, change: int) -> None:
    data = bytearray(wire.pack(message))
    data[position % len(data)] ^= change
    try:
        other = wire.unpack(bytes(data))
    except MalformedMessage:
        return
    assert wire.pack(other) == bytes(data)


def test_only_messages_of_a_round_travel_signed() -> None:
    with pytest.raises(MalformedMessage):
        wire.opened(wire.Signed(PEER, wire.code_of(wire.Beat(False)), b"\x91\xc2", bytes(64)))


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 7))
def test_frames_come_out_whole_however_the_bytes_are_cut(payloads: list[bytes], piece: int) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    buffer, found = FrameBuffer(), []
    for start in range(0, len(stream), piece):
        buffer.feed(stream[start : start + piece])
        while (payload := buffer.next_frame()) is not None:
            found.append(payload)
    assert found == payloads
    assert buffer.rest() == b""


def test_a_frame_too_long_is_refused_by_its_header_alone() -> None:
    buffer = FrameBuffer(limit=10)
    buffer.feed((11).to_bytes(4, "big"))
    with pytest.raises(MalformedMessage, match="11 bytes"):
        buffer.next_frame()
    with pytest.raises(LocalError):
        frame(b"12345678901", limit=10)


def test_the_void_of_a_full_roster_that_knows_all_results_can_be_told() -> None:
    slot = wire.Slot("r" * 52, 1, 0)
    result = wire.ResultAck(slot, bytes(32), (bytes(32),) * wire.MAX_ROSTER, bytes(32), bytes(32), wire.MAX_COUNT)
    ack = encode(wire.Signed(PEER, wire.code_of(result), encode(result), bytes(64)))
    void = wire.Void(slot, "x" * wire.MAX_REASON, (ack,) * wire.MAX_ROSTER)
    signed = wire.Signed(PEER, wire.code_of(void), encode(void), bytes(64))
    assert wire.opened(wire.unpack(wire.pack(signed))) == void
