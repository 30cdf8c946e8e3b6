"""With whom I talk at all, and how many words I take from each.

A peer of a full round has a few hundred words to say in a moment at most, and a few in a second on the average; when I
was stopped, all that it has said since comes at once. Who says more is flooding me: its stream ends, it is charged once,
and until its budget has grown again no word of it is taken.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..errors import ProtocolViolation, StreamClosed
from ..telemetry import Telemetry
from ..transport import PeerId

BURST = 4096
"""Words at once: twice what a session keeps for a peer that does not read."""
PER_SECOND = 64.0
MAX_BUDGETS = 4096
"""As many as members that a table holds."""


@dataclass(slots=True)
class _Budget:
    """The words that a peer has left, as of a time; `told` once it has overdrawn them."""

    words: float
    time: float
    told: bool = False


class Doorkeeper:
    """One node's bans and budgets. Time is an argument."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._banned: dict[PeerId, str] = {}
        self._refused: set[PeerId] = set()
        self._budgets: dict[PeerId, _Budget] = {}

    @property
    def banned(self) -> AbstractSet[PeerId]:
        """With whom I do not talk."""
        return self._banned.keys()

    def ban(self, peer: PeerId, reason: str) -> None:
        """Talk with `peer` no more."""
        self._banned[peer] = reason

    def check(self, peer: PeerId) -> None:
        """Raise `StreamClosed` where I do not talk with `peer`."""
        if peer in self._banned:
            raise StreamClosed(f"{peer} is banned: {self._banned[peer]}")

    def refuses(self, peer: PeerId) -> bool:
        """Whether a stream of `peer` is not served, which is told once of each peer."""
        if peer in self._banned and peer not in self._refused:
            self._refused.add(peer)
            self._telemetry.emit("peer.refused", peer=peer, step="serve", reason=f"banned: {self._banned[peer]}")
        return peer in self._banned

    def hear(self, peer: PeerId, now: float) -> None:
        """Count a word of `peer`. Raises `ProtocolViolation` for the first one too many, `StreamClosed` for the next ones."""
        self.check(peer)
        budget = self._budgets.get(peer)
        if budget is None:
            if len(self._budgets) >= MAX_BUDGETS:
                self._forget(now)
            budget = self._budgets[peer] = _Budget(BURST, now)
        budget.words = min(BURST, budget.words + PER_SECOND * (now - budget.time))
        budget.time = now
        if budget.words >= 1:
            budget.words -= 1
            budget.told = budget.told and budget.words < BURST / 2
            return
        if budget.told:
            raise StreamClosed(f"{peer} says too much")
        budget.told = True
        raise ProtocolViolation(f"{peer} says more than {BURST} words at once and {PER_SECOND:g} a second")

    def _forget(self, now: float) -> None:
        """Make room: whose budget is whole again needs none; in a flood of strangers the older ones must do without."""
        whole = [peer for peer, b in self._budgets.items() if b.words + PER_SECOND * (now - b.time) >= BURST]
        for peer in {*whole, *list(self._budgets)[: MAX_BUDGETS // 4]}:
            del self._budgets[peer]
