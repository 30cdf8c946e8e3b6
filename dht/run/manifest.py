"""The manifest: the signed settings that pin a run and give it its id.

Theory of operation. The manifest holds all that the peers of a run must agree on. Its owner signs it once, as a record
of kind `manifest`; the hash of those signed bytes is the run id (content addressing). A peer that knows the run id can
therefore take the manifest from any other: bytes that hash to the id are the manifest. The record's own run field is
empty, since a record cannot contain its own hash.

The sections below are the schema of `run.toml` and of the wire: names, ranges, choices and defaults stand once. Defaults
are written into the manifest, so that a later version with other defaults changes no run.
"""

import base64
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ...peer.digest import keyed
from ...peer.errors import LocalError, MalformedMessage, RemoteError, UsageError
from ...peer.identity import Identity, is_peer_id
from ...peer.transport import PeerId
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_BODY_BYTES, MAX_LIFETIME, Record
from .settings import OneOf, Reserved, Rest, from_table, to_toml
from .settings import faults as value_faults

MANIFEST_KIND = "manifest"
CODEC_NAMES = ("int8", "int4", "bf16", "fp32")
"""The codecs that a manifest may name; `collectives.codec` has one of each."""
RULE_NAMES = (
    *("gramguard", "mean", "median", "trimmed_mean", "krum", "multikrum", "geometric_median", "centered_clip"),
    *("nnm_trimmed_mean", "flag"),
)
"""The aggregation rules that a manifest may name, the default first; `collectives.robust.rules` has one of each."""

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
    """The signatures that a certificate needs: a quorum's, or a quorum's that includes the owner, which prevents forks."""

    @property
    def allowed_ids(self) -> tuple[PeerId, ...]:
        """Return the peers of `allow`."""
        return tuple(self.allow.split())


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
        for peer in self.admission.allowed_ids:
            if not is_peer_id(peer):
                yield f"[admission] allow: {peer!r} is not a peer id"

    def describe(self) -> tuple[str, ...]:
        """Return the lines of a `run.toml` that gives this manifest again, with every default written out."""
        owner, *settings = to_toml(self)
        return (f"# {owner}", *settings)


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
            body=encode(manifest),
        )
        return cls(manifest, record.encode())

    @classmethod
    def decode(cls, data: bytes, expect_run_id: str | None = None) -> "SignedManifest":
        """Decode and validate a manifest that any peer sent. Raises `MalformedMessage` or `BadSignature`."""
        record = Record.decode(data)
        manifest = decode(Manifest, record.body, max_bytes=MAX_BODY_BYTES)
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

