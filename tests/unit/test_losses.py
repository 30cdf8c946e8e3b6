"""The laboratory's account of a lost contribution: nobody reads it before something fails, so it is tried here."""

from pathlib import Path

from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry, log_path
from natlab.losses import losses


def test_a_round_without_a_home_is_named_with_every_reason_told_meanwhile(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("one", "other")]
    one, other = (Identity.load_or_create(home / "identity.key").peer_id for home in homes)
    times = (0.0, 1.0, 2.0, 2.5, 4.0), (0.0, 0.5, 2.0, 3.0, 5.0)
    first, second = (Telemetry(log_path(home), clock=iter(at).__next__) for home, at in zip(homes, times, strict=True))
    for log in (first, second):
        log.emit("round.done", round=1, cut=[one, other])
    first.emit("round.said", step="Ready", round=2)
    first.emit("peer.lost", peer=other, reason=f"the stream from {other} is closed")
    first.emit("dial.failed", peer=other, step="lan", reason="unreachable")
    first.emit("round.done", round=2, cut=[one])
    second.emit("state.retry", reason="before the round")
    second.emit("step", loss=1.0)
    second.emit("round.behind", reason="the round was certified", round=2)
    second.emit("state.retry", reason="after the round")
    for log in (first, second):
        log.close()
    assert losses(homes, [1]) == []
    assert losses(homes, [1, 2]) == [
        "round 2: left out of the cut: ['home 1']; without its result: ['home 1']",
        "    1.00 s  home 0: peer.lost  home 1: the stream from home 1 is closed",
        "    2.00 s  home 1: round.behind  : the round was certified",
    ]
    assert losses(homes, [3])[0].endswith("without its result: ['home 0', 'home 1']")
