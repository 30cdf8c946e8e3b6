"""What is heard of peers and chains that are not of my round, and answered, within bounds. Pure.

Theory of operation. The Ready of a newcomer may overtake its record, so one of each is kept, unverified, until the peer is
a member. What a word from elsewhere may cost me, a search for the run's chain or a certificate in answer, is spaced in time.
"""

from collections.abc import Collection

from ...peer import wire
from ...peer.base.transport import PeerId
from ...peer.quota.origins import UNKNOWN, Origin, Rates
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


def senders(slot: wire.Slot, members: Collection[PeerId], voters: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Return which of these members send a certificate to who lacks it in a slot: few, voters before others."""
    return tuple(sorted(ranked(slot, members), key=lambda peer: peer not in voters)[:SENDERS])


class LateReadys:
    """Which Readys of decided rounds I answer with the certificate of the last one."""

    def __init__(self) -> None:
        self._each = Rates(1 / TOLD_SECONDS, TOLD_SECONDS)
        self._others = Rates(TOLD_PER_SECOND, TOLD_BURST / TOLD_PER_SECOND)

    def may_answer(self, peer: PeerId, now: float, *, votes: bool) -> bool:
        """Return True if I may answer a peer now; then it counts as answered."""
        key = Origin(peer, "", exempt=False)
        return self._each.take(key, now) and (votes or self._others.take(UNKNOWN, now))
