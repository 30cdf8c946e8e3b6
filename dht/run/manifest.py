"""The manifest: the signed settings that pin a run and give it its id.

Theory of operation. The manifest holds all that the peers of a run must agree on. Its owner signs it once, as a record
of kind `manifest`; the hash of those signed bytes is the run id (content addressing). A peer that knows the run id can
therefore take the manifest from any other: bytes that hash to the id are the manifest. The record's own run field is
empty, since a record cannot contain its own hash.

The sections below are the schema of `run.toml` and of the wire: names, ranges, choices and defaults stand once. Defaults
are written into the manifest, so that a later version with other defaults changes no run. A manifest of version 0.1, which
lacks the settings that are new since, means what that version did (`_RULES_OF_0_1`).
"""

import base64
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from ...peer.digest import keyed
from ...peer.errors import LocalError, MalformedMessage, RemoteError, UsageError
from ...peer.identity import Identity, is_peer_id
from ...peer.transport import PeerId
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_BODY_BYTES, MAX_LIFETIME, Record
from .settings import OneOf, Reserved, Rest, from_table, to_toml
from .settings import faults as value_faults

MANIFEST_KIND = "manifest"
CODEC_NAMES = ("int8", "int4", "bf16", "fp32", "lloyd2")
"""The codecs that a manifest may name; `collectives.codec` has one of each."""
RULE_NAMES = (
    *("gramguard", "mean", "median", "trimmed_mean", "krum", "multikrum", "geometric_median", "centered_clip"),
    *("nnm_trimmed_mean", "flag"),
)
"""The aggregation rules that a manifest may name, the default first; `collectives.robust.rules` has one of each."""

MAX_VOUCH_AFTER = 1000
"""Rounds: who restarts counts them again in the certificates on its disk."""

_Codec = Annotated[str, Size(8), OneOf(CODEC_NAMES)]


@dataclass(frozen=True, slots=True)
class Model:
    """The model: a built-in one by name, or the name of an entry point that a volunteer must allow."""

    name: Annotated[str, Size(200, least=1)] = "gpt"
    options_json: Rest = ()
    """The other keys of the table."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the model: numbers, texts, booleans and lists of these."""
        return {key: json.loads(text) for key, text in self.options_json}


@dataclass(frozen=True, slots=True)
class Data:
    """The training data, and how it is cut into batches."""

    source: Annotated[str, Size(1000, least=1)]
    tokenizer: Annotated[str, Size(200, least=1)] = "bytes"
    """`bytes`, or the name of a file of Hugging Face's `tokenizers`."""
    tokenizer_hash: Annotated[str, Size(80)] = ""
    """The hash of that file; `run create` fills it in."""
    sequence_length: Annotated[int, Between(1, 1 << 20)] = 256
    batch_size: Annotated[int, Between(1, 1 << 16)] = 16


@dataclass(frozen=True, slots=True)
class Inner:
    """Each peer's own optimizer. `lr` is Muon's for the hidden matrices, `adamw_lr` AdamW's for everything else."""

    optimizer: Annotated[str, Size(16), OneOf(("muon", "adamw"))] = "muon"
    lr: Annotated[float, Between(0.0, 10.0)] = 0.02
    adamw_lr: Annotated[float, Between(0.0, 10.0)] = 3e-3
    weight_decay: Annotated[float, Between(0.0, 10.0)] = 0.01
    warmup_steps: Annotated[int, Between(0, 1_000_000)] = 20
    schedule: Annotated[str, Size(16), OneOf(("cosine", "constant", "linear"))] = "cosine"
    steps: Annotated[int, Between(1, 100_000)] = 50
    """Inner steps between two rounds, H."""
    clip: Annotated[float, Between(0.0, 1e6)] = 1.0


@dataclass(frozen=True, slots=True)
class Outer:
    """The swarm's optimizer over the averaged pseudo-gradients."""

    rounds: Annotated[int, Between(1, 1_000_000)] = 100
    lr: Annotated[float, Between(0.0, 10.0)] = 0.7
    momentum: Annotated[float, Between(0.0, 0.999)] = 0.9
    mode: Annotated[str, Size(16), OneOf(("blocking",)), Reserved()] = "blocking"
    """Peers wait for the result of a round."""
    checkpoint_every: Annotated[int, Between(1, 100)] = 10
    """Rounds between two checkpoints of the state on every peer's disk; the outputs of twice as many are kept."""


