"""Presence: the failure detector of a run's membership: sessions, words on them, heartbeats, goodbyes, expiry.

Theory of operation. A member is *here* while its record counts (`MemberTable.active`): I have met it in the last minute,
or enough others say that they have (`vouchers`). Three things end that besides: its heartbeat fails, it sends a goodbye,
or its record expires. A lost member is here again as soon as a newer record of it or any exchange with it arrives, and
it is met again. Every change wakes the tasks that wait in `changed`.

Heartbeats go to all members up to `MESH` of them. In a *crowd*, a run of more, they go only to the peers of my next
round (`attend`). There I show myself to my witnesses, and if I am one I send my word (`Met`) to all whom I have met.
Whoever is here therefore costs each other member a bit of each witness's word, and no session.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import trio

from ...peer import wire
from ...peer.base.transport import PeerId, Rung
from ...peer.node.node import Node
from .remembered import Remembered
from .table import PRESENCE, Member, MemberTable
from .vouchers import Vouchers, chosen_witnesses, tags_of, witnesses

MESH = 64
"""Up to so many members, a full roster, every member exchanges with every other; beyond, each with a few neighbours."""
REVIEW_PERIOD = 5.0
"""Seconds between two looks at who has been silent for a minute, and for whom others vouch."""
NEWS_PERIOD = 1.0
"""Seconds until such a look where something has changed: a flood of words costs no more than one look a second."""
MET_PERIOD = 20.0
"""Seconds between two of my words, and between two beats to a witness: two may be lost before I do not count."""
MET_PAUSE = 2.0
MET_GROWTH = 1.1
"""A word is given again after `MET_PAUSE` s if I have met so many times more since the last: a run that begins is
known to all after a few words, and one that has begun costs a word in `MET_PERIOD`."""
FOUNDING = 60.0
"""Seconds in which a newcomer believes how many members the directory names; then it must have met them."""
KEEP_PERIOD = 5.0
"""Seconds between two writes of the members: a restart that misses the last write still knows the others."""


class Presence:
    """One peer's view of the members of its run that are here."""

    def __init__(self, node: Node, table: MemberTable) -> None:
        self._table = table
        self._num_named = 0
        self._named_until = 0.0
        self._node = node
        self._attended: frozenset[PeerId] = frozenset()
        self._vouchers = Vouchers()
        self._votes: Callable[[], Mapping[PeerId, int]] | None = None
        self._voters: frozenset[PeerId] = frozenset()
        """Who had votes at the last look."""
        self._here: frozenset[PeerId] = frozenset()
        self._others: tuple[tuple[Member, ...], tuple[PeerId, ...]] | None = None
        """The active members, and their ids but mine."""
        self._witnesses_of: tuple[PeerId, ...] | None = None
        """The other members at the last look for witnesses."""
        self._witnesses: list[PeerId] = []
        self._chosen: list[PeerId] = []
        """Those of the witnesses with which I keep a session."""
        self._has_news = True
        """True if another word or a meeting has come since the last look at the table."""
        self._unspoken: set[PeerId] = set()
        """Members that have begun to count since I last gave my word to anybody: they have none of mine."""
        self._spoke = -math.inf
        self._spoke_of = 0
        self._shown: dict[PeerId, float] = {}
        self._newcomer: list[Callable[[PeerId], None]] = []
        self._lost: list[Callable[[PeerId], None]] = []
        self._changed = trio.Event()
        node.on_message(wire.Goodbye, self._receive_goodbye)
        node.on_message(wire.Met, self._receive_met)
        node.on_heard(self._meet)
        node.on_lost(self._lose)

    def on_newcomer(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` whenever a peer begins to count as an active member."""
        self._newcomer.append(handler)

    def on_lost(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` whenever the heartbeat to an active member fails."""
        self._lost.append(handler)

    def follow_chain(
        self, votes: Callable[[], Mapping[PeerId, int]], certified: Callable[[], Collection[PeerId] | None]
    ) -> None:
        """Count words on who is here by the votes of the next round, which `votes` returns; who has any is spared as well.

        `certified` returns the members of the newest certificate, None while I hold none (`MemberTable.certified`).
        """
        self._votes = votes
        self._table.certified = certified
        self._node.votes = lambda peer: peer in self._voters

    def active(self) -> tuple[Member, ...]:
        """The members that count now, including me."""
        return self._table.active(self._node.now())

    def others(self) -> tuple[PeerId, ...]:
        """The active members but me."""
        active = self.active()
        if self._others is None or self._others[0] is not active:
            self._others = active, tuple(member.peer for member in active if member.peer != self._node.peer_id)
        return self._others[1]

    def counts(self, peer: PeerId) -> bool:
        """Return True if a peer is an active member."""
        return self._table.counts(peer, self._node.now())

    @property
    def is_crowd(self) -> bool:
        """True if the run has more than `MESH` members."""
        return self._table.num_here > MESH or (self._num_named > MESH and self._node.now() < self._named_until)

    def named(self, number: int) -> None:
        """Take the number of members that the directory names: a newcomer is in a crowd before its table shows it."""
        if not self._named_until:
            self._named_until = self._node.now() + FOUNDING
        self._num_named = number

    async def changed(self) -> None:
        """Wait for the next change of the table."""
        await self._changed.wait()

    def attend(self, peers: Collection[PeerId]) -> None:
        """Set the peers of my next round: in a crowd they receive the heartbeats."""
        self._attended = frozenset(peers)
        self._watch()

    def take(self, peer: PeerId, *, counted: bool, carrier: PeerId, reason: str) -> None:
        """React to a new record of a peer in the table; `counted` is True if the peer was here before it."""
        if not counted and (heard := self._node.heard(peer)) + PRESENCE > self._node.now():
            self._note_meeting(peer, heard)
        counts = self.counts(peer)
        if counts and not counted:
            self._begin(peer, "member.new", step=f"through {carrier}", reason=reason)
        elif counted and not counts:
            member = self._table.get(peer)
            assert member is not None
            self._node.telemetry.emit("member.left", peer=peer, reason=member.gone)
            self._here -= {peer}
            self._node.lose(peer, member.gone)
            self._watch()
        if counts or counted:
            self._send_changed()

    def drop(self, dropped: Iterable[tuple[PeerId, str]]) -> None:
        """React to members whose rows are gone, with the reasons: they are no longer admitted."""
        for peer, reason in dropped:
            self._node.telemetry.emit("member.left", peer=peer, reason=reason)
            self._here -= {peer}
            self._node.lose(peer, reason)  # Before `_watch`, which would let it go silently.
        self._watch()
        self._send_changed()

    def regain(self, peer: PeerId) -> None:
        """Count a lost peer that has sent me a message; that of a banned one may have been under way."""
        now = self._node.now()
        if peer not in self._node.guard.banned and self._table.regain(peer, now):
            self._note_meeting(peer, now)
            if self.counts(peer):
                self._begin(peer, "member.back", step="exchange members")
                self._send_changed()

    async def run(self) -> None:
        """Find out who is here, show myself to my witnesses and give my word, until cancelled.

        That reads the whole table: every few seconds, and a second after news at most, however many bring them.
        """
        due = -math.inf
        while True:
            now = self._node.now()
            if self._has_news or now >= due:
                self._has_news, due = False, now + REVIEW_PERIOD
                self.review()
                self._show_myself()
            await trio.sleep(NEWS_PERIOD)

    def review(self) -> None:
        """Mark as lost whom nobody has met for a minute, and count for whom the others vouch."""
        now, watch = self._node.now(), False
        doubtful = self._table.to_vouch_for(now + 2 * REVIEW_PERIOD)
        votes = self._votes() if self._votes is not None else None
        self._voters = frozenset(votes or ())
        weights = None if self.is_crowd else votes
        self._table.vouch(self._vouchers.vouched(self._electors(), doubtful, now, weights))
        for peer, reason in self._table.expire(now):
            self._node.telemetry.emit("peer.lost", peer=peer, reason=reason)
            watch = True
        here = frozenset(self.others())
        if here == self._here and not watch:
            return
        new, self._here = here - self._here, here
        for peer in sorted(new):
            self._begin(peer, "member.new", step="review", reason="enough members vouch for it")
        self._watch()
        self._send_changed()

    def wanted_witnesses(self) -> list[PeerId] | None:
        """Return whom of the claimed peers I would keep a session with in a crowd, the best first; None for everybody."""
        if not self.is_crowd:
            return None
        here = frozenset(member.peer for member in self.active())
        now = self._node.now()
        claimed = {peer for peer in self._table.to_vouch_for(now) if peer not in here}
        return [peer for peer in witnesses(here | claimed) if peer in claimed]

    def lost(self) -> list[PeerId]:
        """Return the members that do not count though their record is valid, except banned ones: they may come back."""
        now = self._node.now()
        lost = [member.peer for member in self._table if member.gone and member.expires > now]
        return [peer for peer in lost if peer not in self._node.guard.banned]

    async def keep(self, remembered: Remembered) -> None:
        """Write the members to disk whenever they have changed, until cancelled."""
        while True:
            changed = self._changed
            if others := [member for member in self.active() if member.peer != self._node.peer_id]:
                await self._node.compute(remembered.keep, others)
                await trio.sleep(KEEP_PERIOD)
            await changed.wait()

    def _begin(self, peer: PeerId, event: str, **fields: str) -> None:
        """Announce a member that begins to count."""
        self._here |= {peer}
        self._has_news = True
        self._node.telemetry.emit(event, peer=peer, **fields)
        if not self.is_crowd:
            self._node.watch(self._node.watched | self._here)  # To list the table for each would cost a start n².
        elif peer in self._attended:
            self._watch()
        self._unspoken.add(peer)
        for handler in self._newcomer:
            handler(peer)

    def _meet(self, peer: PeerId) -> None:
        """React to any message of a peer."""
        if peer in self._node.guard.banned or self._table.get(peer) is None:
            return
        counted = self.counts(peer)
        self._note_meeting(peer, self._node.now())
        if not counted and self.counts(peer):
            self._begin(peer, "member.new", step="session", reason="I have met it")
            self._send_changed()

    def _note_meeting(self, peer: PeerId, heard: float) -> None:
        relayed = self._node.transport.rung(peer) is Rung.RELAYED
        if why_not := self._table.meet(peer, heard, self._node.origin_of(peer), relayed=relayed):
            self._node.refuse(peer, "members", why_not)

    def _electors(self) -> list[PeerId]:
        """Return the members whose words count for me: those that I have met, in a crowd my witnesses among them."""
        now, others = self._node.now(), self.others()
        if self.is_crowd:
            self._find_witnesses()
            others = tuple(self._chosen)
        return [peer for peer in others if self._table.has_met(peer, now)]

    def _find_witnesses(self) -> None:
        """Find the witnesses of a crowd, and choose some: once for the same members, and the same witnesses."""
        if (others := self.others()) is not self._witnesses_of:
            self._witnesses_of, before = others, self._witnesses
            self._witnesses = witnesses((*others, self._node.peer_id))
            if self._witnesses != before:
                self._chosen = chosen_witnesses(self._witnesses, self._node.peer_id)

    def _speaks(self) -> bool:
        """Return True if others need my word: in a crowd only those of witnesses are taken."""
        if not self.is_crowd:
            return True
        self._find_witnesses()
        return self._node.peer_id in self._witnesses

    def _show_myself(self) -> None:
        """Give my word to those whom I have met, and in a crowd show my witnesses that I am here."""
        now = self._node.now()
        met = [peer for peer in self.others() if self._table.has_met(peer, now)]
        grown = len(met) > self._spoke_of * MET_GROWTH and now >= self._spoke + MET_PAUSE
        is_due = grown or now >= self._spoke + MET_PERIOD
        to = met if is_due else [peer for peer in met if peer in self._unspoken]
        self._unspoken.clear()
        if (is_due or to) and self._speaks():
            if is_due:
                self._spoke, self._spoke_of = now, len(met)
            self._node.send(to, wire.Met(tags_of(met)))
        if not self.is_crowd:
            return
        self._find_witnesses()
        chosen = self._chosen
        new = [peer for peer in chosen if peer not in self._shown]
        due = [peer for peer in chosen if now >= self._shown.get(peer, now) + MET_PERIOD]
        self._shown = {peer: now if peer in due else self._shown.get(peer, now) for peer in chosen}
        self._node.send(due, wire.Beat())
        if (mine := self._table.get(self._node.peer_id)) is not None:  # They may not have my record yet.
            self._node.send(new, wire.Members((mine.record.encode(),)))

    def _receive_met(self, peer: PeerId, message: wire.Met) -> None:
        if not self._table.has_met(peer, self._node.now()) or not self.counts(peer):
            self._node.refuse(peer, "members", "the word of a stranger on whom it has met")
            return
        if self._vouchers.hear(peer, message.peers, self._node.now()):
            self._has_news = True

    def _receive_goodbye(self, peer: PeerId, message: wire.Goodbye) -> None:
        reason = f"sent a goodbye: {message.reason}"
        self._node.telemetry.emit("member.left", peer=peer, reason=message.reason)
        if self._table.lose(peer, self._node.now(), reason):
            self._here -= {peer}
            self._send_changed()
        self._node.lose(peer, reason)
        self._watch()

    def _lose(self, peer: PeerId, reason: str) -> None:
        if self._table.lose(peer, self._node.now(), reason):
            self._here -= {peer}
            self._send_changed()
            for handler in self._lost:
                handler(peer)

    def _watch(self) -> None:
        """Exchange heartbeats with the members whose failure matters."""
        others = self.others()
        self._node.watch(sorted(self._attended.intersection(others)) if self.is_crowd else others)

    def _send_changed(self) -> None:
        event, self._changed = self._changed, trio.Event()
        event.set()
