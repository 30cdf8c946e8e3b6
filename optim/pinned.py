"""What a manifest pins about averaging, as `collectives` needs it."""

from ..collectives.averager import Spec
from ..collectives.codec import codec_named
from ..collectives.robust.rules import rule_named
from ..dht.run.admission import Charter, Invitation
from ..dht.run.manifest import SignedManifest
from ..peer.errors import UsageError
from ..peer.transport import PeerId
from ..peer.wire.schema import encode


def spec_of(signed: SignedManifest, num_cells: int, invite: bytes) -> Spec:
    """The averaging of a run, for a model of so many cells, of a peer with this invitation."""
    manifest = signed.manifest
    return Spec(
        run=signed.run_id,
        num_cells=num_cells,
        contribution=codec_named(manifest.codec.contribution),
        output=codec_named(manifest.codec.result),
        min_peers=manifest.admission.min_peers,
        floor=manifest.timing.floor,
        ceiling=manifest.timing.ceiling,
        rule=rule_named(manifest.defence.rule),
        charter=charter_of(signed),
        invite=invite,
    )


def invitation(signed: SignedManifest, me: PeerId, text: str) -> bytes:
    """The invitation that I show the others. Raises `UsageError` where a run would not let me in with it."""
    invite = encode(Invitation.parse(text)) if text else b""
    if barred := charter_of(signed).bars(me, invite):
        remedy = f"send the run's owner your peer id, {me}, and pass the invitation that comes back with --invite"
        raise UsageError(f"this run does not let this peer in: {barred}", remedy=remedy)
    return invite


def charter_of(signed: SignedManifest) -> Charter:
    """Who may take part in a run, and whose signature it demands."""
    manifest, admission = signed.manifest, signed.manifest.admission
    return Charter(
        run=signed.run_id,
        owner=manifest.owner,
        kind=admission.kind,
        allowed=frozenset((manifest.owner, *admission.allowed_ids)),
        authority=manifest.owner if admission.authority == "owner" else None,
        earned=admission.kind == "open",
        min_peers=admission.min_peers,
    )
