"""The picture of a run: everything that its views show, typed and frozen. Pure.

Two kinds of figures stand side by side. *Verified* is what follows from certificates: rounds, tokens, who took part, who
voted, trust. *Claimed* is what a member says of itself: its state, device, loss, speed, bytes. Each docstring says which.
"""

from dataclasses import dataclass
from enum import StrEnum

from ...peer.base.transport import PeerId
from .votes import VotesHere


class RunState(StrEnum):
    """What a run is doing."""

    TRAINING = "training"
    WAITING = "waiting"
    OVER = "over"
    EMPTY = "nobody here"


NOT_COUNTED = "its work did not count: next to nothing for its tokens, or unlike the others'"
"""What a certificate tells of a contribution that the run's rule flagged: not why."""


class TroubleKind(StrEnum):
    """What went wrong, or was decided out of turn."""

    FLAG = "flag"
    """A contribution did not count (`NOT_COUNTED`). One of few steps does, by its tokens."""
    VOID = "void"
    """Attempts of a round ended without effect."""
    FORK = "fork"
    """A member showed another chain than the one that is followed."""
    LIAR = "liar"
    """A member answered with what is false."""
    STALL = "stall"
    """Too few voters are here to decide the next round."""
    BAN = "ban"
    PARDON = "pardon"
    REVOKE = "revoke"


@dataclass(frozen=True, slots=True)
class CertifiedRound:
    """One certified round in one row; all but `time` and `loss` is verified."""

    round: int
    time: float | None
    """When the reader saw it first, in Unix seconds; None for a round of the past."""
    tokens: int
    """All tokens of the run up to it."""
    members: int
    contributors: int
    flagged: int
    voters: int
    """Voters that signed."""
    attempt: int
    loss: float | None
    """The median of the losses that members stated when it was seen; claimed."""
    root: str
    """The first eight hex digits of the state root."""


@dataclass(frozen=True, slots=True)
class RecentRound:
    """Who took part in one of the last rounds, and who did not; verified but for the reasons of those who were away."""

    round: int
    hash: str
    root: str
    tokens: int
    """The tokens of this round."""
    roster: tuple[PeerId, ...]
    cut: tuple[PeerId, ...]
    flagged: tuple[PeerId, ...]
    away: tuple[tuple[PeerId, str], ...]
    """Members whose work is not in the result, each with the reason."""
    voters: tuple[PeerId, ...]
    quorum: int | None
    """The votes that a decision needed, of all `total`; both None where the certificate before is not known."""
    total: int | None
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberShown:
    """A member. What is claimed: all but `peer`, `votes`, `here`, `trust`, `rounds` and `credit`."""

    peer: PeerId
    name: str
    state: str
    device: str
    version: str
    round: int
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    rung: str | None
    up: float
    down: float
    sent: int
    received: int
    root: str
    """The state root that it states, in hex."""
    votes: int
    """Its votes in the next round, 0 without any."""
    here: bool | None
    """Whether it has answered the last question of the last minute; None if it was not asked."""
    trust: float | None
    rounds: int | None
    """The rounds that it has contributed to, as far as they count for trust."""
    credit: int
    """Its tokens that count, in the certificates that are held."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is. Round and tokens are verified."""

    round: int
    rounds: int
    tokens: int
    tokens_per_s: float | None
    seconds_left: float | None
    round_seconds: float | None
    claimed: bool
    """True if speed and seconds are what members state, since too few rounds were seen to measure them."""
    state: RunState
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A text that the model has written."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class RunEvaluation:
    """The run's loss on held-out data after a round, as the members drawn for it state."""

    round: int
    loss: float
    by: tuple[PeerId, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """What a contributor has given to the run, by its certificates; the name is claimed."""

    peer: PeerId
    name: str
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class RunTrouble:
    """What went wrong in a round; round 0 and no time where they are not known."""

    round: int
    time: float | None
    kind: TroubleKind
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A run at one moment."""

    run: str
    name: str
    model: str
    by: str
    """For whom it trains, in their own words."""
    contact: str
    data: str
    """The data source that its manifest names."""
    params: int
    """The trained parameters, rounded up to whole cells of the codec; 0 before the first round."""
    link: str
    owner: PeerId
    taken_at: float
    """Unix seconds."""
    taken_by: PeerId
    decides: str
    """Who decides the run's rounds, in one line."""
    joining: str
    """How it is joined where `flockstep join` cannot, in one line; empty where it can."""
    goes_on: str
    """As which run it goes on, or from which one, in one line; empty for a run by itself."""
    verified: str
    """Where the chain that is shown is known from, in one line."""
    progress: RunProgress
    rounds: tuple[CertifiedRound, ...]
    """In order, without a gap."""
    recent: tuple[RecentRound, ...]
    """The newest first."""
    members: tuple[MemberShown, ...]
    votes: VotesHere | None
    evaluations: tuple[RunEvaluation, ...] = ()
    credit: tuple[Credit, ...] = ()
    troubles: tuple[RunTrouble, ...] = ()
    """The newest first."""
