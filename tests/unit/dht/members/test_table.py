"""The member table: what it learns, whom it counts, and that any two tables converge."""

import math
from dataclasses import replace

import pytest
from flockstep.dht.members.body import MEMBER_ADDRESSES, MemberBody, MemberState, fitted, open_member
from flockstep.dht.members.table import LIFETIME, OTHER_PROCESS, PAGE, SUMMARY, MemberTable, Merge, MergeOutcome
from flockstep.dht.members.vouchers import tag_of
from flockstep.dht.records import MAX_LIFETIME, Record
from flockstep.dht.run.admission import Charter
from flockstep.dht.run.layout import NO_LAYOUT, LayoutPin
from flockstep.peer.base.errors import BadSignature, LocalError, MalformedMessage, ProtocolViolation
from flockstep.peer.base.transport import Rung
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

RUN = "a" * 52
ME, *OTHERS = sorted((Identity.from_seed(bytes([n]) * 32) for n in range(5)), key=lambda identity: identity.peer_id)
ANNA, BERT = OTHERS[:2]
TRAINING = MemberBody(MemberState.TRAINING, ("/ip4/192.0.2.1/tcp/4001",), Rung.DIRECT, device="cpu", loss=1.5)


def say(
    identity: Identity, sequence: int, body: MemberBody = TRAINING, *, run: str = RUN, lifetime: float = LIFETIME
) -> Record:
    return Record.sign(identity, run=run, kind="member", sequence=sequence, lifetime=lifetime, body=encode(body))


def merge(table: MemberTable, record: Record, now: float) -> Merge:
    """Merge a record and meet its peer."""
    merged = table.merge(record, now)
    assert table.meet(record.peer, now) == ""
    return merged


def merge_any(table: MemberTable, record: Record) -> None:
    table.merge(record, 0.0)
    table.meet(record.peer, 0.0)


def counted(table: MemberTable, now: float) -> list[str]:
    return [member.peer for member in table.active(now)]


def test_who_trains_another_model_than_the_manifest_pins_is_no_member_and_nobody_is_charged() -> None:
    pin = LayoutPin.of([("a", (300,)), ("b", (2, 2))])
    charter = Charter(layout=pin.hash, cells=pin.cells(256))
    table = MemberTable(RUN, ME.peer_id, charter=charter)
    mine, keeper = (replace(TRAINING, layout=layout, num_cells=3) for layout in (pin.hash, NO_LAYOUT))
    for number, body in enumerate((replace(mine, layout=b"x" * 32), replace(mine, num_cells=4)), 1):
        refused = table.merge(say(ANNA, number, body), 0.0)
        assert (refused.outcome, len(table)) == (MergeOutcome.REFUSED, 0)
        assert "the run's manifest pins" in refused.reason
        assert MemberTable(RUN, ME.peer_id).merge(say(ANNA, number, body), 0.0).outcome is MergeOutcome.NEW
    for number, body in enumerate((keeper, replace(keeper, num_cells=9), mine, replace(mine, num_cells=0)), 3):
        assert table.merge(say(ANNA, number, body), 0.0).outcome in (MergeOutcome.NEW, MergeOutcome.UPDATED)


@given(st.lists(st.lists(st.integers(1, 70), max_size=3).map(tuple), min_size=1, max_size=5))
def test_the_cells_of_a_layout_lie_where_its_pin_says(shapes: list[tuple[int, ...]]) -> None:
    pin = LayoutPin.of((str(number), shape) for number, shape in enumerate(shapes))
    assert sum(-(-math.prod(shape) // 64) for shape in shapes) in pin.cells(64)
    assert LayoutPin.parse(str(pin)) == pin


def test_the_higher_sequence_wins_whatever_the_order() -> None:
    table = MemberTable(RUN, ME.peer_id)
    leaving = replace(TRAINING, state=MemberState.LEAVING)
    assert table.merge(say(ANNA, 3), 0.0).outcome is MergeOutcome.NEW
    assert table.merge(say(ANNA, 3), 0.0) == Merge(MergeOutcome.STALE, "already known")
    assert table.merge(say(ANNA, 2, leaving), 0.0).outcome is MergeOutcome.STALE
    assert table.merge(say(ANNA, 3, leaving), 0.0).outcome is MergeOutcome.STALE
    merge = table.merge(say(ANNA, 4, leaving), 0.0)
    assert (merge.outcome, merge.reason) == (MergeOutcome.UPDATED, "training -> leaving")
    row = table.get(ANNA.peer_id)
    assert row is not None
    assert row.body == leaving
    assert row.body.rung == "direct"


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (replace(say(ANNA, 1), sequence=2), BadSignature),
        (say(ANNA, 1, run="b" * 52), ProtocolViolation),
        (Record.sign(ANNA, run=RUN, kind="manifest", sequence=1, lifetime=1.0, body=b""), ProtocolViolation),
        (Record.sign(ANNA, run=RUN, kind="member", sequence=1, lifetime=1.0, body=b"junk"), MalformedMessage),
    ],
)
def test_a_bad_record_is_charged_to_its_carrier(record: Record, error: type[Exception]) -> None:
    table = MemberTable(RUN, ME.peer_id)
    with pytest.raises(error):
        table.merge(record, 0.0)
    assert len(table) == 0


