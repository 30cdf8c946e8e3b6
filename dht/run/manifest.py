"""The manifest: the signed settings that pin a run and give it its id.

Theory of operation. The manifest holds all that the peers of a run must agree on. Its owner signs it once, as a record
of kind `manifest`; the hash of those signed bytes is the run id (content addressing). A peer that knows the run id can
therefore take the manifest from any other: bytes that hash to the id are the manifest. The record's own run field is
empty, since a record cannot contain its own hash.

The sections below are the schema of `run.toml` and of the wire: names, ranges, choices and defaults stand once. Defaults
are written into the manifest, so that other defaults change no run.

The record's kind states the run's protocol number (`protocol.PROTOCOL`), so a peer that speaks another one knows by the
manifest alone that it cannot take part.
"""

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from ...peer.base.digest import keyed
from ...peer.base.errors import LocalError, MalformedMessage, OtherProtocol, RemoteError, UsageError
from ...peer.base.transport import PeerId
from ...peer.base.troubles import NEEDS_PROGRAM
from ...peer.identity import Identity, is_peer_id
from ...peer.wire import MAX_COUNT
from ...peer.wire.schema import Between, Size, decode, encode
from ..records import MAX_BODY_BYTES, MAX_LIFETIME, MAX_RECORD_BYTES, Record
from .layout import LayoutPin
from .link import is_run_id
from .protocol import PROTOCOL, check_protocol
from .settings import OneOf, Reserved, Rest, from_table, parse_toml, to_toml
from .settings import faults as value_faults

_EARNED = re.compile(r"(\w{40,64}):([0-9.e-]{1,24}):([0-9]{1,3})", re.ASCII)
_ROOT = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)
_LAYOUT = re.compile(r"(?:[0-9a-f]{64}/[1-9][0-9]{0,8}/[0-9]{1,15})?", re.ASCII)
MANIFEST_KIND = f"manifest {PROTOCOL}"
_KIND = re.compile(r"manifest ([1-9][0-9]{0,2})", re.ASCII)
RESULT_CODECS = ("int8", "int4", "bf16", "fp32")
"""The codecs of outputs. Not lloyd2: a block that is mostly zero decodes to ±3 scales, more than the residual test allows."""
CODEC_NAMES = (*RESULT_CODECS, "lloyd2")
"""The codecs that a manifest may name; `collectives.vector.codec` has one of each."""
RULE_NAMES = ("gramguard", "mean")
"""The aggregation rules that a manifest may name, the default first; `collectives.robust.rules` has one of each."""

OWN = "own"
"""The data source of a run whose members bring model, data and loop of their own."""
FROM = "from"
"""The key of `[model]` that names the first state: of `run.toml` alone."""
MOST_FRAGMENTS = 64
MAX_OUTER_LR = 2.0
"""Beyond it an outer step overshoots even where all peers agree."""
MOST_CHECKPOINT_ROUNDS = 100
"""A newcomer takes a checkpoint and then replays the rounds since, 256 at most."""

MAX_PROMPTS = 4
MAX_PROMPT_BYTES = 400
"""Four prompts and what follows them fit into a record of 6 kB (`dht.members.evaluation`)."""
MAX_EARNED_BYTES = 20_000
"""Some 250 members, as many as a roster has; the lists of an admission have the same limit."""
DEFAULT_EVERY = 5
"""With three of eight contributors at a time, each peer evaluates after every 13th round."""

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
    """The training data, which a manifest names as packed data (`optim.shards.packed`), and how it is cut into batches."""

    source: Annotated[str, Size(1000, least=1)]
    tokenizer: Annotated[str, Size(200, least=1)] = "bytes"
    """`bytes`, or the name of a file of Hugging Face's `tokenizers`: beside packed data `tokenizer.json`."""
    sequence_length: Annotated[int, Between(1, 1 << 20)] = 256
    batch_size: Annotated[int, Between(1, 1 << 16)] = 16


