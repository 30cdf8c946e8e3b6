"""One simulated peer: the production node, members, rounds and state transfer, with a sleep in the place of training.

Theory of operation. A life is: become a member, take the run's state from whoever has it, then in turn an inner phase
and a round, as `optim.participant` and `optim.swarm` do it between them. The inner phase ends by the same `Pace`; who
is slow brings fewer tokens. Beyond a full roster the members of a round are a sample, known to everybody from the
round's number; whoever is not in it waits for the others' next state and takes that (DESIGN §8: it follows).
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import trio

from ...collectives.attempt import NextRoot
from ...collectives.averager import Averaged, Averager, Contribution, Spec
from ...collectives.chain.certificate import drawn_for
from ...collectives.chain.fork_choice import told_of, training
from ...collectives.place import Place
from ...collectives.robust.rules import rule_named
from ...collectives.round.actions import OutcomeKind
from ...collectives.state.archive import Archive
from ...dht.directory.memory import Directory
from ...dht.members.gossip import Gossip
from ...dht.members.table import Member, MemberBody, MemberState, MemberTable
from ...dht.run.admission import Charter
from ...optim.member.catch_up import CatchUp, Leaves
from ...optim.pace import Pace
from ...peer import wire
from ...peer.config import PeerConfig
from ...peer.identity import Identity
from ...peer.memory.peer import MemoryTransport
from ...peer.node.node import Node
from ...peer.node.session import unpack_tell
from ...peer.telemetry import Telemetry
from ...peer.wire import MAX_ROSTER
from .options import SimulateOptions
from .state import NUM_CELLS, OUTER, State

RUN = "s" * 52
STEPS = 20
"""Inner steps of a full phase: how finely a peer that was hurried counts what it has done."""
TOKENS_PER_STEP = 50
GLANCE = 0.5
"""Seconds between looks at the others during an inner phase, and as much more as they are more than a full roster: a look
at all takes as long as they are many. The real trainer looks after every step."""
FLOOR, CEILING = 2.0, 120.0
"""The manifest's defaults for the deadlines of a round."""
CHECKPOINT_EVERY = 10
"""Rounds; the manifest's default."""
RETRY_SECONDS = 1.0
SYNC_PATIENCE = 15.0

_unpack = lru_cache(maxsize=4096)(unpack_tell)
"""What one peer has said to all is parsed once for all: messages are frozen, and this many are never under way."""


class Watcher(Protocol):
    """Who looks on: the simulation's chaos, its checks and its attacks."""

    def born(self, peer: "SimulatedPeer") -> None:
        """A peer stands, and has said nothing yet."""

    def said(self, speaker: "SimulatedPeer", message: wire.RoundMessage) -> None:
        """A peer has told a message of a round to others."""

    def started(self, peer: "SimulatedPeer", contribution: Contribution) -> None:
        """A peer takes part in an attempt."""

    def ended(self, peer: "SimulatedPeer", averaged: Averaged) -> None:
        """An attempt has ended for a peer, and its state has moved on where it was certified."""

    def served(self, giver: str, key: bytes, taker: "SimulatedPeer") -> None:
        """A peer has fetched the bytes of this hash, of a round or of a state, from the one with this id."""

    def moved(self, peer: "SimulatedPeer") -> None:
        """A peer has taken its state from another one."""


class OverheardNode(Node):
    """A node that reports what it says in rounds, and from whom it fetches."""

    overhear: Callable[[wire.Signed], None]
    fetched: Callable[[str, bytes], None]

    def tell(self, peers: str | Iterable[str], message: object) -> None:
        """As always, and then a word to the watcher."""
        super().tell(peers, message)
        if isinstance(message, wire.Signed):
            self.overhear(message)

    async def fetch(self, peer: str, key: bytes, size: int, *, patience: float = math.inf) -> bytearray:
        """As always, and then a word to the watcher."""
        data = await super().fetch(peer, key, size, patience=patience)
        self.fetched(peer, key)
        return data


class OverheardAverager(Averager):
    """Rounds of which it is reported what is brought into them."""

    brought: Callable[[Contribution], None]

    async def average(self, contribution: Contribution, next_root: NextRoot) -> Averaged:
        """As always, after a word to the watcher."""
        self.brought(contribution)
        return await super().average(contribution, next_root)


