"""The newest checkpoint of a home folder: also of a peer that was killed while it moved it on, or is just doing that."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.chain import position_after
from flockstep.collectives.chain.kept_outputs import outputs_in
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.spec import charter_of
from flockstep.collectives.state import merkle
from flockstep.collectives.state.archive import LEDGER_FILE
from flockstep.collectives.state.checkpoint_file import load_checkpoint
from flockstep.collectives.state.move import Mover, is_moving
from flockstep.collectives.vector.arrays import Floats
from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.base.home_lock import home_lock
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.signed import verify_signed
from flockstep.scripts.checkpoints.newest import open_newest
from support import killed_moves
from support.certificates import RUN, certify, decided, grow, seats

OWNER = Identity.generate()


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


def half_moved(home: Path) -> tuple[Mover, Path, Floats]:
    """A home folder whose peer ended while it moved its checkpoint on to the state with this θ."""
    run = home / "runs" / RUN
    state = killed_moves.start(run / "checkpoints")
    rounds = killed_moves.train(state, run / "outputs")
    place = position_after(grow(None, 3, mark=merkle.root(killed_moves.leaves_of(state)))[-1], RUN)
    manifest = Manifest(OWNER.peer_id, "half moved on", Data("text:{stdlib}"), outer=killed_moves.MANIFEST.outer)
    (run / "manifest").write_bytes(SignedManifest.sign(manifest, OWNER).publishable)
    mover, folder = Mover(run / "outputs", killed_moves.STEP), run / "checkpoints" / "0"
    assert mover.begin(load_checkpoint(folder), place, killed_moves.leaves_of(state), rounds)
    syncs = count()

    def fsync(fd: int) -> None:
        if next(syncs) == 4:
            raise OSError(errno.EIO, "the power has failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(LocalError, match="the power has failed"):
            mover.complete(folder)
    assert is_moving(folder)
    return mover, folder, state[0]


def test_a_checkpoint_whose_peer_was_killed_is_completed(tmp_path: Path) -> None:
    _, folder, theta = half_moved(tmp_path)
    checkpoint, found = open_newest(tmp_path)
    assert np.array_equal(found, theta)
    assert checkpoint.folder == folder.with_name("3")
    assert not is_moving(checkpoint.folder)


def left_after(home: Path) -> tuple[Path, list[Floats]]:
    """A home folder whose peer left three rounds after its checkpoint: its run's folder, and θ after each round."""
    identity = Identity.generate()
    manifest = Manifest(identity.peer_id, "left", Data("text:{stdlib}"), outer=killed_moves.MANIFEST.outer)
    signed = SignedManifest.sign(manifest, identity)
    run = home / "runs" / signed.run_id
    state = killed_moves.start(run / "checkpoints", signed.run_id)
    (run / "manifest").write_bytes(signed.publishable)
    root, before = merkle.root(killed_moves.leaves_of(state)), None
    ledger = Ledger.open(
        run / LEDGER_FILE, signed.run_id, verify=verify_signed, telemetry=Telemetry(), charter=charter_of(signed)
    )
    again, thetas = (state[0].copy(), state[1].copy()), [state[0].copy()]
    for planned in killed_moves.train(state, run / "outputs"):
        blobs = outputs_in(run / "outputs")[planned.round]
        killed_moves.STEP(*again, 0, planned, [blobs[key].read(key) or b"" for key in planned.outputs])
        drawn = certify(before, 100, roster=(identity,), run=signed.run_id)
        members = len(planned.outputs)
        value = replace(
            value_of(drawn),
            base_root=root,
            next_root=(root := merkle.root(killed_moves.leaves_of(again))),
            members=tuple(sorted([identity.peer_id, *(Identity.generate().peer_id for _ in range(members - 1))])),
            seats=seats(members),
            bounds=planned.bounds,
            outputs=planned.outputs,
        )
        before = decided(value, drawn.slot.at(0, 0), (identity,))  # The owner is the only keeper.
        ledger.append(before)
        thetas.append(again[0].copy())
    return run, thetas


def test_a_home_is_at_the_last_round_that_its_disk_leads_to(tmp_path: Path) -> None:
    run, thetas = left_after(tmp_path)
    checkpoint, theta = open_newest(tmp_path)
    assert (checkpoint.place.round, theta.tobytes()) == (3, thetas[3].tobytes())
    assert checkpoint.place.root == checkpoint.place.certified
    old, theta = open_newest(run / "checkpoints" / "0")  # The folder of a checkpoint is that one.
    assert (old.place.round, theta.tobytes()) == (0, thetas[0].tobytes())


@pytest.mark.parametrize(("damaged", "round_"), [(3, 2), (1, 0)])
def test_a_damaged_output_leads_no_further(tmp_path: Path, damaged: int, round_: int) -> None:
    run, thetas = left_after(tmp_path)
    (path,) = (run / "outputs" / str(damaged)).iterdir()
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    checkpoint, theta = open_newest(tmp_path)
    assert (checkpoint.place.round, theta.tobytes()) == (round_, thetas[round_].tobytes())


def test_a_checkpoint_that_its_peer_moves_on_is_waited_for(tmp_path: Path) -> None:
    mover, folder, theta = half_moved(tmp_path)
    with home_lock(tmp_path, pid=os.getpid()), ThreadPoolExecutor(1) as threads:
        reading = threads.submit(open_newest, tmp_path)
        assert not reading.done()
        mover.complete(folder)
        assert np.array_equal(reading.result()[1], theta)


def test_a_half_moved_checkpoint_without_its_run_is_refused(tmp_path: Path) -> None:
    _, folder, _ = half_moved(tmp_path)
    (folder.parents[1] / "manifest").unlink()
    with pytest.raises(UsageError, match="is not known"):
        open_newest(tmp_path)
