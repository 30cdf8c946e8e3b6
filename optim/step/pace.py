"""Straggler deadline: the inner phase ends after H steps or so many seconds, or a grace after a quorum is ready. Pure.

A slow peer contributes fewer tokens, and the others do not wait for it. The grace is a fraction of the time that the
quorum itself took, so the same rule holds for phases of seconds and of hours. A phase of seconds begins with the end of the
last round, which all peers see at the same time: all reach its end together, whatever their speeds. A peer whose next step
would end after that stops before it, since the others wait for who is late and not for who is early.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...collectives.chain.quorum import quorum
from ...peer.base.errors import UsageError
from ...peer.base.transport import PeerId

DEADLINE_GRACE = 0.25
"""The grace as a fraction of the quorum's own time: a peer up to a quarter slower does all of its steps."""

LATE_PHASES = 2.0
"""Keepers begin a round without a quorum of those that train after so many times the usual phase."""


def slowest(groups: Sequence[frozenset[PeerId]], ready: Collection[PeerId]) -> frozenset[PeerId]:
    """Return the group of which the smallest part is ready: who waits for most of it waits for most of each."""
    return min(groups, key=lambda group: len(group.intersection(ready)) / max(1, len(group)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a run. Raises `UsageError` if a value is out of its range."""

    steps: int
    """The inner steps of a full phase."""

    seconds: float = 0.0
    """The duration of a full phase, where it ends by time; 0: it ends after `steps`."""

    floor: float = 2.0
    """Minimum grace in seconds: below that, the jitter of the network decides which peer is slow."""

    ceiling: float = 600.0
    """Maximum grace in seconds."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.seconds < 0 or not 0 <= self.floor <= self.ceiling:
            raise UsageError(f"pace: steps {self.steps}, floor {self.floor}, ceiling {self.ceiling} are out of range")

    def deadline(self, *, started: float, ready_at: Sequence[float], num_active: int) -> float | None:
        """Return the deadline of my phase, which began at `started`; None while too few others are ready.

        `ready_at` holds the times at which other active members became ready. `num_active` counts me, and so does the
        quorum, since I can be ready at once. Alone I have no deadline.
        """
        others_needed = max(1, quorum(num_active) - 1)
        if len(ready_at) < others_needed:
            return None
        quorum_at = max(started, sorted(ready_at)[others_needed - 1])
        return quorum_at + self.grace(quorum_at - started)

    def called(
        self, *, started: float, ready_at: Mapping[PeerId, float], groups: Sequence[frozenset[PeerId]], expected: float
    ) -> tuple[float, bool] | None:
        """Return when a keeper becomes ready for the round, in seconds, and whether for two thirds; None while nobody is.

        `ready_at` holds when members that train became ready. The keeper waits for two thirds of each of the `groups`,
        the last of which contains the others, since one that is ready early could else make rounds of its own work alone;
        and for no more than twice the `expected` seconds, since members that never become ready could else prevent any.
        """
        orders = [sorted(max(started, at) for peer, at in ready_at.items() if peer in group) for group in groups]
        if not orders[-1]:
            return None
        due = max(orders[-1][0], started + LATE_PHASES * expected)
        needed = [max(1, math.ceil(2 * len(group) / 3)) for group in groups]
        at = max(order[n - 1] if len(order) >= n else math.inf for order, n in zip(orders, needed, strict=True))
        return (at, True) if at <= due else (due, False)

    def usual(self, stated: Sequence[float]) -> float:
        """Return the seconds of a usual phase: the manifest's, or the median of those that contributors have `stated`.

        It follows from no wait: after a wait for late members the next one would else be longer, round after round. Less
        than half of the contributors move a median no further than honest ones differ. Before there are any: the ceiling.
        """
        if self.seconds or not stated:
            return self.seconds or self.ceiling
        return max(self.floor, statistics.median(stated))

    def grace(self, duration: float) -> float:
        """Return the seconds that a quorum waits for slow peers when its own phase took `duration`."""
        return min(self.ceiling, max(self.floor, DEADLINE_GRACE * duration))

    def ended(
        self,
        *,
        now: float,
        started: float,
        step: int,
        ready_at: Sequence[float],
        num_active: int,
        step_seconds: float = 0.0,
    ) -> tuple[bool, str]:
        """Return whether my phase ends after `step` steps, and the reason in either case.

        `step_seconds` is what my next step takes: it must end before the phase does.
        """
        if self.seconds:
            here = f"step {step}, {now - started:.1f} of {self.seconds:g} s"
            if now + step_seconds > started + self.seconds:
                return True, f"the phase's {self.seconds:g} s end before another step would, after {step}"
        else:
            here = f"step {step} of {self.steps}"
            if step >= self.steps:
                return True, f"all {self.steps} steps are done"
        deadline = self.deadline(started=started, ready_at=ready_at, num_active=num_active)
        if deadline is None:
            return False, f"{here}, {len(ready_at)} of {num_active - 1} others are ready"
        if now + step_seconds >= deadline:
            return True, f"the round's deadline passed at {here}"
        return False, f"{here}, {deadline - now:.1f} s to the round's deadline"
