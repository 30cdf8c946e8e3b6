"""`flockstep run create | invite | info` and `plan`: a run from its `run.toml`, invitations to it, and what it is."""

import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...collectives.accountability.trust import TRUST_WINDOW, YOUNG_ROUNDS, TrustRecord
from ...collectives.chain.chain import NOTHING, Head
from ...collectives.chain.fork_choice import head_of, training
from ...collectives.chain.voters import electorate_after, why_no_quorum
from ...collectives.light.marks import Marks, agreement_of
from ...collectives.picture.picture import MemberShown
from ...collectives.picture.votes import VotesHere
from ...collectives.spec import charter_of
from ...dht.members.table import Member
from ...dht.run.admission import Charter, Invitation, Ticket
from ...dht.run.layout import NO_LAYOUT, UNPINNED, LayoutPin
from ...dht.run.link import JoinLink
from ...dht.run.manifest import OWN, Data, Manifest, Model, SignedManifest, load_manifest, start_given
from ...dht.run.settings import parse_toml, read_toml
from ...dht.run.statements import OwnerStatement, OwnerStatements
from ...optim.consent import is_hub_id
from ...optim.models.needs import ModelSize, check_length, check_vocabulary, size_of_gpt
from ...optim.packing.hub import newest_commit
from ...optim.shards.packed import TOKENS, Pin, pinned_data, seed_folder
from ...optim.train.pin import PinnedModel, pin_model
from ...peer.address import split_p2p
from ...peer.base.config import PeerConfig
from ...peer.base.disk import user_path, write_whole
from ...peer.base.errors import FlockstepError, LocalError, UsageError
from ...peer.base.plain import SHORT_ID
from ...peer.base.transport import PeerId
from ...peer.identity import Identity, identity_path, is_peer_id
from ...peer.log.telemetry import Telemetry, log_path
from ..watch.status import show, status_figures
from ..watch.voters import describe_voters, how_to_share, who_decides, why_votes
from ..watch.watching import watched
from ..watch.words import member_story
from .listed import how_to_join, list_run
from .owner import describe_statements
from .pack import pack_for_run
from .plan import Fleet, describe_plan, plan_of

if TYPE_CHECKING:
    from ...collectives.visit.watcher import RunWatcher
    from .start import FirstState

SCHEME = "flockstep://"
HF = "hf:"


def create_run(
    path: Path,
    via: Sequence[str],
    config: PeerConfig,
    write_line: Callable[[str], None],
    *,
    keeps: bool = True,
    public: bool = False,
    model: str = "",
    fleet: Fleet | None = None,
) -> str:
    """Sign a run, write its manifest beside `path`, publish it through the bootstraps, and write its link.

    If `public`, the bootstraps list it for everybody. `model` is the function that makes the model of a run whose members
    bring it: `module:function`, installed or in the current folder. The plan for a `fleet` is written first.

    Returns the link of a run that its owner is to keep from now on; empty without `keeps`, and where all listed peers vote.
    Raises `FlockstepError`; `UsageError` without `keeps` where the other voters are too few to decide.
    """
    text = read_toml(path)
    identity = Identity.load_or_create(identity_path(config.home))
    manifest = Manifest.from_toml(text, where=str(path), owner=identity.peer_id)
    first = _first_state(manifest, start_given(parse_toml(text)), path)
    manifest = manifest if first is None else replace(manifest, start=first.root.hex())
    manifest = replace(manifest, model=_pinned_model(manifest.model))
    built = _built_model(manifest, model, path, write_line)
    manifest = replace(manifest, layout=built.layout)
    if fleet is not None and built.layout:
        _write_plan(manifest, built, fleet, write_line)
    for address in JoinLink("", tuple(via)).bootstraps:
        split_p2p(address)  # A mistyped --via fails here and not at each joiner.
    seed: Path | None = None
    if not manifest.is_own:
        check_length(manifest.data.sequence_length, built.longest)
        data, seed = _pinned(manifest.data, path, config.home, built.vocab_size, write_line)
        manifest = replace(manifest, data=data)
    signed = SignedManifest.sign(manifest, identity)
    charter = charter_of(signed)
    is_among_equals = charter.kind == "allow" and charter.keepers is None
    if not is_among_equals and not keeps and _needs_owner(charter):
        remedy = "leave --no-keep out, or list more keepers in [admission] keepers"
        raise UsageError("--no-keep: without you too few may vote in this run to certify a round", remedy=remedy)
    link = JoinLink(signed.run_id, tuple(via))
    JoinLink.parse(str(link))
    kept = path.with_name(re.sub(r"[^\w.-]+", "-", signed.manifest.name) + ".flockstep")
    begun = first.keep(signed.run_id, config.home / "runs" / signed.run_id) if first is not None else None
    write_whole(kept, signed.publishable)

    from ...dht.rendezvous import publish_manifest

    with closing(Telemetry(log_path(config.home))) as telemetry:
        publish_manifest(signed, link, config, telemetry)
    joining = signed.manifest.joining
    command, lead = (f"{link}", "Its link is") if joining else (f"flockstep join '{link}'", "Lend a computer to it with")
    write_line(f"Run {signed.manifest.name} is published; its signed manifest is {kept}. {lead}")
    for line in ("", f"    {command}", ""):
        write_line(line)
    if joining:
        write_line(f"{joining}.")
    if charter.kind == "invite":
        write_line(f"and --invite INVITATION, which `flockstep run invite {kept}` makes for whom you choose.")
    if seed is not None:
        write_line(f"Its data are in {seed}: keep or join it from this home folder until members have them.")
    if begun is not None:
        write_line(f"It starts from the state {signed.manifest.start[:8]} in {begun}: keep or join it from this home folder.")
    write_line(f"Who decides: {who_decides(signed.manifest)}.")
    write_line(f"Back up this key: {identity_path(config.home)}. Whoever has it owns the run; if it is lost, nobody does.")
    if more := how_to_share(signed.manifest, str(link)):
        write_line(more)
    if public:
        list_run(str(link), config, write_line, listed=True)
    return str(link) if keeps and not is_among_equals else ""


