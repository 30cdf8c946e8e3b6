"""Honest peers that come back with the home folder of a backup contradict nothing that they signed, and end no run."""

import math
import shutil
from pathlib import Path

import pytest
import trio
from attacks.voters import founded, until_done
from flockstep.collectives.accountability.signing import FAR
from flockstep.collectives.agreement.machine import RECALL_SECONDS
from flockstep.peer.memory.network import run_virtual
from support.liars import banned, events_of
from support.swarm import SimSwarm, all_at_once, identities, with_swarm


@pytest.mark.parametrize("count", [3, 4])
def test_who_is_restored_in_the_round_in_which_it_had_signed_is_not_banned(tmp_path: Path, count: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        one, *others = swarm.sims
        home = tmp_path / one.peer
        await all_at_once(swarm.sims)
        shutil.copytree(home, tmp_path / "backup")  # With the times of its files.
        await all_at_once(swarm.sims, 2)
        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(sim.round)
            await trio.sleep(0.15)
            nursery.cancel_scope.cancel()
        assert [event["round"] for event in events_of([one], "round.said") if event["step"] == "Ready"][-1] == 4
        swarm.kill(0)
        shutil.rmtree(home)
        shutil.copytree(tmp_path / "backup", home)
        again = await swarm.start_again(0)
        swarm.gone.clear()
        again.theta[:], again.momentum[:] = others[0].theta, others[0].momentum  # It has caught up.
        again.averager.expect(4, others[0].averager.certificate)
        async with trio.open_nursery() as nursery:  # Its phase was another one: what it says differs.
            nursery.start_soon(lambda: again.round(tokens=90))
            for sim in others:
                nursery.start_soon(sim.round)
        (event,) = events_of([again], "promise.forgotten")
        assert "this peer signed in round 3" in str(event["reason"])
        await until_done(swarm.sims, 4)
        assert banned(swarm.sims) == [set()] * count

    run_virtual(lambda: with_swarm(count, body, cells=12, home=(tmp_path, 100), charter=founded(count)))


@pytest.mark.parametrize("num_lost", [2, 4])
def test_voters_that_have_lost_what_they_signed_together_end_no_run_where_all_are_here(tmp_path: Path, num_lost: int) -> None:
    """Two of four, as after a move to other disks: without them no quorum is left, and each waited for others' rounds."""

    async def body(swarm: SimSwarm) -> None:
        assert len(events_of(swarm.sims, "promise.forgotten")) == num_lost
        await until_done(swarm.sims, 1, within=1000.0)
        recalled = [event["peer"] for event in events_of(swarm.sims, "agreement.recalled")]
        assert sorted(map(str, recalled)) == sorted(sim.peer for sim in swarm.sims[:num_lost])
        assert trio.current_time() >= RECALL_SECONDS
        certificate = swarm.sims[0].averager.certificate
        assert certificate is not None
        assert certificate.slot.attempt >= FAR
        assert banned(swarm.sims) == [set()] * 4

    _lose(tmp_path, num_lost)
    run_virtual(lambda: with_swarm(4, body, cells=12, home=(tmp_path, 100), charter=founded(4)))


def test_who_has_lost_what_it_signed_does_not_vote_while_another_voter_is_away(tmp_path: Path) -> None:
    """That one may hold the round's decision."""

    async def body(swarm: SimSwarm) -> None:
        swarm.kill(3)
        with trio.move_on_after(2 * RECALL_SECONDS):
            await until_done(swarm.sims[:3], 1, within=math.inf)
        assert not events_of(swarm.sims, "agreement.recalled")
        assert all(sim.averager.certificate is None for sim in swarm.sims)

    _lose(tmp_path, 2)
    run_virtual(lambda: with_swarm(4, body, cells=12, home=(tmp_path, 100), charter=founded(4)))


def _lose(home: Path, count: int) -> None:
    for identity in identities(count):
        record = home / identity.peer_id / "spoken"
        record.parent.mkdir()
        record.write_bytes(b"damaged")
