"""Gossip: anti-entropy and rumours, by which the member tables of a run become equal.

Theory of operation. A change of my record is pushed to every active member at once. Every ten seconds I request the
records that I lack from three random members (anti-entropy), and ask one of the lost ones whether it is back. The
directory is queried only while I know no member, and then at intervals: newcomers meet there, members exchange
directly. If the directory does not answer, I ask the members that I remember from an earlier process. A member that was
just lost is asked a few times soon after, since a process that was stopped for a moment is back by then.

In a crowd (`presence.MESH`) that would cost every peer a message and a connection for every other. There each peer has
a few random neighbours instead: a change goes to them and they pass it on once to theirs (rumours, as in Demers 1987),
and anti-entropy runs with them.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial

import trio

from ...peer import wire
from ...peer.errors import MalformedMessage, NetworkError, RemoteError
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..directory.interface import Directory
from ..keys import member_key
from ..records import Record
from .presence import Presence
from .remembered import Remembered
from .table import LIFETIME, MAX_MEMBER_BYTES, MAX_MEMBERS, PAGE, MemberBody, MemberTable, MergeOutcome, open_member

GOSSIP_PERIOD = 10.0
PARTNERS = 3
"""Random partners a turn: a change reaches n members in about log₄ n turns even if its push was lost."""
SEARCH_PERIODS = (0.5, 1.0, 2.0, 5.0)
"""Seconds between queries of the directory while I know no member; the last one repeats."""
NEIGHBOURS = 6
"""A rumour that each peer passes on to 6 at random misses e⁻⁶ = 0.2 % of them; these get it by anti-entropy."""
RUMOUR_PAUSE = 0.5
"""Seconds in which rumours are batched before they are passed on: at 1,000 members a round brings hundreds at a time."""
MAX_RUMOURS = 256
"""Records in one message (`wire.Members`)."""
PUBLISH_PERIOD = 30.0
"""Half of a record's lifetime: after one lost publication I can still be found."""
RENEW_PERIOD = LIFETIME / 3
"""Seconds after which I renew an unchanged record: a member that waits in a long round must not expire."""
GOSSIP_ANSWER_TIMEOUT = 5.0
SEEK_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each request to a member that was just lost; later it is one of those asked every `GOSSIP_PERIOD`."""
_encoded = lru_cache(maxsize=MAX_MEMBERS)(Record.encode)
_decoded = lru_cache(maxsize=MAX_MEMBERS)(Record.decode)
"""A member's record comes from several partners and goes to several, each time the same bytes."""

MAX_MEMBER_RECORD_BYTES = MAX_MEMBER_BYTES + 500
"""A member record with its envelope: longer ones would fill the cache of decoded records."""


def _opened(data: bytes) -> Record:
    """Decode a record that came from somebody. Raises `MalformedMessage`."""
    if len(data) > MAX_MEMBER_RECORD_BYTES:
        raise MalformedMessage(f"a member record of {len(data)} bytes")
    return _decoded(data)


def _check_all(records: Sequence[Record]) -> None:
    """Verify records, so that merging them later finds the result cached; a wrong one is found again there."""
    for record in records:
        with suppress(RemoteError):
            open_member(record)