def _needs_owner(charter: Charter) -> bool:
    """Return True if the first voters cannot decide without the owner."""
    others = charter.founders - {charter.owner}
    return not others or bool(why_no_quorum(electorate_after(None, charter), charter, others))


def _first_state(manifest: Manifest, given: str, path: Path) -> "FirstState | None":
    """Return the state of `[model] from`, a path beside the `run.toml`, if there is one. Raises `FlockstepError`."""
    if not given:
        if manifest.start:
            remedy = "say in [model] from where it is, or leave start out"
            raise UsageError(f"{path}: start names a first state that nobody has", remedy=remedy)
        return None
    from .start import read_first_state

    first = read_first_state(path.parent / user_path(given), manifest.model)
    if manifest.start not in ("", first.root.hex()):
        raise UsageError(
            f"{path}: start is {manifest.start}, but the root of [model] from is {first.root.hex()}",
            remedy="leave start out: it is filled in",
        )
    return first


def _pinned(
    data: Data, path: Path, home: Path, known: int | None, write_line: Callable[[str], None]
) -> tuple[Data, Path | None]:
    """Return the data settings of a `run.toml` with their pack, which is made if they name none, and its folder here, if any.

    `known` is how many tokens the model knows. Raises `FlockstepError`.
    """
    given = data if data.source.startswith(TOKENS) else pack_for_run(data, path.parent, home, known, write_line)
    pinned, index = pinned_data(given, str(path), home)
    check_vocabulary(data.source, index.vocab_size, known)
    pin = Pin.of(pinned.source)
    return pinned, seed_folder(home, index.hash) if pin is not None and pin.size else None


def _pinned_model(model: Model) -> Model:
    """Return the model with the commit of weights of the hub, where neither it nor another revision is named."""
    name, options = model.name.removeprefix(HF), model.options
    if name == model.name or "revision" in options or not is_hub_id(name):
        return model
    options["revision"] = newest_commit("model", name)
    return replace(model, options_json=tuple(sorted((key, json.dumps(value)) for key, value in options.items())))


def _built_model(manifest: Manifest, model: str, path: Path, write_line: Callable[[str], None]) -> PinnedModel:
    """Return what the run trains, by name and shape, for its manifest to pin, and its size. Raises `FlockstepError`.

    Where members bring the model, its owner says what it is: by `layout` in the `run.toml` at `path`, or by `model`.
    """
    if model and not manifest.is_own:
        remedy = "leave it out: the layout follows from [model]"
        raise UsageError(f'--model is for runs with [data] source = "{OWN}", whose members bring the model', remedy=remedy)
    if model and ":" not in model:
        raise UsageError(f"--model {model!r} names no function", remedy="write MODULE:FUNCTION, as in my_model:MyModel")
    count = manifest.pin.num_params if manifest.pin is not None else 0
    given = PinnedModel(manifest.layout, count, 4 * count)
    if manifest.is_own and not model:
        if not manifest.layout:
            how = f"--model MODULE:FUNCTION, or in {path.name} the layout that Swarm.layout_of(model) returns"
            write_line(f"Not pinned: {UNPINNED}. To pin it, give {how}.")
        return given
    if find_spec("torch") is None:
        if manifest.layout and not model:  # As it was computed elsewhere.
            return given
        what = "torch is not installed here, so the layout of the run's model, which its manifest pins, is not known"
        raise LocalError(what, remedy="install it: pytorch.org names the command for your computer")
    named = (model, {}) if model else (manifest.model.name, manifest.model.options)
    built = pin_model(*named, manifest.seed, os.getcwd() if model else "")
    if manifest.layout not in ("", built.layout):
        what = f"{path}: layout is {manifest.layout}, but that of {named[0]} is {built.layout}"
        raise UsageError(what, remedy="leave layout out: it is filled in")
    return built


