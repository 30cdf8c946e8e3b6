"""Presence: the failure detector of a run's membership, with heartbeats, goodbyes, expiry and returning members.

Theory of operation. A member is *here* while its record counts (`MemberTable.active`). Three things end that: its
heartbeat fails, it sends a goodbye, or its record expires. A lost member is here again as soon as a newer record of it
or any message from it arrives. Every change wakes the tasks that wait in `changed`.

Heartbeats go to all members up to `MESH` of them. In a *crowd*, a run of more, they go only to the peers of my next
round (`attend`); all others expire.
"""

from collections.abc import Callable, Collection

import trio

from ...peer import wire
from ...peer.node.node import Node
from ...peer.transport import PeerId
from .remembered import Remembered
from .table import Member, MemberTable

MESH = 64
"""Up to so many members, a full roster, every member exchanges with every other; beyond, each with a few neighbours."""
KEEP_PERIOD = 5.0
"""Seconds between two writes of the members: a restart that misses the last write still knows the others."""


class Presence:
    """One peer's view of the members of its run that are here."""

    def __init__(self, node: Node, table: MemberTable) -> None:
        self._table = table
        self.num_named = 0
        """Members that the directory named: a newcomer is in a crowd before its table shows it."""
        self._node = node
        self._attended: frozenset[PeerId] = frozenset()
        self._newcomer: list[Callable[[PeerId], None]] = []
        self._lost: list[Callable[[PeerId], None]] = []
        self._changed = trio.Event()
        node.on_message(wire.Goodbye, self._receive_goodbye)
        node.on_lost(self._lose)

    def on_newcomer(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` whenever a peer begins to count as an active member."""
        self._newcomer.append(handler)

    def on_lost(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` whenever the heartbeat to an active member fails."""
        self._lost.append(handler)

    def active(self) -> tuple[Member, ...]:
        """The members that count now, including me."""
        return self._table.active(trio.current_time())

    def others(self) -> tuple[PeerId, ...]:
        """The active members but me."""
        return tuple(member.peer for member in self.active() if member.peer != self._node.peer_id)

    def counts(self, peer: PeerId) -> bool:
        """Return True if a peer is an active member."""
        return self._table.counts(peer, trio.current_time())

    @property
    def is_crowd(self) -> bool:
        """True if the run has more than `MESH` members."""
        return max(self._table.num_here, self.num_named) > MESH

    async def changed(self) -> None:
        """Wait for the next change of the table."""
        await self._changed.wait()

    def attend(self, peers: Collection[PeerId]) -> None:
        """Set the peers of my next round: in a crowd they receive the heartbeats."""
        self._attended = frozenset(peers)
        self._watch()

    def take(self, peer: PeerId, *, counted: bool, carrier: PeerId, reason: str) -> None:
        """React to a new record of a peer in the table; `counted` is True if the peer was here before it."""
        counts = self.counts(peer)
        if counts and not counted:
            self._node.telemetry.emit("member.new", peer=peer, step=f"through {carrier}", reason=reason)
            self._introduce(peer)
        elif counted and not counts:
            member = self._table.get(peer)
            assert member is not None
            self._node.telemetry.emit("member.left", peer=peer, reason=member.gone)
            self._node.lose(peer, member.gone)
            self._watch()
        self._send_changed()

    def regain(self, peer: PeerId) -> None:
        """Count a lost peer that has sent me a message; that of a banned one may have been under way."""
        if peer not in self._node.guard.banned and self._table.regain(peer, trio.current_time()):
            self._node.telemetry.emit("member.back", peer=peer, step="exchange members")
            self._introduce(peer)
            self._send_changed()

    def expire(self) -> None:
        """Mark the members whose record has expired as lost."""
        for peer in self._table.expire(trio.current_time()):
            self._node.telemetry.emit("peer.lost", peer=peer, reason="its record expired")
        self._watch()

    def lost(self) -> list[PeerId]:
        """Return the members that do not count though their record is valid, except banned ones: they may come back."""
        now = trio.current_time()
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

    def _introduce(self, peer: PeerId) -> None:
        """Announce a member that begins to count."""
        if not self.is_crowd or peer in self._attended:
            self._watch()
        for handler in self._newcomer:
            handler(peer)

    def _receive_goodbye(self, peer: PeerId, message: wire.Goodbye) -> None:
        reason = f"sent a goodbye: {message.reason}"
        self._node.telemetry.emit("member.left", peer=peer, reason=message.reason)
        if self._table.lose(peer, trio.current_time(), reason):
            self._send_changed()
        self._node.lose(peer, reason)
        self._watch()

    def _lose(self, peer: PeerId, reason: str) -> None:
        if self._table.lose(peer, trio.current_time(), reason):
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
