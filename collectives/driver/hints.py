"""What is heard of peers and chains that are not of my round, and answered, within bounds. Pure.

Theory of operation. The Ready of a newcomer may overtake its record, so one of each is kept, unverified, until the peer is
a member. What a word from elsewhere may cost me, a search for the run's chain or a certificate in answer, is spaced in time.
"""

import math
from collections.abc import Collection
from typing import Generic, TypeVar

from ...peer import wire
from ...peer.base.transport import PeerId
from ..chain.quorum import ranked

MAX_HINTS = 64
"""Readys of peers that are no members yet, one of each."""
MAX_HINT_BYTES = 4096
"""A Ready has some 500."""
SENDERS = 4
"""Members that send a certificate to one that lacks it: liars may be silent, and all of them is 1 MB at 64 members.

They vote, as far as there are voters: of the others most may be keys of one stranger.
"""
TOLD_SECONDS = 1.0
"""Between two certificates that a peer is sent for Readys of decided rounds: each is thirty times as long as a Ready."""
TOLD_BURST, TOLD_PER_SECOND = 64, 4.0
"""Of these to members without a vote: a full roster that comes late, and 60 kB/s: its sender can choose who answers."""
_K = TypeVar("_K")


class NewcomerReadys:
    """The newest Ready of each peer that is no member yet."""

    def __init__(self) -> None:
        self._kept: dict[PeerId, wire.Signed] = {}

    def keep(self, carrier: PeerId, signed: wire.Signed) -> PeerId | None:
        """Keep a message if it is the Ready of its carrier; return whose message was dropped, if any was."""
        is_ready = wire.CODES.get(signed.code) is wire.Ready and len(signed.payload) <= MAX_HINT_BYTES
        if carrier != signed.sender or not is_ready:
            return carrier
        self._kept.pop(carrier, None)
        self._kept[carrier] = signed
        if len(self._kept) <= MAX_HINTS:
            return None
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        return oldest

    def take(self, peer: PeerId) -> wire.Signed | None:
        """Return and forget the Ready of a peer."""
        return self._kept.pop(peer, None)


class Spacing(Generic[_K]):
    """Lets something happen once in so many seconds for each key."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[_K, float] = {}

    def may(self, key: _K, now: float) -> bool:
        """Return True if it may happen now; then it counts as happened."""
        if now < self._last.get(key, -math.inf) + self._seconds:
            return False
        self._last = {other: at for other, at in self._last.items() if now < at + self._seconds}
        self._last[key] = now
        return True


def senders(slot: wire.Slot, members: Collection[PeerId], voters: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Return which of these members send a certificate to who lacks it in a slot: few, voters before others."""
    return tuple(sorted(ranked(slot, members), key=lambda peer: peer not in voters)[:SENDERS])


class LateReadys:
    """Which Readys of decided rounds I answer with the certificate of the last one."""

    def __init__(self) -> None:
        self._each: Spacing[PeerId] = Spacing(TOLD_SECONDS)
        self._room = float(TOLD_BURST)
        self._refilled = -math.inf

    def may_answer(self, peer: PeerId, now: float, *, votes: bool) -> bool:
        """Return True if I may answer a peer now; then it counts as answered."""
        if not self._each.may(peer, now):
            return False
        if votes:
            return True
        self._room = min(float(TOLD_BURST), self._room + TOLD_PER_SECOND * (now - self._refilled))
        self._refilled = now
        if self._room < 1.0:
            return False
        self._room -= 1.0
        return True
