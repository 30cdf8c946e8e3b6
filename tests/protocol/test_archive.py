"""A peer's archive: checkpoints beside the training, outputs of rounds, and a restart."""

import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.kept_outputs import IN_MEMORY, Outputs
from flockstep.collectives.state import checkpoint_file, merkle
from flockstep.collectives.state.archive import Archive
from flockstep.collectives.state.checkpoint_file import DESCRIPTION, STATE, Draft, load_checkpoint
from flockstep.collectives.state.transfer import ask_offers
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.file_blob import FileBlob
from flockstep.peer.wire import StateAsk
from support.restoring_peer import RestoringPeer, all_of, catch_up
from support.swarm import RUN, SimSwarm, with_swarm

CELLS = 20
EVERY = 2
Body = Callable[[SimSwarm, list[RestoringPeer]], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


def run_rounds(count: int, body: Body, folder: Path) -> None:
    async def main(swarm: SimSwarm) -> None:
        await body(swarm, [RestoringPeer(sim) for sim in swarm.sims])

    run_virtual(lambda: with_swarm(count, main, cells=CELLS, home=(folder, EVERY)))


async def train(sims: list[RestoringPeer], rounds: int) -> None:
    """Rounds as in production: a checkpoint of each state for which it is time."""
    for sim in sims:
        await sim.serve_state()
    for _ in range(rounds):
        await all_of(sims, 1)
        for sim in sims:
            await sim.serve_state()


def rounds_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def test_every_so_many_rounds_a_checkpoint_is_written_and_the_last_outputs_are_kept(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        home = tmp_path / sims[0].sim.peer
        await train(sims, 0)
        assert rounds_in(home / "checkpoints") == [0]
        oldest = merkle.leaves(sims[0].sim.theta)
        await train(sims, 7)
        assert not [key for key in oldest if sims[0].sim.node.blobs.find(key, "anybody") is not None]
        assert [event["round"] for event in sims[0].named("checkpoint.written")] == [0, 2, 4, 6]
        assert rounds_in(home / "checkpoints") == [6]
        assert sorted(path.name for path in (home / "checkpoints" / "6").iterdir()) == [DESCRIPTION, STATE]
        assert rounds_in(home / "outputs") == [4, 5, 6, 7]
        (newest,) = await ask_offers(sims[1].sim.node, [sims[0].sim.peer], RUN)
        assert newest.place.round == 6
        for outcome in sims[0].sim.outcomes:
            for key in outcome.value.outputs:
                kept = sims[0].sim.node.blobs.find(key, "anybody")
                if outcome.slot.round < 4:
                    assert kept is None
                elif outcome.slot.round < 7:
                    assert isinstance(kept, FileBlob)
                    assert kept.is_sound(key)
                else:  # The newest ones are in memory.
                    assert kept is not None
                    assert not isinstance(kept, FileBlob)

    run_rounds(3, body, tmp_path)


def test_who_takes_a_state_and_who_settles_on_it_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        await train(sims, 1)
        peer, folder = sims[0], tmp_path / sims[0].sim.peer / "checkpoints"
        checkpoints, place, state = peer.archive.checkpoints, peer.place, (peer.sim.theta, peer.sim.momentum)
        leaves = [leaf for vector in state for leaf in merkle.leaves(vector)]
        drafts = [checkpoints.begin(place) for _ in range(2)]
        for draft in drafts:
            assert draft is not None
            for index, (vector, span) in enumerate((it, span) for it in state for span in merkle.leaf_spans(it.size)):
                draft.put(index, bytes(merkle.leaf_bytes(vector, *span)))
        for draft in drafts:
            assert draft is not None
            checkpoints.finish(draft, place, leaves)
        assert load_checkpoint(folder / str(place.round)).place == place
        assert [event["round"] for event in peer.named("checkpoint.written")] == [0, 1]

    run_rounds(1, body, tmp_path)


def test_while_outputs_are_being_written_they_are_served_from_memory(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        node = sims[0].sim.node
        real, seen = node.compute, list[bool]()

        async def watched(function: Callable[..., Any], *arguments: Any) -> Any:
            if getattr(function, "__name__", "") == "_write" and isinstance(arguments[-1], Mapping):
                seen.extend(node.blobs.find(key, "anybody") is not None for key in arguments[-1])
            return await real(function, *arguments)

        node.compute = watched  # type: ignore[method-assign]
        await all_of(sims, 2)
        assert len(seen) == 4
        assert all(seen)

    run_rounds(2, body, tmp_path)


def test_however_many_outputs_a_round_has_two_syncs_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = list[int](), os.fsync
    outputs = {digest(bytes([number])): bytes([number]) for number in range(40)}

    async def main(swarm: SimSwarm) -> None:
        node = swarm.sims[0].node
        kept = Outputs(node, tmp_path)

        def fsync(fd: int) -> None:
            synced.append(fd)
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        await kept.keep(1, outputs)
        assert len(synced) == 2  # The file and its name.
        await kept.keep(1, outputs)
        assert len(synced) == 2
        again = Outputs(node, tmp_path)
        await again.load()
        assert {key: again._in_files[1][key].read(key) for key in outputs} == outputs

    run_virtual(lambda: with_swarm(1, main))


def test_outputs_are_written_where_the_write_of_another_round_removes_the_same_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.rmtree

    def after_another(path: Path) -> None:
        real(path)  # What the other thread does between the listing and the removal of this one.
        real(path)

    async def main(swarm: SimSwarm) -> None:
        sim = swarm.sims[0]
        kept = Outputs(sim.node, tmp_path)
        kept.needed = 0
        last = 2 * IN_MEMORY + 1
        for round_ in (1, last):
            monkeypatch.setattr(shutil, "rmtree", after_another if round_ == last else real)
            await kept.keep(round_, {digest(bytes([round_])): bytes([round_])})
        assert not (tmp_path / "1").exists()
        again = Outputs(sim.node, tmp_path)
        await again.load()
        assert digest(bytes([last])) in again
        assert not [event for event in sim.events if event["event"] == "outputs.unwritten"]

    run_virtual(lambda: with_swarm(1, main))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff" * 40, b"\x00\x00\x00\x02\x92", b"\x00\x00\x00\x03\x92\x90\x90\x90"])
def test_a_file_that_holds_no_outputs_is_told_and_the_others_are_served(tmp_path: Path, data: bytes) -> None:
    async def main(swarm: SimSwarm) -> None:
        sim = swarm.sims[0]
        await Outputs(sim.node, tmp_path).keep(1, {digest(b"a"): b"a"})
        (tmp_path / "1" / "0").write_bytes(data)
        (tmp_path / "1" / "f").write_bytes(data)
        kept = Outputs(sim.node, tmp_path)
        await kept.load()
        assert digest(b"a") in kept
        told = [event for event in sim.events if event["event"] == "outputs.unreadable"]
        assert len(told) == (0 if data[-3:] == b"\x90" * 3 else 1)  # An index of nothing, and more.

    run_virtual(lambda: with_swarm(1, main))


def test_a_round_that_lands_while_the_state_is_written_voids_the_draft_and_the_next_is_written(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        sim = sims[0]
        await train(sims, 1)
        await all_of(sims, 1)
        leaves = merkle.leaves(sim.sim.theta) + merkle.leaves(sim.sim.momentum)
        kept = sim.sim.momentum.copy()
        sim.sim.momentum[-1] += 1
        await sim.archive.checkpoints.write(sim.place, sim.state, leaves)
        sim.sim.momentum[:] = kept
        (void,) = sim.named("checkpoint.void")
        assert void["round"] == 2
        assert not list((tmp_path / sim.sim.peer / "checkpoints").glob("*" + checkpoint_file.DRAFT_SUFFIX))
        await all_of(sims, 1)
        await sim.serve_state()
        assert [event["round"] for event in sim.named("checkpoint.written")] == [0, 3]

    run_rounds(2, body, tmp_path)


async def begin_again(swarm: SimSwarm, index: int) -> RestoringPeer:
    """The next life of a sim, with what its folder holds."""
    sim = RestoringPeer(await swarm.restart(index))
    await sim.held.restore()
    sim.sim.averager.expect(sim.place.round + 1, sim.place.certificate)
    return sim


@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 7])
def test_a_new_life_begins_where_the_disk_ends_and_goes_on(tmp_path: Path, rounds: int) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        await train(sims, rounds)
        ends = [sim.place.head for sim in sims]
        roots = {sim.sim.root for sim in sims}
        again = [await begin_again(swarm, index) for index in range(3)]
        assert [sim.place.head for sim in again] == [sim.ledger.head for sim in again] == ends
        assert {sim.sim.root for sim in again} == roots
        for sim in again:
            (restored,) = sim.named("state.restored")
            assert restored["round"] == rounds
            assert restored["checkpoint"] == rounds - rounds % EVERY
            assert not sim.named("replay.failed")
            assert sim.held.num_bytes == 0
            await sim.serve_state()
            assert not sim.named("checkpoint.written")  # The one that it has is enough until the next is due.
        await train(again, 1)
        assert {sim.place.round for sim in again} == {rounds + 1}

    run_rounds(3, body, tmp_path)


def test_without_resume_it_is_as_if_nothing_were_there(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        await train(sims, 3)
        node, spec = sims[0].sim.node, sims[0].sim.averager._spec
        archive = await Archive.open(node, spec, tmp_path / sims[0].sim.peer, (), every=EVERY, resume=False)
        assert archive.checkpoints.newest(archive.ledger) is None
        assert not await ask_offers(sims[1].sim.node, [sims[0].sim.peer], RUN)

    run_rounds(2, body, tmp_path)


def break_(path: Path, how: str) -> None:
    if how == "cut off":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "changed":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize(("how", "share"), [("cut off", 0.6), ("changed", 0.1), ("gone", 1.0)])
def test_a_damaged_checkpoint_is_not_begun_with_and_its_good_leaves_are_not_fetched(
    tmp_path: Path, how: str, share: float
) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        await train(sims, 5)
        root = sims[0].sim.root
        break_(tmp_path / sims[0].sim.peer / "checkpoints" / "4" / STATE, how)
        again = RestoringPeer(await swarm.restart(0))
        for vector in again.state:
            vector[:] = np.arange(vector.size)
        await again.held.restore()
        assert len(again.named("checkpoint.damaged")) == 1
        assert not again.named("state.restored")
        await again.held.hash()
        await catch_up(again, sims[1:])
        assert (again.place.round, again.sim.root) == (5, root)
        taken = again.named("state.taking")
        assert int(str(taken[-1]["total"])) - int(str(taken[0]["bytes"])) == share * 2 * 4 * CELLS * 256
        await trio.sleep(1)
        assert rounds_in(tmp_path / again.sim.peer / "checkpoints") == [4]

    run_rounds(2, body, tmp_path)


def test_of_two_checkpoints_the_newer_one_is_enough(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        await train(sims, 3)
        folder = tmp_path / sims[0].sim.peer / "checkpoints"
        shutil.copytree(folder / "2", tmp_path / "copy")
        await train(sims, 2)
        shutil.copytree(tmp_path / "copy", folder / "2")
        again = await begin_again(swarm, 0)
        (told,) = again.named("checkpoint.superseded")
        assert told["round"] == 2
        assert rounds_in(folder) == [4]
        shutil.copytree(tmp_path / "copy", folder / "2")
        break_(folder / "4" / STATE, "changed")
        again = await begin_again(swarm, 0)
        assert again.named("state.restored")[0]["checkpoint"] == 2
        assert again.place.round == 5

    run_rounds(2, body, tmp_path)


@pytest.mark.parametrize("how", ["cut off", "changed", "gone"])
def test_a_damaged_output_ends_the_replay_and_others_have_it(tmp_path: Path, how: str) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        await train(sims, 7)
        outputs = sims[0].sim.outcomes[-1].value.outputs
        (path,) = (tmp_path / sims[0].sim.peer / "outputs" / "7").iterdir()
        break_(path, how)
        ends, root = sims[0].place.head, sims[0].sim.root
        again = await begin_again(swarm, 0)
        assert again.place.round == 6
        assert "no peer has an output" in str(again.named("replay.failed")[0]["reason"])
        assert again.ledger.head == ends  # What is known is not forgotten before others have been asked.
        await again.held.hash()
        await catch_up(again, sims[1:])
        assert (again.place.head, again.sim.root) == (ends, root)
        for key in filter(lambda key: key != digest(b""), outputs):
            kept = again.archive.outputs._in_files[7][key]
            assert kept.path == path
            assert kept.is_sound(key)

    run_rounds(3, body, tmp_path)


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


@pytest.mark.parametrize("after", range(0, 60, 9))
def test_a_disk_that_fails_at_any_write_costs_what_was_to_be_written_and_nothing_else(
    tmp_path: Path, after: int
) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        for sim in sims:  # Nobody signs what it cannot write down (test_signing): these records are on a disk that works.
            sim.archive.conduct.guard._path = None
        with pytest.MonkeyPatch.context() as patch:
            BrokenDisk(patch, after)
            await train(sims, 6)
        assert {sim.place.round for sim in sims} == {6}
        assert len({sim.sim.root for sim in sims}) == 1
        told = {str(event["event"]) for sim in sims for event in sim.sim.events if "unwritten" in str(event["event"])}
        assert {"outputs.unwritten", "checkpoint.unwritten", "ledger.unwritten"} <= told
        for sim in sims:  # Those who missed the last rounds get them from memory.
            for outcome in sim.sim.outcomes[-IN_MEMORY:]:
                assert all(sim.sim.node.blobs.get(key, "anybody") is not None for key in outcome.value.outputs)
        await train(sims, EVERY)
        assert {sim.place.round for sim in sims} == {6 + EVERY}
        for sim in sims:
            assert sim.named("checkpoint.written")[-1]["round"] == 6 + EVERY
            assert rounds_in(tmp_path / sim.sim.peer / "checkpoints")[-1] == 6 + EVERY
        again = await begin_again(swarm, 0)
        assert again.sim.root == sims[1].sim.root

    run_rounds(2, body, tmp_path)


def test_on_a_full_disk_nobody_signs_and_the_round_is_made_once_there_is_room(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            BrokenDisk(patch, 0)
            outcomes = [await sim.sim.round() for sim in sims]
        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.VOID}
        for sim in sims:
            assert sim.named("promise.unwritten")
            assert sim.named("agreement.unsigned")
            assert not sim.named("round.said")
        await train(sims, 1)
        assert {sim.place.round for sim in sims} == {1}

    run_rounds(2, body, tmp_path)


def test_a_draft_that_is_there_decides_which_of_two_checkpoints_is_taken(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, sims: list[RestoringPeer]) -> None:
        *others, late = sims
        swarm.sims.remove(late.sim)
        await train(others, 2)
        await all_of(others, 2)
        await others[0].serve_state()  # The other one's disk was too slow.
        Draft(tmp_path / late.sim.peer / "checkpoints" / "2", CELLS * 256).close()
        for vector in late.state:
            vector[:] = np.arange(vector.size)
        await late.held.hash()
        members = [other.member() for other in others]
        await late.examine(members)
        assert (await late.catch_up._choose(members[0], members)).place.round == 2
        shutil.rmtree(tmp_path / late.sim.peer / "checkpoints")
        assert (await late.catch_up._choose(members[0], members)).place.round == 4
        for other in others:
            other.sim.node.on_ask(StateAsk, refuse)
        with pytest.raises(NetworkError, match="nobody offers a checkpoint"):
            await late.catch_up._choose(members[0], members)

    run_rounds(3, body, tmp_path)


async def refuse(peer: str, question: object) -> object:
    raise NetworkError("not today")