@dataclass(frozen=True, slots=True)
class Inner:
    """Each peer's own optimizer. `lr` is Muon's for the hidden matrices, `adamw_lr` AdamW's for everything else."""

    optimizer: Annotated[str, Size(16), OneOf(("muon", "adamw"))] = "muon"
    lr: Annotated[float, Between(0.0, 10.0)] = 0.02
    adamw_lr: Annotated[float, Between(0.0, 10.0)] = 6e-3
    """A `run.toml` without it and without Muon gets `LONE_ADAMW_LR`."""
    weight_decay: Annotated[float, Between(0.0, 10.0)] = 0.01
    warmup_steps: Annotated[int, Between(0, 1_000_000)] = 20
    schedule: Annotated[str, Size(16), OneOf(("cosine", "constant", "linear"))] = "cosine"
    steps: Annotated[int, Between(1, 100_000)] = 50
    """Inner steps between two outer steps of the same parameters, H."""
    clip: Annotated[float, Between(0.0, 1e6)] = 1.0
    seconds: Annotated[float, Between(0.0, 86_400.0)] = 0.0
    """Seconds in which every peer makes as many inner steps as it can, instead of `steps`; 0: a phase ends by count."""
    momentum: Annotated[float, Between(0.0, 0.999)] = 0.95
    """Muon's. A `run.toml` without it gets `inner_momentum`."""
    betas: Annotated[tuple[Annotated[float, Between(0.0, 0.9999)], ...], Size(2, least=2)] = (0.9, 0.95)
    """AdamW's. 0.95, not 0.999, which would average squares over more steps than an inner phase has."""
    ramp: Annotated[int, Between(1, 8)] = 1
    """The most batches of one optimizer step, which are 1, 2, 4 and 8 in the quarters of a run. A `run.toml` without it
    gets `LONG_RAMP` where the run has `LONG_ROUNDS`."""


@dataclass(frozen=True, slots=True)
class Outer:
    """The swarm's optimizer over the averaged pseudo-gradients."""

    rounds: Annotated[int, Between(1, 1_000_000)] = 100
    lr: Annotated[float, Between(0.0, 10.0)] = 0.9
    momentum: Annotated[float, Between(0.0, 0.999)] = 0.8
    mode: Annotated[str, Size(16), OneOf(("blocking", "streaming"))] = "blocking"
    """Whether peers wait for the result of a round, or train on while it runs."""
    fragments: Annotated[int, Between(1, MOST_FRAGMENTS)] = 1
    """Runs of parameters of equal length; in streaming mode a round averages one of them, in turn."""
    checkpoint_every: Annotated[int, Between(1, MOST_CHECKPOINT_ROUNDS)] = 10
    """Rounds (of each fragment) after which every peer writes a checkpoint; the outputs of so many are on its disk."""
    momentum_warmup: Annotated[int, Between(0, 100_000)] = 0
    """Rounds (of each fragment) over which the momentum rises from 0. A `run.toml` without it gets `MOMENTUM_WARMUP`."""


LONG_RAMP, LONG_ROUNDS = 8, 100
"""The default of a new run of so many rounds and more: in 30 rounds it gains nothing (docs/log.md)."""
DEFAULT_FRAGMENTS = 5
"""The default divides H into as many phases, at most: with more of them the votes on a round outlast its bytes."""
STREAMED_STEPS = 100
"""From this H on, streaming is the default: the phase of a fragment has 20 steps, longer than the votes on a round."""

LONE_ADAMW_LR = 3e-3
"""The default where AdamW has the hidden matrices, too. Beside Muon it has embeddings and gains, which want twice that
(docs/log.md); nanochat takes 0.008 for its unembedding and 0.3 for its embedding, beside Muon's 0.02."""

INNER_MOMENTUM, LARGE_INNER_MOMENTUM = 0.8, 0.95
"""The defaults of a new run with small and with large batches (`inner_momentum`)."""
SMALL_BATCH, LARGE_BATCH = 1_024, 102_400
"""Tokens a peer and step. Few have noisy gradients, and 0.95 carries those on (docs/log.md); published runs of 100,000
tokens and more take 0.95."""

