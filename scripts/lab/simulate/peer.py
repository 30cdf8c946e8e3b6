"""One simulated peer: production code with a sleep in the place of training.

Theory of operation. A peer drives a `Member` of production (`optim.member.member`) as a trainer does: it joins, takes the
run's state from a provider, and then alternates inner phases and rounds. The inner phase ends by the same `Pace`; a slow
peer contributes fewer tokens. Above a full roster the members of a round are a sample that follows from the round's number.
A peer outside of it waits for the others' next state and takes that (it follows).
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ....collectives.allreduce.actions import OutcomeKind
from ....collectives.chain.chain import ChainPosition
from ....collectives.driver.contribution import Averaged, Contribution, NextRoot
from ....collectives.driver.rounds import Averager
from ....collectives.robust.rules import rule_named
from ....collectives.spec import Spec
from ....collectives.state.archive import Archive
from ....collectives.vector.codec import FlatSum
from ....dht.directory.interface import Directory
from ....dht.members.body import MemberBody, MemberState
from ....dht.members.gossip import Gossip
from ....dht.members.table import Member as Row
from ....dht.members.table import MemberTable
from ....optim.member.member import Member
from ....optim.member.reach import Contact
from ....optim.step.pace import Pace, slowest
from ....peer import wire
from ....peer.base.config import PeerConfig
from ....peer.base.digest import keyed
from ....peer.base.transport import Stream
from ....peer.identity import Identity
from ....peer.log.telemetry import Telemetry
from ....peer.memory.peer import MemoryTransport
from ....peer.node.node import Node
from ....peer.node.session import unpack_message
from ....peer.quota.origins import Origin
from ....peer.wire import MAX_PARTS
from .meter import MEMBERSHIP, REST, ROUNDS, Meter
from .options import SimulateOptions
from .state import NUM_CELLS, OUTER, State

if TYPE_CHECKING:
    from .world import World

SIM_RUN = "s" * 52
SIM_STEPS = 20
"""Inner steps of a full phase, the resolution in which a shortened phase is counted."""
TOKENS_PER_STEP = 50
GLANCE = 0.5
"""Seconds, scaled up beyond a full roster, since the cost of a poll grows with the members. The real trainer polls after
every step."""
_FLOOR, _CEILING = 2.0, 120.0
"""The manifest's defaults for the deadlines of a round."""
CHECKPOINT_EVERY = 10
"""Rounds; the manifest's default."""
SIM_RETRY_SECONDS = 1.0
SIM_LEAVE_PATIENCE = 120.0
"""Seconds that a peer which leaves stays at most."""

_unpack = lru_cache(maxsize=4096)(unpack_message)
"""Parse a message to all peers once: messages are frozen, and fewer than this are in flight."""


class WatchedNode(Node):
    """A node that reports its signed messages to the world, and whose messages are charged to their purpose."""

    on_send: Callable[[wire.Signed], None]
    meter: Meter

    def send(self, peers: str | Iterable[str], message: object) -> None:
        """Send, then report."""
        super().send(peers, message)
        if isinstance(message, wire.Signed):
            self.on_send(message)

    def _receive_message(self, origin: Origin, peer: str, message: object, num_bytes: int) -> None:
        is_of_round = isinstance(message, wire.Signed | wire.Certificate | wire.Proof | wire.Unheard)
        with self.meter.of(ROUNDS if is_of_round else MEMBERSHIP):
            super()._receive_message(origin, peer, message, num_bytes)

    async def _serve(self, stream: Stream) -> None:
        with self.meter.of(MEMBERSHIP):
            await super()._serve(stream)


def watch(averager: Averager, started: Callable[[Contribution], None]) -> None:
    """Let an averager report the contributions with which it takes part in attempts."""
    average = averager.average

    async def watched(contribution: Contribution, next_root: NextRoot) -> Averaged:
        started(contribution)
        return await average(contribution, next_root)

    averager.average = watched  # type: ignore[method-assign]  # As the attacks do.


@dataclass(frozen=True, slots=True)
class _View:
    """The fork choice and the next members, as they follow from the members, my position and the number of proofs."""

    members: tuple[Row, ...]
    place: ChainPosition
    news: int
    follows_another_chain: bool
    drawn: frozenset[str]
    """The known members of the next round."""


