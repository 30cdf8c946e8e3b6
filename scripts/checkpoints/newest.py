"""The newest state in a home folder: also while its peer moves its checkpoint on, or was killed at that.

A peer has one checkpoint, and overwrites it leaf by leaf (`collectives.state.move`). So the parameters are read with their
hashes, and anew if the checkpoint has moved on meanwhile. One whose peer has ended in the middle is completed first. The
outputs of the rounds after it lead on to the newest state that is certified.
"""

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...collectives.chain.chain import position_after
from ...collectives.chain.ledger import Ledger
from ...collectives.spec import charter_of
from ...collectives.state.archive import LEDGER_FILE, OUTPUTS_FOLDER
from ...collectives.state.checkpoint_file import DESCRIPTION, Checkpoint, load_checkpoint
from ...collectives.state.move import Mover, is_moving, rounds_between
from ...collectives.vector.arrays import Floats
from ...collectives.vector.codec import codec_named
from ...dht.run.manifest import SignedManifest
from ...dht.run.revision import revised_by
from ...optim.member.apply import leaf_step
from ...optim.step.outer import OuterSettings
from ...peer.base.disk import disk_errors
from ...peer.base.errors import LocalError, OtherProtocol, RemoteError, UsageError
from ...peer.base.home_lock import HOME_LOCK, home_lock, is_locked
from ...peer.log.telemetry import Telemetry
from ...peer.wire.signed import verify_signed

ATTEMPTS = 3
"""A peer moves its checkpoint on every few minutes, and reading takes less: a second attempt meets no second move."""
MOVE_SECONDS = 600.0
"""Seconds to wait for a peer that moves its checkpoint on: 8 GB onto a slow disk."""
MOVE_POLL = 0.2


def open_newest(source: Path) -> tuple[Checkpoint, Floats]:
    """Return the newest checkpoint that `source` names (see `find_checkpoint`), and its θ. Raises `FlockstepError`.

    Of a home folder or a run's both are of the last round that the disk leads to, which is the returned one's `place`.
    """
    for attempt in range(ATTEMPTS):
        try:
            checkpoint = load_checkpoint(_settled(source))
            later = None if (source / DESCRIPTION).exists() else _later(checkpoint)
            return later or (checkpoint, checkpoint.read_theta())
        except LocalError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def find_checkpoint(source: Path) -> Path:
    """Return the folder of the newest checkpoint in a home folder or a run's folder, or `source` if it is one.

    Raises `UsageError` if there is none, or if there are several runs.
    """
    if (source / DESCRIPTION).exists():
        return source
    if (source / "checkpoints").is_dir():
        rounds = [path for path in (source / "checkpoints").iterdir() if path.name.isdigit()]
        if rounds:
            return max(rounds, key=lambda path: int(path.name))
    runs = sorted(path.parent for path in source.glob("runs/*/checkpoints") if any(path.glob("*/" + DESCRIPTION)))
    if len(runs) > 1:
        names = " ".join(str(run) for run in runs)
        raise UsageError(f"{source} holds {len(runs)} runs", remedy=f"name the folder of one: {names}")
    if not runs:
        raise UsageError(
            f"there is no checkpoint in {source}",
            remedy="name a home folder in which a peer has trained, or the folder of a checkpoint",
        )
    return find_checkpoint(runs[0])


def manifest_beside(folder: Path) -> SignedManifest:
    """Return the manifest of the run whose checkpoint lies in a folder. Raises `UsageError`."""
    path = folder.resolve().parent.parent / "manifest"
    try:
        return SignedManifest.decode(path.read_bytes())
    except OtherProtocol as error:
        raise UsageError(f"{path}: {error}", remedy=error.remedy) from error
    except (OSError, RemoteError) as error:
        remedy = "name a home folder, or a checkpoint where its peer has left it, in runs/RUN/checkpoints"
        raise UsageError(f"the run of {folder} is not known: {path}: {error}", remedy=remedy) from error


def _later(checkpoint: Checkpoint) -> tuple[Checkpoint, Floats] | None:
    """Return a checkpoint at the newest state of its run's folder, and its θ; None if the disk leads to none after it."""
    run = checkpoint.folder.resolve().parent.parent
    if not (run / LEDGER_FILE).exists():
        return None
    charter = charter_of(signed := manifest_beside(checkpoint.folder))
    with disk_errors(f"read {run / LEDGER_FILE}"):
        ledger = Ledger.beside(run / LEDGER_FILE, charter, verify_signed, Telemetry())
    mover = _mover(run, signed)
    for number in range(ledger.head.round, checkpoint.place.round, -1):  # Its peer may be about to write the newest outputs.
        if (certificate := ledger.certificate(number)) is None:
            break
        place = position_after(certificate, checkpoint.run, charter)
        rounds = rounds_between(ledger, checkpoint.place, place)
        if rounds and (theta := mover.theta_at(checkpoint, place, rounds)) is not None:
            return replace(checkpoint, place=place), theta
    return None


def _mover(run: Path, signed: SignedManifest) -> Mover:
    outer, codec = OuterSettings.of(signed.manifest), codec_named(signed.manifest.codec.result)
    return Mover(run / OUTPUTS_FOLDER, leaf_step(outer, codec, partial(revised_by, signed)))


def _settled(source: Path) -> Path:
    """Return the folder of the newest checkpoint once nobody moves it on."""
    deadline = time.monotonic() + MOVE_SECONDS
    while is_moving(folder := find_checkpoint(source)):
        run = folder.resolve().parent.parent
        home = run.parent.parent
        if not is_locked(home / HOME_LOCK):
            mover = _mover(run, manifest_beside(folder))
            with home_lock(home, pid=os.getpid()):
                return mover.complete(folder).folder
        if time.monotonic() > deadline:
            raise LocalError(f"{folder} is still being moved on to a later round", remedy="try again later")
        time.sleep(MOVE_POLL)
    return folder
