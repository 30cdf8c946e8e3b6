"""Claims that wait: those about a later round until it begins, and those whose exhibit is fetched.

Both are bounded for each carrier. A carrier that has no room may bring its claims again later.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import trio

from ...peer.base.transport import PeerId

MAX_EARLY_CARRIERS, MAX_EARLY_BYTES = 16, 1 << 19
"""Members whose claims about later rounds wait, and the bytes of each: as many as a newcomer is sent (`bans`)."""
MAX_AWAITED, MAX_AWAITED_IN_ALL = 4, 16
"""Claims of one carrier, and of all, whose exhibits are awaited."""
MAX_BENCHES = 4
"""Exhibits that are fetched at a time: each takes the memory of one part."""


class EarlyClaims:
    """Claims about later rounds, by carrier: what held in these rounds is not known yet."""

    def __init__(self) -> None:
        self._claims: dict[PeerId, dict[bytes, int]] = {}
        """Each with the round that it is about."""
        self.round = 1
        """The round that this peer is in."""

    def keep(self, carrier: PeerId, claim: bytes, about: int) -> None:
        """Keep a claim until its round begins, as far as its carrier has room."""
        claims = self._claims.get(carrier, {})
        has_place = carrier in self._claims or len(self._claims) < MAX_EARLY_CARRIERS
        if has_place and sum(map(len, claims)) + len(claim) <= MAX_EARLY_BYTES:
            self._claims[carrier] = claims | {claim: about}

    def enter(self, round_: int) -> Iterator[tuple[PeerId, list[bytes]]]:
        """Enter a round; yields each carrier with its claims that are due."""
        self.round = round_
        for carrier, claims in [*self._claims.items()]:
            due = [claim for claim, about in claims.items() if about <= round_]
            if len(due) < len(claims):
                self._claims[carrier] = {claim: about for claim, about in claims.items() if about > round_}
            else:
                del self._claims[carrier]
            yield carrier, due


class Exhibits:
    """The exhibits that are awaited: one of each carrier is fetched at a time."""

    def __init__(self) -> None:
        self._bench = trio.CapacityLimiter(MAX_BENCHES)
        self._awaited: Counter[PeerId] = Counter()
        self._lanes: dict[PeerId, trio.Lock] = defaultdict(trio.Lock)
        """By carrier, as long as it has an awaited exhibit."""

    def expect(self, carrier: PeerId) -> bool:
        """Take a place for one more exhibit of a carrier, which `turn` gives back; False if there is none."""
        has_room = self._awaited[carrier] < MAX_AWAITED and self._awaited.total() < MAX_AWAITED_IN_ALL
        self._awaited += Counter({carrier: int(has_room)})  # A sum drops what is 0.
        return has_room

    @asynccontextmanager
    async def turn(self, carrier: PeerId) -> AsyncIterator[None]:
        """Wait for the turn of an expected exhibit, and give its place back at the end."""
        try:
            async with self._lanes[carrier], self._bench:
                yield
        finally:
            self._awaited -= Counter({carrier: 1})
            if carrier not in self._awaited:
                del self._lanes[carrier]
