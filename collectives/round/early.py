"""Round messages that arrive before my attempt or my round of them, within a budget of bytes. Pure.

Others may be ready before me, and their messages must not be lost. But whoever is a member may send what it likes, of
any round, and in an open run anybody is one. So a few messages of each signer are kept, of limited bytes, and where all
together are too many those of the signer that holds most are dropped: no number of signers takes more memory than that.
"""

from collections import deque

from ...peer import wire
from ...peer.base.transport import PeerId

EARLY_PER_PEER = 16
"""A round has nine messages per peer; of those that arrive before I am ready the earliest slots are dropped."""
EARLY_BYTES_PER_PEER = wire.MAX_SIGNED_BYTES + (1 << 17)
"""The longest roster and its basis, two sketches and all that is short."""
EARLY_BYTES = 16 << 20
"""A full roster's."""

EarlyMessage = tuple[wire.Signed, wire.RoundMessage]


class EarlyMessages:
    """The early messages of all peers."""

    def __init__(self) -> None:
        self._queues: dict[PeerId, deque[EarlyMessage]] = {}
        self._bytes: dict[PeerId, int] = {}
        self.num_bytes = 0
        """The bytes of all."""

    def add(self, signed: wire.Signed, message: wire.RoundMessage) -> PeerId | None:
        """Keep a message; returns the peer that lost older ones for it, None if nobody did."""
        sender, loser = signed.sender, None
        queue = self._queues.setdefault(sender, deque())
        if any(kept.signature == signed.signature for kept, _ in queue):
            return None  # Any member may repeat what another one has signed.
        queue.append((signed, message))
        self._count(sender, len(signed.payload))
        while len(self._queues[sender]) > EARLY_PER_PEER or self._bytes[sender] > EARLY_BYTES_PER_PEER:
            loser = sender
            self._drop_earliest(sender)
        while self.num_bytes > EARLY_BYTES:
            loser = max(self._bytes, key=self._bytes.__getitem__)
            self._drop_earliest(loser)
        return loser

    def forget(self, peer: PeerId) -> None:
        """Drop a peer's messages."""
        self._queues.pop(peer, None)
        self.num_bytes -= self._bytes.pop(peer, 0)

    def take(self, round_: int) -> list[EarlyMessage]:
        """Return the messages up to a round, by peer in the order of their ids; those of later rounds stay."""
        kept, self._queues, self._bytes, self.num_bytes = self._queues, {}, {}, 0
        taken = []
        for peer in sorted(kept):
            for signed, message in kept[peer]:
                if message.slot.round <= round_:
                    taken.append((signed, message))
                else:
                    self.add(signed, message)
        return taken

    def _drop_earliest(self, peer: PeerId) -> None:
        """Drop a peer's message of the lowest round and attempt, of several the oldest."""
        queue = self._queues[peer]
        slots = [message.slot for _, message in queue]
        earliest = min(range(len(queue)), key=lambda index: (slots[index].round, slots[index].attempt))
        signed, _ = queue[earliest]
        del queue[earliest]
        self._count(peer, -len(signed.payload))
        if not self._queues[peer]:
            self.forget(peer)

    def _count(self, peer: PeerId, num_bytes: int) -> None:
        self._bytes[peer] = self._bytes.get(peer, 0) + num_bytes
        self.num_bytes += num_bytes
