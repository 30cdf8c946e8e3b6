"""The owner's statements: what holds, how copies merge, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from flockstep.dht.keys import member_key, statements_key
from flockstep.dht.published import validate_published
from flockstep.dht.records import MAX_LIFETIME, MAX_RECORD_BYTES, Record
from flockstep.dht.run import statements as limits
from flockstep.dht.run.statements import (
    ABOUT_RUN,
    MAX_OWNER_LOG_BYTES,
    MAX_OWNER_STATEMENTS,
    MAX_STATED_REASON,
    OWNER_KIND,
    STATEMENTS_PER_PAGE,
    OwnerStatement,
    OwnerStatements,
    OwnerVerb,
    StatementRecords,
    next_page,
    open_statement,
    pages_of,
    unpack_statements,
)
from flockstep.peer.base.errors import BadSignature, LocalError, MalformedMessage, ProtocolViolation, RemoteError
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from hypothesis import given
from hypothesis import strategies as st

RUN = "a" * 52
OWNER, ANNA, BERT, CARL = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3, 4))
NONE = OwnerStatements(RUN, OWNER.peer_id)


def stated(*decisions: tuple[str, Identity], reason: str = "", until: int = 0) -> OwnerStatements:
    log = NONE
    for verb, about in decisions:
        log = log.sign(OWNER, OwnerStatement(verb, about.peer_id, reason, until))
    return log


def long_log(count: int) -> OwnerStatements:
    return stated(*[("ban", (ANNA, BERT, CARL)[number % 3]) for number in range(count)])


LONG = long_log(2 * STATEMENTS_PER_PAGE + 5)


def test_the_later_statement_about_a_peer_holds() -> None:
    log = stated(("vouch", ANNA), ("ban", BERT), ("vouch", BERT), ("revoke", ANNA), ("ban", CARL), ("pardon", CARL))
    assert not log.vouched
    assert log.revoked == {ANNA.peer_id}
    assert (log.bans, log.pardons) == ({BERT.peer_id: ""}, {CARL.peer_id: 0})
    assert list(log.in_force) == [2, 3, 4, 6]
    again = log.sign(OWNER, OwnerStatement("vouch", ANNA.peer_id)).sign(OWNER, OwnerStatement("pardon", BERT.peer_id))
    assert again.vouched == {ANNA.peer_id, BERT.peer_id}
    assert not again.revoked
    assert not again.bans


def test_no_statement_about_admission_lifts_a_ban() -> None:
    for verb in ("vouch", "revoke"):
        assert ANNA.peer_id in stated(("ban", ANNA), (verb, ANNA)).bans
    assert stated(("revoke", ANNA), ("ban", ANNA), ("pardon", ANNA)).revoked == {ANNA.peer_id}


def test_only_the_owner_states_and_never_about_itself() -> None:
    with pytest.raises(LocalError, match="only the owner"):
        NONE.sign(ANNA, OwnerStatement("ban", BERT.peer_id))
    with pytest.raises(LocalError, match="nothing about itself"):
        NONE.sign(OWNER, OwnerStatement("ban", OWNER.peer_id))


def test_a_full_log_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OWNER_STATEMENTS", 3)
    with pytest.raises(LocalError, match="takes no more") as raised:
        long_log(4)
    assert "a new run" in raised.value.remedy


# Merging

logs = st.integers(0, len(LONG)).map(lambda count: replace(LONG, records=LONG.records[:count]))
other_third = st.sampled_from([("pardon", ANNA), ("vouch", CARL), ("ban", BERT)])


@st.composite
def copies(draw: st.DrawFn) -> OwnerStatements:
    """What a peer may hold: a prefix, or that of an owner that signed some numbers twice."""
    base = draw(logs)
    kept = min(len(base), draw(st.integers(0, 6)))
    other = replace(base, records=base.records[:kept])
    for verb, about in draw(st.lists(other_third, max_size=3)):
        other = other.sign(OWNER, OwnerStatement(verb, about.peer_id, "the other computer"))
    return draw(st.sampled_from([base, other]))


@given(copies(), copies(), copies())
def test_merging_is_commutative_associative_and_idempotent(
    a: OwnerStatements, b: OwnerStatements, c: OwnerStatements
) -> None:
    assert a.merge(b.records) == b.merge(a.records)
    assert a.merge(b.records).merge(c.records) == a.merge(b.merge(c.records).records)
    assert a.merge(a.records) == a
    assert a.merge(b.records).hash == b.merge(a.records).hash


@given(logs, st.lists(st.sampled_from(LONG.records), max_size=40))
def test_no_old_copy_takes_a_statement_back(held: OwnerStatements, others: list[Record]) -> None:
    merged = held.merge(others)
    assert merged.records[: len(held)] == held.records
    assert merged.records == LONG.records[: len(merged)]
    known = {record.sequence for record in (*held.records, *others)}
    assert len(merged) == len(LONG) or len(merged) + 1 not in known


def test_statements_of_others_are_refused() -> None:
    elsewhere = OwnerStatements("b" * 52, OWNER.peer_id).sign(OWNER, OwnerStatement("ban", ANNA.peer_id))
    strangers = OwnerStatements(RUN, ANNA.peer_id).sign(ANNA, OwnerStatement("ban", BERT.peer_id))
    for log in (elsewhere, strangers):
        with pytest.raises(ProtocolViolation, match="a statement of"):
            NONE.merge(log.records)
    (record,) = stated(("ban", ANNA)).records
    with pytest.raises(BadSignature):
        NONE.merge([replace(record, body=encode(OwnerStatement("ban", BERT.peer_id)))])


def record_of(
    sequence: int = 1, kind: str = OWNER_KIND, body: bytes = encode(OwnerStatement("ban", ANNA.peer_id))
) -> Record:
    return Record.sign(OWNER, run=RUN, kind=kind, sequence=sequence, lifetime=MAX_LIFETIME, body=body)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (record_of(sequence=0), "of the number 0"),
        (record_of(sequence=MAX_OWNER_STATEMENTS + 1), "of the number 4097"),
        (record_of(kind="member"), "expected an 'owner' record"),
        (record_of(body=encode(OwnerStatement("ban", OWNER.peer_id))), "about itself"),
        (record_of(body=encode(OwnerStatement("revise", ANNA.peer_id, settings="{}"))), "stated about the owner"),
        (
            record_of(body=encode(OwnerStatement("ban", ANNA.peer_id)).replace(b"ban", b"b\nn")),
            "nothing that an owner states",
        ),
        (record_of(body=encode(OwnerStatement("ban", ANNA.peer_id)).replace(b"12D3", b"12DE")), "not a peer id"),
    ],
)
def test_what_is_no_statement_is_refused_though_the_owner_signed_it(record: Record, why: str) -> None:
    with pytest.raises(RemoteError, match=why):
        NONE.merge([record])


def test_a_reason_has_a_limit() -> None:
    log = stated(("ban", ANNA), reason="x" * MAX_STATED_REASON)
    assert open_statement(log.records[0]).reason == "x" * MAX_STATED_REASON
    with pytest.raises(LocalError):
        stated(("ban", ANNA), reason="x" * (MAX_STATED_REASON + 1))


# Pages of the directory


def page_of(records: Sequence[Record]) -> bytes:
    return encode(StatementRecords(tuple(record.encode() for record in records)))


def test_a_longer_page_is_a_newer_one() -> None:
    pages = dict(pages_of(LONG))
    assert {
        number: validate_published(statements_key(RUN, OWNER.peer_id, number), page) for number, page in pages.items()
    } == {
        0: STATEMENTS_PER_PAGE,
        1: STATEMENTS_PER_PAGE,
        2: 5,
    }
    assert next_page(LONG) == 2
    assert next_page(replace(LONG, records=LONG.records[:STATEMENTS_PER_PAGE])) == 1
    assert unpack_statements(LONG.packed) == LONG.records


def test_the_longest_statements_fit_a_page_and_a_full_log_its_limit() -> None:
    longest = record_of(body=encode(OwnerStatement("pardon", ANNA.peer_id, "x" * MAX_STATED_REASON, 1 << 62)))
    assert len(page_of([longest] * STATEMENTS_PER_PAGE)) < MAX_RECORD_BYTES
    assert len(page_of([longest] * MAX_OWNER_STATEMENTS)) < MAX_OWNER_LOG_BYTES


@pytest.mark.parametrize(
    ("page", "value"),
    [
        (0, page_of(LONG.records[1:3])),
        (0, page_of([LONG.records[0], LONG.records[2]])),
        (0, page_of([LONG.records[0], LONG.records[0]])),
        (0, page_of(LONG.records[: STATEMENTS_PER_PAGE + 1])),
        (1, page_of(LONG.records[:2])),
        (64, page_of(LONG.records[:2])),
        (0, page_of(OwnerStatements(RUN, ANNA.peer_id).sign(ANNA, OwnerStatement("ban", BERT.peer_id)).records)),
        (0, page_of(OwnerStatements("b" * 52, OWNER.peer_id).sign(OWNER, OwnerStatement("ban", BERT.peer_id)).records)),
        (0, page_of([replace(LONG.records[0], signature=bytes(64))])),
        (0, LONG.records[0].encode()),
        (0, b""),
    ],
)
def test_what_is_no_page_is_refused(page: int, value: bytes) -> None:
    with pytest.raises(RemoteError):
        validate_published(statements_key(RUN, OWNER.peer_id, page), value)


@pytest.mark.parametrize("key", [statements_key(RUN, OWNER.peer_id, 0) + suffix for suffix in ("0", " ", "/", "x")])
def test_a_page_has_one_key(key: str) -> None:
    with pytest.raises(RemoteError):
        validate_published(key, page_of(LONG.records[:3]))
    with pytest.raises(RemoteError):
        validate_published(member_key(RUN, OWNER.peer_id), page_of(LONG.records[:3]))


@given(st.binary(max_size=200), st.integers(0, 1000), st.binary(max_size=12))
def test_no_bytes_raise_anything_but_the_errors_of_strangers(junk: bytes, position: int, put: bytes) -> None:
    sample = page_of(LONG.records[:2])
    position %= len(sample)
    for data in (junk, sample[:position] + put + sample[position + len(put) :]):
        try:
            assert NONE.merge(unpack_statements(data)).records == LONG.records[:2]
        except RemoteError:
            continue


def test_more_bytes_than_a_log_has_are_not_read() -> None:
    with pytest.raises(MalformedMessage, match="at most"):
        unpack_statements(bytes(MAX_OWNER_LOG_BYTES + 1))


def test_every_verb_is_a_statement() -> None:
    about = {verb: OWNER if verb in ABOUT_RUN else ANNA for verb in OwnerVerb}
    assert {open_statement(record).verb for it in about.items() for record in stated(it).records} == set(OwnerVerb)


def test_another_verb_is_malformed() -> None:
    known = encode(OwnerStatement("vouch", ANNA.peer_id))
    record = Record.sign(
        OWNER, run=RUN, kind=OWNER_KIND, sequence=1, lifetime=MAX_LIFETIME, body=known.replace(b"vouch", b"heard")
    )
    with pytest.raises(MalformedMessage, match="'heard' is nothing that an owner states"):
        NONE.merge([record])
