"""Faults of a simulation: strikes at moments of the protocol, churn, stalls and partitions.

Theory of operation. Chaos is called with every message of a round when it is sent. The first Ready of a round begins it:
then the partitions of that round begin, and the moments of its joins, leaves and stalls are drawn over the
duration of the last round. A strike happens a moment after its message was sent, so that the message is delivered.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import trio

from ....peer import wire
from .options import CONVENER_MESSAGES, SimulateOptions, Strike
from .peer import SimulatedPeer

if TYPE_CHECKING:
    from .world import World

LEAVING_SECONDS = 1e-3
"""Seconds from a message to its strike: enough for the message to leave, too few for a response."""
BLOW_EVENTS = {"kill": "chaos.kill", "leave": "chaos.leave", "stall": "chaos.stall", "cut": "chaos.cut"}
"""The event of each blow."""
FEWEST = 2
"""Churn never leaves fewer peers, since that would end the run."""


class Chaos:
    """Injects the faults of the options."""

    def __init__(self, swarm: "World", options: SimulateOptions) -> None:
        self._swarm = swarm
        self._options = options
        self._random = random.Random(f"{options.seed} chaos")
        self.unmet = list(options.strikes)
        """The strikes whose moment has not come."""
        self._roster: wire.Roster | None = None
        self._round = 0
        self._round_began = 0.0

    def sent(self, sender: SimulatedPeer, message: wire.RoundMessage) -> None:
        """React to a message that a peer has sent."""
        if isinstance(message, wire.Ready) and message.slot.round > self._round:
            self._begin(message.slot.round)
        if isinstance(message, wire.Roster):
            self._roster = message
        for strike in list(self.unmet):
            if strike.round == message.slot.round and strike.after == type(message).__name__:
                victim = self._victim(strike, sender)
                if victim is not None and (strike.after in CONVENER_MESSAGES or victim is sender):
                    self.unmet.remove(strike)
                    self._swarm.nursery.start_soon(self._strike, strike, victim)

    def _victim(self, strike: Strike, sender: SimulatedPeer) -> SimulatedPeer | None:
        living, roster = self._swarm.living, self._roster
        if isinstance(strike.victim, int):
            return next((peer for peer in living.values() if peer.name == f"p{strike.victim}"), None)
        if strike.after in CONVENER_MESSAGES and strike.victim == "proposer":
            return sender
        if roster is None or roster.slot.round != strike.round:
            # Before there is a roster, the voters take turns by id.
            settled = sorted(peer.peer for peer in living.values() if peer.settled)
            turn = strike.round % max(1, len(settled))
            return living.get(_member(strike.victim, settled[turn:] + settled[:turn], ()))
        return living.get(_member(strike.victim, roster.members, roster.bounds))

    async def _strike(self, strike: Strike, victim: SimulatedPeer) -> None:
        await trio.sleep(LEAVING_SECONDS)
        if victim.peer in self._swarm.living:
            self._swarm.note(BLOW_EVENTS[strike.blow], peer=victim.peer, reason=str(strike))
            await self._blow(strike.blow, victim, strike.seconds)

    async def _blow(self, blow: str, victim: SimulatedPeer, seconds: float) -> None:
        network = self._swarm.network
        if blow in ("kill", "leave"):
            if blow == "leave" and victim.settled:
                await victim.leave()
            if victim.peer in self._swarm.living:  # It may have been killed while it sent its Goodbye.
                self._swarm.end(victim, "killed" if blow == "kill" else "left")
            if blow == "kill" and seconds:
                await trio.sleep(seconds)
                self._swarm.join(int(victim.name[1:]))
            return
        begin, end = (network.stall, network.resume) if blow == "stall" else (network.cut, network.mend)
        begin(victim.peer)
        await trio.sleep(seconds)
        if victim.peer in self._swarm.living:
            self._swarm.note("chaos.over", peer=victim.peer, reason=f"{blow} for {seconds:g} s")
            end(victim.peer)

    def _begin(self, round_: int) -> None:
        now = trio.current_time()
        lasted = now - self._round_began if self._round else self._options.steps_time.high
        self._round, self._round_began = round_, now
        for split in self._options.partitions:
            if split.round == round_:
                peers = iter(self._swarm.living)
                groups = [list(itertools.islice(peers, size)) for size in split.groups]
                self._swarm.note("chaos.partition", reason="+".join(str(len(group)) for group in groups))
                self._swarm.network.partition(*groups)
                self._swarm.nursery.start_soon(self._heal, split.seconds)
        for moment in self._moments(self._options.churn, lasted):
            self._swarm.nursery.start_soon(self._leave, moment, self._random.uniform(0.0, lasted))
        for moment in self._moments(self._options.churn, lasted):
            self._swarm.nursery.start_soon(self._join, moment)
        for moment in self._moments(self._options.stall, lasted):
            self._swarm.nursery.start_soon(self._stall, moment)

    def _moments(self, expected: float, seconds: float) -> Iterator[float]:
        """Yield the moments of a Poisson process with `expected` events in `seconds`."""
        moment = 0.0
        while expected and (moment := moment + self._random.expovariate(expected / seconds)) < seconds:
            yield moment

    async def _heal(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self._swarm.note("chaos.heal", reason=f"after {seconds:g} s")
        self._swarm.network.heal()

    async def _leave(self, moment: float, pause: float) -> None:
        """Let any peer leave in order, or be killed and come back a `pause` later.

        Who was killed comes back: else the run would wait for its vote, and end sooner or later.
        """
        await trio.sleep(moment)
        peers = [peer for peer in self._swarm.living.values() if not peer.is_leaving]
        if len(peers) > FEWEST:
            leaver, blow = self._random.choice(peers), self._random.choice(("leave", "kill"))
            self._swarm.note(BLOW_EVENTS[blow], peer=leaver.peer, reason="churn")
            await self._blow(blow, leaver, pause)

    async def _join(self, moment: float) -> None:
        await trio.sleep(moment)
        self._swarm.join()

    async def _stall(self, moment: float) -> None:
        await trio.sleep(moment)
        victim = self._random.choice(list(self._swarm.living.values()))
        self._swarm.note("chaos.stall", peer=victim.peer, reason="by chance")
        await self._blow("stall", victim, self._options.stall_time.draw(self._random))


def _member(role: str, order: Sequence[str], bounds: Sequence[int]) -> str:
    """Return the id of the peer with a role in a roster; empty if there is none."""
    if role == "proposer":
        return order[0] if order else ""
    owning = [peer for index, peer in enumerate(order) if not bounds or bounds[index] < bounds[index + 1]]
    if role == "owner":
        return next((peer for peer in reversed(owning) if peer != order[0]), "")
    # A sender is any contributor; best one that owns nothing, so that nothing but its contribution is lost.
    idle = [peer for peer in order[1:] if peer not in owning]
    return next(iter(idle or order[len(order) // 2 :]), "")
