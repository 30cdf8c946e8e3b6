"""What is said of a snapshot's file."""

from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.picture.snapshot import encode_snapshot
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.scripts.watch.snapshot import check_file
from support.pictures import BEGAN, big_picture


def test_a_check_says_when_it_was_taken_and_refuses_a_time_that_is_none(tmp_path: Path) -> None:
    picture, file, said = replace(big_picture(4, 2), taken_at=BEGAN), tmp_path / "run.json", list[str]()
    me = Identity.generate()
    file.write_bytes(encode_snapshot(picture, "0.1.0", me))
    check_file(file, said.append)
    assert "taken at  2023-11-14 22:13 UTC (by who has taken it)" in said
    file.write_bytes(encode_snapshot(replace(picture, taken_at=1e300), "0.1.0", me))
    with pytest.raises(UsageError, match="is not a valid snapshot"):
        check_file(file, said.append)