def test_an_unknown_word_is_no_state_and_no_rung() -> None:
    good = encode(TRAINING)
    for word, other in ((b"training", b"sleeping"), (b"direct", b"indire")):
        body = good.replace(word, other)
        assert body != good
        with pytest.raises(MalformedMessage, match="is not a valid"):
            open_member(Record.sign(ANNA, run=RUN, kind="member", sequence=1, lifetime=1.0, body=body))
    with pytest.raises(LocalError):
        encode(replace(TRAINING, loss=float("nan")))


def test_my_own_records_grow_and_outlive_a_restart() -> None:
    table = MemberTable(RUN, ME.peer_id, sequence=1000)
    first, second = (table.update_own(ME, TRAINING, now) for now in (0.0, 1.0))
    assert 1000 < first.sequence < second.sequence
    assert "this process" in table.merge(first, 1.0).reason
    assert counted(table, 1e9) == [ME.peer_id]
    assert table.expire(1e9) == ()
    assert not table.lose(ME.peer_id, 1.0, "silent")
    again = MemberTable(RUN, ME.peer_id, sequence=0)
    assert again.merge(second, 0.0) == Merge(MergeOutcome.REFUSED, OTHER_PROCESS)
    assert len(again) == 0
    assert again.update_own(ME, TRAINING, 0.0).sequence > second.sequence


def test_three_ways_not_to_count_any_more() -> None:
    table = MemberTable(RUN, ME.peer_id)
    anna, bert, carl, dora = OTHERS
    for identity in OTHERS:
        merge(table, say(identity, 1), 0.0)
    merge(table, say(anna, 2, MemberBody(MemberState.LEFT)), 1.0)
    assert table.lose(bert.peer_id, 2.0, "silent")
    assert not table.lose(bert.peer_id, 3.0, "silent")
    assert not table.lose("a stranger", 3.0, "silent")
    merge(table, say(carl, 2), 30.0)
    for now in (59.0, 118.0, 170.0):
        table.meet(carl.peer_id, now)
        table.meet(dora.peer_id, now)
    assert counted(table, LIFETIME - 1) == [carl.peer_id, dora.peer_id]
    assert counted(table, LIFETIME) == [carl.peer_id]
    assert table.expire(LIFETIME) == ((dora.peer_id, "its record expired"),)
    assert table.expire(LIFETIME + 1) == ()
    gone = {member.peer: member.gone for member in table}
    assert gone == {
        anna.peer_id: "it left",
        bert.peer_id: "silent",
        carl.peer_id: "",
        dora.peer_id: "its record expired",
    }
    assert [member.peer for member in table] == sorted(gone)


def test_only_a_newer_record_brings_a_member_back() -> None:
    table = MemberTable(RUN, ME.peer_id)
    old = say(ANNA, 1)
    merge(table, old, 0.0)
    table.expire(LIFETIME)
    assert table.merge(old, LIFETIME).outcome is MergeOutcome.STALE
    assert counted(table, LIFETIME) == []
    merge(table, say(ANNA, 2), LIFETIME)
    assert counted(table, LIFETIME) == [ANNA.peer_id]
    table.lose(ANNA.peer_id, LIFETIME, "silent")
    merge(table, say(ANNA, 3), LIFETIME)
    assert counted(table, LIFETIME) == [ANNA.peer_id]


def test_who_speaks_again_counts_again_unless_it_left_or_ran_out() -> None:
    table = MemberTable(RUN, ME.peer_id)
    merge(table, say(ANNA, 1), 0.0)
    merge(table, say(BERT, 1), 0.0)
    assert not table.regain(ANNA.peer_id, 1.0)  # It was never lost.
    table.lose(ANNA.peer_id, 1.0, "silent")
    assert table.regain(ANNA.peer_id, 2.0)
    assert counted(table, 2.0) == [BERT.peer_id]  # It has not been met since.
    table.meet(ANNA.peer_id, 2.0)
    assert counted(table, 2.0) == sorted([ANNA.peer_id, BERT.peer_id])
    table.lose(ANNA.peer_id, 3.0, "silent")
    assert not table.regain(ANNA.peer_id, LIFETIME)
    merge(table, say(BERT, 2, replace(TRAINING, state=MemberState.LEFT)), 3.0)
    assert not table.regain(BERT.peer_id, 4.0)
    assert not table.regain("a stranger", 4.0)
    assert counted(table, 4.0) == []


