"""Signed records: a round trip is the identity, and other bytes are refused."""

from dataclasses import replace

import pytest
from flockstep.dht.records import MAX_BODY_BYTES, MAX_LIFETIME, MAX_RECORD_BYTES, MAX_SEQUENCE, Record
from flockstep.peer.base.errors import BadSignature, LocalError, MalformedMessage, RemoteError
from flockstep.peer.identity import Identity
from hypothesis import given, settings
from hypothesis import strategies as st

ME = Identity.from_seed(bytes(32))
OTHER = Identity.from_seed(bytes([1]) * 32)
RECORD = Record.sign(ME, run="a run", kind="member", sequence=7, lifetime=60.0, body=b"body")

texts = st.text(max_size=16)
changes = st.tuples(st.integers(0, 10_000), st.binary(max_size=8), st.integers(0, 8))


def mutate(data: bytes, position: int, insert: bytes, skip: int) -> bytes:
    """`data` with a few bytes exchanged, added or left out."""
    position %= len(data) + 1
    return data[:position] + insert + data[position + skip :]


@given(texts, st.integers(0, MAX_SEQUENCE), st.floats(0, MAX_LIFETIME), st.binary(max_size=100))
def test_a_record_survives_the_wire(run: str, sequence: int, lifetime: float, body: bytes) -> None:
    record = Record.sign(ME, run=run, kind="member", sequence=sequence, lifetime=lifetime, body=body)
    again = Record.decode(record.encode())
    again.check()
    assert again == record
    assert again.peer == ME.peer_id


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another"},
        {"kind": "manifest"},
        {"peer": OTHER.peer_id},
        {"peer": "not a peer id"},
        {"sequence": 8},
        {"lifetime": 61.0},
        {"body": b"Body"},
        {"signature": bytes(64)},
    ],
)
def test_the_signature_covers_every_field(change: dict[str, object]) -> None:
    with pytest.raises(BadSignature):
        replace(RECORD, **change).check()  # type: ignore[arg-type]


def test_a_signature_made_for_something_else_is_none_of_a_record() -> None:
    blank = replace(RECORD, signature=bytes(64))
    with pytest.raises(BadSignature):
        replace(RECORD, signature=ME.sign(blank.encode())).check()


def test_limits_hold_on_both_sides() -> None:
    largest = Record.sign(
        ME, run="r" * 64, kind="k" * 16, sequence=MAX_SEQUENCE, lifetime=MAX_LIFETIME, body=bytes(MAX_BODY_BYTES)
    )
    assert Record.decode(largest.encode()) == largest
    with pytest.raises(LocalError):
        Record.sign(ME, run="", kind="k", sequence=0, lifetime=1.0, body=bytes(MAX_BODY_BYTES + 1))
    with pytest.raises(MalformedMessage, match="at most"):
        Record.decode(bytes(MAX_RECORD_BYTES + 1))


@given(changes)
@settings(max_examples=300)
def test_no_other_bytes_pass(change: tuple[int, bytes, int]) -> None:
    data = mutate(RECORD.encode(), *change)
    try:
        record = Record.decode(data)
        record.check()
    except RemoteError:
        return
    assert record == RECORD
    assert data == RECORD.encode()
