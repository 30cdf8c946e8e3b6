"""The interface between a round and its driver: phases, setup, actions and outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.transport import PeerId
from ...peer.wire.signed import Verify
from ..accountability.conduct import Conduct
from ..agreement.actions import AgreementTiming, Note
from ..agreement.electorate import Electorate
from ..chain.certificate import value_of
from ..spec import Spec

MAX_TRIES = 2
"""One retry of a fetch: the first failure may be a connection that died unnoticed."""


class Phase(StrEnum):
    """The phases of a round; see the theory of operation in `machine`."""

    GATHER = "gather"
    COLLECT = "collect"
    JUDGE = "judge"
    REDUCE = "reduce"
    CHECK = "check"
    CONFIRM = "confirm"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Timing:
    """The timeouts of one attempt, in seconds."""

    gather: float
    """From a ready quorum to the close of the roster without the others."""
    control: float
    """One all-to-all exchange of small messages."""
    transfer: float
    """All parts to their owners, or all outputs to everybody."""
    patience: float
    """For a quorum to become ready; after it I go on training alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The inputs of one peer to an attempt."""

    ready: wire.Ready
    nonce: bytes = bytes(32)
    """The nonce that `ready` commits to."""
    active: frozenset[PeerId]
    """The members drawn for the round that the failure detector holds alive, this one included."""
    spec: Spec
    """The settings that hold in the round."""
    conduct: Conduct
    """Which members are banned, trusted, given a part and waited for; the owner's newest statements."""
    before: wire.Value | None
    """The value of the last certificate; None in the first round."""
    steps: int
    loss: float
    ramp: float = 1.0
    """The factor on the weight of my tokens."""
    phase_seconds: float
    """The duration of my inner phase."""
    timing: Timing
    verify: Verify

    @property
    def cells(self) -> range:
        """The cells of the vector that the round averages."""
        return self.spec.cells_of(self.ready.slot.round)

    @property
    def revision(self) -> wire.PackedRevision:
        """The owner's revision that holds in this round, as the certificate before states it."""
        return b"" if self.before is None else self.before.revision


Sign: TypeAlias = Callable[[wire.RoundMessage, wire.Proof | None], wire.Signed | str]
"""Signs a statement once it is on disk, with the lock that it makes; or returns why it must not be signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteSetup:
    """What one round's vote begins with."""

    me: PeerId
    slot: wire.Slot
    electorate: Electorate
    charter: Charter
    timing: AgreementTiming
    sign: Sign
    verify: Verify
    proof: wire.Proof | None = None
    """My lock of an earlier process, in this round."""
    is_observer: bool = False
    """True if an earlier memory of this round may be lost: I sign nothing before the next one."""


@dataclass(frozen=True, slots=True)
class Send:
    """Sign `message`, deliver it to me at once, and send it to the others."""

    to: tuple[PeerId, ...]
    message: wire.RoundMessage


@dataclass(frozen=True, slots=True)
class Forward:
    """Send what is signed already unchanged: a peer's message, or a proof, which proves itself."""

    to: tuple[PeerId, ...]
    mail: wire.Signed | wire.Proof


@dataclass(frozen=True, slots=True)
class AskFor:
    """Ask these members to pass on what another one signs in this round: it has not sent it to me, or it is late."""

    to: tuple[PeerId, ...]
    peer: PeerId


@dataclass(frozen=True, slots=True)
class FetchValue:
    """Fetch all outputs of an encoded value from these voters, compute the root, and report `value_held` if it follows."""

    value: bytes
    voters: tuple[PeerId, ...]
    holders: tuple[PeerId, ...] = ()
    """Who should hold them, and is asked in place of the voters alone until one lets me wait: most may be free keys."""


@dataclass(frozen=True, slots=True)
class HashParts:
    """Encode my contribution part by part, serve each part to its readers, and report `parts_hashed`."""

    bounds: tuple[int, ...]
    readers: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True, slots=True)
class ShowParts:
    """Serve all parts of my contribution to these members, too."""

    readers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class FetchBytes:
    """Fetch bytes of a part by hash, check their encoding, and report `fetched` or `not_fetched`."""

    part: int
    source: PeerId
    hash: bytes
    num_cells: int
    num_bytes: int
    others: tuple[PeerId, ...] = ()
    """Members that may read it, too, and serve it to me or fetch it for me if I cannot reach the source."""
    is_from_maker: bool = True
    """True if others may wait here until it has come: its source made it. Who has it from others may wait for me in turn."""

    @property
    def sources(self) -> tuple[PeerId, ...]:
        """Whom to ask, one after the other."""
        return *(self.source,) * MAX_TRIES, *self.others

    @property
    def name(self) -> bytes:
        """The name under which others offer it: the hash of an output, whoever has made it. 32 bytes."""
        return self.hash


