"""What a peer keeps on its disk: checkpoints beside the training, outputs of rounds, and what a new life makes of them."""

import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.chain.kept_outputs import IN_MEMORY
from flockstep.collectives.state import checkpoint_file, merkle
from flockstep.collectives.state.archive import Archive
from flockstep.collectives.state.checkpoint_file import STATE, Draft
from flockstep.collectives.state.transfer import ask_offers
from flockstep.peer.errors import NetworkError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.file_blob import FileBlob
from flockstep.peer.wire import StateAsk
from support.restoring_peer import Fledgling, all_of, catch_up
from support.swarm import RUN, Flock, with_flock

CELLS = 20
EVERY = 2
Body = Callable[[Flock, list[Fledgling]], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


def fly(count: int, body: Body, folder: Path) -> None:
    async def main(flock: Flock) -> None:
        await body(flock, [Fledgling(bird) for bird in flock.birds])

    run_virtual(lambda: with_flock(count, main, cells=CELLS, home=(folder, EVERY)))


async def train(birds: list[Fledgling], rounds: int) -> None:
    """Rounds as in production: a checkpoint of each state for which it is time."""
    for bird in birds:
        await bird.serve_state()
    for _ in range(rounds):
        await all_of(birds, 1)
        for bird in birds:
            await bird.serve_state()


def rounds_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def test_every_so_many_rounds_a_checkpoint_and_the_outputs_that_lead_on_from_the_older_one(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        home = tmp_path / birds[0].bird.peer
        await train(birds, 0)
        assert rounds_in(home / "checkpoints") == [0]
        oldest = merkle.leaves(birds[0].bird.theta)
        await train(birds, 7)
        assert not [key for key in oldest if birds[0].bird.node.blobs.find(key, "anybody") is not None]
        assert [event["round"] for event in birds[0].named("checkpoint.written")] == [0, 2, 4, 6]
        assert rounds_in(home / "checkpoints") == [4, 6]
        assert rounds_in(home / "outputs") == [4, 5, 6, 7]
        (newest, older) = await ask_offers(birds[1].bird.node, [birds[0].bird.peer], RUN)
        assert (newest.place.round, older.place.round) == (6, 4)
        for outcome in birds[0].bird.outcomes:
            for key in outcome.outputs:
                kept = birds[0].bird.node.blobs.find(key, "anybody")
                if outcome.slot.round < 4:
                    assert kept is None
                elif outcome.slot.round < 7:
                    assert isinstance(kept, FileBlob)
                    assert kept.is_sound(key)
                else:  # The newest ones are in memory.
                    assert kept is not None
                    assert not isinstance(kept, FileBlob)

    fly(3, body, tmp_path)


def test_while_outputs_are_being_written_they_are_served_from_memory(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        node = birds[0].bird.node
        real, seen = node.compute, list[bool]()

        async def watched(function: Callable[..., Any], *arguments: Any) -> Any:
            if getattr(function, "__name__", "") == "_write" and isinstance(arguments[-1], Mapping):
                seen.extend(node.blobs.find(key, "anybody") is not None for key in arguments[-1])
            return await real(function, *arguments)

        node.compute = watched  # type: ignore[method-assign]
        await all_of(birds, 2)
        assert len(seen) == 4
        assert all(seen)

    fly(2, body, tmp_path)


def test_a_round_that_lands_while_the_state_is_written_voids_the_draft_and_the_next_is_written(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        bird = birds[0]
        await train(birds, 1)
        await all_of(birds, 1)
        leaves = merkle.leaves(bird.bird.theta) + merkle.leaves(bird.bird.momentum)
        kept = bird.bird.momentum.copy()
        bird.bird.momentum[-1] += 1
        await bird.archive.checkpoints.write(bird.place, bird.state, leaves)
        bird.bird.momentum[:] = kept
        (void,) = bird.named("checkpoint.void")
        assert void["round"] == 2
        assert not list((tmp_path / bird.bird.peer / "checkpoints").glob("*" + checkpoint_file.DRAFT_SUFFIX))
        await all_of(birds, 1)
        await bird.serve_state()
        assert [event["round"] for event in bird.named("checkpoint.written")] == [0, 3]

    fly(2, body, tmp_path)


async def begin_again(flock: Flock, index: int) -> Fledgling:
    """The next life of a bird, with what its folder holds."""
    bird = Fledgling(await flock.restart(index))
    await bird.catch_up.restore()
    bird.bird.averager.expect(bird.place.round + 1, bird.place.certificate)
    return bird


@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 7])
def test_a_new_life_begins_where_the_disk_ends_and_goes_on(tmp_path: Path, rounds: int) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        await train(birds, rounds)
        ends = [bird.place.head for bird in birds]
        roots = {bird.bird.root for bird in birds}
        for bird in birds:
            bird.ledger.close()
        again = [await begin_again(flock, index) for index in range(3)]
        assert [bird.place.head for bird in again] == [bird.ledger.head for bird in again] == ends
        assert {bird.bird.root for bird in again} == roots
        for bird in again:
            (restored,) = bird.named("state.restored")
            assert restored["round"] == rounds
            assert restored["checkpoint"] == rounds - rounds % EVERY
            assert not bird.named("replay.failed")
            assert bird.catch_up.num_bytes == 0
            await bird.serve_state()
            assert not bird.named("checkpoint.written")  # The one that it has is enough until the next is due.
        await train(again, 1)
        assert {bird.place.round for bird in again} == {rounds + 1}

    fly(3, body, tmp_path)


def test_without_resume_it_is_as_if_nothing_were_there(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        await train(birds, 3)
        node, spec = birds[0].bird.node, birds[0].bird.averager._spec
        archive = await Archive.open(node, spec, tmp_path / birds[0].bird.peer, (), every=EVERY, resume=False)
        assert archive.checkpoints.newest(archive.ledger) is None
        assert not await ask_offers(birds[1].bird.node, [birds[0].bird.peer], RUN)

    fly(2, body, tmp_path)


def break_(path: Path, how: str) -> None:
    if how == "cut off":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "changed":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut off", "changed", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, how: str) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        await train(birds, 5)
        root = birds[0].bird.root
        break_(tmp_path / birds[0].bird.peer / "checkpoints" / "4" / STATE, how)
        again = await begin_again(flock, 0)
        assert len(again.named("checkpoint.damaged")) == 1
        assert again.named("state.restored")[0]["checkpoint"] == 2
        assert (again.place.round, again.bird.root) == (5, root)

    fly(2, body, tmp_path)


@pytest.mark.parametrize("how", ["cut off", "changed", "gone"])
def test_a_damaged_output_ends_the_replay_and_others_have_it(tmp_path: Path, how: str) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        await train(birds, 7)
        (path, *_) = sorted((tmp_path / birds[0].bird.peer / "outputs" / "7").iterdir())
        break_(path, how)
        ends, root = birds[0].place.head, birds[0].bird.root
        again = await begin_again(flock, 0)
        assert again.place.round == 6
        assert "nobody has an output" in str(again.named("replay.failed")[0]["reason"])
        assert again.ledger.head == ends  # What is known is not forgotten before others have been asked.
        await again.catch_up.hash_state()
        await catch_up(again, birds[1:])
        assert (again.place.head, again.bird.root) == (ends, root)
        assert FileBlob(path, 0, path.stat().st_size).is_sound(bytes.fromhex(path.name))

    fly(3, body, tmp_path)


def test_a_checkpoint_of_a_chain_that_was_left_is_not_begun_with(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        await train(birds, 4)
        mine, others = birds[0], birds[1:]
        flock.birds.remove(mine.bird)  # It is alone from here on, and so are the others.
        await all_of(others, 3)
        alone = flock.birds
        flock.birds = [mine.bird]
        await all_of([mine], 1)
        mine.archive.checkpoints._owed = True
        await mine.serve_state()
        flock.birds = [mine.bird, *alone]
        await mine.catch_up.hash_state()
        mine.ledger.follow([c for number in range(5, 8) if (c := others[0].ledger.certificate(number)) is not None])
        again = await begin_again(flock, 0)
        assert again.named("state.restored")[0]["checkpoint"] == 4
        assert again.place.round <= 7

    fly(3, body, tmp_path)


class BrokenDisk:
    """Writing fails as on a full disk, from the n-th write on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        for name in ("write", "fsync", "replace", "ftruncate"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))
        monkeypatch.setattr(Path, "write_bytes", self.failing(Path.write_bytes))

    def failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return do


@pytest.mark.parametrize("after", range(0, 60, 3))
def test_a_disk_that_fails_at_any_write_costs_what_was_to_be_written_and_nothing_else(
    tmp_path: Path, after: int
) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            BrokenDisk(patch, after)
            await train(birds, 6)
        assert {bird.place.round for bird in birds} == {6}
        assert len({bird.bird.root for bird in birds}) == 1
        told = {str(event["event"]) for bird in birds for event in bird.bird.events if "unwritten" in str(event["event"])}
        assert {"outputs.unwritten", "checkpoint.unwritten", "ledger.unwritten"} <= told
        for bird in birds:  # Those who missed the last rounds get them from memory.
            for outcome in bird.bird.outcomes[-IN_MEMORY:]:
                assert all(bird.bird.node.blobs.get(key, "anybody") is not None for key in outcome.outputs)
        await train(birds, EVERY)
        assert {bird.place.round for bird in birds} == {6 + EVERY}
        for bird in birds:
            assert bird.named("checkpoint.written")[-1]["round"] == 6 + EVERY
            assert rounds_in(tmp_path / bird.bird.peer / "checkpoints")[-1] == 6 + EVERY
        again = await begin_again(flock, 0)
        assert again.bird.root == birds[1].bird.root

    fly(2, body, tmp_path)


def test_a_disk_that_fails_while_a_state_is_taken_costs_the_checkpoint_only(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        *others, late = birds
        flock.birds.remove(late.bird)
        await train(others, 4)
        for vector in late.state:
            vector[:] = np.arange(vector.size)
        await late.catch_up.hash_state()
        members = [other.member() for other in others]
        with pytest.MonkeyPatch.context() as patch:
            BrokenDisk(patch, 5)
            await late.catch_up._take_checkpoint(members[0], members)
        assert late.bird.root == others[0].bird.root
        assert late.named("checkpoint.unwritten")
        assert not list((tmp_path / late.bird.peer / "checkpoints").iterdir())
        assert not late.archive.checkpoints.drafted(4)

    fly(3, body, tmp_path)


def test_a_draft_that_is_there_decides_which_of_two_checkpoints_is_taken(tmp_path: Path) -> None:
    async def body(flock: Flock, birds: list[Fledgling]) -> None:
        *others, late = birds
        flock.birds.remove(late.bird)
        await train(others, 4)
        Draft(tmp_path / late.bird.peer / "checkpoints" / "2", CELLS * 256).close()
        for vector in late.state:
            vector[:] = np.arange(vector.size)
        await late.catch_up.hash_state()
        members = [other.member() for other in others]
        offer, following = await late.catch_up._choose(members[0], members)
        assert (offer.place.round, len(following)) == (2, 2)
        shutil.rmtree(tmp_path / late.bird.peer / "checkpoints")
        offer, following = await late.catch_up._choose(members[0], members)
        assert (offer.place.round, len(following)) == (4, 0)
        for other in others:
            other.bird.node.on_ask(StateAsk, refuse)
        with pytest.raises(NetworkError, match="nobody offers a checkpoint"):
            await late.catch_up._choose(members[0], members)

    fly(3, body, tmp_path)


async def refuse(peer: str, question: object) -> object:
    raise NetworkError("not today")
