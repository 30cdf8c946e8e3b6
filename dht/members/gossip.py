"""Gossip: anti-entropy and rumours, by which the member tables of a run become equal.

Theory of operation. A change of my record is pushed to every active member at once. Every ten seconds I request the
records that I lack from three random members (anti-entropy), and ask one of the lost ones whether it is back. The
directory is queried only while I know no member, and then at intervals: newcomers meet there, members exchange
directly. A record alone makes nobody a member (`table`): its peer is dialled, carriers in turns (`claims.Probes`). If
the directory does not answer, I ask the members that I remember from an earlier process. A member that was just lost
is asked a few times soon after, since a process that was stopped for a moment is back by then.

In a crowd (`presence.MESH`) that would cost every peer a message and a connection for every other. There each peer has
a few random neighbours instead: a change goes to them and they pass it on once to theirs (rumours, as in Demers 1987),
and anti-entropy runs with them. What may wait goes with the renewal once a minute, and claims are not passed on.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial

import trio

from ...peer import wire
from ...peer.base.errors import MalformedMessage, NetworkError, RemoteError, UsageError
from ...peer.base.transport import Address, PeerId
from ...peer.node.node import Node
from ..directory.interface import Directory
from ..keys import member_key
from ..records import Record
from ..run.admission import Charter
from .body import CACHED_BODY_BYTES, MAX_MEMBER_BYTES, MemberBody, MemberState, open_member
from .claims import Probes
from .presence import Presence
from .remembered import Remembered
from .table import LIFETIME, MAX_MEMBERS, OTHER_PROCESS, PAGE, PRESENCE, MemberTable, MergeOutcome

GOSSIP_PERIOD = 10.0
PARTNERS = 3
"""Random partners a turn: a change reaches n members in about log₄ n turns even if its push was lost."""
SEARCH_PERIODS = (0.5, 1.0, 2.0, 5.0)
"""Seconds between queries of the directory while I know no member; the last one repeats."""
FOLLOWERS = 2
"""Of the neighbours those that asked me last: a newcomer, whom nobody has chosen, hears rumours, too."""
NEIGHBOURS = 6
"""A rumour that each peer passes on to 6 at random misses e⁻⁶ = 0.2 % of them; these get it by anti-entropy."""
CROWD_TURNS = 3
"""In a crowd one partner every 30 s: a summary of 300 members has 19 kB, and rumours bring nearly everything."""
RUMOUR_PAUSE = 0.5
"""Seconds in which rumours are batched before they are passed on: at 1,000 members a round brings hundreds at a time."""
MAX_RUMOURS = 256
"""Records in one message (`wire.Members`)."""
PUBLISH_PERIOD = 30.0
"""Half of a record's lifetime: after one lost publication I can still be found."""
RENEW_PERIOD = LIFETIME / 3
"""Seconds after which I renew a record without news: a member that waits in a long round must not expire."""
GOSSIP_ANSWER_TIMEOUT = 5.0
MAX_PAGES = MAX_MEMBERS // PAGE
EXCHANGE_SECONDS = 30.0
"""The limits of one exchange: who answers with ever newer records, or slowly, must not keep me from renewing mine."""
GREETINGS = 32
"""Members named by the directory that are asked at once: of 64 that do not answer, the last is given up after 10 s."""
CLAIM_PROBES = 8
PROBE_PAUSE = 0.5
"""Seconds between two lots of `CLAIM_PROBES` dials of claimed peers: a run of 64 is met in 4 s, a flood costs 16 dials/s."""
SEEK_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each request to a member that was just lost; later it is one of those asked every `GOSSIP_PERIOD`."""
_encoded = lru_cache(maxsize=MAX_MEMBERS)(Record.encode)
_decoded = lru_cache(maxsize=MAX_MEMBERS)(Record.decode)
"""A member's record comes from several partners and goes to several, each time the same bytes."""

ENVELOPE_BYTES = 500
"""What a record has at most beside its body."""