def plan_run(
    path: Path, fleet: Fleet, write_line: Callable[[str], None], *, model: str = "", as_json: bool = False
) -> None:
    """Write what the run of a `run.toml` takes on some computers. Raises `FlockstepError`."""
    text = read_toml(path)
    manifest = Manifest.from_toml(text, where=str(path), owner="")
    if manifest.model.name == "gpt" and not manifest.is_own:  # Known without torch, and at once.
        count = size_of_gpt(manifest.model.options).num_trained
        built = PinnedModel(str(LayoutPin(NO_LAYOUT, 1, count)), count, 4 * count)
    else:
        built = _built_model(manifest, model, path, lambda line: None)
    if not built.layout:
        remedy = "name it by --model MODULE:FUNCTION, or give the layout that Swarm.layout_of(model) returns"
        raise UsageError(f"{path}: members bring the model, so its size is not known", remedy=remedy)
    _write_plan(manifest, built, fleet, write_line, as_json=as_json)


def _write_plan(
    manifest: Manifest, built: PinnedModel, fleet: Fleet, write_line: Callable[[str], None], *, as_json: bool = False
) -> None:
    pin = LayoutPin.parse(built.layout)
    assert pin is not None
    size = ModelSize(pin.num_params, built.weight_bytes)
    plan = plan_of(manifest, size, built.num_weights, fleet)
    if as_json:
        write_line(json.dumps(asdict(plan)))
        return
    for line in describe_plan(manifest, size, fleet, plan):
        write_line(line)


def invite(
    target: str, peer: PeerId, count: int, days: int, config: PeerConfig, write_line: Callable[[str], None]
) -> None:
    """Sign an invitation to a run of mine for so many days, and write it. Raises `FlockstepError`."""
    signed = _manifest(target, config)
    identity = Identity.load_or_create(identity_path(config.home))
    kind, owner = signed.manifest.admission.kind, signed.manifest.owner
    if owner != identity.peer_id:
        remedy = "name the home folder with the owner's key by --home"
        raise UsageError(f"only its owner {owner} can invite to this run, not {identity.peer_id}", remedy=remedy)
    if kind == "allow" and not peer:
        remedy = "name it with --peer: `flockstep join` prints its id when it is refused"
        raise UsageError("to the allow-list of a run one peer is added at a time, by its id", remedy=remedy)
    if kind == "open":
        remedy = 'publish it with [admission] kind = "invite" to require them'
        raise UsageError(f'this run needs no invitations: its admission is "{kind}"', remedy=remedy)
    if peer and not is_peer_id(peer):
        raise UsageError(f"{peer!r} is not a peer id", remedy="`flockstep join` prints it when it is refused")
    if peer and count != 1:
        raise UsageError("an invitation is bound to a peer or to a count, not to both", remedy="leave one of them out")
    seed = b"" if peer else secrets.token_bytes(32)
    key, num_peers = (peer, 0) if peer else (Identity.from_seed(seed).peer_id, count)
    expires = int(time.time()) + days * 86_400
    invitation = Invitation.sign(identity, signed.line, key, count=num_peers, expires=expires)
    write_line(f"{Ticket(invitation, seed)}")


def _manifest(target: str, config: PeerConfig) -> SignedManifest:
    """Fetch the manifest of a link, or read a `.flockstep` file."""
    if SCHEME not in target:
        return load_manifest(Path(target))
    from ...dht.rendezvous import fetch_manifest

    with closing(Telemetry(log_path(config.home) if config.home.exists() else None)) as telemetry:
        return fetch_manifest(JoinLink.parse(target), config, telemetry)


def link_at_head(link: JoinLink, members: Sequence[Member], named: Mapping[PeerId, Marks | None]) -> JoinLink:
    """Return the link with a certificate for those who join by it: what more than half of its bootstraps name.

    Where they name none it is the head that most members state; where these state none the link stays as it is.
    """
    followed = {peer: marks for peer, marks in named.items() if marks is not None}
    start = agreement_of(followed).start if followed else None
    if start is not None and start.round:
        return replace(link, at=(start.round, start.hash))
    heads = Counter(head for member in training(members) if (head := head_of(member)) != NOTHING)

    def order(head: Head) -> tuple[int, int, bytes]:
        return -heads[head], -head.round, head.hash

    if not heads:
        return link
    head = min(heads, key=order)
    return replace(link, at=(head.round, head.hash))