def test_nobody_reserves_a_place_for_longer_than_others() -> None:
    table = MemberTable(RUN, ME.peer_id)
    merge(table, say(ANNA, 1, lifetime=MAX_LIFETIME), 0.0)
    merge(table, say(BERT, 1, lifetime=5.0), 0.0)
    assert counted(table, 5.0) == [ANNA.peer_id]
    table.meet(ANNA.peer_id, LIFETIME - 1)
    assert counted(table, LIFETIME - 1) == [ANNA.peer_id]
    assert counted(table, LIFETIME) == []


def test_a_full_table_forgets_whoever_is_gone_longest_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.dht.members.table.MAX_MEMBERS", 3)
    anna, bert, carl, dora = OTHERS
    table = MemberTable(RUN, ME.peer_id)
    merge(table, say(anna, 1), 0.0)
    merge(table, say(bert, 1), 0.0)
    assert table.merge(say(carl, 1), 0.0).outcome is MergeOutcome.FULL
    table.update_own(ME, TRAINING, 0.0)
    assert len(table) == 3
    assert merge(table, say(anna, 2), 0.0).outcome is MergeOutcome.UPDATED
    table.lose(bert.peer_id, 1.0, "silent")
    table.lose(anna.peer_id, 2.0, "silent")
    assert merge(table, say(dora, 1), 3.0).outcome is MergeOutcome.NEW
    assert {member.peer for member in table} == {ME.peer_id, anna.peer_id, dora.peer_id}


def test_expired_records_are_not_handed_on_but_their_sequence_is_known() -> None:
    table = MemberTable(RUN, ME.peer_id)
    merge(table, say(ANNA, 7), 0.0)
    assert table.newer_than(b"", 0.0) == (say(ANNA, 7),)
    assert table.newer_than(SUMMARY.pack(tag_of(ANNA.peer_id), 6), 0.0) == (say(ANNA, 7),)
    assert table.newer_than(SUMMARY.pack(tag_of(ANNA.peer_id), 7), 0.0) == ()
    assert table.newer_than(b"", LIFETIME) == ()
    table.expire(LIFETIME)
    assert table.summary() == SUMMARY.pack(tag_of(ANNA.peer_id), 7)


def test_a_summary_that_ends_within_an_entry_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="no summary"):
        MemberTable(RUN, ME.peer_id).newer_than(bytes(SUMMARY.size + 1), 0.0)


@given(st.lists(st.tuples(st.sampled_from(OTHERS), st.integers(0, 5), st.booleans()), max_size=20))
@settings(max_examples=50, deadline=None)
def test_two_tables_agree_after_one_exchange(heard: list[tuple[Identity, int, bool]]) -> None:
    left, right = MemberTable(RUN, ME.peer_id), MemberTable(RUN, ME.peer_id)
    for identity, sequence, to_left in heard:
        merge_any(left if to_left else right, say(identity, sequence))
    for record in left.newer_than(right.summary(), 0.0):
        merge_any(right, record)
    for record in right.newer_than(left.summary(), 0.0):
        merge_any(left, record)
    assert left.summary() == right.summary()
    assert left.active(0.0) == right.active(0.0)


def test_a_big_table_is_handed_over_page_by_page() -> None:
    full, empty = MemberTable(RUN, ME.peer_id), MemberTable(RUN, ME.peer_id)
    for number in range(PAGE + 1):
        merge(full, say(Identity.from_seed((number + 1).to_bytes(32, "big")), 1), 0.0)
    sizes = []
    while page := full.newer_than(empty.summary(), 0.0):
        sizes.append(len(page))
        for record in page:
            empty.merge(record, 0.0)
    assert sizes == [PAGE, 1]
    assert empty.summary() == full.summary()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 2.5, None])
def test_figures_that_a_record_has_no_room_for_are_clamped_and_named(loss: float | None) -> None:
    relays = tuple(f"/ip4/198.51.100.{n}/tcp/4001/p2p/{ANNA.peer_id}/p2p-circuit" for n in range(2))
    many = ("/dns4/" + "a" * 300 + "/tcp/1", *(f"/ip4/192.0.2.{n}/tcp/4001" for n in range(40)), *relays)
    body = replace(TRAINING, addresses=many, loss=loss, tokens_per_s=1e16)
    with pytest.raises(LocalError):
        encode(body)
    clamped, reason = fitted(body)
    assert decode(MemberBody, encode(clamped), max_bytes=6000) == clamped
    assert len(clamped.addresses) == MEMBER_ADDRESSES
    assert clamped.addresses[0] == many[1]
    assert clamped.addresses[-2:] == relays
    assert clamped.loss == (loss if loss is not None and math.isfinite(loss) else None)
    assert "43 addresses to 16" in reason
    assert ("the loss" in reason) == (clamped.loss != loss)
    assert fitted(clamped) == (clamped, "")
