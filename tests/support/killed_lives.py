"""Rounds of real peers in memory, one of which is killed at the n-th call that changes its folder, torn in the middle.

Its next life begins with the folder as that call left it. The others go on, and do not wait.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.certificate import open_value
from flockstep.collectives.chain.chain import ChainPosition
from flockstep.peer import wire
from flockstep.peer.log.telemetry import Event
from support.restoring_peer import RestoringPeer
from support.swarm import SimSwarm, with_swarm

CALLS = ("write", "fsync", "replace", "unlink", "link", "mkdir", "rmdir", "ftruncate", "truncate")
WARM = 2
"""Rounds before the one in which the peer may be killed."""
PAUSE = 3.0
"""Virtual seconds until its next life."""
FAULTS = ("peer.banned", "peer.charged", "state.drift", "checkpoint.damaged", "promise.forgotten", "promise.unreadable")
"""What a kill must cause nowhere."""


class Killer:
    """Calls `kill` at the n-th call of `CALLS` on something in `folder`, after copying what is there to `copy`."""

    def __init__(self, folder: Path, copy: Path, number: int, kill: Callable[[], object]) -> None:
        self._folder, self._copy, self._left, self._kill = str(folder), copy, number, kill
        self._real = {name: getattr(os, name) for name in CALLS}
        self.at = ""
        """The call at which the peer was killed; empty before."""

    def __enter__(self) -> Self:
        for name in CALLS:
            setattr(os, name, partial(self._call, name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        real = self._real[name]
        if self.at or not self._is_inside(arguments[0]):
            return real(*arguments, **options)
        self._left -= 1
        if self._left:
            return real(*arguments, **options)
        self.at = name
        half = len(arguments[1]) // 2 if name == "write" else 0
        if half:
            real(arguments[0], arguments[1][:half])
        shutil.copytree(self._folder, self._copy)
        self._kill()
        return half + real(arguments[0], arguments[1][half:]) if half else real(*arguments, **options)

    def _is_inside(self, where: int | str | Path) -> bool:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        return path.startswith(self._folder)


@dataclass
class Killed:
    """What became of a peer that was killed."""

    at: str = ""
    signed: dict[tuple[wire.Slot, int, object], set[bytes]] = field(default_factory=dict)
    """The statements that it signed in all its lives and that left it, by what they are about."""
    accepted: list[wire.Prevote] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    """Outputs of the value that it had accepted in the round of its death which its next life did not hold."""
    events: list[Event] = field(default_factory=list)
    rounds: int = 0
    """Rounds that its last life ended together with all others."""

    def listen(self, peer: RestoringPeer, lives: Callable[[], bool]) -> None:
        """Note what a life signs."""
        guard = peer.archive.conduct.guard
        sign = guard.sign

        def noted(message: wire.RoundMessage, lock: wire.Proof | None = None) -> wire.Signed | str:
            signed, kind = sign(message, lock), STATEMENTS[type(message)]
            if isinstance(signed, wire.Signed) and kind.convicts and lives():
                self.signed.setdefault((message.slot, signed.code, kind.subject(message)), set()).add(signed.payload)
                if isinstance(message, wire.Prevote):
                    self.accepted.append(message)
            return signed

        guard.sign = noted  # type: ignore[method-assign]

    def compare(self, before: RestoringPeer, after: RestoringPeer) -> None:
        """Look for what the old life had accepted in the round of its death, in the disk of the next one."""
        averager = before.sim.averager
        for accept in self.accepted:
            if averager._vote is None or accept.slot.round != averager.round:
                continue
            if (value := averager._vote.value(accept.value)) is not None:
                self.missing += [key for key in open_value(value).outputs if key not in after.archive.outputs]


async def live(sim: RestoringPeer, others: Callable[[], list[RestoringPeer]], until: Callable[[], bool]) -> None:
    """Make round after round, and catch up where others are ahead."""
    while not until():
        ahead = [other for other in others() if other.place.round > sim.place.round + 1]
        outcome = await sim.sim.round()
        if outcome.kind is OutcomeKind.DONE:
            place = ChainPosition(outcome.slot.round, outcome.value.next_root, outcome.value.tokens, outcome.certificate)
            await sim.held.advance(place)
            await sim.serve_state()
            continue
        await sim.held.hash()
        if (certificate := sim.sim.averager.decided) is not None:
            await sim.catch_up.replay(certificate)
        elif ahead or outcome.kind is not OutcomeKind.VOID:
            members = [other.member() for other in others()]
            await sim.examine(members)
            if (provider := sim.catch_up.provider(members)) is not None:
                await sim.catch_up.take_from(provider, members)
        await sim.held.hash()
        sim.sim.averager.expect(sim.place.round + 1, sim.place.certificate)
        await trio.sleep(0.5)


async def killed_at(number: int, count: int, folder: Path) -> Killed:
    """Kill the first of `count` peers at the n-th call that changes its folder; it comes back and ends two rounds."""
    found = Killed()

    async def main(swarm: SimSwarm) -> None:
        sims = [RestoringPeer(sim) for sim in swarm.sims]
        first, is_over = sims[0], False
        home, copy = folder / first.sim.peer, folder / "copy"
        lives = True
        found.listen(first, lambda: lives)
        for sim in sims:
            await sim.serve_state()

        def beside(sim: RestoringPeer) -> Callable[[], list[RestoringPeer]]:
            return lambda: [other for other in sims if other is not sim]

        async with trio.open_nursery() as nursery:
            for sim in sims:
                nursery.start_soon(live, sim, beside(sim), lambda sim=sim: sim.place.round >= WARM)
        life = trio.CancelScope()

        def kill() -> None:
            nonlocal lives
            lives = False
            swarm.network.kill(first.sim.peer)
            life.cancel()

        def ended() -> int:
            done = [outcome for outcome in sims[0].sim.outcomes if outcome.kind is OutcomeKind.DONE]
            return sum(len(outcome.members) == count for outcome in done)

        async with trio.open_nursery() as nursery:
            for sim in sims[1:]:
                nursery.start_soon(live, sim, beside(sim), lambda: is_over)
            with Killer(home, copy, number, kill) as killer, life:
                await live(first, beside(first), lambda: False)
            found.at = killer.at
            await trio.sleep(PAUSE)
            shutil.rmtree(home)
            copy.rename(home)
            again = sims[0] = RestoringPeer(await swarm.start_again(0))
            found.listen(again, lambda: True)
            found.compare(first, again)
            await again.held.restore()
            again.sim.averager.expect(again.place.round + 1, again.place.certificate)
            await live(again, beside(again), lambda: ended() >= 2)
            is_over = True
            nursery.cancel_scope.cancel()
        found.rounds = ended()
        found.events = [event for sim in sims for event in sim.sim.events if event["event"] in FAULTS]
        heads = {sim.ledger.at(min(other.place.round for other in sims)) for sim in sims}
        assert len(heads) == 1

    await with_swarm(count, main, cells=20, home=(folder, 2))
    return found
