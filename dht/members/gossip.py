"""Keeps the member table of a run alive: contact, push, anti-entropy, heartbeats, and the door in the directory.

Theory of operation. A change of mine is pushed to every active member at once. Every ten seconds I ask three random
members for what I lack, and one of those whom I lost whether it is back. The directory is asked only while I know
nobody and then now and then: it is how strangers meet, not how members talk; where it does not answer, those whom I
met in a former life are asked. A member whose heartbeat fails is out of the table until a newer record of it comes or
it speaks to me again: I ask it a few times soon after I lost it, since what was stopped for a moment is back by then.

Beyond 64 members that would cost everybody a word and a connection for everybody else. There each has a few neighbours
instead, drawn at random: a change goes to them and they pass it on, once, to theirs (rumours, as in Demers 1987), I ask
them for what I lack, and heartbeats go to those with whom I share a round (`attend`). All others just expire.
"""

import random
from collections.abc import Callable, Collection
from functools import lru_cache

import trio

from ...peer import wire
from ...peer.errors import NetworkError, RemoteError
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..directory.memory import Directory
from ..records import Record
from ..run.manifest import member_key
from .remembered import Remembered
from .table import LIFETIME, MAX_MEMBERS, PAGE, Member, MemberBody, MemberTable, Outcome

PERIOD = 10.0
PARTNERS = 3
"""Random partners a turn: a change reaches n members in about log₄ n turns even when its push was lost."""
SEARCH_PERIODS = (0.5, 1.0, 2.0, 5.0)
"""Seconds between looks into the directory while I know nobody; the last one goes on."""
MESH = 64
"""Up to so many members, a full roster, everybody talks to everybody. Beyond, everybody with a few."""
NEIGHBOURS = 6
"""Whoever passes a rumour on to 6 at random leaves e⁻⁶ = 0.2 % without it; these learn it when they ask."""
RUMOUR_PAUSE = 0.5
"""Seconds that rumours gather before they are passed on: at 1,000 members a round brings hundreds, many at a time."""
MAX_RUMOURS = 256
"""Records in one message (`wire.Members`)."""
PUBLISH_PERIOD = 30.0
"""Half of a record's lifetime: one lost publication does not make me unfindable."""
RENEW_PERIOD = LIFETIME / 3
"""After so long without news I say again what I said last: who waits in a long round must not seem to be gone."""
ANSWER_TIMEOUT = 5.0
SEEK_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each question to a member that I have just lost; later it is one of those asked every `PERIOD`."""
KEEP_PERIOD = 5.0
"""Seconds between two writings of who is here: a restart that misses the last of them still knows the others."""
_encoded = lru_cache(maxsize=MAX_MEMBERS)(Record.encode)
_decoded = lru_cache(maxsize=MAX_MEMBERS)(Record.decode)
"""A member's record comes from several partners and goes to several, each time the same bytes."""


