"""Places that can run out, in equal parts of networks, addresses and peers: the oldest of who has most gives way. Pure.

Theory of operation. First come, first served hands everything to whoever comes early and stays: keys cost nothing, and one
address holds all places for ever. So a newcomer always gets a place. Where a limit is exceeded by it, one place is given up:
that of the network that has most, in it of the address that has most, of that one the peer that has most, and there the
oldest. The newcomer counts, so whoever has most replaces its own places, and takes one of others only while they have more
(max-min fairness, as in `shares`).

The oldest gives way, and not the one that has been idle for the longest: a byte a second makes any place look busy, while
honest members are quiet for seconds. Age can be gamed only by arriving again, and arrivals have a rate: beside a neighbour in
its own address that always reconnects, a peer keeps its place for as many arrivals as the address has places. Sleepers are
the oldest, and go first.

Where a lost place is worse than one not won, as in a table of members, the newest of who has most gives way (`newest`). That
is the newcomer itself where nobody has more.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .origins import Origin

Holder = TypeVar("Holder", bound=Hashable)

GAVE_WAY = "the oldest of those that hold most gave way"
"""The reason that a holder is told, or an event states."""


@dataclass(slots=True, eq=False)
class _Part:
    """The places of all, of a network, of an address or of a peer."""

    num: int = 0
    parts: "dict[str, _Part]" = field(default_factory=dict)
    """The parts of it, those that have been here for the longest first; none in that of a peer."""
    holders: dict[Hashable, None] = field(default_factory=dict)
    """Of a peer, the oldest first."""


class Places(Generic[Holder]):
    """Places for so many in all, of one network, one address and one peer.

    Networks and addresses that are exempt have the limits of all and of a peer alone. `newest`: who has most gives up its
    newest place, not its oldest.
    """

    def __init__(
        self,
        in_all: float,
        per_address: float = math.inf,
        per_network: float = math.inf,
        per_peer: float = math.inf,
        *,
        newest: bool = False,
    ) -> None:
        self._limits = in_all, per_network, per_address, per_peer
        self._newest = newest
        self._all = _Part()
        self._paths: dict[Holder, tuple[str, str, str]] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, holder: object) -> bool:
        return holder in self._paths

    def enter(self, holder: Holder, origin: Origin, peer: str = "") -> Holder | None:
        """Give `holder`, which has none, a place; returns who has none now: None, another, or itself where none is left."""
        self._paths[holder] = path = origin.network, origin.address, peer
        line = [self._all]
        for name in path:
            line.append(line[-1].parts.setdefault(name, _Part()))
        for part in line:
            part.num += 1
        line[-1].holders[holder] = None
        for depth in (3, 0) if origin.exempt else (3, 2, 1, 0):
            if line[depth].num > self._limits[depth]:
                loser = self._loser(line[depth], line)
                self.leave(loser)
                return loser
        return None

    def leave(self, holder: Holder) -> None:
        """Give a place back; nothing happens if it has none."""
        if (path := self._paths.pop(holder, None)) is None:
            return
        part = self._all
        part.num -= 1
        for name in path:
            above, part = part, part.parts[name]
            part.num -= 1
            if not part.num:
                del above.parts[name]
                return
        del part.holders[holder]

    def _loser(self, part: _Part, line: list[_Part]) -> Holder:
        """Return who gives way in a part; of equal parts that of the newcomer, whose parts are `line`, unless it is alone."""

        def rank(one: _Part) -> tuple[int, bool]:
            return one.num, one in line and (self._newest or one.num > 1)

        while part.parts:
            parts = part.parts.values()
            part = max(reversed(parts) if self._newest else parts, key=rank)
        loser: Holder = next(reversed(part.holders) if self._newest else iter(part.holders))  # type: ignore[assignment]
        return loser
