"""An honest peer that comes back with the home folder of a backup, times and all, contradicts nothing that it signed."""

import shutil
from pathlib import Path

import pytest
import trio
from attacks.voters import founded, until_done
from flockstep.peer.memory.network import run_virtual
from support.liars import banned, events_of
from support.swarm import SimSwarm, all_at_once, with_swarm


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
