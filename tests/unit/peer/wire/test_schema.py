"""The canonical encoding: a round trip is the identity, and other encodings are refused."""

import tracemalloc
from dataclasses import dataclass
from typing import Annotated

import pytest
from flockstep.peer import wire
from flockstep.peer.base.errors import LocalError, MalformedMessage
from flockstep.peer.wire.schema import Between, Size, decode, encode
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Inner:
    flag: bool
    share: Annotated[float, Between(0, 1)]


@dataclass(frozen=True, slots=True)
class Outer:
    count: Annotated[int, Between(0, 1000)]
    name: Annotated[str, Size(10)]
    blob: Annotated[bytes, Size(8, least=2)]
    rows: Annotated[tuple[Inner, ...], Size(3)]
    pair: tuple[Annotated[int, Between(-5, 5)], bool]
    loss: float | None


inners = st.builds(Inner, st.booleans(), st.floats(0, 1))
outers = st.builds(
    Outer,
    st.integers(0, 1000),
    st.text(max_size=2),
    st.binary(min_size=2, max_size=8),
    st.lists(inners, max_size=3).map(tuple),
    st.tuples(st.integers(-5, 5), st.booleans()),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
GOOD = Outer(7, "name", b"blob", (Inner(True, 0.5),), (-3, False), None)


@given(outers)
def test_what_is_encoded_decodes_to_the_same(message: Outer) -> None:
    assert decode(Outer, encode(message), max_bytes=1000) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_malformed_message(data: bytes) -> None:
    try:
        message = decode(Outer, data, max_bytes=1000)
    except MalformedMessage:
        return
    assert encode(message) == data


@given(st.data())
def test_one_changed_byte_decodes_to_itself_or_not_at_all(data: st.DataObject) -> None:
    good = bytearray(encode(GOOD))
    good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        message = decode(Outer, bytes(good), max_bytes=1000)
    except MalformedMessage:
        return
    assert encode(message) == bytes(good)


@pytest.mark.parametrize(
    "raw",
    [
        "96cd0007a46e616d65c404626c6f6291 92c3cb3fe0000000000000 92fdc2 c0",  # 7 as a 16-bit integer
        "9607a46e616d65c404626c6f629192c3cb3fe000000000000092fdc2c000",  # a byte behind the end
        "9607a46e616d65c401629192c3cb3fe000000000000092fdc2c0",  # a blob of one byte
        "9607a46e616d65c404626c6f629192c3cb3ff800000000000092fdc2c0",  # a share of 1.5
        "9607a46e616d65c404626c6f629192c3cb7ff800000000000092fdc2c0",  # a share that is NaN
        "9607a46e616d65c404626c6f629192c3ca3f00000092fdc2c0",  # a share in single precision
        "9607a46e616d65c404626c6f629192c301 92fdc2c0",  # a share that is an integer
        "9607a46e616d65c404626c6f629192c3cb3fe000000000000092fd00c0",  # 0 for False
        "9607c4046e616d65c404626c6f629192c3cb3fe000000000000092fdc2c0",  # bytes for a text
        "9507a46e616d65c404626c6f629192c3cb3fe000000000000092fdc2",  # a field too few
        "9707a46e616d65c404626c6f629192c3cb3fe000000000000092fdc2c0c0",  # a field too many
        "9607a46e616d65c404626c6f629192c3cb3fe000000000000093fdc2c2c0",  # a pair of three
        "9607a46e616d65c404626c6f629192c3cb3fe000000000000091fdc0",  # a pair of one
        "82c0c0c1c1",
        "",
    ],
)
def test_every_other_spelling_is_refused(raw: str) -> None:
    with pytest.raises(MalformedMessage):
        decode(Outer, bytes.fromhex(raw), max_bytes=1000)


def test_the_canonical_spelling_is_as_written_here() -> None:
    assert encode(GOOD).hex() == "9607a46e616d65c404626c6f629192c3cb3fe000000000000092fdc2c0"


def test_a_length_is_refused_before_anything_of_that_length_is_made() -> None:
    four_billion_items = bytes.fromhex("ddffffffff")
    with pytest.raises(MalformedMessage, match="not MessagePack"):
        decode(Outer, four_billion_items, max_bytes=1000)
    with pytest.raises(MalformedMessage, match="at most 3"):
        decode(Outer, encode(GOOD), max_bytes=3)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode(Outer, b"\x91" * 100_000, max_bytes=1_000_000)


def test_a_megabyte_of_empty_arrays_is_refused_before_they_are_made() -> None:
    """The parser takes 60 bytes and 0.2 µs for each byte of them: a fifth of a second, in which nothing else is done."""
    many = b"\x9a" + (b"\xdc\xff\xff" + b"\x90" * 65_535) * 10
    for code in wire.messages.CODES:
        tracemalloc.start()
        with pytest.raises(MalformedMessage, match=r"more than \d+ arrays"):
            wire.unpack(bytes([code]) + many)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(many)
        tracemalloc.stop()


def test_as_many_arrays_as_a_class_has_are_read() -> None:
    full = Outer(7, "name", b"blob", (Inner(True, 0.5),) * 3, (-3, False), None)
    assert decode(Outer, encode(full), max_bytes=1000) == full
    parts = tuple((index, tuple(range(wire.MAX_ROSTER))) for index in range(wire.MAX_PARTS))
    names = bytes(wire.NAME_BYTES * wire.MAX_ROSTER)
    have = wire.Have(wire.Slot("a" * 52, 1, bytes(32)), bytes(32), b"", parts, names, bytes(32))
    assert wire.unpack(wire.pack(have)) == have


def test_what_nobody_could_accept_is_not_sent() -> None:
    with pytest.raises(LocalError, match="count"):
        encode(Outer(1001, "", b"ab", (), (0, True), None))


def test_a_refusal_names_the_field_however_deep() -> None:
    with pytest.raises(LocalError, match=r"Outer\.rows\[1\]\.share: 2\.0 is not a finite number between 0 and 1$"):
        encode(Outer(1, "", b"ab", (Inner(True, 0.5), Inner(True, 2.0)), (0, True), None))
    with pytest.raises(MalformedMessage, match=r"^Outer\.name: expected str, got bytes$"):
        decode(Outer, bytes.fromhex("9607c40161c404626c6f629192c3cb3fe000000000000092fdc2c0"), max_bytes=1000)


def test_a_field_without_a_limit_cannot_be_used() -> None:
    @dataclass(frozen=True, slots=True)
    class Unlimited:
        text: str

    with pytest.raises(LocalError, match="needs a limit"):
        encode(Unlimited("any"))
