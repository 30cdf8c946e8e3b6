"""Frames, packed messages and signed ones."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from flockstep.collectives.chain.packed import MAX_PLAIN_BYTES
from flockstep.dht.records import MAX_LIFETIME, Record
from flockstep.dht.run.statements import (
    MAX_OWNER_STATEMENTS,
    MAX_STATED_REASON,
    OWNER_KIND,
    OwnerStatement,
    OwnerStatements,
    is_voucher,
)
from flockstep.peer import wire
from flockstep.peer.base.errors import LocalError, MalformedMessage
from flockstep.peer.identity import Identity
from flockstep.peer.wire import MAX_CLAIMS, Accusations, Claim
from flockstep.peer.wire.fields import MAX_VOUCHER_BYTES
from flockstep.peer.wire.framing import FrameBuffer, frame
from flockstep.peer.wire.schema import encode
from hypothesis import given
from hypothesis import strategies as st

SLOT = wire.Slot("run", 3, b"p" * 32, 1)
PEER = "12D3KooW" + "a" * 44
SEAT = wire.Seat(0.2, 3, b"invite", b"voucher", True)
HASH, SIGNATURE = b"h" * 32, b"s" * 64
MESSAGES = [
    wire.Beat(False),
    wire.Goodbye("done"),
    wire.MembersAsk("run", b"\1" * 16),
    wire.Members((b"record",)),
    wire.Met(bytes(8)),
    wire.Unheard("run", 3, PEER, True),
    wire.StateAsk("run"),
    wire.StateOffer(((1, HASH, b"certificate"),)),
    wire.LeavesAsk("run", HASH),
    wire.Leaves((HASH,)),
    wire.FilesAsk("run", b"invitation"),
    wire.FilesHeld(b"hhhh"),
    wire.Fetch(HASH, 7),
    wire.Serve(5, ""),
    wire.Signed(PEER, 20, b"payload", SIGNATURE),
    wire.LedgerAsk("run", 1, 4),
    wire.LedgerPage((b"certificate",)),
    wire.VoteAsk("run"),
    wire.VoteShown(3),
    Claim("run", (b"one", b"another"), 3),
    Accusations((b"claim",)),
    wire.Ready(SLOT, HASH, 1, 1e6, 2e6, HASH, b"invite", b"voucher", (wire.Lock(1, HASH),), True, b"r", 9.0, 2.0, 3.0),
    wire.Heard(SLOT, b"of eight", 3),
    wire.Basis(SLOT, (b"ready",), (b"heard",)),
    wire.Roster(SLOT, HASH, (PEER,), (0, 8), (SEAT,), b"\1", HASH),
    wire.Commit(SLOT, HASH, 1, 2, 0.5, (HASH,), 0.25),
    wire.Have(SLOT, HASH, HASH, ((0, (0, 1)), (2, ())), b"n" * 32, HASH),
    wire.Cut(SLOT, HASH, b"", (0,), ((0, b"n" * 16),), (0, 2), (b"\2",)),
    wire.Sketch(SLOT, HASH, (b"o" * 32,), bytes(3 * 32 * 4)),
    wire.Weigh(SLOT, HASH, 0, ((0, 0.5), (2, 0.25))),
    wire.Result(SLOT, HASH, 0, HASH),
    wire.Outputs(SLOT, HASH, 1, (HASH,), (0,)),
    wire.Propose(SLOT, b"value", HASH, (b"ready",)),
    wire.Prevote(SLOT, HASH),
    wire.Precommit(SLOT, HASH),
    wire.Void(SLOT, "why"),
    wire.Proof(SLOT, b"value", (PEER,), (SIGNATURE,)),
    wire.Certificate(SLOT, b"value", (PEER,), (SIGNATURE,)),
]
ABSENT = (wire.Absence(PEER, 1),)
INSIDE = [
    wire.Value("run", 3, HASH, HASH, (PEER,), (0, 8), (SEAT,), HASH, (0,), (HASH,), HASH, 9, (0,), b"terms", (7,), ABSENT)
]
"""What is encoded inside other messages, without a code of its own."""
GOLDEN = Path(__file__).parents[3] / "golden" / "messages.txt"
"""The name and the encoding of each of them; a line that changes needs a new code."""


def encoded() -> Iterator[tuple[str, bytes]]:
    yield from ((type(message).__name__, wire.pack(message)) for message in MESSAGES)
    yield from ((type(message).__name__, encode(message)) for message in INSIDE)


def test_bytes_are_those_of_the_golden_file() -> None:
    golden = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert golden == {name: data.hex() for name, data in encoded()}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: object) -> None:
    assert wire.unpack(wire.pack(message)) == message


def test_every_number_has_its_message_here() -> None:
    assert {type(message) for message in MESSAGES} == set(wire.CODES.values())


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_malformed_or_a_message(data: bytes) -> None:
    check_reading(data)


def check_reading(data: bytes) -> None:
    """Bytes are malformed, or the one encoding of a message."""
    try:
        message = wire.unpack(data)
    except MalformedMessage:
        return
    assert wire.pack(message) == data


@pytest.mark.parametrize("data", [b"", b"\xf0anything"])
def test_a_message_of_no_known_kind_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        wire.unpack(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@given(position=st.integers(0, 400), change=st.integers(1, 255))
def test_a_damaged_message_is_malformed_or_another_one(message: object, position: int, change: int) -> None:
    data = bytearray(wire.pack(message))
    data[position % len(data)] ^= change
    check_reading(bytes(data))


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


def full(count: int, voters: int, invite: bytes = b"", voucher: bytes = b"") -> tuple[wire.Roster, wire.Basis, wire.Value]:
    """The largest roster, basis and value of so many members and voters that show the owner's statements of these bytes."""
    slot = wire.Slot("r" * 52, wire.MAX_COUNT, HASH, wire.MAX_ATTEMPT)
    lock = wire.Lock(wire.MAX_ATTEMPT, HASH)
    ready = wire.Ready(slot, HASH, wire.MAX_COUNT, 1e9, 1e9, HASH, invite, voucher, (lock,))
    packed = encode(wire.Signed(PEER, wire.code_of(ready), encode(ready), SIGNATURE))
    seats = (wire.Seat(0.5, wire.MAX_COUNT, invite, voucher),) * count
    parts = min(count, wire.MAX_PARTS)
    bounds, indices = (wire.MAX_COUNT,) * (parts + 1), tuple(range(count))
    members, hashes = (PEER,) * count, (HASH,) * parts
    revision, credit = bytes(wire.MAX_REVISION_BYTES), (wire.MAX_COUNT,) * count
    word = wire.Heard(slot, bytes(wire.MARK_BYTES * count), wire.MAX_COUNT)
    heards = (encode(wire.Signed(PEER, wire.code_of(word), encode(word), SIGNATURE)),) * voters
    basis = wire.Basis(slot, (packed,) * count, heards)
    roster = wire.Roster(slot, HASH, members, bounds, seats, b"\xff" * (-(-count // 8)), HASH, revision)
    place, total = (*slot.decision, HASH), wire.MAX_COUNT
    absent = (wire.Absence(PEER, wire.MAX_MISSED),) * (parts // 3)  # The others are a quorum.
    value = wire.Value(*place, members, bounds, seats, HASH, indices, hashes, HASH, total, indices, revision, credit, absent)
    return roster, basis, value


def sent(data: bytes) -> bytes:
    """Return what arrives of a frame."""
    buffer = FrameBuffer()
    buffer.feed(frame(data))
    payload = buffer.next_frame()
    assert payload is not None
    return payload


ALL = {"invite": bytes(wire.MAX_INVITE_BYTES), "voucher": bytes(MAX_VOUCHER_BYTES)}


@pytest.mark.parametrize(
    ("count", "voters", "shown"),
    [(1000, 7, {}), (256, 32, {}), (wire.MAX_PARTS, wire.MAX_PARTS, {}), (wire.MAX_PARTS, wire.MAX_PARTS, ALL)],
)
def test_what_a_full_roster_makes_can_be_sent_and_shown_as_evidence(
    count: int, voters: int, shown: dict[str, bytes]
) -> None:
    roster, basis, value = full(count, voters, **shown)
    packed = encode(value)
    assert len(packed) <= wire.MAX_VALUE_BYTES
    propose = wire.Propose(roster.slot, packed, b"", basis.readys[: wire.MAX_PARTS])
    for message in (roster, basis, propose):
        signed = wire.Signed(PEER, wire.code_of(message), encode(message), SIGNATURE)
        assert wire.opened(wire.unpack(wire.pack(signed))) == message
    signers, signatures = (PEER,) * wire.MAX_PARTS, (SIGNATURE,) * wire.MAX_PARTS
    for kind in (wire.Proof, wire.Certificate):
        largest = kind(roster.slot, packed, signers, signatures)
        assert wire.unpack(wire.pack(largest)) == largest
        assert len(encode(largest)) <= MAX_PLAIN_BYTES


def largest() -> Iterator[wire.RoundMessage]:
    """The largest of each statement of a full roster whose length grows with it."""
    (roster, basis, value), (widest, *_) = full(wire.MAX_PARTS, wire.MAX_PARTS, **ALL), full(1000, 7)
    slot, hashes, everybody = roster.slot, (HASH,) * wire.MAX_PARTS, tuple(range(wire.MAX_ROSTER))
    name, judges = bytes(wire.NAME_BYTES), everybody[: wire.MAX_PARTS]
    yield max(roster, widest, key=lambda it: len(encode(it)))
    yield wire.Propose(slot, encode(value), HASH, basis.readys)
    yield wire.Commit(slot, HASH, wire.MAX_COUNT, wire.MAX_COUNT, 1.5, hashes, 0.5, "x" * 8)
    parts = tuple((part, everybody) for part in judges)
    yield wire.Have(slot, HASH, HASH, parts, name * wire.MAX_ROSTER, HASH)
    masks = (b"\1" * (wire.MAX_ROSTER // 8),) * wire.MAX_PARTS
    yield wire.Cut(slot, HASH, HASH, judges, tuple((index, name) for index in judges), everybody, masks)
    yield wire.Sketch(slot, HASH, hashes, bytes(wire.MAX_SKETCH_BYTES))
    yield wire.Weigh(slot, HASH, wire.MAX_ROSTER - 1, tuple((index, 0.1) for index in everybody))
    yield wire.Result(slot, HASH, wire.MAX_ROSTER - 1, HASH)
    yield wire.Outputs(slot, HASH, wire.MAX_OUTPUTS - 1, hashes, everybody)


@pytest.mark.parametrize("message", [*largest()], ids=lambda message: type(message).__name__)
def test_the_largest_of_each_statement_can_be_signed_and_sent(message: wire.RoundMessage) -> None:
    assert len(encode(message)) <= wire.MAX_STATEMENT_BYTES
    signed = wire.Signed(PEER, wire.code_of(message), encode(message), SIGNATURE)
    assert wire.opened(wire.unpack(sent(wire.pack(signed)))) == message


BINDING = [
    (wire.Sketch, wire.Commit, wire.Roster),
    (wire.Commit, wire.Roster),
    (wire.Result, wire.Cut, wire.Roster),
]
"""The statements of each claim about bytes (`collectives.accountability.evidence`)."""


@pytest.mark.parametrize("kinds", BINDING, ids=lambda kinds: kinds[0].__name__)
def test_every_claim_about_bytes_can_be_signed_and_sent(kinds: tuple[type[wire.RoundMessage], ...]) -> None:
    by_kind = {type(message): message for message in largest()}
    messages = [by_kind[kind] for kind in kinds]
    statements = tuple(encode(wire.Signed(PEER, wire.code_of(it), encode(it), SIGNATURE)) for it in messages)
    claim = Claim("r" * 52, statements, wire.MAX_ROSTER - 1)
    signed = wire.Signed(PEER, wire.code_of(claim), encode(claim), SIGNATURE)
    assert len(signed.payload) <= wire.MAX_SIGNED_BYTES
    assert wire.unpack(sent(wire.pack(signed))) == signed


def test_the_longest_voucher_can_be_shown() -> None:
    owner, run = Identity.from_seed(bytes(32)), "r" * 64
    peer = Identity.from_seed(bytes([1]) * 32).peer_id
    longest = OwnerStatement("vouch", peer, "x" * MAX_STATED_REASON, wire.MAX_COUNT)
    records = OwnerStatements(run, owner.peer_id).sign(owner, longest).records
    numbered = Record.sign(
        owner, run=run, kind=OWNER_KIND, sequence=MAX_OWNER_STATEMENTS, lifetime=MAX_LIFETIME, body=records[0].body
    )
    assert is_voucher(numbered.encode(), owner.peer_id, run, peer)
    assert len(numbered.encode()) <= MAX_VOUCHER_BYTES


def test_whatever_a_member_may_sign_can_be_shown_by_others() -> None:
    """Otherwise a liar contradicts itself in statements too long for a claim, and its accuser's encoder raises."""
    longest = encode(wire.Signed(PEER, 41, bytes(wire.MAX_STATEMENT_BYTES), SIGNATURE))
    claim = Claim("r" * 52, (longest, longest), 0)
    signed = encode(wire.Signed(PEER, wire.code_of(claim), encode(claim), SIGNATURE))
    accusations = Accusations((signed,) * MAX_CLAIMS)
    assert wire.unpack(sent(wire.pack(accusations))) == accusations


def test_heads_of_arrays_alone_take_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            wire.unpack(wire.pack(wire.Beat(False))[:1] + b"\xdc\xff\xff" * 900)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20  # 470 MB by what the heads announce.
    finally:
        tracemalloc.stop()


def test_the_longest_ready_fits_where_others_carry_it() -> None:
    slot = wire.Slot("r" * 64, wire.MAX_COUNT, HASH, wire.MAX_ATTEMPT)
    lock = wire.Lock(wire.MAX_ATTEMPT, HASH)
    shown = bytes(wire.MAX_INVITE_BYTES), bytes(wire.MAX_VOUCHER_BYTES), (lock,), True, bytes(wire.MAX_PARTS), 1.0, 1.0, 1.0
    ready = wire.Ready(slot, HASH, wire.MAX_COUNT, 1.0, 1.0, HASH, *shown)
    assert len(encode(wire.Signed("p" * 64, wire.code_of(ready), encode(ready), SIGNATURE))) <= wire.MAX_READY_BYTES
