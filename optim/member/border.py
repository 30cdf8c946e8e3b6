"""Defines what crosses between the trainer and its network process: commands, answers, notices, shared vectors.

The trainer (`client`) sends the commands, the network process (`participant`) carries them out and sends the notices;
`peer.process.bridge` carries both. Imports no torch, like everything that the network process imports.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.chain.chain import ChainPosition
from ...collectives.state.checkpoint_file import TensorAt
from ...collectives.vector.arrays import Floats
from ...collectives.vector.codec import CELL, Codec, FlatVector
from ...peer.base.config import PeerConfig
from ...peer.base.digest import DIGEST_BYTES
from ...peer.base.transport import PeerId, Rung
from ...peer.log.telemetry import Event
from ...peer.process.bridge import Command, Notice
from ...peer.process.shared import SharedVectors, Vectors, VectorShape
from ..data.leases import Ranking, Share, View

BLANK = ChainPosition(0, bytes(DIGEST_BYTES), 0, None)
"""The position of a trainer that has just started."""


def vectors_of(num_cells: int, num_fragments: int, codec: Codec) -> Vectors:
    """Return the shapes of the shared vectors, of a model of that many cells whose contributions have this codec."""
    size = num_cells * CELL
    longest = -(-num_cells // max(1, min(num_fragments, num_cells))) * CELL
    return {
        "theta": VectorShape(size, np.float32),
        "momentum": VectorShape(size, np.float32),
        "delta": VectorShape(longest, codec.memory_dtype),
        "residual": VectorShape(size, codec.memory_dtype),
    }


@dataclass(frozen=True, slots=True, eq=False)
class TrainingVectors:
    """The vectors that both processes map, of whole cells; θ and m are float32, the others what the codec keeps.

    The trainer writes the θ that a new run starts from, and Δ while no round runs; the network process writes the rest.
    """

    theta: Floats
    momentum: Floats
    delta: FlatVector
    """Δ, the pseudo-gradient of an inner phase, on its way into a round: from its first element on of the cells averaged."""
    residual: FlatVector
    """What the codec left out of my last contribution (error feedback)."""

    @classmethod
    def of(cls, shared: SharedVectors) -> "TrainingVectors":
        """The vectors of a mapped file of the shapes of `vectors_of`."""
        return cls(shared["theta"], shared["momentum"], shared["delta"], shared["residual"])


@dataclass(frozen=True, slots=True)
class RunOpened:
    """The run is reached."""

    manifest: bytes
    """A `SignedManifest`, encoded."""
    peer_id: PeerId
    revision: bytes = b""
    """The newest revision that the owner has stated, as the directory has it: that of the chain is known after joining."""
    round: int = 0
    """The certified round from which a newcomer starts, as link or bootstraps name it; 0 where none does."""


@dataclass(frozen=True, slots=True)
class OpenRun(Command[RunOpened]):
    """Reach the run of a join link: host, directory, manifest, node."""

    link: str
    config: PeerConfig
    """Its `home` is absolute."""


@dataclass(frozen=True, slots=True)
class AttachVectors(Command[None]):
    """Map the trainer's vectors, and set up all that depends on the model."""

    path: Path
    num_cells: int
    tensors: tuple[TensorAt, ...]


@dataclass(frozen=True, slots=True)
class JoinRun(Command[None]):
    """Become a member that nobody waits for yet."""

    device: str
    version: str
    layout: bytes
    """The fingerprint of the parameters that are trained."""
    frozen: bytes
    """The fingerprint of those that are not."""


@dataclass(frozen=True, slots=True)
class StateSynced:
    """The vectors hold the run's state."""

    position: ChainPosition
    changed: bool
    """Whether θ or m changed."""


@dataclass(frozen=True, slots=True)
class SyncState(Command[StateSynced]):
    """Hold the run's newest state: mine if I start the run, else the other members'."""


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """How an attempt of a round ended; θ and m have made the outer step if it is certified."""

    position: ChainPosition
    kind: OutcomeKind
    reason: str
    drifted: bool = False
    """Whether the outer step led to another state root than the certified one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageDelta(Command[RoundEnded]):
    """Attempt the next round with Δ of the cells that it averages.

    The fields are those of `collectives.driver.contribution.Contribution`.
    """

    tokens: int
    steps: int
    loss: float
    grace: float
    seconds: float
    ramp: float
    patience: float


@dataclass(frozen=True, slots=True)
class PublishEvaluation(Command[None]):
    """Publish what was measured of the shared model after a round that this member was drawn to evaluate."""

    round: int
    loss: float
    tokens: int
    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportProgress(Command[None]):
    """Publish what this member has trained so far."""

    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    """None if it is not known, or not finite."""


@dataclass(frozen=True, slots=True)
class PublishLeases(Command[View | None]):
    """Publish which units of the data this member leases; the answer is what is known of the others' leases."""

    share: Share
    ranking: Ranking
    number: int
    """Of two messages that arrive out of order the one with the higher number holds."""
    urgent: bool
    """Whether it is published at once instead of with the next news."""


@dataclass(frozen=True, slots=True)
class FetchFile(Command[None]):
    """Write a file of the run's data, which members provide, to a path. Fails where nobody that is here has it."""

    hash: bytes
    size: int
    """Bytes."""
    path: Path


@dataclass(frozen=True, slots=True)
class LeaveRun(Command[None]):
    """Send every member a goodbye."""

    reason: str


@dataclass(frozen=True, slots=True)
class TelemetryNotice(Notice):
    """An event of the network process."""

    event: Event


@dataclass(frozen=True, slots=True)
class Pulse(Notice):
    """What the trainer's pace and its leases depend on, sent when it changes."""

    round: int
    """The next round: a pulse from before my last round names another one than I do."""
    ready: tuple[PeerId, ...]
    """The other members that are ready for it, and set the pace."""
    active: int
    """How many members that train set the pace, I among them; keepers do not."""
    why_not_average: str
    """Why a round cannot be attempted now; empty where it can."""
    behind: bool
    """Whether the run is further than my state."""
    lagging: int
    """How many members do not hold my state yet."""
    kept: int
    """The round of the newest checkpoint on my disk."""
    sent: int
    received: int
    rungs: dict[PeerId, Rung]
    """How I am connected to each other member."""
    leases: View | None
    """What is known of the others' leases; None before I train any data."""
    successor: str = ""
    """The run that this one goes on as, once I may follow it (`Member.successor`)."""


NO_PULSE = Pulse(0, (), 1, "", False, 0, -1, 0, 0, {}, None)
"""Before the first one has arrived."""
