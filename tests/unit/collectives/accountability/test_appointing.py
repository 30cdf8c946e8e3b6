"""The memory of whoever appoints: one appointment a term, through restarts, lost and damaged disks."""

from pathlib import Path

import pytest
from flockstep.collectives.accountability.appointing import MAX_APPOINTED_BYTES, AppointmentRecord
from flockstep.peer import wire
from flockstep.peer.base.errors import LocalError
from flockstep.peer.wire.signed import open_signed
from hypothesis import given
from hypothesis import strategies as st
from support.swarm import identities

ME, *OTHERS = identities(4)
IDS = tuple(sorted(other.peer_id for other in OTHERS))
SLOT = wire.Slot("a" * 52, 3, b"p" * 32, 2)


def test_a_term_is_appointed_once_also_after_a_restart(tmp_path: Path) -> None:
    first = AppointmentRecord(ME, tmp_path).sign(SLOT, IDS)
    assert open_signed(first[0]) == first[1] == wire.Appointment(SLOT, IDS)
    again = AppointmentRecord(ME, tmp_path)
    assert again.newest == again.sign(SLOT, IDS) == first
    elsewhere = wire.Slot("a" * 52, 3, b"q" * 32, 2)
    before = wire.Slot("a" * 52, 2, b"p" * 32, 5)
    for slot, voters in ((SLOT, IDS[:2]), (SLOT.at(1, 0), IDS), (elsewhere, IDS), (before, IDS)):
        with pytest.raises(LocalError, match="this key has appointed for term 2 of round 3"):
            again.sign(slot, voters)
    assert again.newest == first


@given(wanted=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), max_size=8))
def test_no_two_appointments_share_a_term(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("record")
    made: dict[tuple[int, int], wire.Appointment] = {}
    for round_, term, num_voters in wanted:
        slot = wire.Slot("a" * 52, round_, b"p" * 32, term)
        try:
            _, appointment = AppointmentRecord(ME, folder).sign(slot, IDS[:num_voters])
        except LocalError:
            continue
        assert made.setdefault((round_, term), appointment) == appointment


def test_what_the_members_show_stands_for_a_lost_record(tmp_path: Path) -> None:
    first = AppointmentRecord(ME, tmp_path / "lost").sign(SLOT, IDS)
    foreign = AppointmentRecord(OTHERS[0], tmp_path / "other").sign(SLOT.at(9, 0), IDS)
    record = AppointmentRecord(ME, tmp_path / "new")
    for shown in (first, foreign):
        record.learn(shown[0])
    assert record.newest == first
    later = record.sign(SLOT.at(3, 0), IDS)
    record.learn(first[0])
    assert record.newest == later


def test_a_damaged_record_is_no_empty_one(tmp_path: Path) -> None:
    record = AppointmentRecord(ME, tmp_path)
    record.sign(SLOT, IDS)
    path = tmp_path / "appointed" / "newest"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + bytes(MAX_APPOINTED_BYTES)):
        path.write_bytes(damaged)
        with pytest.raises(LocalError, match="is damaged"):
            record.sign(SLOT.at(3, 0), IDS)