def _opened(data: bytes) -> Record:
    """Decode a record that came from somebody. Raises `MalformedMessage`."""
    if len(data) > MAX_MEMBER_BYTES + ENVELOPE_BYTES:
        raise MalformedMessage(f"a member record of {len(data)} bytes")
    return _decoded(data) if len(data) <= CACHED_BODY_BYTES + ENVELOPE_BYTES else Record.decode(data)


def _check_all(records: Iterable[Record]) -> None:
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
        self._said: MemberBody | None = None
        self._announced = 0.0
        self._asking = trio.CapacityLimiter(PARTNERS)
        self._greeting = trio.CapacityLimiter(GREETINGS)
        self._greeted: set[PeerId] = set()
        """Peers that are being asked for their table: a newcomer among them need not be asked again."""
        self._neighbours: list[PeerId] = []
        self._followers: list[PeerId] = []
        self._rumours: dict[bytes, None] = {}
        self._refused: dict[PeerId, str] = {}
        """Why the records of peers were refused last, the oldest forgotten first."""
        self._doubles: tuple[Address, ...] = ()
        """The addresses in the last record that another process has signed with this peer's key, be it an earlier one."""
        self.looked = trio.Event()
        """Set once the directory has answered and the members that it named have been asked."""
        self._answered: set[PeerId] = set()
        """Who has answered before that."""
        self._has_answer = trio.Event()
        self._probes = Probes()
        self._claimed = trio.Event()
        self.presence.on_newcomer(self._exchange_with_newcomer)
        self.presence.on_lost(lambda peer: node.nursery.start_soon(self._seek, peer))
        node.prefer(self.presence.counts)
        node.restrict(table.why_not_serve)
        node.on_ask(wire.MembersAsk, self._answer)
        node.on_message(wire.Members, self._receive_rumours)

    def check_entry(self, *, has_begun: bool = False) -> None:
        """Raise `UsageError` where more members than may hold my invitation, and others are here or the run `has_begun`."""
        is_alone = not has_begun and all(member.peer == self._node.peer_id for member in self.presence.active())
        if not is_alone and (why_not := self._table.why_shut_out()):
            remedy = "ask the run's owner for another invitation, and pass it with --invite"
            raise UsageError(f"the run's members do not let this peer in: {why_not}", remedy=remedy)

    def announce(self, body: MemberBody) -> None:
        """Sign my new state and push it to every active member; in a crowd what may wait goes with my next renewal."""
        self._body = body
        if self._is_news(body):
            self._push(body)

    def _is_news(self, body: MemberBody) -> bool:
        """Return True if others must know my new state at once; in a crowd only what a round or a dial depends on is news.

        Once a full roster of members states a new head, one more changes nothing; so a round costs each peer a constant. A
        member that looks for a newer state has no head that anybody needs; that ends within seconds, or is renewed.
        """
        said = self._said
        if said is None or not self.presence.is_crowd:
            return True
        if (said.addresses, said.rung, said.layout, said.frozen) != (body.addresses, body.rung, body.layout, body.frozen):
            return True
        if said.state != body.state:
            return body.state != MemberState.SYNCING
        stated = sum(member.body.head == body.head for member in self.presence.active())
        return (said.round, said.head, said.root) != (body.round, body.head, body.root) and stated < wire.MAX_PARTS

    def _push(self, body: MemberBody) -> None:
        self._said, self._announced = body, trio.current_time()
        self._record = self._table.update_own(self._node.identity, body, self._announced)
        self._node.send(self._partners(), wire.Members((_encoded(self._record),)))

    async def doubles(self) -> tuple[Address, ...]:
        """Return the addresses in the last record that another process has signed with this peer's key, after a lookup.

        Two processes that start at once each publish their record between two lookups, so one of them sees the other's.
        """
        await self._look_up(self._node.peer_id)
        await self._publish_record()
        await self._look_up(self._node.peer_id)
        return self._doubles

    def follow(self, charter: Charter) -> None:
        """Admit members by other rules from now on."""
        self.presence.drop(self._table.follow(charter))

    async def await_look(self, are_enough: Callable[[Collection[PeerId]], bool]) -> None:
        """Wait until the directory has answered and the members that it named have been asked, or those that answered are
        enough: a dead one is named for an hour, and to dial it takes seconds.
        """
        while not self.looked.is_set() and not are_enough(self._answered):
            await self._has_answer.wait()

    def _end_look(self) -> None:
        self.looked.set()
        self._has_answer.set()

    async def run(self) -> None:
        """Exchange records until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._search)
            nursery.start_soon(self._publish)
            nursery.start_soon(self._exchange)
            nursery.start_soon(self._probe)
            nursery.start_soon(self.presence.run)
            if self._remembered is not None:
                nursery.start_soon(self.presence.keep, self._remembered)

    async def _search(self) -> None:
        turn = 0
        while True:
            try:
                found = await self._directory.find(self._run)
                self.presence.named(len(found))
                strangers = [peer for peer in found if peer != self._node.peer_id and not self.presence.counts(peer)]
                if self.presence.is_crowd:  # A few of them know the others; each costs a lookup.
                    strangers = self._random.sample(strangers, min(2 * NEIGHBOURS, len(strangers)))
                async with trio.open_nursery() as nursery:
                    for peer in strangers:
                        await self._look_up(peer)
                        if self.presence.is_crowd and peer not in strangers[:PARTNERS]:
                            self._show_record(peer)
                        else:
                            nursery.start_soon(self._greet, peer)
                self._partners()  # In a crowd my first neighbours are among them.
                self._end_look()
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
                    nursery.start_soon(self._greet, peer)
        if self.presence.others():
            self._end_look()

    async def _greet(self, peer: PeerId) -> None:
        """Show my record to a peer that may be here, and ask for its table: if it answers I have met it."""
        self._show_record(peer)
        self._greeted.add(peer)
        try:
            async with self._greeting:
                await self._ask_for_records(peer)
        finally:
            self._greeted.discard(peer)

    async def _probe(self) -> None:
        """Dial peers that others claim to be here; in a crowd only those that would be my witnesses."""
        while True:
            await self._claimed.wait()
            self._claimed = trio.Event()
            while self._probes:
                for peer in self._probes.take(CLAIM_PROBES, trio.current_time(), self.presence.wanted_witnesses()):
                    if self._table.is_claim(peer) and peer not in self._node.guard.banned:
                        self._show_record(peer)
                await trio.sleep(PROBE_PAUSE)

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

    async def _publish_record(self) -> None:
        try:
            await self._directory.provide(self._run)
            if self._record is not None:
                await self._directory.put(member_key(self._run, self._node.peer_id), self._record.encode())
        except NetworkError as error:
            self._node.telemetry.emit("directory.failed", step="publish", reason=str(error))

    async def _publish(self) -> None:
        await self._look_up(self._node.peer_id)  # What it replaces may be the record of another process.
        while True:
            await self._publish_record()
            await trio.sleep(PUBLISH_PERIOD if self._record is not None else SEARCH_PERIODS[0])

    async def _exchange(self) -> None:
        """Run anti-entropy with random partners, turn after turn."""
        turn, searched = 0, False
        while True:
            if (body := self._body) is not None and (said := self._said) is not None:
                searches = (body.state, said.state) == (MemberState.SYNCING, MemberState.TRAINING)
                if (searches and searched) or trio.current_time() - self._announced >= RENEW_PERIOD:
                    self._push(body)
                searched = searches
            close, lost = self._partners(), self.presence.lost()
            num_partners = PARTNERS if not self.presence.is_crowd else turn % CROWD_TURNS == 0
            partners = self._random.sample(close, min(num_partners, len(close)))
            turn += 1
            async with trio.open_nursery() as nursery:
                for peer in partners + self._random.sample(lost, min(1, len(lost))):
                    nursery.start_soon(self._ask, peer)
            await trio.sleep(GOSSIP_PERIOD)

    async def _ask(self, peer: PeerId) -> None:
        """Fetch the records that I lack from one peer; a failure is left to its heartbeat."""
        # A few at a time: of many asked at once, each would send the same records.
        async with self._asking:
            await self._ask_for_records(peer)

    async def _ask_for_records(self, peer: PeerId) -> None:
        try:
            with trio.fail_after(EXCHANGE_SECONDS):
                for _ in range(MAX_PAGES):
                    question = wire.MembersAsk(self._run, self._table.summary(peer))
                    answer = await self._node.ask(peer, question, timeout=GOSSIP_ANSWER_TIMEOUT)
                    if not isinstance(answer, wire.Members):
                        return
                    self.presence.regain(peer)
                    # If a whole page was new to me there may be another one.
                    if await self._merge_page(peer, answer) < PAGE:
                        self._note_answer(peer)
                        return
            reason = f"more than {MAX_PAGES} pages"
            self._node.telemetry.emit("gossip.failed", peer=peer, step="exchange members", reason=reason)
        except trio.TooSlowError:
            reason = f"its records take more than {EXCHANGE_SECONDS:g} s; the rest comes with the next exchange"
            self._node.telemetry.emit("gossip.failed", peer=peer, step="exchange members", reason=reason)
        except NetworkError as error:
            self._node.telemetry.emit("gossip.failed", peer=peer, step="exchange members", reason=str(error))
        except RemoteError as error:
            self._node.charge(peer, "exchange members", error)

    def _note_answer(self, peer: PeerId) -> None:
        """Note before the end of the first look that I know all that a peer knows."""
        if not self.looked.is_set():
            self._answered.add(peer)
            event, self._has_answer = self._has_answer, trio.Event()
            event.set()

    async def _answer(self, peer: PeerId, question: wire.MembersAsk) -> wire.Members:
        if question.run != self._run:
            raise NetworkError("this peer takes part in another run")
        self.presence.regain(peer)
        if self.presence.is_crowd and self.presence.counts(peer):
            self._followers = [*(each for each in self._followers if each != peer), peer][-FOLLOWERS:]
        newer = self._table.newer_than(question.known, trio.current_time())
        return wire.Members(tuple(_encoded(record) for record in newer))

    def _partners(self) -> tuple[PeerId, ...]:
        """Return the peers that I exchange with: all members, in a crowd my neighbours."""
        if not self.presence.is_crowd:
            return self.presence.others()
        self._neighbours = [peer for peer in self._neighbours if self.presence.counts(peer)]
        if (missing := NEIGHBOURS - FOLLOWERS - len(self._neighbours)) > 0:
            others = [peer for peer in self.presence.others() if peer not in self._neighbours]
            new = self._random.sample(others, min(missing, len(others)))
            self._neighbours += new
            for peer in new:
                self._compare(peer)
        followers = [peer for peer in self._followers if self.presence.counts(peer) and peer not in self._neighbours]
        return (*self._neighbours, *followers)

    def _receive_rumours(self, carrier: PeerId, message: wire.Members) -> None:
        """Merge pushed records: of a member those of any peer, of a stranger only its own, which is alone or the first."""
        pushed = message.records
        self._node.spend(carrier, len(pushed))  # To read one costs a third of a signature, and most need none.
        if not (is_member := self._node.is_member(carrier)) and len(pushed) > 1:
            self._node.refuse(carrier, "members", "a stranger brings records of others")
            pushed = pushed[:1]
        records = self._unknown(pushed)
        if not is_member:
            records = {data: record for data, record in records.items() if record.peer == carrier}
        if new := self._fitting(records, carrier):
            check = partial(_check_all, new.values())
            self._node.verify(carrier, "members", len(new), check, lambda _: self._merge_all(carrier, new))

    def _unknown(self, pushed: Iterable[bytes]) -> dict[bytes, Record]:
        """Decode records, and return those that are not held: five of six copies of a rumour are. Raises as `_opened`."""
        records, get = {}, self._table.get
        for data in pushed:
            record = _opened(data)
            if (held := get(record.peer)) is None or held.record is not record:
                records[data] = record
        return records

    def _fitting(self, records: Mapping[bytes, Record], carrier: PeerId) -> dict[bytes, Record]:
        """Return those records that fit into the table: what does not fit costs no signature."""
        if not records:
            return {}
        room, why_not = self._table.room_for_claims(carrier, self._node.origin_of(carrier))
        fitting = {}
        for data, record in records.items():
            if self._table.get(record.peer) is None and not self._has_met(record.peer):
                if not room:
                    self._node.refuse(carrier, "members", why_not)
                    continue
                room -= 1
            fitting[data] = record
        return fitting

    def _has_met(self, peer: PeerId) -> bool:
        return self._node.heard(peer) + PRESENCE > trio.current_time()

    def _merge_all(self, carrier: PeerId, records: dict[bytes, Record]) -> None:
        """Merge verified records; in a crowd those that are new to me are passed on, unless they are claims."""
        for data, record in records.items():
            if self._merge(record, carrier) and self.presence.counts(record.peer):
                self._spread(data)

    def _spread(self, data: bytes) -> None:
        """Pass a record on with the next rumours, in a crowd."""
        if not self.presence.is_crowd:
            return
        if not self._rumours:
            self._node.nursery.start_soon(self._pass_on)
        self._rumours[data] = None

    async def _pass_on(self) -> None:
        await trio.sleep(RUMOUR_PAUSE)
        rumours = list(self._rumours)
        self._rumours.clear()
        for start in range(0, len(rumours), MAX_RUMOURS):
            self._node.send(self._partners(), wire.Members(tuple(rumours[start : start + MAX_RUMOURS])))

    async def _merge_page(self, carrier: PeerId, message: wire.Members) -> int:
        """Merge all records of an answer; returns how many of them were new."""
        new = self._fitting(self._unknown(message.records), carrier)
        await self._node.compute(_check_all, new.values())
        return sum(self._merge(record, carrier) for record in new.values())

    def _holds(self, record: Record) -> bool:
        """Return True for the very record of the table: a rumour comes from every neighbour, each time as the same object."""
        held = self._table.get(record.peer)
        return held is not None and held.record is record

    def _merge(self, record: Record, carrier: PeerId) -> bool:
        """Merge one record; returns True if it was new."""
        if record.peer in self._node.guard.banned or self._holds(record):
            return False
        counted, now = self.presence.counts(record.peer), trio.current_time()
        origin, met = self._node.origin_of(carrier), self._has_met(record.peer)
        merge = self._table.merge(record, now, carrier=carrier, origin=origin, met=met)
        if merge.reason == OTHER_PROCESS:
            self._doubles = open_member(record).addresses
        if merge.outcome is MergeOutcome.REFUSED and self._refused.get(record.peer) != merge.reason:
            self._refused[record.peer] = merge.reason  # Once, however often it comes: it is in nobody's table.
            while len(self._refused) > MAX_MEMBERS:
                del self._refused[next(iter(self._refused))]
            self._node.telemetry.emit("member.refused", peer=record.peer, step="merge", reason=merge.reason)
        elif merge.outcome is MergeOutcome.FULL:
            self._node.refuse(carrier, "members", merge.reason)
        if merge.outcome not in (MergeOutcome.NEW, MergeOutcome.UPDATED):
            return False
        self._refused.pop(record.peer, None)
        member = self._table.get(record.peer)
        assert member is not None
        self._node.learn(record.peer, member.body.addresses)
        self.presence.take(record.peer, counted=counted, carrier=carrier, reason=merge.reason)
        if self._table.is_claim(record.peer):
            self._probes.add(record.peer, carrier)
            self._claimed.set()
        return True

    def _exchange_with_newcomer(self, peer: PeerId) -> None:
        member = self._table.get(peer)
        assert member is not None
        if not self.presence.is_crowd:
            if peer not in self._greeted:
                self._compare(peer)
        elif self._has_met(peer):
            self._show_record(peer)
        self._spread(_encoded(member.record))

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
