"""The network process's side of the leases: which member trains which part of the data, by the members' records."""

from collections.abc import Callable, Iterator, Mapping

import trio

from ...dht.members.table import MemberTable
from ...peer.base.errors import MalformedMessage
from ...peer.base.transport import PeerId
from ...peer.log.telemetry import Telemetry
from ...peer.wire.schema import encode
from .leases import NO_CREDIT, NO_SHARE, Ranking, Share, View, look, open_share


class Neighbours:
    """The shares of the data in the member table, as one member sees them."""

    def __init__(
        self,
        table: MemberTable,
        me: PeerId,
        telemetry: Telemetry,
        credit: Callable[[Mapping[PeerId, float]], tuple[Mapping[PeerId, float], Mapping[PeerId, float]]] = (
            lambda speeds: (NO_CREDIT, NO_CREDIT)
        ),
    ) -> None:
        """`credit` returns each contributor's share in the tokens that the newest certificate counts, and in these speeds."""
        self._credit = credit
        self._table = table
        self._me = me
        self._telemetry = telemetry
        self._ranking = Ranking(0, 0)
        self._published = b""
        self._share = NO_SHARE
        self._number = 0
        self._malformed: frozenset[PeerId] = frozenset()
        """The members whose present share is ignored: each has left an event."""

    def publish(self, share: Share, ranking: Ranking, number: int) -> bytes:
        """Take my trainer's share, unless a newer one is here; returns the newest as it goes into my member record."""
        if number > self._number:
            self._number, self._share, self._ranking = number, share, ranking
            self._published = encode(share)
        return self._published

    def view(self) -> View | None:
        """A `View` for my trainer; None before it has a part in any data."""
        if not self._share.source:
            return None
        speeds = {row.peer: row.body.tokens_per_s for row in self._table}
        return look(self._others(), self._me, self._share, self._ranking, *self._credit(speeds))

    def _others(self) -> Iterator[tuple[PeerId, Share, bool]]:
        """The shares of the others that count or did; a malformed one is ignored, with an event until it is another one."""
        now, malformed = trio.current_time(), set()
        for row in self._table:
            if row.peer == self._me or self._table.is_claim(row.peer):
                continue
            try:
                share = open_share(row.body.share)
            except MalformedMessage as error:
                malformed.add(row.peer)
                if row.peer not in self._malformed:
                    self._telemetry.emit("share.ignored", peer=row.peer, step="read its share", reason=str(error))
            else:
                yield row.peer, share, self._table.counts(row.peer, now)
        self._malformed = frozenset(malformed)
