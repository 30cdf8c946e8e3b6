"""Runs that start from a given state: it comes from its holders, and the seed's state takes its place nowhere."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.chain import start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import Draft
from flockstep.collectives.vector.codec import CELL
from flockstep.dht.run.manifest import Admission, SignedManifest
from flockstep.peer.base.transport import PeerId
from flockstep.peer.memory.network import run_virtual
from support.keepers import CELLS, TENSORS, KeptRun, all_at, in_memory, kept_run, key

KEEPER = 10
THETA = np.linspace(3, 4, CELLS * CELL).astype(np.float32)
LEAVES = merkle.leaves(THETA) + merkle.leaves(np.zeros_like(THETA))
ROOT = merkle.root(LEAVES)


def started_run(**changes: Any) -> SignedManifest:
    manifest = kept_run(1, first=KEEPER).manifest
    return SignedManifest.sign(replace(manifest, start=ROOT.hex(), **changes), key(KEEPER))


def give(peer: PeerId, signed: SignedManifest, folder: Path) -> None:
    """Put the first state where the peer looks for its checkpoint."""
    draft = Draft(folder / peer / "checkpoints" / "0", THETA.size)
    for index, vector in enumerate((THETA, np.zeros_like(THETA))):
        draft.put(index, merkle.leaf_bytes(vector, 0, vector.size))
    draft.finish(signed.run_id, start_of_run(ROOT), TENSORS, LEAVES)


def live(body: Callable[[KeptRun], Any], folder: Path, signed: SignedManifest) -> None:
    run_virtual(partial(in_memory, signed, folder, body), seed=0)


def test_newcomers_wait_for_a_holder_of_the_given_state_and_start_from_it(tmp_path: Path) -> None:
    signed = started_run()

    async def body(run: KeptRun) -> None:
        trainers = [run.train(number) for number in range(2)]
        await trio.sleep(300)
        for trainer in trainers:
            assert [event["reason"] for event in trainer.named("state.awaited")] == [
                "the run starts from a given state, and no member that holds it is here"
            ]
            assert not trainer.named("state.synced")
        give(key(KEEPER).peer_id, signed, tmp_path)
        keeper = run.keep(KEEPER)
        await run.until(lambda: all_at([keeper, *trainers], 2), 300)
        for trainer in trainers:
            assert trainer.named("state.synced")[0]["root"] == ROOT.hex()
        assert keeper.keeper is not None
        assert keeper.keeper.kept is not None
        first = keeper.keeper.kept.archive.ledger.certificate(1)
        assert first is not None
        assert value_of(first).base_root == ROOT
        late = run.keep(KEEPER + 1)  # It has no vote, and no model either.
        await run.until(lambda: all_at([late], 3), 300)
        assert len({peer.at[1] for peer in (late, keeper, *trainers) if peer.at[0] == late.at[0]}) == 1

    live(body, tmp_path, signed)


@pytest.mark.parametrize("resume", [True, False])
def test_a_founder_that_trains_starts_only_from_the_given_state(tmp_path: Path, resume: bool) -> None:
    """Without `resume` it does not look at its disk: then nobody has the state, and the seed's is none."""
    signed = started_run(admission=Admission(voters="members"))
    give(key(KEEPER).peer_id, signed, tmp_path)

    async def body(run: KeptRun) -> None:
        owner = run.train(KEEPER, resume=resume)
        other = run.train(0)
        if resume:
            await run.until(lambda: all_at([owner, other], 2), 300)
            assert owner.named("state.restored")[0]["root"] == ROOT.hex()
            assert other.named("state.synced")[0]["root"] == ROOT.hex()
        else:
            await trio.sleep(300)
            assert owner.named("state.awaited")
            assert owner.round == other.round == 0
            assert not owner.named("state.synced") + other.named("state.synced")

    live(body, tmp_path, signed)