_SHORT_RUN = {"lr": 0.8, "momentum": 0.5}
"""The outer settings of a run below 100 rounds: measured better than 0.7 and 0.9 (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """The codecs: of contributions to owners, and of outputs from owners."""

    contribution: _Codec = "int4"
    result: _Codec = "int4"


@dataclass(frozen=True, slots=True)
class Defence:
    """The aggregation rule."""

    rule: Annotated[str, Size(32), OneOf(RULE_NAMES)] = RULE_NAMES[0]


@dataclass(frozen=True, slots=True)
class Admission:
    """Which peers may take part, and how many a round needs."""

    kind: Annotated[str, Size(16), OneOf(("open", "invite", "allow"))] = "open"
    """All peers; the holders of the owner's invitations (`flockstep run invite`); or the peers of `allow` and the owner."""
    allow: Annotated[str, Size(20_000)] = ""
    """Peer ids, separated by spaces."""
    min_peers: Annotated[int, Between(1, 64)] = 1
    authority: Annotated[str, Size(16), OneOf(("quorum", "owner"))] = "quorum"
    """Who decides: a quorum of the voters, or the owner alone."""
    voters: Annotated[str, Size(16), OneOf(("members", "keepers", "work"))] = "keepers"
    """Who votes: every member, one vote each; the keepers: the owner, those listed here, and those it vouches for; or every
    member, with the votes that it has earned by work."""
    keepers: Annotated[str, Size(20_000)] = ""
    """Peer ids, separated by spaces: the first voters besides the owner, where keepers vote."""
    stall: Annotated[str, Size(16), OneOf(("present", "majority", "wait"))] = "wait"
    """What follows where too few voters are here: those that are here decide, a majority of all does, or all wait."""
    vouch_after: Annotated[int, Between(0, MAX_VOUCH_AFTER)] = 30
    """Certified rounds after which the owner's own peer vouches for a member by itself; 0: never."""
    steward: Annotated[PeerId, Size(64)] = ""
    """The peer that may appoint voters where all wait, beside the owner; empty: none."""

    @property
    def allowed_ids(self) -> tuple[PeerId, ...]:
        """Return the peers of `allow`."""
        return tuple(self.allow.split())

    @property
    def keeper_ids(self) -> tuple[PeerId, ...]:
        """Return the peers of `keepers`."""
        return tuple(self.keepers.split())

    @property
    def keepers_decide(self) -> bool:
        """Return True if keepers vote, and not the owner alone or every member."""
        return self.voters == "keepers" and self.authority == "quorum"


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """The bounds, in seconds, of every adaptive deadline of a round."""

    floor: Annotated[float, Between(0.01, 3600.0)] = 2.0
    ceiling: Annotated[float, Between(0.01, 86_400.0)] = 120.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the peers of a run agree on."""

    owner: Annotated[PeerId, Size(64)]
    name: Annotated[str, Size(64, least=1)]
    data: Data
    revision: Annotated[int, Between(0, 1_000_000), Reserved()] = 0
    """Always the default; runs of an earlier version may have another one, which changes nothing."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    model: Model = Model()
    inner: Inner = Inner()
    outer: Outer = Outer()
    codec: CodecSettings = CodecSettings()
    defence: Defence = Defence()
    admission: Admission = Admission()
    timing: TimingSettings = TimingSettings()

    @classmethod
    def from_toml(cls, text: str, *, where: str, owner: PeerId) -> "Manifest":
        """Read a `run.toml`. Raises `UsageError`, whose text begins with `where`, a file name."""
        try:
            tables = tomllib.loads(text)
            if "owner" in tables:
                raise UsageError("owner is not set here: it is the peer that signs the manifest")
            manifest = from_table(cls, {**tables, "owner": owner})
            manifest = replace(manifest, admission=_admission(tables.get("admission", {})))
            for fault in manifest.faults():
                raise UsageError(fault)
        except (ValueError, UsageError) as error:  # ValueError: tomllib's for broken syntax and for absurd numbers.
            raise UsageError(f"{where}: {error}") from error
        if manifest.outer.rounds < 100:
            outer = from_table(Outer, {**_SHORT_RUN, **tables.get("outer", {})}, "outer")
            manifest = replace(manifest, outer=outer)
        return manifest

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with these settings; nothing if they are valid."""
        yield from value_faults(self)
        if self.timing.floor > self.timing.ceiling:
            yield f"[timing] floor {self.timing.floor:g} is above ceiling {self.timing.ceiling:g}"
        if self.admission.allow and self.admission.kind != "allow":
            yield f'[admission] allow lists peers, but kind is "{self.admission.kind}": write kind = "allow"'
        if self.admission.keepers and self.admission.voters != "keepers":
            yield '[admission] keepers lists peers, but everybody votes: write voters = "keepers"'
        if self.admission.vouch_after and not self.admission.keepers_decide:
            yield "[admission] vouch_after is for runs in which keepers vote: remove it"
        yield from self._steward_faults()
        for key, peers in (("allow", self.admission.allowed_ids), ("keepers", self.admission.keeper_ids)):
            for peer in peers:
                if not is_peer_id(peer):
                    yield f"[admission] {key}: {peer!r} is not a peer id"

    def _steward_faults(self) -> Iterator[str]:
        admission, steward = self.admission, self.admission.steward
        if not steward:
            return
        if not is_peer_id(steward):
            yield f"[admission] steward: {steward!r} is not a peer id"
        if (admission.authority, admission.voters, admission.stall) != ("quorum", "keepers", "wait"):
            yield '[admission] steward is for voters = "keepers" and stall = "wait": leave it out'
        if steward in (self.owner, *admission.keeper_ids):
            yield "[admission] steward is the owner or a keeper: name a peer without a vote"

    def describe(self) -> tuple[str, ...]:
        """Return the lines of a `run.toml` that gives this manifest again, with every default written out."""
        owner, *settings = to_toml(self)
        return (f"# {owner}", *settings)


def _admission(table: dict[str, Any]) -> Admission:
    """Return the admission of a checked table of a `run.toml`: some defaults are others where the run is not open."""
    given = from_table(Admission, table, "admission")
    defaults: dict[str, Any] = {"voters": table.get("voters", "members" if given.kind == "allow" else "keepers")}
    is_public = given.kind == "open" and defaults["voters"] == "keepers"
    if not is_public:
        defaults["stall"] = "present"
    if not is_public or given.authority == "owner":
        defaults["vouch_after"] = 0
    return from_table(Admission, defaults | table, "admission")


def _as_in_0_1(cls: Any, **changed: Any) -> Any:
    """Return a section as version 0.1 had it: its annotations without `changed`, which are new types, or None if new."""
    hints = get_type_hints(cls, include_extras=True) | changed
    kept = [(item.name, hints[item.name]) for item in fields(cls) if hints[item.name] is not None]
    return make_dataclass(f"{cls.__name__}01", kept, frozen=True)


_RULES_OF_0_1: dict[str, Any] = {"voters": "members", "keepers": "", "stall": "present", "vouch_after": 0, "steward": ""}
"""What a manifest of version 0.1 means by the settings that it lacks: its members follow these rules already."""
_ADMISSION_01 = _as_in_0_1(Admission, **dict.fromkeys(_RULES_OF_0_1))
_MANIFEST_01 = _as_in_0_1(Manifest, admission=_ADMISSION_01)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest: as version 0.1 did if it has the rules of that version, so that its run id stays."""
    if manifest.admission != replace(manifest.admission, **_RULES_OF_0_1):
        return encode(manifest)
    values = {item.name: getattr(manifest, item.name) for item in fields(manifest)}
    old = {item.name: getattr(manifest.admission, item.name) for item in fields(_ADMISSION_01)}
    return encode(_MANIFEST_01(**(values | {"admission": _ADMISSION_01(**old)})))


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest of this version or of 0.1. Raises `MalformedMessage`."""
    try:
        old = decode(_MANIFEST_01, data, max_bytes=MAX_BODY_BYTES)
    except MalformedMessage:
        return decode(Manifest, data, max_bytes=MAX_BODY_BYTES)
    values = {item.name: getattr(old, item.name) for item in fields(old)}
    return Manifest(**(values | {"admission": Admission(**(vars(old.admission) | _RULES_OF_0_1))}))


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest and its owner's signed bytes, whose hash is the run id."""

    manifest: Manifest
    publishable: bytes

    @property
    def run_id(self) -> str:
        """The run id: the hash of the signed bytes in 52 characters of lower-case base32."""
        return base64.b32encode(keyed("run id", self.publishable)).decode().rstrip("=").lower()

    @classmethod
    def sign(cls, manifest: Manifest, identity: Identity) -> "SignedManifest":
        """Sign a manifest. Raises `LocalError` for an identity other than the owner's."""
        if manifest.owner != identity.peer_id:
            raise LocalError(f"only its owner {manifest.owner} can sign the manifest, not {identity.peer_id}")
        for fault in manifest.faults():
            raise LocalError(f"refusing to sign an invalid manifest: {fault}")
        record = Record.sign(
            identity,
            run="",
            kind=MANIFEST_KIND,
            sequence=manifest.revision,
            lifetime=MAX_LIFETIME,
            body=encode_manifest(manifest),
        )
        return cls(manifest, record.encode())

    @classmethod
    def decode(cls, data: bytes, expect_run_id: str | None = None) -> "SignedManifest":
        """Decode and validate a manifest that any peer sent. Raises `MalformedMessage` or `BadSignature`."""
        record = Record.decode(data)
        manifest = decode_manifest(record.body)
        signed = cls(manifest, bytes(data))
        if expect_run_id is not None and signed.run_id != expect_run_id:
            raise MalformedMessage(f"this is the manifest of run {signed.run_id}, not of {expect_run_id}")
        if (record.kind, record.run, record.sequence) != (MANIFEST_KIND, "", manifest.revision):
            raise MalformedMessage(f"not the record of a manifest, but of kind {record.kind!r}")
        if record.peer != manifest.owner:
            raise MalformedMessage(f"{record.peer!r} signed a manifest that {manifest.owner!r} owns")
        for fault in manifest.faults():
            raise MalformedMessage(f"a manifest that this version cannot run: {fault}")
        record.check()
        return signed


def load_manifest(path: Path) -> SignedManifest:
    """Read a `.flockstep` file. Raises `UsageError`."""
    try:
        return SignedManifest.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy="check the path") from error
    except RemoteError as error:
        remedy = "take the file again from the run's owner, or write one with `flockstep run create`"
        raise UsageError(f"{path} is not a manifest: {error}", remedy=remedy) from error

