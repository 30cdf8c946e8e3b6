"""What a peer brings into an attempt of a round, and what it has of it at the end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...peer.base.transport import PeerId
from ...peer.node.bulk import Blob
from ..allreduce.actions import Outcome
from ..vector.codec import FlatSum

NextRoot = Callable[[Sequence[int], Sequence[Blob]], bytes]
"""Computes the state root that the encoded outputs (one per part, with the bounds) lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One peer's pseudo-gradient with error feedback, x = Δ + e in whole cells, and its cost."""

    vector: FlatSum | None
    """Of the cells that the round averages; None for a keeper, which has trained on 0 tokens and contributes nothing."""
    round: int
    base_root: bytes
    tokens: int
    steps: int
    loss: float
    grace: float
    """Seconds for slower members to become ready after a quorum is."""
    seconds: float = math.inf
    """How long I have trained for it, without any wait: the cost of waiting is measured against it."""
    ramp: float = 1.0
    """The factor on the weight of these tokens: less than 1 in a newcomer's first rounds."""
    patience: float = 0.0
    """Seconds to the next round, where nobody waits for the result of this one meanwhile; 0 where everybody does."""
    is_leaving: bool = False
    """True if I leave after this round, and want no vote in the next one."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The outcome of an attempt; if certified, also my encoded parts and all encoded outputs, both by part."""

    outcome: Outcome
    mine: tuple[Blob, ...] = ()
    outputs: tuple[Blob, ...] = ()
    phases: Mapping[PeerId, float] = field(default_factory=dict)
    """How long each contributor in the cut has trained, in seconds, as it states."""
