"""Bans, and a token bucket of messages for each peer.

A peer of a full round sends at most a few hundred messages in a burst, and a few per second on average; after I was
stopped, all its messages arrive at once. A peer that sends more is flooding: its stream ends, it is charged once, and
no message of it is accepted until its bucket has refilled.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..errors import ProtocolViolation, StreamClosed
from ..telemetry import Telemetry
from ..transport import PeerId

BURST = 4096
"""Messages in a burst: twice the queue that a session keeps for a peer that does not read."""
PER_SECOND = 64.0
MAX_BUDGETS = 4096
"""As many as the members that a member table holds."""


@dataclass(slots=True)
class _Budget:
    """The token bucket of one peer, as of a time; `charged` once it was overdrawn."""

    tokens: float
    time: float
    charged: bool = False


class Guard:
    """One node's bans and message budgets. Time is an argument."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._banned: dict[PeerId, str] = {}
        self._refused: set[PeerId] = set()
        self._budgets: dict[PeerId, _Budget] = {}

    @property
    def banned(self) -> AbstractSet[PeerId]:
        """The banned peers."""
        return self._banned.keys()

    def ban(self, peer: PeerId, reason: str) -> None:
        """Ban `peer`."""
        self._banned[peer] = reason

    def check(self, peer: PeerId) -> None:
        """Raise `StreamClosed` if `peer` is banned."""
        if peer in self._banned:
            raise StreamClosed(f"{peer} is banned: {self._banned[peer]}")

    def refuses(self, peer: PeerId) -> bool:
        """Return True if a stream of `peer` must be refused; emits one event per peer."""
        if peer in self._banned and peer not in self._refused:
            self._refused.add(peer)
            self._telemetry.emit("peer.refused", peer=peer, step="serve", reason=f"banned: {self._banned[peer]}")
        return peer in self._banned

    def take_token(self, peer: PeerId, now: float) -> None:
        """Take a token for a message of `peer`. Raises `ProtocolViolation` for the first excess one, then `StreamClosed`."""
        self.check(peer)
        budget = self._budgets.get(peer)
        if budget is None:
            if len(self._budgets) >= MAX_BUDGETS:
                self._forget(now)
            budget = self._budgets[peer] = _Budget(BURST, now)
        budget.tokens = min(BURST, budget.tokens + PER_SECOND * (now - budget.time))
        budget.time = now
        if budget.tokens >= 1:
            budget.tokens -= 1
            budget.charged = budget.charged and budget.tokens < BURST / 2
            return
        if budget.charged:
            raise StreamClosed(f"{peer} exceeds its message budget")
        budget.charged = True
        raise ProtocolViolation(f"{peer} sends more than {BURST} messages in a burst and {PER_SECOND:g} a second")

    def _forget(self, now: float) -> None:
        """Evict budgets: full ones are not needed, and in a flood of strangers the oldest quarter is dropped."""
        full = [peer for peer, b in self._budgets.items() if b.tokens + PER_SECOND * (now - b.time) >= BURST]
        for peer in {*full, *list(self._budgets)[: MAX_BUDGETS // 4]}:
            del self._budgets[peer]
