"""Members that were parted from each other, with the real participant: who is on the branch that gives way follows."""

from functools import partial
from pathlib import Path

import pytest
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, Peer, all_at, in_memory, kept_run


def last_cut(peer: Peer) -> list[str]:
    done = peer.named("round.done")[-1]["cut"]
    assert isinstance(done, list)
    return sorted(map(str, done))


@pytest.mark.parametrize("seed", [0, 7])  # With 7 a keeper without a vote comes to a round that the others are in.
def test_two_keepers_that_went_on_apart_are_one_chain_again_with_their_trainers(tmp_path: Path, seed: int) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(number) for number in (0, 1)]
        trainers = [run.train(number, seconds=0.2) for number in (2, 3)]
        peers = [*keepers, *trainers]
        names = sorted(peer.peer for peer in trainers)
        await run.until(lambda: all_at(peers, 3))
        run.network.partition(*([keeper.peer, trainer.peer] for keeper, trainer in zip(keepers, trainers, strict=True)))
        parted = [peer.round for peer in trainers]
        await run.until(lambda: all(peer.round > before + 8 for peer, before in zip(trainers, parted, strict=True)))
        run.network.heal()
        await run.until(lambda: [last_cut(peer) for peer in peers] == [names] * 4, seconds=120.0)
        assert len({str(peer.named("round.done")[-1]["root"]) for peer in peers}) == 1

    run_virtual(partial(in_memory, kept_run(2, stall="present"), tmp_path, body, seed=seed), seed=seed)


@pytest.mark.parametrize("seconds", [0.2, 5.0])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.explore) for seed in (1, 2))])
def test_two_voters_that_went_on_alone_are_one_chain_again_however_fast_they_train(
    tmp_path: Path, seconds: float, seed: int
) -> None:
    async def body(run: KeptRun) -> None:
        both = [run.train(number, seconds=seconds) for number in (0, 1)]
        names = sorted(peer.peer for peer in both)
        await run.until(lambda: all_at(both, 3))
        run.network.partition([names[0]], [names[1]])
        parted = [peer.round for peer in both]
        await run.until(lambda: all(peer.round > before + 8 for peer, before in zip(both, parted, strict=True)))
        run.network.heal()
        await run.until(lambda: [last_cut(peer) for peer in both] == [names] * 2, seconds=120.0)
        assert both[0].named("round.done")[-1]["root"] == both[1].named("round.done")[-1]["root"]

    run_virtual(partial(in_memory, kept_run(2, stall="present"), tmp_path, body, seed=seed), seed=seed)
