"""What a round starts from, what it asks its driver to do, and how it ends: the vocabulary of `round`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.digest import digest
from ...peer.transport import PeerId
from ..accountability.trust import Standing
from ..chain.certificate import Verify
from ..robust.rule import Rule
from ..robust.rules import rule_named

MEAN = rule_named("mean")
EMPTY = digest(b"")
"""The hash of an empty part."""


class Phase(StrEnum):
    """Where a round stands; see the theory of operation in `round`."""

    GATHER = "gather"
    AGREE = "agree"
    COLLECT = "collect"
    JUDGE = "judge"
    REDUCE = "reduce"
    CHECK = "check"
    CONFIRM = "confirm"
    ABANDON = "abandon"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the steps of a round may take, in seconds."""

    gather: float
    """From the moment that a quorum is ready until the others are no longer waited for."""
    control: float
    """One exchange of small messages among all."""
    transfer: float
    """All parts to their owners, or all outputs to everybody."""
    patience: float
    """For a quorum to become ready at all; then I go on training alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What I bring into a round."""

    me: PeerId
    ready: wire.Ready
    active: frozenset[PeerId]
    """The members whom I believe alive, I included."""
    num_cells: int
    part_bytes: Callable[[int], int]
    """The size of an encoded contribution of that many cells."""
    output_bytes: Callable[[int], int]
    """The size of an encoded output of that many cells."""
    previous: bytes
    """The hash of the certificate that my state comes from."""
    tokens_before: int
    """All tokens of the run up to that certificate."""
    tokens: int
    steps: int
    loss: float
    min_peers: int
    phase_seconds: float
    """How long my inner phase took."""
    timing: Timing
    verify: Verify
    charter: Charter = OPEN
    is_banned: Callable[[PeerId], bool] = lambda peer: False
    standing: Callable[[PeerId], Standing | None] = lambda peer: None
    """What a peer has earned; None where I cannot know."""
    may_own: Callable[[PeerId], bool] = lambda peer: True
    """Whether a peer gets a part in rosters that I propose."""
    rule: Rule = MEAN
    """How contributions become one."""
    nonce: bytes = bytes(32)
    """What `ready` commits to."""
    ramp: float = 1.0
    """What the weight of my tokens is multiplied by."""


@dataclass(frozen=True, slots=True)
class Send:
    """Sign `message`, deliver it to me at once, and tell it to the others."""

    to: tuple[PeerId, ...]
    message: wire.RoundMessage


@dataclass(frozen=True, slots=True)
class Forward:
    """Tell somebody else's signed message to the others, as it is."""

    to: tuple[PeerId, ...]
    signed: wire.Signed


@dataclass(frozen=True, slots=True)
class HashParts:
    """Encode my contribution part by part, serve each part to its readers, and report `parts_hashed`."""

    bounds: tuple[int, ...]
    readers: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True, slots=True)
class FetchPart:
    """Get a part of a contribution by its hash, check it as encoded cells, report `part_fetched` or `part_not_fetched`."""

    part: int
    contributor: int
    source: PeerId
    hash: bytes
    num_cells: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FetchOutput:
    """Get a part's output by its hash, check it as encoded cells, report `output_fetched` or `output_not_fetched`."""

    part: int
    source: PeerId
    hash: bytes
    num_cells: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum a part over these contributors with these weights, encode it, serve it to all, and report `reduced`."""

    cut: bytes
    part: int
    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    num_cells: int


@dataclass(frozen=True, slots=True)
class SketchParts:
    """Sketch each part of my contribution under the seed drawn after `after`, and report `sketched`."""

    after: bytes
    columns: int


@dataclass(frozen=True, slots=True)
class CompareSketch:
    """Compare what a contributor says of a part with its bytes; report `compared` if it is true, accuse it if not."""

    after: bytes
    part: int
    contributor: int


@dataclass(frozen=True, slots=True)
class Judge:
    """Ask the rule what contributions with these masses and sketches count, and report `judged`."""

    cut: bytes
    masses: tuple[float, ...]
    sketches: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CheckOutputs:
    """Find the outputs, by part, that are no sum of the contributions with these weights, and report `checked`."""

    after: bytes
    outputs: Mapping[int, bytes]
    weights: tuple[tuple[float, ...], ...]
    first: tuple[bytes, ...]
    """The sketches under the first seed."""
    second: tuple[bytes, ...]
    """Those under this one."""


@dataclass(frozen=True, slots=True)
class Finalize:
    """All outputs are here: compute the root of the state that they lead to, and report `finalized`."""

    bounds: tuple[int, ...]
    outputs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The round is over; see the machine's `outcome`."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that must not pass in silence: a refusal, an exclusion, a second and different word."""

    event: str
    peer: PeerId
    step: str
    reason: str


Work: TypeAlias = HashParts | FetchPart | FetchOutput | SketchParts | CompareSketch | Judge | Reduce | CheckOutputs | Finalize
"""What takes time."""
Action: TypeAlias = Send | Forward | Work | Ended | Note


class OutcomeKind(StrEnum):
    """How a round ended for me."""

    DONE = "done"
    """Certified, and I hold everything that is needed to apply it."""
    VOID = "void"
    """Without effect, for everybody."""
    MISSED = "missed"
    """It went on without me."""
    BEHIND = "behind"
    """The others hold another state than I: fetch theirs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a round. `reason` is one line for a person."""

    kind: OutcomeKind
    slot: wire.Slot
    reason: str
    members: tuple[PeerId, ...] = ()
    cut: tuple[PeerId, ...] = ()
    bounds: tuple[int, ...] = ()
    outputs: tuple[bytes, ...] = ()
    root: bytes = b""
    tokens: int = 0
    """All tokens of the run, this round's contributors included."""
    certificate: wire.Certificate | None = None
    overdue: Phase | None = None
    """The phase whose deadline passed, where that is why the round is void."""
    gave_up: tuple[PeerId, ...] = ()
    """Members of a certified round who had given it up."""
    lied: tuple[PeerId, ...] = ()
    """Members of a certified round whose output of a part was false."""