class SimulatedPeer:
    """One life of a peer; `state` is the one that the run starts from."""

    def __init__(self, name: str, identity: Identity, options: SimulateOptions, watcher: Watcher, state: State) -> None:
        self.name = name
        self.identity = identity
        self.run = RUN
        self.state = state
        self.scope = trio.CancelScope()
        self.settled = False
        """Whether it holds a state of the run, and takes part."""
        self._options = options
        self._watcher = watcher
        self._glance = GLANCE * max(1.0, options.peers / MAX_ROSTER)
        self._random = random.Random(f"{options.seed} {name}")
        self._pace = Pace(steps=STEPS, floor=FLOOR, ceiling=CEILING)
        self._body = MemberBody(state=MemberState.SYNCING)
        self._seen: tuple[tuple[Member, ...], Place, int] | None = None
        self._outrun = False
        self._drawn: frozenset[str] = frozenset()

    @property
    def peer(self) -> str:
        """Its id."""
        return self.identity.peer_id

    @property
    def place(self) -> Place:
        """Where its state stands."""
        return self._catch_up.place

    async def live(
        self, transport: MemoryTransport, directory: Directory, telemetry: Telemetry, folder: Path, *, founder: bool
    ) -> None:
        """Until cancelled; done with all rounds it stays, for whoever is behind."""
        config = PeerConfig()
        with self.scope:
            async with OverheardNode(transport, self.identity, config, telemetry, inline=True, unpack=_unpack) as node:
                node.overhear = self._overheard
                node.fetched = lambda giver, key: self._watcher.served(giver, key, self)
                await self._assemble(node, directory, folder)
                self._watcher.born(self)
                self._body = replace(self._body, addresses=transport.addresses())
                await self._catch_up.resume(Place(0, self.state.root, 0, None))
                node.nursery.start_soon(self._gossip.run)
                if founder:
                    await self._settle(await self._catch_up.hash_state())
                else:
                    await self._sync()
                await self._train()
                await self._stay()

    async def _assemble(self, node: Node, directory: Directory, folder: Path) -> None:
        state = self.state
        self.node = node
        self._gossip = Gossip(node, MemberTable(RUN, self.peer), directory, RUN, seed=self._random.getrandbits(32))
        spec = Spec(
            run=RUN,
            num_cells=NUM_CELLS,
            contribution=state.codec,
            output=state.codec,
            min_peers=self._options.min_peers,
            floor=FLOOR,
            ceiling=CEILING,
            rule=rule_named(self._options.rule),
            charter=Charter(min_peers=self._options.min_peers),
        )
        self.archive = await Archive.open(node, spec, folder, (), every=CHECKPOINT_EVERY, resume=False)
        kept = self.archive.outputs, self.archive.conduct
        self.averager = OverheardAverager(node, spec, self._trainers, *kept)
        self.averager.brought = lambda contribution: self._watcher.started(self, contribution)
        self._catch_up = CatchUp(node, spec, OUTER, (state.theta, state.momentum), self.archive)
        self._gossip.on_newcomer(self.averager.greet)

    async def leave(self) -> None:
        """Say goodbye."""
        self._announce(state=MemberState.LEFT)
        await self.node.leave("the simulation sends it away")

    async def _train(self) -> None:
        while self.place.round < self._options.rounds:
            duration = self._options.steps_time.draw(self._random)
            steps = await self._inner_phase(duration)
            if self._behind():
                await self._sync()
            else:
                await self._round(steps, duration)

    async def _stay(self) -> None:
        while True:
            if self._behind() or self._catch_up.giver(self._gossip.active()) is not None:
                await self._sync()
            await trio.sleep(self._glance)

    async def _inner_phase(self, duration: float) -> int:
        """Train for so long, or until the round does not wait any longer; the steps that were done."""
        started = trio.current_time()
        ready_at: dict[str, float] = {}
        while not self._behind():
            now = trio.current_time()
            for peer in self.averager.ready():
                ready_at.setdefault(peer, now)
            steps = min(STEPS, int((now - started + 1e-6) / duration * STEPS)) if duration else STEPS
            drawn = self._next_members()
            ended, _ = self._pace.ended(
                now=now, started=started, step=steps, ready_at=list(ready_at.values()), num_active=len(drawn)
            )
            if ended and self.peer in drawn:
                return max(steps, 1)
            left = started + duration - now
            await trio.sleep(min(self._glance, left) if left > 0 else self._glance)
        return 0

    async def _round(self, steps: int, duration: float) -> None:
        """Attempts of the next round, until one ends for good."""
        number = self.place.round + 1
        x = self.state.contribution(self.peer, number)
        while not self._behind() and self.peer in self._next_members():
            self._gossip.attend(self._next_members())
            contribution = Contribution(
                vector=x.copy(),
                round=number,
                base_root=self.place.root,
                tokens=steps * TOKENS_PER_STEP,
                steps=steps,
                loss=1.0,
                grace=self._pace.grace(duration),
                seconds=duration,
            )
            averaged = await self.averager.average(contribution, self.state.next_root)
            outcome = averaged.outcome
            done = outcome.kind is OutcomeKind.DONE
            if done:
                self.state.apply(averaged, x if self.peer in outcome.cut else None)
                place = Place(outcome.slot.round, outcome.root, outcome.tokens, outcome.certificate)
                await self._catch_up.advance(place)
                leaves = await self._catch_up.hash_state()
            self._note(averaged)
            self._watcher.ended(self, averaged)
            if done:
                await self._settle(leaves)
                return
            await trio.sleep(RETRY_SECONDS)

    def _note(self, averaged: Averaged) -> None:
        outcome = averaged.outcome
        figures: dict[str, Any] = {"round": outcome.slot.round, "attempt": outcome.slot.attempt}
        figures |= {"roster": list(outcome.members)}
        if outcome.kind is OutcomeKind.DONE:
            figures |= {"cut": list(outcome.cut), "root": self.place.root.hex()}
            self.node.telemetry.emit("round.done", **figures)
        else:
            self.node.telemetry.emit(f"round.{outcome.kind}", reason=outcome.reason, **figures)

    async def _sync(self) -> None:
        """Take the run's state, until nobody has a better one."""
        self._announce(state=MemberState.SYNCING)
        with trio.move_on_after(SYNC_PATIENCE):
            await self._gossip.looked.wait()
        leaves, source = await self._catch_up.reach(self._gossip, SYNC_PATIENCE)
        place = self.place
        await self._catch_up.advance(place)
        self.averager.expect(place.round + 1, place.certificate)
        self.node.telemetry.emit("state.synced", peer=source or "", round=place.round, root=place.root.hex())
        await self._settle(leaves)
        self._watcher.moved(self)

    async def _settle(self, leaves: Leaves) -> None:
        """Hold a state: keep it if it is time for a checkpoint, and be waited for."""
        place, state = self.place, (self.state.theta, self.state.momentum)
        await self.archive.checkpoints.write(place, state, leaves[0] + leaves[1])
        self.settled = True
        self._announce(state=MemberState.TRAINING, root=place.root, **told_of(place))

    def _announce(self, **news: Any) -> None:
        self._body = replace(self._body, **news)
        self._gossip.announce(self._body)

    def _behind(self) -> bool:
        self._look()
        return self.averager.behind or self._outrun

    def _trainers(self) -> frozenset[str]:
        return frozenset(member.peer for member in training(self._gossip.active()))

    def _next_members(self) -> frozenset[str]:
        """Who takes part in the next round, as far as I know."""
        self._look()
        return self._drawn

    def _look(self) -> None:
        """Draw my conclusions from the others' conditions and mine, where any of them has changed."""
        members, place, news = self._gossip.active(), self.place, self._catch_up.proofs.news
        seen = self._seen
        if seen is not None and seen[0] is members and seen[1] is place and seen[2] == news:
            return
        self._seen = members, place, news
        self._outrun = self._catch_up.outrun(members)
        self._drawn = drawn_for(wire.Slot(RUN, place.round + 1, 0), self._trainers())

    def _overheard(self, signed: wire.Signed) -> None:
        self._watcher.said(self, wire.opened(signed))
