"""Takes over what this computer holds of a run into the one that goes on from it: state, progress, invitation, consent."""

from pathlib import Path

from ...collectives.state.archive import CHECKPOINTS_FOLDER
from ...collectives.state.checkpoint_file import begin_with
from ...dht.members.remembered import Remembered
from ...dht.run.manifest import SignedManifest
from ...dht.run.succession import why_not_follow
from ...peer.base.disk import write_whole
from ...peer.base.errors import LocalError
from ...peer.log.telemetry import Telemetry

MAX_HANDED_BYTES = 1 << 20
HANDED_OVER = ("agreed", "agreed-keep", "data.json", "ticket")
"""Of a run's folder: that its user has agreed to it, which parts of the data are trained, and its invitation."""


def hand_over(home: Path, after: SignedManifest, telemetry: Telemetry) -> None:
    """Make the state in which a run ended, and its small files, those of the run that goes on, unless that has its own.

    Only where this computer follows it by the owner's word, and the manifest of the run before is here, by the same owner and
    with the same model and data: its user has agreed to that one. What fails is an event: this peer takes the state from the
    others then, or asks its user again.
    """
    follows = after.manifest.follows
    before, folder = home / "runs" / follows.run, home / "runs" / after.run_id
    remembered = Remembered(before, follows.run, telemetry)
    earlier = remembered.manifest() if follows.run else None
    if earlier is None or why_not_follow(earlier, after) or remembered.successor() != after.run_id:
        return
    try:
        for name in HANDED_OVER:
            old, new = before / name, folder / name
            if old.is_file() and not new.exists() and old.stat().st_size <= MAX_HANDED_BYTES:
                write_whole(new, old.read_bytes(), private=name == "ticket")
        state, start = before / CHECKPOINTS_FOLDER / str(follows.round), folder / CHECKPOINTS_FOLDER / "0"
        is_new = not start.parent.is_dir() or not any(start.parent.iterdir())
        if is_new and state.is_dir():
            begin_with(state, start, after.run_id, bytes.fromhex(after.manifest.start))
            telemetry.emit("state.handed_over", step="follow", round=follows.round, root=after.manifest.start)
    except (OSError, LocalError) as error:
        telemetry.emit("state.not_handed_over", step="follow", reason=str(error), round=follows.round)
