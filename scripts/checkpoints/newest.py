"""The newest state in a home folder, also while its peer trains.

A peer has one checkpoint, and deletes it once a newer one is whole. So the parameters are read with their hashes, and anew if
the checkpoint is gone meanwhile. The outputs of the rounds after it lead on to the newest state that is certified.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...collectives.chain.certificate import value_of
from ...collectives.chain.chain import position_after
from ...collectives.chain.kept_outputs import outputs_in
from ...collectives.chain.ledger import Ledger
from ...collectives.spec import charter_of
from ...collectives.state.archive import LEDGER_FILE, OUTPUTS_FOLDER
from ...collectives.state.checkpoint_file import DESCRIPTION, Checkpoint, load_checkpoint
from ...collectives.vector.arrays import Floats
from ...collectives.vector.codec import codec_named
from ...dht.run.manifest import SignedManifest
from ...dht.run.revision import revised_by
from ...optim.member.apply import OuterState
from ...optim.step.outer import OuterSettings
from ...peer.base.digest import digest
from ...peer.base.disk import disk_errors
from ...peer.base.errors import LocalError, OtherProtocol, RemoteError, UsageError
from ...peer.log.telemetry import Telemetry
from ...peer.wire.signed import verify_signed

ATTEMPTS = 3
"""A peer writes a checkpoint every few minutes, and reading takes less: a second attempt meets no second one."""


def open_newest(source: Path) -> tuple[Checkpoint, Floats]:
    """Return the newest checkpoint that `source` names (see `find_checkpoint`), and its θ. Raises `FlockstepError`.

    Of a home folder or a run's both are of the last round that the disk leads to, which is the returned one's `place`.
    """
    for attempt in range(ATTEMPTS):
        try:
            checkpoint = load_checkpoint(find_checkpoint(source))
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
        outputs = outputs_in(run / OUTPUTS_FOLDER)
    theta, momentum = (np.empty(checkpoint.size, np.float32) for _ in range(2))
    checkpoint.copy_to((theta, momentum))
    state = OuterState(theta, momentum, OuterSettings.of(signed.manifest), codec_named(signed.manifest.codec.result))
    place = checkpoint.place
    while (certificate := ledger.certificate(place.round + 1)) is not None:
        value, kept = value_of(certificate), {digest(b""): b""}
        kept |= {key: data for key, blob in outputs.get(value.round, {}).items() if (data := blob.read(key)) is not None}
        if value.base_root != place.root or not kept.keys() >= set(value.outputs):
            break
        try:
            manifest = revised_by(signed, b"" if place.certificate is None else value_of(place.certificate).revision)
            state.use(OuterSettings.of(manifest).at(value.round), codec_named(manifest.codec.result))
            step = value.bounds, [kept[key] for key in value.outputs]
            if state.next_root(*step) != value.next_root:
                break
        except RemoteError:  # A damaged output.
            break
        state.apply(*step)
        place = position_after(certificate, checkpoint.run, charter)
    return (replace(checkpoint, place=place), theta) if place.round > checkpoint.place.round else None
