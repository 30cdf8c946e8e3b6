"""What the manifest pins about averaging: codecs, rule, deadlines, charter."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ..dht.run.admission import OPEN, Charter, Ticket
from ..dht.run.manifest import Manifest, SignedManifest
from ..dht.run.revision import revised_by, why_not_revise
from ..peer import wire
from ..peer.base.errors import UsageError
from ..peer.base.transport import PeerId
from .robust.rule import Rule
from .robust.rules import MEAN, rule_named
from .vector.codec import CELL, Codec, codec_named
from .vector.mixed import codecs_named
from .vector.partition import fragment_of


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a round's contributions and outputs, as far as it decides what is well-formed."""

    run: str
    num_cells: int
    contribution: Codec
    output: Codec
    under: "Callable[[bytes], Terms] | None" = field(default=None, compare=False)
    """Returns these under a revision of the run's settings; None where there are no revisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the manifest pins about averaging."""

    run: str
    num_cells: int
    contribution: Codec
    output: Codec
    min_peers: int
    floor: float
    """Seconds that every deadline has at least."""
    ceiling: float
    """Seconds that no deadline exceeds."""
    rule: Rule = MEAN
    """How contributions become one."""
    charter: Charter = OPEN
    """Who may take part, and whose signature is demanded."""
    invite: bytes = b""
    """My invitation, where the charter demands one."""
    start: bytes = b""
    """The state root that the run starts from; empty where the peers make the first state from the seed."""
    num_fragments: int = 1
    """Fragments of the vector; each round averages the next one."""
    why_not_revise: Callable[[bytes, bytes], str] = lambda revision, before: ""
    """Returns why the first of two revisions of the run's settings cannot follow the second one; empty if it can."""
    settings: "Callable[[bytes], Manifest] | None" = None
    """Returns the run's settings under a revision that a certificate names; None: always these."""

    def under(self, revision: bytes) -> "Spec":
        """Return what holds in the rounds after a certificate that names this revision."""
        if self.settings is None:
            return self
        codec = self.settings(revision).codec
        return replace(self, contribution=codecs_named(codec.contributions), output=codec_named(codec.result))

    def cells_of(self, round_: int) -> range:
        """The cells that a round averages."""
        return fragment_of(round_, self.num_cells, self.num_fragments)

    def part_bytes(self, num_cells: int, codec: str) -> int | None:
        """Return the bytes of a part in the codec that its sender states; None for one that it may not choose."""
        found = self.contribution.of(codec)
        return None if found is None else found.num_bytes(num_cells)

    def after(self, value: wire.Value | None) -> "Spec":
        """Return what holds in the round after that of a validated value; None: in the first round.

        What this version does not know changes nothing here: the member is about to leave, with a line that says so.
        """
        with suppress(UsageError):
            return self.under(b"" if value is None else value.revision)
        return self

    @property
    def terms(self) -> Terms:
        """What decides whether bytes are well-formed."""
        return Terms(self.run, self.num_cells, self.contribution, self.output, lambda revision: self.under(revision).terms)


def spec_of(signed: SignedManifest, num_cells: int, invite: bytes) -> Spec:
    """The averaging of a run, for a model of so many cells, of a peer with this invitation."""
    manifest = signed.manifest
    return Spec(
        run=signed.run_id,
        num_cells=num_cells,
        contribution=codecs_named(manifest.codec.contributions),
        output=codec_named(manifest.codec.result),
        min_peers=manifest.admission.min_peers,
        floor=manifest.timing.floor,
        ceiling=manifest.timing.ceiling,
        rule=rule_named(manifest.defence.rule),
        charter=charter_of(signed),
        invite=invite,
        start=bytes.fromhex(manifest.start),
        num_fragments=manifest.outer.fragments,
        why_not_revise=partial(why_not_revise, signed),
        settings=partial(revised_by, signed),
    )


def credential(charter: Charter, me: PeerId, text: str, time: float) -> bytes:
    """Return the credential that I show the others. Raises `UsageError` where it would not let me in.

    `time` is Unix time in seconds; 0 for a peer that returns to a run, since only an entry can be too late.
    """
    invite = Ticket.parse(text).credential(me) if text else b""
    if why_not := charter.why_not_admit(me, invite) or charter.why_not_enter(me, invite, (), time):
        remedy = f"send the run's owner your peer id, {me}, and pass the invitation that comes back with --invite"
        raise UsageError(f"this run does not let this peer in: {why_not}", remedy=remedy)
    return b"" if charter.kind == "open" else invite  # Readys that show what is of no use have no place in a roster.


def charter_of(signed: SignedManifest) -> Charter:
    """Who may take part in a run, and whose signature it demands."""
    manifest, admission = signed.manifest, signed.manifest.admission
    listed = frozenset((manifest.owner, *admission.allowed_ids))
    first = frozenset((manifest.owner, *admission.keeper_ids))
    if admission.voters == "keepers":
        founders = first
    else:
        founders = listed if admission.kind == "allow" else frozenset((manifest.owner,))
    return Charter(
        run=signed.run_id,
        owner=manifest.owner,
        kind=admission.kind,
        allowed=listed,
        earned=admission.kind == "open",
        min_peers=admission.min_peers,
        founders=founders,
        keepers=first if admission.voters == "keepers" else None,
        layout=b"" if manifest.pin is None else manifest.pin.hash,
        cells=range(0) if manifest.pin is None else manifest.pin.cells(CELL),
        manifest=manifest,
    )
