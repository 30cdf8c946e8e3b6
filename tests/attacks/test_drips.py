"""Providers that serve a byte now and then, for ever: whoever is behind still reaches the run's state."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
from flockstep.collectives.state import merkle
from flockstep.peer import wire
from flockstep.peer.base.transport import Stream
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.bulk import Bulk
from flockstep.peer.wire.framing import frame
from support.restoring_peer import RestoringPeer, all_of, catch_up
from support.swarm import SimSwarm, with_swarm

CELLS = 40
PATIENCE = 19.0
"""Seconds between two bytes: no timeout without a byte ever passes."""


def drip(sims: Sequence[RestoringPeer], count: int) -> list[float]:
    """Let so many of these, the first that are asked, serve what is asked for a byte at a time. Returns when one was sent."""
    sent, liars = list[float](), set[str]()

    def corrupt(bulk: Bulk, peer: str) -> None:
        honest = bulk._send

        async def send(stream: Stream, request: wire.Fetch) -> None:
            if len(liars) < count:
                liars.add(peer)
            if peer not in liars:
                await honest(stream, request)
                return
            blob = bulk._blobs.get(request.hash, stream.remote)
            assert blob is not None
            left = bytes(blob)[request.offset :]
            await stream.send_all(frame(wire.pack(wire.Serve(len(left), ""))))
            for place in range(len(left)):
                await stream.send_all(left[place : place + 1])
                sent.append(trio.current_time())
                await trio.sleep(PATIENCE)

        bulk._send = send  # type: ignore[method-assign]

    for sim in sims:
        corrupt(sim.sim.node._bulk, sim.sim.peer)
    return sent


@pytest.mark.parametrize("liars", [1, 2])
def test_a_missed_round_is_replayed_beside_providers_that_drip(tmp_path: Path, liars: int) -> None:
    async def body(others: Sequence[RestoringPeer], late: RestoringPeer) -> None:
        sent = drip(others, liars)
        with trio.fail_after(200):
            await catch_up(late, others)
        assert (late.place.head, late.place.root) == (others[0].place.head, others[0].place.root)  # Copies differ in voters.
        assert sent

    run(tmp_path, body, missed=1, checkpoint=False)


@pytest.mark.parametrize("leaves", [1, 20])
def test_a_state_comes_beside_providers_that_drip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: int) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", CELLS * 256 // leaves)

    async def body(others: Sequence[RestoringPeer], late: RestoringPeer) -> None:
        sent = drip(others, 2)
        members = [other.member() for other in others]
        with trio.fail_after(200):
            await late.examine(members)
            await late.catch_up._take_checkpoint(members[-1], members)
        assert (late.place.head, late.place.root) == (others[0].place.head, others[0].place.root)  # Copies differ in voters.
        assert sent

    run(tmp_path, body, missed=2, checkpoint=True)


def run(folder: Path, body: object, *, missed: int, checkpoint: bool) -> None:
    async def main(swarm: SimSwarm) -> None:
        sims = [RestoringPeer(sim) for sim in swarm.sims]
        await all_of(sims, 1)
        *others, late = sims
        swarm.sims.remove(late.sim)
        await all_of(others, missed)
        for other in others if checkpoint else ():
            await other.serve_state()
        await late.held.hash()
        await body(others, late)  # type: ignore[operator]

    run_virtual(partial(with_swarm, 6, main, cells=CELLS, home=(folder, 100)))