class Gossip:
    """One peer's part in its run's membership."""

    def __init__(
        self,
        node: Node,
        table: MemberTable,
        directory: Directory,
        run: str,
        *,
        seed: int,
        remembered: Remembered | None = None,
    ) -> None:
        self._node = node
        self._table = table
        self._directory = directory
        self._run = run
        self._remembered = remembered
        self._random = random.Random(seed)
        self._record: Record | None = None
        self._body: MemberBody | None = None
        self._announced = 0.0
        self._asking = trio.CapacityLimiter(PARTNERS)
        self._attended: frozenset[PeerId] = frozenset()
        self._neighbours: list[PeerId] = []
        self._rumours: dict[bytes, None] = {}
        self._num_found = 0
        """Members that the directory named: a newcomer is in a crowd before it knows it."""
        self._newcomer: list[Callable[[PeerId], None]] = []
        self._changed = trio.Event()
        self.looked = trio.Event()
        """Set once the directory has answered and those whom it named have been asked."""
        node.on_ask(wire.MembersAsk, self._answer)
        node.on_tell(wire.Members, self._hear)
        node.on_tell(wire.Goodbye, self._goodbye)
        node.on_lost(self._lose)

    def on_newcomer(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` whenever a peer begins to count as an active member."""
        self._newcomer.append(handler)

    def active(self) -> tuple[Member, ...]:
        """The members who count now, I among them."""
        return self._table.active(trio.current_time())

    def others(self) -> tuple[PeerId, ...]:
        """The active members but me."""
        return tuple(member.peer for member in self.active() if member.peer != self._node.peer_id)

    async def changed(self) -> None:
        """Wait for the next change of the table."""
        await self._changed.wait()

    def announce(self, body: MemberBody) -> None:
        """State my condition and push it to every active member."""
        self._body, self._announced = body, trio.current_time()
        self._record = self._table.update_own(self._node.identity, body, self._announced)
        self._node.tell(self._close(), wire.Members((_encoded(self._record),)))

    def attend(self, peers: Collection[PeerId]) -> None:
        """These are the peers of my next round: in a run of many, their silence matters more than that of the others."""
        self._attended = frozenset(peers)
        self._update_watch()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._search)
            nursery.start_soon(self._publish)
            nursery.start_soon(self._exchange)
            if self._remembered is not None:
                nursery.start_soon(self._keep, self._remembered)

    async def _search(self) -> None:
        turn = 0
        while True:
            try:
                found = await self._directory.find(self._run)
                self._num_found = len(found)
                strangers = [peer for peer in found if peer != self._node.peer_id and not self._counts(peer)]
                if self._is_crowd():  # A few of them know the others; each costs a look-up.
                    strangers = self._random.sample(strangers, min(2 * NEIGHBOURS, len(strangers)))
                for peer in strangers:
                    await self._meet(peer)
                self._close()  # In a crowd my first neighbours are among them.
                self.looked.set()
            except NetworkError as error:
                self._node.telemetry.emit("directory.failed", step="find members", reason=str(error))
                await self._look_around()
            if self.others():
                await trio.sleep(PUBLISH_PERIOD)
            else:
                await trio.sleep(SEARCH_PERIODS[min(turn, len(SEARCH_PERIODS) - 1)])
            turn += 1

    async def _look_around(self) -> None:
        """No directory answers: ask those whom I remember. Whoever answers knows the others."""
        if self._remembered is None or self.others():
            return
        async with trio.open_nursery() as nursery:
            for peer, addresses in self._remembered.addresses().items():
                if peer != self._node.peer_id:
                    self._node.learn(peer, addresses)
                    nursery.start_soon(self._ask, peer)
        if self.others():
            self.looked.set()

    async def _keep(self, remembered: Remembered) -> None:
        """Write down who is here whenever that has changed."""
        while True:
            changed = self._changed
            if others := [member for member in self.active() if member.peer != self._node.peer_id]:
                await self._node.compute(remembered.keep, others)
                await trio.sleep(KEEP_PERIOD)
            await changed.wait()

    async def _meet(self, peer: PeerId) -> None:
        """Learn from the directory where `peer` is, then exchange tables with it."""
        try:
            value = await self._directory.get(member_key(self._run, peer))
            if value is not None:
                record = Record.decode(value)
                self._merge(record, carrier=peer)
        except RemoteError as error:
            self._node.charge(peer, "directory", error)
        except NetworkError as error:
            self._node.telemetry.emit("directory.failed", peer=peer, step="find its address", reason=str(error))

    async def _publish(self) -> None:
        while True:
            try:
                await self._directory.provide(self._run)
                if self._record is not None:
                    await self._directory.put(member_key(self._run, self._node.peer_id), self._record.encode())
            except NetworkError as error:
                self._node.telemetry.emit("directory.failed", step="publish", reason=str(error))
            await trio.sleep(PUBLISH_PERIOD if self._record is not None else SEARCH_PERIODS[0])

    async def _exchange(self) -> None:
        while True:
            now = trio.current_time()
            if self._body is not None and now - self._announced >= RENEW_PERIOD:
                self.announce(self._body)
            for peer in self._table.expire(now):
                self._node.telemetry.emit("peer.lost", peer=peer, reason="its record expired")
            self._update_watch()
            close = self._close()
            partners = self._random.sample(close, min(PARTNERS, len(close)))
            lost = [member.peer for member in self._table if member.gone and member.expires > now]
            lost = [peer for peer in lost if peer not in self._node.doorkeeper.banned]
            async with trio.open_nursery() as nursery:
                for peer in partners + self._random.sample(lost, min(1, len(lost))):
                    nursery.start_soon(self._ask, peer)
            await trio.sleep(PERIOD)

    async def _ask(self, peer: PeerId) -> None:
        """Fetch what I lack from one peer; one that does not answer is left to its heartbeat."""
        try:
            # A few at a time: whoever asks many at once is told by each what it learns from the first.
            async with self._asking:
                full = True
                while full:
                    question = wire.MembersAsk(self._run, self._table.summary())
                    answer = await self._node.ask(peer, question, timeout=ANSWER_TIMEOUT)
                    # Where a whole page was new to me there may be another one.
                    full = isinstance(answer, wire.Members) and self._merge_all(peer, answer) >= PAGE
            if isinstance(answer, wire.Members):
                self._regain(peer)
        except NetworkError as error:
            self._node.telemetry.emit("gossip.failed", peer=peer, step="exchange members", reason=str(error))
        except RemoteError as error:
            self._node.charge(peer, "exchange members", error)

    async def _answer(self, peer: PeerId, question: wire.MembersAsk) -> wire.Members:
        if question.run != self._run:
            raise NetworkError("this peer takes part in another run")
        self._regain(peer)
        newer = self._table.newer_than(question.known, trio.current_time())
        return wire.Members(tuple(_encoded(record) for record in newer))

    def _close(self) -> tuple[PeerId, ...]:
        """With whom I talk: all members, or of many my neighbours."""
        if not self._is_crowd():
            return self.others()
        self._neighbours = [peer for peer in self._neighbours if self._counts(peer)]
        if (missing := NEIGHBOURS - len(self._neighbours)) > 0:
            others = [peer for peer in self.others() if peer not in self._neighbours]
            new = self._random.sample(others, min(missing, len(others)))
            self._neighbours += new
            for peer in new:
                self._compare(peer)
        return tuple(self._neighbours)

    def _hear(self, carrier: PeerId, message: wire.Members) -> None:
        """A rumour: what is new to me I pass on."""
        news = [data for data in message.records if self._merge(_decoded(data), carrier)]
        if news and self._is_crowd():
            if not self._rumours:
                self._node.nursery.start_soon(self._pass_on)
            self._rumours.update(dict.fromkeys(news))

    async def _pass_on(self) -> None:
        await trio.sleep(RUMOUR_PAUSE)
        rumours = list(self._rumours)
        self._rumours.clear()
        for start in range(0, len(rumours), MAX_RUMOURS):
            self._node.tell(self._close(), wire.Members(tuple(rumours[start : start + MAX_RUMOURS])))

    def _is_crowd(self) -> bool:
        return max(self._table.num_here, self._num_found) > MESH

    def _merge_all(self, carrier: PeerId, message: wire.Members) -> int:
        """Take all records of an answer; how many of them were news."""
        return sum(self._merge(_decoded(data), carrier) for data in message.records)

    def _merge(self, record: Record, carrier: PeerId) -> bool:
        """Take one record; whether it was news."""
        held = self._table.get(record.peer)
        if record.peer in self._node.doorkeeper.banned:
            return False
        if held is not None and held.record is record:
            return False  # A rumour comes from every neighbour, and each time it is decoded to the same record.
        counted = self._counts(record.peer)
        merge = self._table.merge(record, trio.current_time())
        if merge.outcome is Outcome.REFUSED:
            self._node.telemetry.emit("member.refused", peer=record.peer, step="merge", reason=merge.reason)
        if merge.outcome not in (Outcome.NEW, Outcome.UPDATED):
            return False
        member = self._table.get(record.peer)
        assert member is not None
        self._node.learn(record.peer, member.body.addresses)
        if not counted and self._counts(record.peer):
            self._node.telemetry.emit("member.new", peer=record.peer, step=f"through {carrier}", reason=merge.reason)
            self._introduce(record.peer)
        elif counted and not self._counts(record.peer):
            self._node.telemetry.emit("member.left", peer=record.peer, reason=member.gone)
            self._node.lose(record.peer, member.gone)
            self._update_watch()
        self._tell_changed()
        return True

    def _introduce(self, peer: PeerId) -> None:
        """A member begins to count."""
        if not self._is_crowd() or peer in self._attended:
            self._update_watch()
        if not self._is_crowd():
            self._compare(peer)
        for handler in self._newcomer:
            handler(peer)

    def _compare(self, peer: PeerId) -> None:
        """Two tables meet: I ask for what I lack, and show who I am."""
        if self._record is not None:
            self._node.tell(peer, wire.Members((_encoded(self._record),)))
        self._node.nursery.start_soon(self._ask, peer)

    def _regain(self, peer: PeerId) -> None:
        """Whom I had lost has spoken to me; of whom I have banned that may have been under way."""
        if peer not in self._node.doorkeeper.banned and self._table.regain(peer, trio.current_time()):
            self._node.telemetry.emit("member.back", peer=peer, step="exchange members")
            self._introduce(peer)
            self._tell_changed()

    def _goodbye(self, peer: PeerId, message: wire.Goodbye) -> None:
        self._node.telemetry.emit("member.left", peer=peer, reason=message.reason)
        if self._table.lose(peer, trio.current_time(), f"said goodbye: {message.reason}"):
            self._tell_changed()
        self._node.lose(peer, f"said goodbye: {message.reason}")
        self._update_watch()

    def _lose(self, peer: PeerId, reason: str) -> None:
        if self._table.lose(peer, trio.current_time(), reason):
            self._tell_changed()
            self._node.nursery.start_soon(self._seek, peer)

    async def _seek(self, peer: PeerId) -> None:
        """Ask whom I have just lost whether it is back."""
        for pause in SEEK_PAUSES:
            await trio.sleep(pause)
            if self._counts(peer) or peer in self._node.doorkeeper.banned:
                return
            await self._ask(peer)

    def _counts(self, peer: PeerId) -> bool:
        return self._table.counts(peer, trio.current_time())

    def _update_watch(self) -> None:
        others = self.others()
        self._node.watch(sorted(self._attended.intersection(others)) if self._is_crowd() else others)

    def _tell_changed(self) -> None:
        event, self._changed = self._changed, trio.Event()
        event.set()