class Gossip:
    """One peer's gossip: its exchange of member records with others of its run, and with the directory."""

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
        self.presence = Presence(node, table)
        self._table = table
        self._directory = directory
        self._run = run
        self._remembered = remembered
        self._random = random.Random(seed)
        self._record: Record | None = None
        self._body: MemberBody | None = None
        self._announced = 0.0
        self._asking = trio.CapacityLimiter(PARTNERS)
        self._neighbours: list[PeerId] = []
        self._rumours: dict[bytes, None] = {}
        self.looked = trio.Event()
        """Set once the directory has answered and the members that it named have been asked."""
        self.presence.on_newcomer(self._exchange_with_newcomer)
        self.presence.on_lost(lambda peer: node.nursery.start_soon(self._seek, peer))
        node.prefer(self.presence.counts)
        node.restrict(table.why_not_serve)
        node.on_ask(wire.MembersAsk, self._answer)
        node.on_message(wire.Members, self._receive_rumours)

    def announce(self, body: MemberBody) -> None:
        """Sign my new state and push it to every active member, or in a crowd to my neighbours."""
        self._body, self._announced = body, trio.current_time()
        self._record = self._table.update_own(self._node.identity, body, self._announced)
        self._node.send(self._partners(), wire.Members((_encoded(self._record),)))

    async def run(self) -> None:
        """Exchange records until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._search)
            nursery.start_soon(self._publish)
            nursery.start_soon(self._exchange)
            if self._remembered is not None:
                nursery.start_soon(self.presence.keep, self._remembered)

    async def _search(self) -> None:
        turn = 0
        while True:
            try:
                found = await self._directory.find(self._run)
                self.presence.num_named = len(found)
                strangers = [peer for peer in found if peer != self._node.peer_id and not self.presence.counts(peer)]
                if self.presence.is_crowd:  # A few of them know the others; each costs a lookup.
                    strangers = self._random.sample(strangers, min(2 * NEIGHBOURS, len(strangers)))
                for peer in strangers:
                    await self._look_up(peer)
                self._partners()  # In a crowd my first neighbours are among them.
                self.looked.set()
            except NetworkError as error:
                self._node.telemetry.emit("directory.failed", step="find members", reason=str(error))
                await self._ask_remembered()
            if self.presence.others():
                await trio.sleep(PUBLISH_PERIOD)
            else:
                await trio.sleep(SEARCH_PERIODS[min(turn, len(SEARCH_PERIODS) - 1)])
            turn += 1

    async def _ask_remembered(self) -> None:
        """Ask the members that I remember, if no directory answers: one that answers knows the others."""
        if self._remembered is None or self.presence.others():
            return
        async with trio.open_nursery() as nursery:
            for peer, addresses in self._remembered.addresses().items():
                if peer != self._node.peer_id:
                    self._node.learn(peer, addresses)
                    self._show_record(peer)
                    nursery.start_soon(self._ask, peer)
        if self.presence.others():
            self.looked.set()

    async def _look_up(self, peer: PeerId) -> None:
        """Take the record of `peer` from the directory; a new member is then asked for its table."""
        try:
            value = await self._directory.get(member_key(self._run, peer))
            if value is not None:
                self._merge(Record.decode(value), carrier=peer)
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
        """Run anti-entropy with random partners, turn after turn."""
        while True:
            if self._body is not None and trio.current_time() - self._announced >= RENEW_PERIOD:
                self.announce(self._body)
            self.presence.expire()
            close, lost = self._partners(), self.presence.lost()
            partners = self._random.sample(close, min(PARTNERS, len(close)))
            async with trio.open_nursery() as nursery:
                for peer in partners + self._random.sample(lost, min(1, len(lost))):
                    nursery.start_soon(self._ask, peer)
            await trio.sleep(GOSSIP_PERIOD)

    async def _ask(self, peer: PeerId) -> None:
        """Fetch the records that I lack from one peer; a failure is left to its heartbeat."""
        try:
            # A few at a time: of many asked at once, each would send the same records.
            async with self._asking:
                full = True
                while full:
                    question = wire.MembersAsk(self._run, self._table.summary())
                    answer = await self._node.ask(peer, question, timeout=GOSSIP_ANSWER_TIMEOUT)
                    # If a whole page was new to me there may be another one.
                    full = isinstance(answer, wire.Members) and await self._merge_page(peer, answer) >= PAGE
            if isinstance(answer, wire.Members):
                self.presence.regain(peer)
        except NetworkError as error:
            self._node.telemetry.emit("gossip.failed", peer=peer, step="exchange members", reason=str(error))
        except RemoteError as error:
            self._node.charge(peer, "exchange members", error)

    async def _answer(self, peer: PeerId, question: wire.MembersAsk) -> wire.Members:
        if question.run != self._run:
            raise NetworkError("this peer takes part in another run")
        self.presence.regain(peer)
        newer = self._table.newer_than(question.known, trio.current_time())
        return wire.Members(tuple(_encoded(record) for record in newer))

    def _partners(self) -> tuple[PeerId, ...]:
        """Return the peers that I exchange with: all members, in a crowd my neighbours."""
        if not self.presence.is_crowd:
            return self.presence.others()
        self._neighbours = [peer for peer in self._neighbours if self.presence.counts(peer)]
        if (missing := NEIGHBOURS - len(self._neighbours)) > 0:
            others = [peer for peer in self.presence.others() if peer not in self._neighbours]
            new = self._random.sample(others, min(missing, len(others)))
            self._neighbours += new
            for peer in new:
                self._compare(peer)
        return tuple(self._neighbours)

    def _receive_rumours(self, carrier: PeerId, message: wire.Members) -> None:
        """Merge pushed records: of a member those of any peer, of a stranger only its own."""
        records = {data: _opened(data) for data in message.records}
        if not self._node.is_member(carrier):
            if others := [data for data, record in records.items() if record.peer != carrier]:
                self._node.refuse(carrier, "members", "a stranger brings records of others")
            for data in others:
                del records[data]
        new = [record for record in records.values() if not self._holds(record)]
        self._node.verify(carrier, "members", len(new), partial(_check_all, new), lambda _: self._merge_all(carrier, records))

    def _merge_all(self, carrier: PeerId, records: dict[bytes, Record]) -> None:
        """Merge verified records; in a crowd those that are new to me are passed on."""
        news = [data for data, record in records.items() if self._merge(record, carrier)]
        if news and self.presence.is_crowd:
            if not self._rumours:
                self._node.nursery.start_soon(self._pass_on)
            self._rumours.update(dict.fromkeys(news))

    async def _pass_on(self) -> None:
        await trio.sleep(RUMOUR_PAUSE)
        rumours = list(self._rumours)
        self._rumours.clear()
        for start in range(0, len(rumours), MAX_RUMOURS):
            self._node.send(self._partners(), wire.Members(tuple(rumours[start : start + MAX_RUMOURS])))

    async def _merge_page(self, carrier: PeerId, message: wire.Members) -> int:
        """Merge all records of an answer; returns how many of them were new."""
        records = [_opened(data) for data in message.records]
        await self._node.compute(_check_all, [record for record in records if not self._holds(record)])
        return sum(self._merge(record, carrier) for record in records)

    def _holds(self, record: Record) -> bool:
        """Return True for the very record of the table: a rumour comes from every neighbour, each time as the same object."""
        held = self._table.get(record.peer)
        return held is not None and held.record is record

    def _merge(self, record: Record, carrier: PeerId) -> bool:
        """Merge one record; returns True if it was new."""
        if record.peer in self._node.guard.banned or self._holds(record):
            return False
        counted = self.presence.counts(record.peer)
        merge = self._table.merge(record, trio.current_time())
        if merge.outcome is MergeOutcome.REFUSED:
            self._node.telemetry.emit("member.refused", peer=record.peer, step="merge", reason=merge.reason)
        if merge.outcome not in (MergeOutcome.NEW, MergeOutcome.UPDATED):
            return False
        member = self._table.get(record.peer)
        assert member is not None
        self._node.learn(record.peer, member.body.addresses)
        self.presence.take(record.peer, counted=counted, carrier=carrier, reason=merge.reason)
        return True

    def _exchange_with_newcomer(self, peer: PeerId) -> None:
        if not self.presence.is_crowd:
            self._compare(peer)

    def _compare(self, peer: PeerId) -> None:
        """Push my record to a peer and request those that I lack."""
        self._show_record(peer)
        self._node.nursery.start_soon(self._ask, peer)

    def _show_record(self, peer: PeerId) -> None:
        """Push my record to a peer: where the run is closed it answers no question before it has seen that."""
        if self._record is not None:
            self._node.send(peer, wire.Members((_encoded(self._record),)))

    async def _seek(self, peer: PeerId) -> None:
        """Ask a member that was just lost whether it is back."""
        for pause in SEEK_PAUSES:
            await trio.sleep(pause)
            if self.presence.counts(peer) or peer in self._node.guard.banned:
                return
            await self._ask(peer)
