"""Snapshots: the size of a big run, the signature, and files that are none."""

import itertools
import json
from dataclasses import replace

import pytest
from flockstep.collectives.picture.picture import Credit, Picture, RecentRound
from flockstep.collectives.picture.snapshot import (
    MAX_ROWS_SHOWN,
    MAX_SNAPSHOT_BYTES,
    check_snapshot,
    encode_snapshot,
    figures_of,
    round_columns,
)
from flockstep.peer.base.errors import LocalError, MalformedMessage
from flockstep.peer.identity import Identity
from support.pictures import big_picture

ME = Identity.from_seed(bytes(range(32)))


@pytest.fixture(scope="module")
def picture() -> Picture:
    return big_picture(64, 400)


def test_a_run_of_64_peers_and_5000_rounds_has_less_than_a_megabyte(picture: Picture) -> None:
    rows = tuple(replace(picture.rounds[-1], round=number) for number in range(1, 5_001))
    data = encode_snapshot(replace(picture, rounds=rows), "0.1.0", ME)
    assert len(data) < MAX_SNAPSHOT_BYTES
    figures = json.loads(data)
    assert len(figures["recent"]) == 200
    assert len(figures["rounds"]["round"]) == 5_000
    first = figures["recent"][0]
    assert [figures["peers"][place] for place in first["cut"]] == list(picture.recent[0].cut)
    assert figures["taken_by"] == ME.peer_id


def test_a_snapshot_is_checked_by_its_bytes(picture: Picture) -> None:
    data = encode_snapshot(picture, "0.1.0", ME)
    assert check_snapshot(data + b"\n") == figures_of(picture, "0.1.0") | {"taken_by": ME.peer_id}
    other = Identity.generate().peer_id.encode()
    for changed in (data.replace(b'"round":399', b'"round":398', 1), data.replace(ME.peer_id.encode(), other)):
        assert changed != data
        with pytest.raises(MalformedMessage, match="has not signed it"):
            check_snapshot(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]" + b',"signature":"' + b"0" * 128 + b'"}',
        b'{"taken_by":5' + b',"signature":"' + b"0" * 128 + b'"}',
        b'{"a":1' + b',"signature":"' + b"x" * 128 + b'"}',
        b"[" * 100_000 + b',"signature":"' + b"0" * 128 + b'"}',
        b"\xff" * 500,
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        check_snapshot(data)


def test_of_too_many_rounds_by_name_the_oldest_are_left_out(picture: Picture) -> None:
    reason = "x" * 200
    away = tuple((peer, reason) for peer in picture.recent[0].roster)
    data = encode_snapshot(replace(picture, recent=tuple(replace(row, away=away) for row in picture.recent)), "0.1.0", ME)
    assert len(data) <= MAX_SNAPSHOT_BYTES
    assert check_snapshot(data)["recent"][0]["round"] == 400


def test_a_very_long_run_is_thinned_but_for_its_end(picture: Picture) -> None:
    rows = [replace(picture.rounds[0], round=number) for number in range(1, 20_001)]
    rounds = round_columns(rows)["round"]
    assert len(rounds) <= MAX_ROWS_SHOWN
    assert rounds[0] == 1
    assert rounds[-1_000:] == list(range(19_001, 20_001))


def test_a_thinned_run_grows_at_its_end(picture: Picture) -> None:
    rows = [replace(picture.rounds[0], round=number) for number in range(1, 20_001)]
    columns = [round_columns(rows[:count])["round"] for count in range(19_010, 19_030)]
    assert all(later[:-1] == earlier for earlier, later in itertools.pairwise(columns))


def test_rounds_with_ever_other_members_and_long_names_still_fit(picture: Picture) -> None:
    def crowded(number: int) -> RecentRound:
        names = tuple(f"12D3KooW{number:06d}{place:04d}".ljust(52, "x") for place in range(64))
        return replace(picture.recent[0], round=400 - number, roster=names, cut=names, flagged=(), away=(), voters=names[:5])

    rows = tuple(replace(picture.rounds[0], round=number, tokens=10**15 + number) for number in range(1, 20_001))
    credit = tuple(Credit(str(number).zfill(52), "\U0001f600" * 64, 10**12, 10**4) for number in range(512))
    big = replace(picture, recent=tuple(map(crowded, range(200))), rounds=rows, credit=credit)
    figures = check_snapshot(encode_snapshot(big, "0.1.0", ME))
    assert figures["rounds"]["round"][-1] == 20_000
    assert figures["members"]
    assert 0 < len(figures["recent"]) < 200
    assert len(figures["peers"]) < 200 * 64
    credit = tuple(replace(one, name="x" * 50_000) for one in credit)
    figures = check_snapshot(encode_snapshot(replace(big, credit=credit), "0.1.0", ME))
    assert 0 < len(figures["credit"]) < 512
    with pytest.raises(LocalError, match="more than 1,048,576 bytes"):
        encode_snapshot(replace(picture, link="x" * MAX_SNAPSHOT_BYTES), "0.1.0", ME)
