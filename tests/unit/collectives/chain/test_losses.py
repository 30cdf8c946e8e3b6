"""The losses of rounds on disk: sparse, bounded, and of no weight if the disk fails."""

import math
import struct
from pathlib import Path

from flockstep.collectives.chain.losses import MAX_NOTED_ROUNDS, Losses, known_losses
from flockstep.peer.log.telemetry import Telemetry
from support.recorded import recorded


def test_losses_outlive_a_restart_with_gaps_and_within_a_bound(tmp_path: Path) -> None:
    losses = Losses(tmp_path / "losses", Telemetry())
    assert losses.since(1, 16) == ()
    for round_, loss in ((2, 3.5), (5, 2.0), (3, None), (5, 1.5), (MAX_NOTED_ROUNDS + 1, 9.0)):
        losses.note(round_, loss)
    again = Losses(tmp_path / "losses", Telemetry())
    assert again.since(1, 16) == (0.0, 3.5, 0.0, 0.0, 1.5)
    assert again.since(2, 2) == (3.5, 0.0)
    assert known_losses(1, again.since(1, 16)) == {2: 3.5, 5: 1.5}
    assert (tmp_path / "losses").stat().st_size == 5 * 4
    again.learn({})
    again.learn({MAX_NOTED_ROUNDS + 1: 9.0, 4: 4.0, 5: 9.0})
    assert again.since(1, 16) == (0.0, 3.5, 0.0, 4.0, 1.5)
    (tmp_path / "losses").write_bytes(struct.pack("<3f", 2.0, math.nan, math.inf) + b"?")
    assert again.since(1, 16) == (2.0, 0.0, 0.0)


def test_a_disk_that_fails_is_an_event(tmp_path: Path) -> None:
    telemetry, events = recorded()
    Losses(tmp_path / "gone" / "losses", telemetry).note(1, 2.0)
    assert [event["event"] for event in events] == ["losses.unwritten"]