@dataclass(frozen=True, slots=True)
class FetchOutput(FetchBytes):
    """Fetch a part's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPart(FetchBytes):
    """Fetch a part of a contribution."""

    contributor: int

    @property
    def name(self) -> bytes:
        """The name under which others offer it: of its source, too. 32 bytes.

        By its hash alone, who commits to another's hashes would contribute with bytes that it never had.
        """
        return keyed("part of a contributor", self.source.encode(), self.hash)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce a part: sum it over these contributors with these weights, encode it, serve it to all, report `reduced`.

    Of contributors without a weight the bytes need not be here.
    """

    cut: bytes
    part: int
    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    num_cells: int


@dataclass(frozen=True, slots=True)
class SketchParts:
    """Sketch each part of my contribution under a seed, and report `sketched`."""

    seed: bytes
    columns: int


@dataclass(frozen=True, slots=True)
class CompareSketch:
    """Compare a contributor's sketch of a part with the bytes; report `compared` if it matches, else accuse it."""

    seed: bytes
    part: int
    contributor: int


@dataclass(frozen=True, slots=True)
class Judge:
    """Apply the run's rule to contributions with these voices, masses and sketches, and report `judged`."""

    cut: bytes
    voices: tuple[float, ...]
    masses: tuple[float, ...]
    sketches: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CheckOutputs:
    """Find the outputs, by part, that the rule cannot have made of the contributions, and report `checked`."""

    seed: bytes
    outputs: Mapping[int, bytes]
    weights: tuple[tuple[float, ...], ...]
    first: tuple[bytes, ...]
    """The sketches after the cut."""
    second: tuple[bytes, ...]
    """The sketches after the outputs, under `seed`; of who is silent those after the cut, which say nothing here."""
    silent: tuple[int, ...]
    """The places of the contributors without a sketch after the outputs."""


@dataclass(frozen=True, slots=True)
class Finalize:
    """Compute the root of the state that the complete outputs lead to, and report `finalized`."""

    bounds: tuple[int, ...]
    outputs: tuple[bytes, ...]


Work: TypeAlias = (
    HashParts
    | FetchPart
    | FetchOutput
    | FetchValue
    | SketchParts
    | CompareSketch
    | Judge
    | Reduce
    | CheckOutputs
    | Finalize
)
"""Actions that take time."""
Action: TypeAlias = Send | Forward | AskFor | ShowParts | Work | Note


class OutcomeKind(StrEnum):
    """How a round ended for this peer."""

    DONE = "done"
    """Certified, and I hold all outputs to apply it."""
    VOID = "void"
    """Without a decision in this attempt; a later one may still decide on what this one made."""
    MISSED = "missed"
    """Closed without me."""
    BEHIND = "behind"
    """The others hold another state: fetch theirs."""


ROUND_EVENTS: Mapping[OutcomeKind, str] = {
    OutcomeKind.DONE: "round.done",
    OutcomeKind.VOID: "round.void",
    OutcomeKind.MISSED: "round.missed",
    OutcomeKind.BEHIND: "round.behind",
}
"""The event that each outcome leaves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a round. `reason` is one line for a person."""

    kind: OutcomeKind
    slot: wire.Slot
    reason: str
    members: tuple[PeerId, ...] = ()
    certificate: wire.Certificate | None = None
    overdue: Phase | None = None
    """The phase that timed out, if that is why the round is void."""
    late: tuple[PeerId, ...] = ()
    """Owners of a certified round whose output a deputy has made, since it did not come in time."""
    counted: Mapping[int, frozenset[int]] = field(default_factory=dict, hash=False)
    """By part of a certified round, the roster indices of the contributions that count in it; empty if I cannot know."""
    holders: Mapping[int, int] = field(default_factory=dict, hash=False)
    """By part of a certified round, the roster index of who has reduced it; empty if I cannot know."""
    slow: tuple[PeerId, ...] = ()
    """Owners of a certified round whose output came in time, and long after those of most."""
    withheld: tuple[PeerId, ...] = ()
    """Who left parts of a void attempt without an output that counts at the deadline."""
    silent: tuple[PeerId, ...] = ()
    """Owners that sent no Have in time, and voters that did not answer a proposer in time."""
    idle: tuple[PeerId, ...] = ()
    """Members that were Ready to contribute to a certified round and are not in its value, or were here and not Ready."""
    masked: tuple[tuple[PeerId, PeerId], ...] = ()
    """Contributors that count as zeros in a part, each with the holder of that part."""
    unsketched: tuple[PeerId, ...] = ()
    """Contributors that the proposer named silent after the outputs, or that sketched long after most."""

    @property
    def value(self) -> wire.Value:
        """What was decided, if the round is done."""
        assert self.certificate is not None, "a round without a decision has no value"
        return value_of(self.certificate)

    @property
    def cut(self) -> tuple[PeerId, ...]:
        """Those whose contributions are in the value, if the round is done."""
        value = self.value
        return tuple(value.members[index] for index in value.contributors)