@dataclass(frozen=True, slots=True)
class RunAsked:
    """What a run's members, its directory and its bootstraps have answered."""

    statements: OwnerStatements
    members: Sequence[Member]
    shown: Sequence[MemberShown]
    trust: Mapping[PeerId, TrustRecord]
    votes: VotesHere | None
    named: Mapping[PeerId, Marks | None]
    link: str
    problem: str = ""
    """Why not more is known; empty if nothing is wrong."""


def run_info(target: str, config: PeerConfig, write_line: Callable[[str], None], *, as_json: bool = False) -> None:
    """Write a run's manifest, members and trust; `target` is its link, or its `.flockstep` file, which needs no network."""
    signed = _manifest(target, config)
    asked = RunAsked(OwnerStatements(signed.run_id, signed.manifest.owner), (), (), {}, None, {}, "")
    if SCHEME in target:
        try:
            asked = ask_run(JoinLink.parse(target), signed, config)
        except FlockstepError as error:
            asked = replace(asked, problem=str(error), link=target)
    statements, votes = asked.statements, asked.votes
    if as_json:
        voters = votes.electorate.voters if votes is not None else ()
        why = {voter: why_votes(voter, signed.manifest) for voter in voters}
        figures = {
            "run": signed.run_id,
            "manifest": asdict(signed.manifest),
            "statements": [statement_figures(number, one) for number, one in statements.in_force.items()],
            "members": [status_figures(member_story(member)) for member in asked.shown],
            "trust": {peer: asdict(record) for peer, record in asked.trust.items()},
            "voting": None if votes is None else {**votes.figures, "why": why},
            "bootstraps": {peer: head_named(marks) for peer, marks in asked.named.items()},
            "link": asked.link,
        }
        write_line(json.dumps(figures))
        return
    lines = [f"run {signed.run_id}", "", *signed.manifest.describe(), ""]
    lines.append(f"Who decides, as published: {who_decides(signed.manifest)}.")
    if statements.records:
        lines += ["", "Statements of its owner", *describe_statements(statements)]
    if asked.problem:
        lines += ["", f"Its members could not be asked: {asked.problem}"]
    for line in (*lines, ""):
        write_line(line)
    if asked.shown:
        show([member_story(member, votes) for member in asked.shown])
        about = ["", str(votes), *describe_voters(votes, signed.manifest)] if votes is not None else []
        for line in (*about, "", *how_to_join(signed.manifest, asked.link)):
            write_line(line)
    for peer, marks in asked.named.items():
        write_line(f"bootstrap {peer} names {head_named(marks) or 'no certificate'}")
    if asked.shown and not charter_of(signed).earned:
        write_line("Its certificates are for its members only. All of them have their full weight.")
    if asked.trust:
        write_line("peer      trust  rounds")
        for peer, record in asked.trust.items():
            more = "+" if record.rounds >= YOUNG_ROUNDS else ""  # The count is capped there.
            write_line(f"{peer[-SHORT_ID:]:9} {record.trust:.3f}  {record.rounds}{more}")


def ask_run(link: JoinLink, signed: SignedManifest, config: PeerConfig) -> RunAsked:
    """Ask a run's members and bootstraps. Raises `FlockstepError`."""

    async def ask(watcher: "RunWatcher") -> RunAsked:
        problem = ""
        named = await watcher.ask_bootstraps()
        try:
            await watcher.look(TRUST_WINDOW)
        except UsageError as error:  # The bootstraps disagree; what each of them names is shown.
            problem = str(error)
        members, picture = watcher.members(), watcher.picture()
        shown = str(link_at_head(link, members, named))
        statements, trust = watcher.statements, watcher.chain.trust if charter_of(signed).earned else {}
        return RunAsked(statements, members, picture.members, trust, picture.votes, named, shown, problem)

    return watched(link, config, ask)


def statement_figures(number: int, stated: OwnerStatement) -> dict[str, Any]:
    """Return a statement of the owner as JSON; its settings, which only a revision has, as an object."""
    figures = {"number": number, **asdict(stated)}
    settings = figures.pop("settings")
    return {**figures, "settings": json.loads(settings)} if settings else figures


def head_named(marks: Marks | None) -> str:
    """Return the head that a bootstrap names, ROUND:HASH as in a link; empty where it names none."""
    return str(marks.head) if marks is not None and marks.head.round else ""
