"""What a keeper knows of those that train: how long their phases are, and who contributes nothing. Pure."""

import math
from collections import Counter
from collections.abc import Collection, Mapping

from ...peer.base.transport import PeerId

MAX_IDLE_ROUNDS = 8
"""Rounds after which a member that contributes nothing is not waited for: keys are free."""


class Trainers:
    """The phases and the idle rounds of those that train, as certified rounds show them."""

    def __init__(self) -> None:
        self.round_began = -math.inf
        """When the last round was certified here; long ago where this peer has only heard of it."""
        self._phases: dict[PeerId, float] = {}
        """By member that is here, the seconds of its last phase that was in a certified cut, as it has stated them."""
        self._idle: Counter[PeerId] = Counter()
        """By member, the certified rounds in a row that it was here and contributed nothing to."""

    def counted(self, training: Collection[PeerId]) -> frozenset[PeerId]:
        """Return those that train, without those that have contributed to none of the last rounds."""
        counted = frozenset(peer for peer in training if self._idle[peer] < MAX_IDLE_ROUNDS)
        return counted or frozenset(training)

    def phases(self, group: Collection[PeerId]) -> list[float]:
        """Return the seconds of the last phases of these members, as far as they are known."""
        return [seconds for peer, seconds in self._phases.items() if peer in group]

    def note(
        self, stated: Mapping[PeerId, float], cut: Collection[PeerId], here: Collection[PeerId], now: float
    ) -> None:
        """Remember who was in a round's cut, and the phases that they state: none lasts longer than the round has."""
        self._idle = Counter({peer: 0 if peer in cut else self._idle[peer] + 1 for peer in here})
        most = now - self.round_began
        known = self._phases | {peer: min(seconds, most) for peer, seconds in stated.items() if seconds}
        self._phases = {peer: seconds for peer, seconds in known.items() if peer in here}
