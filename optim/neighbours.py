"""Who trains which part of the data, as this member's records tell: the network process's side of the leases."""

from dataclasses import asdict

import trio

from ..dht.members.table import MAX_BODY_BYTES, MemberTable, Share
from ..peer.process.bridge import Payload
from ..peer.transport import PeerId
from ..peer.wire.schema import decode
from .data.leases import Ranking, look


class Neighbours:
    """What the table of members says about the data, seen from one of them."""

    def __init__(self, table: MemberTable, me: PeerId) -> None:
        self._table = table
        self._me = me
        self._ranking = Ranking(0, 0)
        self._share = Share()
        self._number = 0

    def tell(self, payload: Payload) -> Share:
        """My trainer's news of its own part: the newest that there is, should two have come out of order."""
        if payload["number"] > self._number:
            self._number = payload["number"]
            self._share = decode(Share, bytes.fromhex(payload["share"]), max_bytes=MAX_BODY_BYTES)
            self._ranking = Ranking(payload["seed"], payload["num_units"])
        return self._share

    def view(self) -> Payload | None:
        """A `View` for my trainer; None before it has a part in any data."""
        if not self._share.source:
            return None
        now = trio.current_time()
        others = ((row.peer, row.body.share, self._table.counts(row.peer, now)) for row in self._table)
        view = look((other for other in others if other[0] != self._me), self._me, self._share, self._ranking)
        return asdict(view)
