"""`flockstep run`: make a run from its `run.toml`, and look at one."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from ..collectives.accountability.trust import YOUNG_ROUNDS, Standing
from ..dht.members.table import Member
from ..dht.run.admission import SERIAL_BYTES, Invitation
from ..dht.run.link import JoinLink
from ..dht.run.manifest import Data, Manifest, SignedManifest, load_manifest, save_manifest
from ..peer.address import split_p2p
from ..peer.config import PeerConfig
from ..peer.errors import FlockstepError, UsageError
from ..peer.identity import Identity, is_peer_id
from ..peer.telemetry import Telemetry, log_path
from ..peer.transport import PeerId
from .status import SHORT_ID, figures, show, story_of

Say = Callable[[str], None]

SCHEME = "flockstep://"


def identity_path(home: Path) -> Path:
    """The key file of a home folder: who I am, and what signs my runs."""
    return home / "identity.key"


def create_run(path: Path, via: Sequence[str], config: PeerConfig, say: Say) -> None:
    """Sign a run, write its manifest beside `path`, publish it through the bootstraps and say the link to join it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}", remedy="docs/run-toml.md shows what belongs in it") from error
    identity = Identity.load_or_create(identity_path(config.home))
    manifest = Manifest.from_toml(text, where=str(path), owner=identity.peer_id)
    signed = SignedManifest.sign(replace(manifest, data=_pinned(manifest.data, path)), identity)
    link = JoinLink(signed.run_id, tuple(via))
    for address in link.bootstraps:
        split_p2p(address)  # A mistyped --via fails here and not at the volunteers.
    JoinLink.parse(str(link))
    kept = path.with_name(re.sub(r"[^\w.-]+", "-", signed.manifest.name) + ".flockstep")
    save_manifest(signed, kept)

    from ..dht.rendezvous import publish_manifest

    with closing(Telemetry(log_path(config.home))) as telemetry:
        publish_manifest(signed, link, config, telemetry)
    say(f"Run {signed.manifest.name} is open; its signed manifest is {kept}. Lend a computer to it with\n")
    say(f"    flockstep join '{link}'\n")


def _pinned(data: Data, path: Path) -> Data:
    """The data of a manifest with the hash of its tokenizer's file, which lies beside the `run.toml`."""
    if data.tokenizer == "bytes":
        return data
    from ..optim.data.tokenizer import hash_of

    found = hash_of(path.parent / Path(data.tokenizer).expanduser())
    if data.tokenizer_hash not in ("", found):
        raise UsageError(
            f"{path}: tokenizer_hash is {data.tokenizer_hash}, but that of {data.tokenizer} is {found}",
            remedy="leave tokenizer_hash out: it is filled in",
        )
    return replace(data, tokenizer_hash=found)


def invite(target: str, peer: PeerId, count: int, config: PeerConfig, say: Say) -> None:
    """Sign an invitation to a run of mine, and say it. Raises `FlockstepError`."""
    signed = _manifest(target, config)
    identity = Identity.load_or_create(identity_path(config.home))
    kind, owner = signed.manifest.admission.kind, signed.manifest.owner
    if owner != identity.peer_id:
        remedy = "say with --home where the owner's key is"
        raise UsageError(f"only its owner {owner} can invite to this run, not {identity.peer_id}", remedy=remedy)
    if kind != "invite":
        remedy = 'publish it with [admission] kind = "invite" if it shall need any'
        raise UsageError(f'this run needs no invitations: its admission is "{kind}"', remedy=remedy)
    if peer and not is_peer_id(peer):
        raise UsageError(f"{peer!r} is not a peer id", remedy="`flockstep join` says it to whom it turns away")
    if peer and count != 1:
        raise UsageError("an invitation is bound to a peer or to a count, not to both", remedy="leave one of them out")
    invitation = Invitation.sign(identity, signed.run_id, secrets.token_bytes(SERIAL_BYTES), peer=peer, count=count)
    say(f"{invitation}")


def _manifest(target: str, config: PeerConfig) -> SignedManifest:
    """The manifest of a link, or in a `.flockstep` file."""
    if SCHEME not in target:
        return load_manifest(Path(target))
    from ..dht.rendezvous import fetch_manifest

    with closing(Telemetry(log_path(config.home))) as telemetry:
        return fetch_manifest(JoinLink.parse(target), config, telemetry)


def run_info(target: str, config: PeerConfig, say: Say, *, as_json: bool = False) -> None:
    """What a run pins and who is in it: `target` is its link, or its `.flockstep` file, which needs no network."""
    members: list[Member] = []
    earned: Mapping[PeerId, Standing] = {}
    unreachable = ""
    signed = _manifest(target, config)
    if SCHEME in target:
        from .run_trust import fetch_standings

        with closing(Telemetry(log_path(config.home))) as telemetry:
            try:
                members, earned = fetch_standings(JoinLink.parse(target), signed, config, telemetry)
            except FlockstepError as error:
                unreachable = str(error)
    if as_json:
        manifest = asdict(signed.manifest)
        trust = {peer: asdict(standing) for peer, standing in earned.items()}
        shown = [figures(story_of(member)) for member in members]
        say(json.dumps({"run": signed.run_id, "manifest": manifest, "members": shown, "trust": trust}))
        return
    say(f"run {signed.run_id}\n")
    say("\n".join(signed.manifest.describe()))
    if unreachable:
        say(f"\nIts members could not be asked: {unreachable}")
    elif members:
        say("")
        show([story_of(member) for member in members])
    if earned:
        say("\npeer      trust  rounds")
        for peer, standing in earned.items():
            more = "+" if standing.rounds >= YOUNG_ROUNDS else ""  # They are counted no further.
            say(f"{peer[-SHORT_ID:]:9} {standing.trust:.3f}  {standing.rounds}{more}")
