"""What goes wrong in a simulation: strikes at moments of the protocol, churn, stalls and partitions.

Theory of operation. Chaos hears every message of a round at the moment when it is told. The first Ready of a round
begins it: then the partitions of that round begin or end, and the moments of its joins, leaves and stalls are drawn
over as long as the last round took. A strike hits a moment after its message was told, so that the message is out.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import trio

from ...collectives.chain.certificate import ranked
from ...peer import wire
from ...peer.memory.network import MemoryNetwork
from .options import CONVENER_WORDS, SimulateOptions, Strike
from .peer import SimulatedPeer

OUT_OF_THE_DOOR = 1e-3
"""Seconds from a word until the strike that follows on it: enough for the word to leave, too few for an answer."""
FEWEST = 2
"""Churn never leaves fewer: the run would be over."""


class Flock(Protocol):
    """The peers, as chaos needs to reach them."""

    network: MemoryNetwork
    living: dict[str, SimulatedPeer]
    """By id, in the order in which they came."""
    nursery: trio.Nursery

    def join(self) -> None:
        """One more peer."""

    def end(self, peer: SimulatedPeer, why: str) -> None:
        """A peer is gone, as by SIGKILL."""

    def note(self, event: str, *, peer: str = "", reason: str = "") -> None:
        """Write it down."""

    def hit(self, peer: SimulatedPeer) -> None:
        """A peer no longer hears everybody."""


class Chaos:
    """Strikes where its options say."""

    def __init__(self, flock: Flock, options: SimulateOptions) -> None:
        self._flock = flock
        self._options = options
        self._random = random.Random(f"{options.seed} chaos")
        self._waiting = list(options.strikes)
        self._roster: wire.Roster | None = None
        self._round = 0
        self._round_began = 0.0

    @property
    def unmet(self) -> list[Strike]:
        """Strikes whose moment has not come."""
        return self._waiting

    def said(self, speaker: SimulatedPeer, message: wire.RoundMessage) -> None:
        """A message was told."""
        if isinstance(message, wire.Ready) and message.slot.round > self._round:
            self._begin(message.slot.round)
        if isinstance(message, wire.Roster):
            self._roster = message
        for strike in list(self._waiting):
            if strike.round == message.slot.round and strike.after == type(message).__name__:
                victim = self._victim(strike, speaker)
                if victim is not None and (strike.after in CONVENER_WORDS or victim is speaker):
                    self._waiting.remove(strike)
                    self._flock.nursery.start_soon(self._strike, strike, victim)

    def _victim(self, strike: Strike, speaker: SimulatedPeer) -> SimulatedPeer | None:
        living, roster = self._flock.living, self._roster
        if isinstance(strike.victim, int):
            return next((peer for peer in living.values() if peer.name == f"p{strike.victim}"), None)
        if strike.after in CONVENER_WORDS and strike.victim == "convener":
            return speaker
        if roster is None or roster.slot.round != strike.round:
            # Before there is a roster its order is that of the ranks of those who are there.
            settled = [peer.peer for peer in living.values() if peer.settled]
            slot = wire.Slot(speaker.run, strike.round, 0)
            return living.get(_member(strike.victim, ranked(slot, settled), ()))
        return living.get(_member(strike.victim, roster.members, roster.bounds))

    async def _strike(self, strike: Strike, victim: SimulatedPeer) -> None:
        await trio.sleep(OUT_OF_THE_DOOR)
        if victim.peer in self._flock.living:
            self._flock.note(f"chaos.{strike.blow}", peer=victim.peer, reason=str(strike))
            await self._blow(strike.blow, victim, strike.seconds)

    async def _blow(self, blow: str, victim: SimulatedPeer, seconds: float) -> None:
        network = self._flock.network
        self._flock.hit(victim)
        if blow in ("kill", "leave"):
            if blow == "leave" and victim.settled:
                await victim.leave()
            if victim.peer in self._flock.living:  # It may have been killed while it said goodbye.
                self._flock.end(victim, "killed" if blow == "kill" else "left")
            return
        begin, end = (network.stall, network.resume) if blow == "stall" else (network.cut, network.mend)
        begin(victim.peer)
        await trio.sleep(seconds)
        if victim.peer in self._flock.living:
            self._flock.note("chaos.over", peer=victim.peer, reason=f"{blow} for {seconds:g} s")
            end(victim.peer)

    def _begin(self, round_: int) -> None:
        now = trio.current_time()
        lasted = now - self._round_began if self._round else self._options.steps_time.high
        self._round, self._round_began = round_, now
        for split in self._options.partitions:
            if split.first == round_:
                peers = iter(self._flock.living)
                groups = [list(itertools.islice(peers, size)) for size in split.groups]
                self._flock.note("chaos.partition", reason="+".join(str(len(group)) for group in groups))
                self._flock.network.partition(*groups)
            elif split.last + 1 == round_:
                self._flock.note("chaos.heal", reason=f"round {split.last} is through")
                self._flock.network.heal()
        for moment in self._moments(self._options.churn, lasted):
            self._flock.nursery.start_soon(self._leave, moment)
        for moment in self._moments(self._options.churn, lasted):
            self._flock.nursery.start_soon(self._join, moment)
        for moment in self._moments(self._options.stall, lasted):
            self._flock.nursery.start_soon(self._stall, moment)

    def _moments(self, expected: float, seconds: float) -> Iterator[float]:
        """When things happen of which so many are expected in so many seconds, independently of each other."""
        moment = 0.0
        while expected and (moment := moment + self._random.expovariate(expected / seconds)) < seconds:
            yield moment

    async def _leave(self, moment: float) -> None:
        await trio.sleep(moment)
        peers = list(self._flock.living.values())
        if len(peers) <= max(FEWEST, self._options.min_peers):
            return
        leaver, blow = self._random.choice(peers), self._random.choice(("kill", "leave"))
        self._flock.note(f"chaos.{blow}", peer=leaver.peer, reason="churn")
        await self._blow(blow, leaver, 0.0)

    async def _join(self, moment: float) -> None:
        await trio.sleep(moment)
        self._flock.join()

    async def _stall(self, moment: float) -> None:
        await trio.sleep(moment)
        victim = self._random.choice(list(self._flock.living.values()))
        self._flock.note("chaos.stall", peer=victim.peer, reason="by chance")
        await self._blow("stall", victim, self._options.stall_time.draw(self._random))


def _member(role: str, order: Sequence[str], bounds: Sequence[int]) -> str:
    """The id of whoever has a role in a roster; empty where nobody has."""
    if role == "convener":
        return order[0] if order else ""
    owning = [peer for index, peer in enumerate(order) if not bounds or bounds[index] < bounds[index + 1]]
    if role == "owner":
        return next((peer for peer in reversed(owning) if peer != order[0]), "")
    # A sender is any contributor; best one that owns nothing, so that nothing but its contribution is lost.
    idle = [peer for peer in order[1:] if peer not in owning]
    return next(iter(idle or order[len(order) // 2 :]), "")