MOMENTUM_WARMUP = 10
"""The default of a new run: until its momentum has hit its stride, a step along it is too long (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """The codecs: of contributions to owners, and of outputs from owners."""

    contribution: _Codec = "int4"
    result: Annotated[str, Size(8), OneOf(RESULT_CODECS)] = "int4"
    choices: Annotated[str, Size(64)] = ""
    """Codecs, separated by spaces, that a peer may use for its contributions instead, as its line allows."""

    @property
    def contributions(self) -> tuple[str, ...]:
        """Return the codecs of contributions, the usual one first."""
        return self.contribution, *self.choices.split()


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
    voters: Annotated[str, Size(16), OneOf(("members", "keepers"))] = "keepers"
    """Who votes: every member, or the keepers: the owner, those listed here, and those it vouches for."""
    keepers: Annotated[str, Size(20_000)] = ""
    """Peer ids, separated by spaces: the first voters besides the owner, where keepers vote."""

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
        """Return True if keepers vote, and not every member."""
        return self.voters == "keepers"


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """The bounds, in seconds, of every adaptive deadline of a round."""

    floor: Annotated[float, Between(0.01, 3600.0)] = 2.0
    ceiling: Annotated[float, Between(0.01, 86_400.0)] = 120.0


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The evaluation of the shared model while it trains."""

    every: Annotated[int, Between(0, 1000)] = 0
    """Rounds between two evaluations; 0: none."""
    prompts: Annotated[tuple[Annotated[str, Size(MAX_PROMPT_BYTES, least=1)], ...], Size(MAX_PROMPTS)] = ()
    """Texts that the model continues each time."""


@dataclass(frozen=True, slots=True)
class Earned:
    """What a peer has earned in the run before: its trust, and the rounds that it contributed to, as far as they count."""

    peer: PeerId
    trust: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Follows:
    """The run whose last certified state this one goes on from (`succession`); empty where it begins by itself."""

    run: Annotated[str, Size(52)] = ""
    first: Annotated[str, Size(52)] = ""
    """The first run of the line: an invitation to that one admits to all of them."""
    round: Annotated[int, Between(0, MAX_COUNT)] = 0
    """The last round of the run before."""
    hash: Annotated[str, Size(64)] = ""
    """The hash of that round's certificate, in hex."""
    rounds: Annotated[int, Between(0, MAX_COUNT)] = 0
    """Rounds of all runs before: the schedules of learning rate, momentum and ramp go on from there."""
    earned: Annotated[str, Size(MAX_EARNED_BYTES)] = ""
    """Its last members with what they have earned, `PEER:TRUST:ROUNDS` separated by spaces: they enter as members."""

    @classmethod
    def of(cls, first: str, run: str, round_: int, hash_: bytes, rounds: int, earned: Iterable[Earned]) -> "Follows":
        """Return it with what these have earned: of more than fit, those who have contributed to most rounds."""
        ordered = sorted(earned, key=lambda it: (-it.rounds, -it.trust, it.peer))
        rows = [f"{it.peer}:{it.trust!r}:{it.rounds}" for it in ordered]
        while sum(len(row) + 1 for row in rows) > MAX_EARNED_BYTES:
            rows.pop()
        return cls(run, first, round_, hash_.hex(), rounds, " ".join(sorted(rows)))

    @property
    def members(self) -> tuple[Earned, ...]:
        """What each member has earned."""
        return _read_earned(self.earned)

    def faults(self, start: str) -> Iterator[str]:
        """Yield what is wrong with it, in a run that starts from the state root `start`."""
        if self == Follows():
            return
        if not (is_run_id(self.run) and is_run_id(self.first) and _ROOT.fullmatch(self.hash) and self.hash):
            yield "[follows] names no run and certificate: `flockstep run succeed` fills it in"
        if not start or not 1 <= self.round <= self.rounds:
            yield "[follows] is without a state that was certified"
        rows = self.earned.split()
        if len(self.members) != len(rows) or len({it.peer for it in self.members}) != len(rows):
            yield "[follows] earned lists what is no peer with its trust and rounds, or one twice"


