"""The newest state of a home folder: where the outputs on its disk lead to from its checkpoint."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.chain import start_of_run
from flockstep.collectives.chain.kept_outputs import OutputIndex, _packed
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.spec import charter_of
from flockstep.collectives.state import merkle
from flockstep.collectives.state.archive import LEDGER_FILE
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.optim.member.apply import OuterState
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.signed import verify_signed
from flockstep.scripts.checkpoints.newest import open_newest
from support.certificates import certify, decided, seats
from support.killed_writes import write

CELLS, BOUNDS = 10, (0, 4, 10)


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


def left_after(home: Path) -> tuple[Path, list[Floats]]:
    """A home folder whose peer left three rounds after its checkpoint: its run's folder, and θ after each round."""
    identity, random = Identity.generate(), np.random.default_rng(0)
    manifest = Manifest(identity.peer_id, "left", Data("text:{stdlib}"))
    outer, codec = OuterSettings.of(manifest), codec_named(manifest.codec.result)
    signed = SignedManifest.sign(manifest, identity)
    run = home / "runs" / signed.run_id
    theta, momentum = (random.normal(size=CELLS * CELL).astype(np.float32) for _ in range(2))
    state = OuterState(theta, momentum, outer, codec)
    write(run / "checkpoints", start_of_run(state.root), (theta, momentum), signed.run_id)
    (run / "manifest").write_bytes(signed.publishable)
    ledger = Ledger.open(
        run / LEDGER_FILE, signed.run_id, verify=verify_signed, telemetry=Telemetry(), charter=charter_of(signed)
    )
    thetas, before = [theta.copy()], None
    for number in range(1, 4):
        mean = random.normal(size=CELLS * CELL).astype(np.float32)
        outputs = [bytes(codec.encode(mean[low * CELL : high * CELL])) for low, high in pairwise(BOUNDS)]
        by_key = {digest(data): data for data in outputs}
        (run / "outputs" / str(number)).mkdir(parents=True)
        with (run / "outputs" / str(number) / "outputs").open("wb") as file:
            file.writelines(_packed(OutputIndex(tuple(by_key), tuple(map(len, by_key.values()))), by_key))
        base = state.root
        state.use(outer.at(number), codec)
        state.apply(BOUNDS, outputs)
        drawn = certify(before, 100, roster=(identity,), run=signed.run_id)
        value = replace(
            value_of(drawn),
            base_root=base,
            next_root=state.root,
            members=tuple(sorted([identity.peer_id, Identity.generate().peer_id])),
            seats=seats(2),
            bounds=BOUNDS,
            outputs=tuple(by_key),
        )
        before = decided(value, drawn.slot.at(0), (identity,))  # The owner is the only keeper.
        ledger.extend([before])
        thetas.append(theta.copy())
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


def test_a_checkpoint_without_its_run_is_refused(tmp_path: Path) -> None:
    run, _ = left_after(tmp_path)
    (run / "manifest").unlink()
    with pytest.raises(UsageError, match="is not known"):
        open_newest(tmp_path)