class SimulatedPeer:
    """One process of a peer; `state` is the initial state of the run."""

    def __init__(self, name: str, identity: Identity, options: SimulateOptions, world: "World", state: State) -> None:
        self.name = name
        self.identity = identity
        self.state = state
        self.scope = trio.CancelScope()
        self._training = trio.CancelScope()
        self.is_leaving = False
        """True from the moment that it was told to leave."""
        self.settled = False
        """True once it holds a state of the run and takes part."""
        self._options = options
        self._world = world
        self._random = random.Random(f"{options.seed} {name}")
        self._pace = Pace(steps=SIM_STEPS, floor=_FLOOR, ceiling=_CEILING)
        self._view: _View | None = None

    @property
    def peer(self) -> str:
        """Its id."""
        return self.identity.peer_id

    @property
    def place(self) -> ChainPosition:
        """The chain position of its state."""
        return self.member.place

    @property
    def averager(self) -> Averager:
        """Its rounds."""
        return self.member.averager

    async def live(
        self, transport: MemoryTransport, directory: Directory, telemetry: Telemetry, folder: Path, *, founder: bool
    ) -> None:
        """Run until cancelled; after its last round it stays as a provider."""
        config = PeerConfig()
        with self.scope, self._world.meter.of(MEMBERSHIP):
            async with WatchedNode(transport, self.identity, config, telemetry, inline=True, unpack=_unpack) as node:
                node.meter, node.on_send = self._world.meter, lambda signed: self._world.sent(self, wire.opened(signed))
                await self._assemble(node, directory, folder)
                self._world.assembled(self)
                self.member.held.place = ChainPosition(0, self.state.root, 0, None)
                self._contact.begin(self.place.head)
                if founder:
                    await self.member.held.hash()
                    self.member.settle()
                    self.settled = True
                else:
                    await self._sync()
                with self._training:
                    await self._train()
                await self._stay()

    async def _assemble(self, node: Node, directory: Directory, folder: Path) -> None:
        state = self.state
        self.node = node
        table, seed = MemberTable(SIM_RUN, self.peer), self._random.getrandbits(32)
        body = MemberBody(state=MemberState.SYNCING, layout=keyed("layout of the simulated model"))
        self._contact = Contact(node, table, Gossip(node, table, directory, SIM_RUN, seed=seed), body)
        spec = Spec(
            run=SIM_RUN,
            num_cells=NUM_CELLS,
            contribution=state.codec,
            output=state.codec,
            min_peers=1,
            floor=_FLOOR,
            ceiling=_CEILING,
            rule=rule_named(self._options.rule),
            charter=self._world.charter,
            num_fragments=self._options.fragments,
        )
        archive = await Archive.open(node, spec, folder, (), every=CHECKPOINT_EVERY, resume=False)
        self.member = Member(self._contact, spec, OUTER, (state.theta, state.momentum), archive)
        watch(self.averager, lambda contribution: self._world.started(self, contribution))

    async def leave(self) -> None:
        """Stay for one more round where my vote may be needed, then send a Goodbye and leave."""
        self.is_leaving = True
        await self.member.leave("the simulation sends it away", SIM_LEAVE_PATIENCE, self._training.cancel)

    async def _train(self) -> None:
        began = trio.current_time()
        while self.place.round < self._options.rounds:
            duration = self._options.steps_time.draw(self._random)
            steps = await self._inner_phase(duration, began)
            captured = trio.current_time()
            if self._behind():
                await self._sync()
            else:
                await self._round(steps, duration)
            # In streaming mode the next phase is trained while the round runs.
            began = captured if self._options.fragments > 1 else trio.current_time()

    async def _stay(self) -> None:
        seen, glance = None, GLANCE * max(1.0, self._options.peers / MAX_PARTS)
        while not self._training.cancel_called:
            is_behind = self._behind()
            has_news, seen = self._view is not seen, self._view
            if is_behind or (has_news and self.member.catch_up.provider(self._contact.presence.active()) is not None):
                await self._sync()
            await trio.sleep(glance)
        await trio.sleep_forever()

    async def _inner_phase(self, duration: float, started: float) -> int:
        """Train for `duration` since `started`, or until the deadline of the phase; return the steps done."""
        ready_at: dict[str, float] = {}
        glance = GLANCE * max(1.0, self._options.peers / MAX_PARTS)
        while not self._behind():
            now = trio.current_time()
            for peer in self.averager.ready():
                ready_at.setdefault(peer, now)
            steps = min(SIM_STEPS, int((now - started + 1e-6) / duration * SIM_STEPS)) if duration else SIM_STEPS
            drawn = self._look().drawn
            pacing = slowest(self.member.archive.conduct.pacing(drawn), {*ready_at, self.peer})
            times = [at for peer, at in ready_at.items() if peer in pacing]
            num_active = len(pacing | {self.peer})
            ended, _ = self._pace.ended(now=now, started=started, step=steps, ready_at=times, num_active=num_active)
            if ended and self.peer in drawn:
                return max(steps, 1)
            left = started + duration - now
            await trio.sleep(min(glance, left) if left > 0 else glance)
        return 0

    async def _round(self, steps: int, duration: float) -> None:
        """Repeat attempts of the next round until one is certified."""
        number, meter = self.place.round + 1, self._world.meter
        with meter.of(REST):
            x = self.state.contribution(self.peer, number)
        while not self._behind() and self.peer in self._look().drawn:
            contribution = Contribution(
                vector=FlatSum([x]),
                round=number,
                base_root=self.place.root,
                tokens=steps * TOKENS_PER_STEP,
                steps=steps,
                loss=1.0,
                grace=self._pace.grace(duration),
                seconds=duration,
            )
            with meter.of(ROUNDS):
                averaged = await self.member.average(contribution)
            is_done = averaged.outcome.kind is OutcomeKind.DONE
            with meter.of(REST):
                if is_done and self.peer in averaged.outcome.cut:
                    self.state.keep_rest(averaged, x)
                self._world.ended(self, averaged)
            if is_done:
                return
            await trio.sleep(SIM_RETRY_SECONDS)

    async def _sync(self) -> None:
        """Take the run's state, until no member has a better one."""
        await self.member.sync()
        self.settled = True
        self._world.checks.moved(self, trio.current_time())

    def _behind(self) -> bool:
        return self._look().follows_another_chain or self.averager.behind

    def _look(self) -> _View:
        """Return what I see; computed anew if any member, my position or a proof has changed."""
        catch_up, members, place = self.member.catch_up, self._contact.presence.active(), self.place
        view, news = self._view, catch_up.chain.news
        if view is None or view.members is not members or view.place is not place or view.news != news:
            follows = catch_up.follows_another_chain(members)
            self._view = view = _View(members, place, news, follows, self.averager.drawn())
        return view