@lru_cache(maxsize=64)
def _read_earned(text: str) -> tuple[Earned, ...]:
    found = [match for match in map(_EARNED.fullmatch, text.split()) if match is not None and is_peer_id(match[1])]
    rows = [Earned(match[1], float(match[2]), int(match[3])) for match in found if _is_share(match[2])]
    return tuple(rows)


def _is_share(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the peers of a run agree on."""

    owner: Annotated[PeerId, Size(64)]
    name: Annotated[str, Size(64, least=1)]
    data: Data
    revision: Annotated[int, Between(0, 1_000_000), Reserved()] = 0
    """The sequence of its record: always the default, since a run id names one manifest (`revision` changes its settings)."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    model: Model = Model()
    inner: Inner = Inner()
    outer: Outer = Outer()
    codec: CodecSettings = CodecSettings()
    defence: Defence = Defence()
    admission: Admission = Admission()
    timing: TimingSettings = TimingSettings()
    eval: EvalSettings = EvalSettings()
    start: Annotated[str, Size(64)] = ""
    """The state root of the first (θ, m) in hex, which no peer can make; empty: it is made from the seed."""
    layout: Annotated[str, Size(120)] = ""
    """What is trained, by name and shape (`layout.LayoutPin`): a hash, how many tensors, how many parameters. Empty:
    the first members decide."""
    by: Annotated[str, Size(80)] = ""
    """Who asks for the training, in the owner's words; a volunteer reads it beside the owner's key."""
    contact: Annotated[str, Size(120)] = ""
    """Where volunteers can ask, such as a mail address."""
    follows: Follows = Follows()

    @classmethod
    def from_toml(cls, text: str, *, where: str, owner: PeerId) -> "Manifest":
        """Read a `run.toml`, but for `start_given`. Raises `UsageError`, whose text begins with `where`, a file name."""
        try:
            tables = parse_toml(text)
            start_given(tables)
            if "owner" in tables:
                raise UsageError("owner is not set here: it is the peer that signs the manifest")
            if "follows" in tables:
                raise UsageError("[follows] is not set here: `flockstep run succeed` has a run go on as another one")
            manifest = from_table(cls, {**tables, "owner": owner})
            # Before others' defaults are computed of these.
            checked = {"data": manifest.data, "inner": manifest.inner, "outer": manifest.outer}
            for fault in chain.from_iterable(value_faults(table, name) for name, table in checked.items()):
                raise UsageError(fault)
            outer, evaluation = _outer(tables.get("outer", {}), manifest.inner), manifest.eval
            if "eval" in tables:
                evaluation = _evaluation(tables["eval"])
            defaults: dict[str, float] = {
                "momentum": inner_momentum(manifest.data.sequence_length * manifest.data.batch_size),
                "ramp": LONG_RAMP if outer.rounds >= LONG_ROUNDS else 1,
            }
            if manifest.inner.optimizer != "muon":
                defaults["adamw_lr"] = LONE_ADAMW_LR
            inner = from_table(Inner, defaults | tables.get("inner", {}), "inner")
            manifest = replace(manifest, inner=inner, outer=outer, eval=evaluation)
            for fault in manifest.faults():
                raise UsageError(fault)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        return manifest

    @property
    def pin(self) -> LayoutPin | None:
        """What is trained, as `layout` says; None if it is not pinned."""
        return LayoutPin.parse(self.layout)

    @property
    def is_own(self) -> bool:
        """Whether members bring model, data and loop, in a program with a `Swarm`."""
        return self.data.source == OWN

    @property
    def joining(self) -> str:
        """How this run is joined where `flockstep join` cannot, in one line; empty where it can."""
        return str(NEEDS_PROGRAM) if self.is_own else ""

    @property
    def model_name(self) -> str:
        """The model's name, for people: a run whose members bring it has one only if its `[model]` says so."""
        return "a model of its members" if self.is_own and self.model == Model() else self.model.name

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run: every fragment has `outer.rounds`."""
        return self.outer.rounds * self.outer.fragments

    @property
    def schedule_rounds(self) -> int:
        """Rounds over which the schedules run: those of this run, and of the runs that it goes on from."""
        return self.follows.rounds + self.num_rounds

    @property
    def checkpoint_rounds(self) -> int:
        """Rounds between two checkpoints: so many of every fragment, where 100 are enough for that."""
        return min(MOST_CHECKPOINT_ROUNDS, self.outer.checkpoint_every * self.outer.fragments)

    @property
    def phase_steps(self) -> int:
        """Inner steps between two rounds."""
        return self.inner.steps // self.outer.fragments

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with these settings; nothing if they are valid."""
        yield from value_faults(self)
        if not _ROOT.fullmatch(self.start):
            yield f"start {self.start!r} is no state root of 64 hex digits: leave it out, and `run create` fills it in"
        if not _LAYOUT.fullmatch(self.layout) or (self.pin is not None and self.pin.num_params < self.pin.num_tensors):
            yield f"layout {self.layout!r} is none: `Swarm.layout_of(model)` returns that of a model of your own"
        if any(key == FROM for key, _ in self.model.options_json):
            yield "[model] from is a path on its owner's computer, which no manifest may name"
        if self.timing.floor > self.timing.ceiling:
            yield f"[timing] floor {self.timing.floor:g} is above ceiling {self.timing.ceiling:g}"
        if self.admission.allow and self.admission.kind != "allow":
            yield f'[admission] allow lists peers, but kind is "{self.admission.kind}": write kind = "allow"'
        if self.admission.keepers and self.admission.voters != "keepers":
            yield '[admission] keepers lists peers, but everybody votes: write voters = "keepers"'
        for name in self.codec.choices.split():
            if name not in CODEC_NAMES or self.codec.contributions.count(name) > 1:
                others = ", ".join(sorted({*CODEC_NAMES} - {self.codec.contribution}))
                yield f"[codec] choices: {name!r} is not one more codec: write some of {others}, each once"
        yield from self._mode_faults()
        yield from self._evaluation_faults()
        yield from self.follows.faults(self.start)
        for key, peers in (("allow", self.admission.allowed_ids), ("keepers", self.admission.keeper_ids)):
            for peer in peers:
                if not is_peer_id(peer):
                    yield f"[admission] {key}: {peer!r} is not a peer id"

    def _mode_faults(self) -> Iterator[str]:
        outer, steps = self.outer, self.inner.steps
        if outer.mode == "blocking" and outer.fragments != 1:
            yield '[outer] fragments are for mode = "streaming": remove them'
        elif steps % outer.fragments:
            yield f"[outer] fragments = {outer.fragments} does not divide [inner] steps = {steps}"

    def _evaluation_faults(self) -> Iterator[str]:
        if self.eval.prompts and not self.eval.every:
            yield "[eval] prompts are for runs that are evaluated: give every, the rounds between two evaluations"
        elif self.eval.every and self.is_own:
            yield f"[eval] evaluates language models: [data] source {self.data.source!r} is no text"

    def describe(self) -> tuple[str, ...]:
        """Return the lines of a `run.toml` that gives this manifest again, with every default written out."""
        owner, *settings = to_toml(self)
        table = settings.index("[follows]") - 1
        settings, follows = settings[:table], settings[table:] if self.follows.run else []
        if not self.eval.every:  # A table [eval] asks for evaluations.
            settings = settings[: settings.index("[eval]") - 1]
        return (f"# {owner}", *settings, *(f"# {line}".rstrip() for line in follows))


def inner_momentum(tokens: int) -> float:
    """Return Muon's default momentum for so many tokens a peer and step.

    Between the two sizes that are measured or published, the share of the newest gradient falls as a power of the tokens.
    """
    share = math.log(tokens / SMALL_BATCH) / math.log(LARGE_BATCH / SMALL_BATCH)
    smaller = math.pow((1 - LARGE_INNER_MOMENTUM) / (1 - INNER_MOMENTUM), min(1.0, max(0.0, share)))
    return round(1 - (1 - INNER_MOMENTUM) * smaller, 2)


def start_given(tables: dict[str, Any]) -> str:
    """Take `[model] from`, the path of the first state, out of a `run.toml`; empty if there is none. Raises `UsageError`."""
    model = tables.get("model")
    if not isinstance(model, dict) or FROM not in model:
        return ""
    path = model.pop(FROM)
    if not isinstance(path, str) or not path:
        raise UsageError(f"[model] from must be a path in quotes, not {path!r}")
    return path


def _outer(table: dict[str, Any], inner: Inner) -> Outer:
    """Return the outer loop of a checked table of a `run.toml`: some defaults depend on the mode."""
    mode = "streaming" if inner.steps >= STREAMED_STEPS else "blocking"
    defaults: dict[str, Any] = {"mode": mode, "momentum_warmup": MOMENTUM_WARMUP}
    given = from_table(Outer, defaults | table, "outer")
    if given.mode == "streaming":
        defaults["fragments"] = max(count for count in range(1, DEFAULT_FRAGMENTS + 1) if inner.steps % count == 0)
    return from_table(Outer, defaults | table, "outer")


def _evaluation(table: dict[str, Any]) -> EvalSettings:
    """Return the evaluation of a checked table of a `run.toml`, which asks for one every so many rounds."""
    given = from_table(EvalSettings, {"every": DEFAULT_EVERY} | table, "eval")
    if type(given.every) is int and given.every < 1:
        raise UsageError(f"[eval] every must be 1 or more rounds, not {given.every}: leave [eval] out to evaluate nothing")
    return given


def run_id_of(publishable: bytes) -> str:
    """Return the run id: the hash of a manifest's signed bytes in 52 characters of lower-case base32."""
    return base64.b32encode(keyed("run id", publishable)).decode().rstrip("=").lower()


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest and its owner's signed bytes, whose hash is the run id."""

    manifest: Manifest
    publishable: bytes

    @property
    def run_id(self) -> str:
        """The run id (`run_id_of`)."""
        return run_id_of(self.publishable)

    @property
    def line(self) -> str:
        """The id of the first run of its line (`Follows`): its own where it goes on from none. Invitations name it."""
        return self.manifest.follows.first or self.run_id

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
        """Decode and validate a manifest that any peer sent.

        Raises `OtherProtocol`, and `MalformedMessage` or `BadSignature` for a false one.
        """
        record, run_id = Record.decode(data), run_id_of(data)
        if expect_run_id is not None and run_id != expect_run_id:
            raise MalformedMessage(f"this is the manifest of run {run_id}, not of {expect_run_id}")
        kind = _KIND.fullmatch(record.kind)
        if kind is None or record.run:
            raise MalformedMessage(f"not the record of a manifest, but of kind {record.kind!r}")
        record.check()
        remedy = "take part with the flockstep that published it, or ask its owner for the link of a new run"
        check_protocol(f"run {run_id} is", int(kind[1]), remedy)
        manifest = decode(Manifest, record.body, max_bytes=MAX_BODY_BYTES)
        if record.sequence != manifest.revision:
            raise MalformedMessage(f"the {record.sequence}th record of a manifest, and not the {manifest.revision}th")
        if record.peer != manifest.owner:
            raise MalformedMessage(f"{record.peer!r} signed a manifest that {manifest.owner!r} owns")
        for fault in manifest.faults():
            raise MalformedMessage(f"a manifest of no valid run: {fault}")
        return cls(manifest, bytes(data))


def load_manifest(path: Path) -> SignedManifest:
    """Read a `.flockstep` file. Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            return SignedManifest.decode(file.read(MAX_RECORD_BYTES + 1))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy="check the path") from error
    except OtherProtocol as error:
        raise UsageError(f"{path}: {error}", remedy=error.remedy) from error
    except RemoteError as error:
        remedy = "take the file again from the run's owner, or write one with `flockstep run create`"
        raise UsageError(f"{path} is not a manifest: {error}", remedy=remedy) from error

