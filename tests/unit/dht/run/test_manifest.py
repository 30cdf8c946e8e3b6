"""Manifests, run ids, join links, and the values that the directory accepts under each key."""

import contextlib
import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.dht.keys import member_key, run_key
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.published import validate_published
from flockstep.dht.records import MAX_BODY_BYTES, MAX_LIFETIME, Record
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import (
    CODEC_NAMES,
    MANIFEST_KIND,
    Admission,
    CodecSettings,
    Data,
    EvalSettings,
    Inner,
    Manifest,
    Model,
    Outer,
    SignedManifest,
    TimingSettings,
    load_manifest,
    run_id_of,
    start_given,
)
from flockstep.dht.run.protocol import PROTOCOL
from flockstep.dht.run.settings import MAX_TOML_BYTES, parse_toml, read_toml
from flockstep.peer.base.errors import (
    LocalError,
    MalformedMessage,
    OtherProtocol,
    ProtocolViolation,
    RemoteError,
    UsageError,
)
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.schema import decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

OWNER = Identity.from_seed(bytes(32))
OTHER = Identity.from_seed(bytes([1]) * 32)
MEMBERS = '[admission]\nvoters = "members"\n'
SMALL = 'name = "tiny"\n[data]\nsource = "text:corpus.txt"\n'


def parse(text: str) -> Manifest:
    return Manifest.from_toml(text, where="run.toml", owner=OWNER.peer_id)


SIGNED = SignedManifest.sign(parse(SMALL), OWNER)
VIA = f"/ip4/192.0.2.1/tcp/4001/p2p/{OTHER.peer_id}"
RELAYED = f"/dns4/relay.example.org/tcp/4001/p2p/{OTHER.peer_id}/p2p-circuit/p2p/{OWNER.peer_id}"
LINK = JoinLink(SIGNED.run_id, (VIA, RELAYED))

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)
scalars = st.one_of(
    st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), names
)
options = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True).filter(lambda key: key != "name"),
    st.one_of(scalars, st.lists(scalars, max_size=3)),
    max_size=4,
)


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


manifests = st.builds(
    Manifest,
    owner=st.just(OWNER.peer_id),
    name=names,
    data=st.builds(Data, source=names, sequence_length=st.integers(1, 4096)),
    seed=st.integers(0, 2**32 - 1),
    model=options.map(lambda table: Model("gpt", tuple(sorted((key, to_json(table[key])) for key in table)))),
    inner=st.builds(
        Inner,
        optimizer=st.sampled_from(["muon", "adamw"]),
        lr=st.floats(0, 10),
        schedule=st.sampled_from(["cosine", "constant", "linear"]),
    ),
    outer=st.builds(Outer, rounds=st.integers(1, 200), lr=st.floats(0, 2), momentum=st.floats(0, 0.999)),
    codec=st.sampled_from(CODEC_NAMES).flatmap(
        lambda name: st.builds(
            CodecSettings,
            contribution=st.just(name),
            choices=st.sampled_from(["", " ".join(other for other in CODEC_NAMES if other != name)]),
        )
    ),
    admission=st.builds(Admission, min_peers=st.integers(1, 64)),
    timing=st.builds(TimingSettings, floor=st.floats(0.01, 10), ceiling=st.floats(10, 86_400)),
    eval=st.just(EvalSettings()),
)
evaluated = st.builds(
    EvalSettings,
    every=st.integers(1, 1000),
    prompts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4).map(tuple),
)


@given(manifests)
def test_a_manifest_survives_its_own_description_and_the_wire(manifest: Manifest) -> None:
    assert parse("\n".join(manifest.describe())) == manifest
    signed = SignedManifest.sign(manifest, OWNER)
    assert SignedManifest.decode(signed.publishable, signed.run_id) == signed


@given(evaluated)
def test_evaluations_survive_too(settings_: EvalSettings) -> None:
    manifest = replace(parse(SMALL), eval=settings_)
    assert parse("\n".join(manifest.describe())) == manifest
    assert decode(Manifest, encode(manifest), max_bytes=MAX_BODY_BYTES) == manifest
    assert parse(SMALL + "[eval]\n").eval == EvalSettings(5, ())


def test_a_description_shows_no_control_characters() -> None:
    manifest = parse('name = "\\u001b[31m\\u009b\\u007f"\n[data]\nsource = "text:x"\n')
    assert all(line.isprintable() for line in manifest.describe())


@pytest.mark.parametrize("layout", ["x", f"{'0' * 64}/0/1", f"{'0' * 63}/1/1", f"{'0' * 64}/22/5"])
def test_a_layout_that_no_model_has_is_none(layout: str) -> None:
    with pytest.raises(UsageError, match="is none: `Swarm"):
        parse(f'layout = "{layout}"\n{SMALL}')


def test_a_run_whose_members_bring_the_model_says_how_it_is_joined() -> None:
    own, shared = (parse(f'name = "x"\n[data]\nsource = "{source}"\n') for source in ("own", "text:x"))
    assert (own.joining, own.model_name) == (str(NEEDS_PROGRAM), "a model of its members")
    assert (shared.joining, shared.model_name) == ("", "gpt")
    named = parse('name = "x"\n[model]\nname = "hf:llama"\n[data]\nsource = "own"\n')
    assert named.model_name == "hf:llama"
    assert len(own.joining) <= 200  # What the run's page shows of a text.


@pytest.mark.parametrize(("batch", "momentum"), [(1, 0.8), (4, 0.8), (16, 0.87), (40, 0.9), (400, 0.95), (4_000, 0.95)])
def test_the_default_inner_momentum_follows_the_tokens_of_a_step(batch: int, momentum: float) -> None:
    table = f"batch_size = {batch}\n[inner]\n"  # Of 256 tokens each.
    assert parse(SMALL + table).inner.momentum == momentum
    assert parse(SMALL + table + "momentum = 0.7\n").inner.momentum == 0.7


def test_adamw_alone_has_half_the_rate_that_it_has_beside_muon() -> None:
    alone = '[inner]\noptimizer = "adamw"\n'
    assert [parse(SMALL + table).inner.adamw_lr for table in ("", alone)] == [0.006, 0.003]
    assert parse(SMALL + alone + "adamw_lr = 0.02\n").inner.adamw_lr == 0.02


def test_defaults_are_written_into_the_manifest() -> None:
    manifest = parse(SMALL)
    assert manifest.inner == Inner("muon", 0.02, 6e-3, 0.01, 20, "cosine", 50, 1.0, momentum=0.87, ramp=8)
    assert manifest.outer == Outer(100, 0.9, 0.8, "blocking", momentum_warmup=10)
    assert parse(SMALL + "[outer]\nrounds = 9\nlr = 1\n").outer == Outer(9, 1.0, 0.8, momentum_warmup=10)
    ramps = [(99, ""), (100, ""), (9, "[inner]\nramp = 4"), (100, "[inner]\nramp = 1")]
    assert [parse(f"{SMALL}[outer]\nrounds = {rounds}\n{ramp}").inner.ramp for rounds, ramp in ramps] == [1, 8, 4, 1]
    assert parse(SMALL + '[model]\nsize = "1m"\nwide = true\nname = "mlp"\n').model.options == {
        "size": "1m",
        "wide": True,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "name is missing"),
        ('name = "x"', r"\[data\] source is missing"),
        ("revision = 1\n" + SMALL, "unknown key revision: remove it"),
        ("name =", "Invalid value"),
        ('nmae = "x"', "unknown key nmae: did you mean name?"),
        (SMALL + "[inner]\nstpes = 5", r"unknown key \[inner\] stpes: did you mean steps\?"),
        (SMALL + "[codec]\nzzz = 5", "known are contribution, result"),
        (SMALL + '[admission]\nauthority = "owner"', r"\[admission\] authority is gone: remove it: the owner decides alone"),
        (SMALL + '[codec]\nchoices = "int8 int9"', "'int9' is not one more codec"),
        (SMALL + '[codec]\nchoices = "int4"', "'int4' is not one more codec"),
        (SMALL + '[codec]\nchoices = "int8 int8"', "'int8' is not one more codec"),
        ("data = 3\n" + 'name = "x"', r"data must be a table: write \[data\]"),
        (SMALL + '[inner]\nlr = "fast"', r"\[inner\] lr must be a number, not 'fast'"),
        (SMALL + "[inner]\nlr = true", "must be a number, not True"),
        (SMALL + "[inner]\nlr = nan", "must be between 0.0 and 10.0, not nan"),
        (SMALL + "[inner]\nlr = 1" + "0" * 400, "must be a number"),
        (SMALL + "[inner]\nmomentum = 1", r"\[inner\] momentum must be between 0.0 and 0.999, not 1"),
        (SMALL + "[inner]\nmomentum = nan", r"\[inner\] momentum must be between 0.0 and 0.999, not nan"),
        (SMALL + "[inner]\nbetas = 0.9", r"\[inner\] betas must be a list, not 0.9"),
        (SMALL + "[inner]\nbetas = [0.9]", r"\[inner\] betas must list 2 to 2, not 1"),
        (SMALL + "[inner]\nbetas = [0.9, 1.0]", r"\[inner\] betas: number 2 must be between 0.0 and 0.9999, not 1.0"),
        (SMALL + "[outer]\nmomentum_warmup = -1", r"\[outer\] momentum_warmup must be between 0 and 100,000, not -1"),
        (SMALL + "[inner]\nsteps = 50.0", "must be a whole number, not 50.0"),
        (SMALL + '[inner]\nsteps = "500"', r"\[inner\] steps must be a whole number, not '500'"),
        (SMALL + '[outer]\nrounds = "20"', r"\[outer\] rounds must be a whole number, not '20'"),
        (SMALL + "[outer]\nrounds = 2026-01-01", r"\[outer\] rounds must be a whole number"),
        (SMALL + "x = " + "[" * 5000, "its values are nested too deeply"),
        (SMALL + "[inner]\nsteps = 0", "must be between 1 and 100,000, not 0"),
        (SMALL + '[inner]\noptimizer = "sgd"', "must be one of muon, adamw, not 'sgd'"),
        (SMALL + '[defence]\nrule = "flag"', "rule must be one of gramguard, mean, not 'flag'"),
        (SMALL + '[admission]\nkind = "shut"', "must be one of open, invite, allow, not 'shut'"),
        (SMALL + '[admission]\nallow = "12D3"', 'kind is "open": write kind = "allow"'),
        (SMALL + '[admission]\nkind = "allow"\nallow = "12D3"', "'12D3' is not a peer id"),
        (SMALL + '[admission]\nvoters = "members"\nkeepers = "12D3"', 'everybody votes: write voters = "keepers"'),
        (SMALL + '[admission]\nvoters = "work"', "must be one of members, keepers, not 'work'"),
        (SMALL + "[timing]\nfloor = 200", "floor 200 is above ceiling 120"),
        (SMALL + "[model]\nday = 2026-01-01", r"\[model\] day must be a number, a text"),
        (SMALL + "[model]\nx = inf", r"\[model\] x must be a number, a text"),
        (SMALL + "[model]\nx = {y = 1}", r"\[model\] x must be a number, a text"),
        (SMALL + '[model]\n"x y" = 1', "'x y' is not a name"),
        (SMALL + f"[model]\nx = {list(range(600))}", "1024 bytes"),
        (SMALL + "[model]\n" + "\n".join(f"x{i} = 1" for i in range(65)), "more than 64"),
        (SMALL.replace("tiny", "x" * 65), "name must have 1 to 64 bytes of text, not 65"),
        (SMALL + "[eval]\nevery = 0", r"\[eval\] every must be 1 or more rounds, not 0"),
        (SMALL + "[eval]\nevery = -5", r"\[eval\] every must be 1 or more rounds, not -5"),
        (SMALL + "[eval]\nprompts = 5", r"\[eval\] prompts must be a list, not 5"),
        (SMALL + '[eval]\nprompts = ["a", 5]', r"\[eval\] prompts: number 2 must be a text, not 5"),
        (SMALL + f'[eval]\nprompts = ["{"x" * 401}"]', "prompts: number 1 must have 1 to 400 bytes of text, not 401"),
        (SMALL + '[eval]\nprompts = [""]', "prompts: number 1 must have 1 to 400 bytes of text, not 0"),
        (SMALL + '[eval]\nprompts = ["a", "b", "c", "d", "e"]', "prompts must list at most 4, not 5"),
        (SMALL + '[eval]\nprompt = "a"', r"unknown key \[eval\] prompt: did you mean prompts\?"),
        (SMALL.replace("text:corpus.txt", "own") + "[eval]", "evaluates language models: .* 'own' is no text"),
        (f'owner = "{OTHER.peer_id}"\n' + SMALL, "owner is not set here"),
    ],
)
def test_every_mistake_in_a_file_gets_one_plain_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        parse(text)
    assert str(caught.value).startswith("run.toml: ")
    assert "\n" not in str(caught.value)


def test_a_file_of_settings_is_a_file_of_bounded_length(tmp_path: Path) -> None:
    pipe, long = tmp_path / "pipe", tmp_path / "long"
    if hasattr(os, "mkfifo"):  # Windows has none.
        os.mkfifo(pipe)
    else:
        pipe.mkdir()
    long.write_bytes(b"#" * (MAX_TOML_BYTES + 1))
    no = tmp_path / "no"
    for path, why in ((pipe, "not a file"), (tmp_path, "not a file"), (long, "more than 128 KiB"), (no, "No such")):
        with pytest.raises(UsageError, match=why):
            read_toml(path)
    long.write_bytes(b"#" * MAX_TOML_BYTES)
    assert parse_toml(read_toml(long)) == {}
    long.write_bytes(b'\xef\xbb\xbfname = "a"\r\n')  # As some editors begin a file.
    assert parse_toml(read_toml(long)) == {"name": "a"}


@pytest.mark.parametrize("table", ["", 'kind = "invite"', 'kind = "allow"', 'voters = "members"'])
def test_keepers_decide_where_the_file_does_not_say_otherwise_whoever_may_join(table: str) -> None:
    admission = parse(f"{SMALL}[admission]\n{table}\n").admission
    assert admission.voters == ("members" if "members" in table else "keepers")


def test_a_key_that_is_gone_says_so_and_what_to_do() -> None:
    why = r"\[admission\] stall is gone: remove it: a run whose voters are away waits for them"
    with pytest.raises(UsageError, match=why):
        parse(f'{SMALL}[admission]\nstall = "present"\n')


@pytest.mark.parametrize(
    ("steps", "table", "fragments", "num_rounds", "phase_steps"),
    [
        (99, "", 1, 7, 99),
        (100, "", 5, 35, 20),
        (100, 'mode = "blocking"', 1, 7, 100),
        (100, 'mode = "streaming"', 5, 35, 20),
        (50, 'mode = "streaming"', 5, 35, 10),
        (7, 'mode = "streaming"', 1, 7, 7),
        (60, 'mode = "streaming"\nfragments = 3', 3, 21, 20),
        (60, 'mode = "streaming"\nfragments = 60', 60, 420, 1),
    ],
)
def test_streaming_divides_the_phase_by_its_fragments(
    steps: int, table: str, fragments: int, num_rounds: int, phase_steps: int
) -> None:
    manifest = parse(f"{SMALL}[inner]\nsteps = {steps}\n[outer]\nrounds = 7\n{table}\n")
    assert manifest.outer.fragments == fragments
    assert (manifest.num_rounds, manifest.phase_steps) == (num_rounds, phase_steps)
    assert manifest.checkpoint_rounds == min(100, 10 * fragments)
    assert SignedManifest.decode(SignedManifest.sign(manifest, OWNER).publishable).manifest == manifest


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("fragments = 2", "fragments are for mode"),
        ("delay = 2", "delay"),
        ('mode = "streaming"\nfragments = 3', "does not divide"),
        ('mode = "streaming"\nfragments = 0', "between 1 and 64"),
        ('mode = "later"', "one of blocking, streaming"),
    ],
)
def test_a_mode_that_cannot_be_says_why(table: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(f"{SMALL}[outer]\n{table}\n")


def test_a_mode_that_this_version_does_not_have_is_refused_on_the_wire() -> None:
    with pytest.raises(MalformedMessage, match=r"\[outer\] mode must be one of blocking, streaming, not 'eager'"):
        SignedManifest.decode(forge(replace(GOOD, outer=Outer(mode="eager"))))


def test_the_run_id_names_exactly_these_bytes() -> None:
    other = SignedManifest.sign(parse(SMALL.replace("tiny", "other")), OWNER)
    assert SIGNED.run_id != other.run_id
    with pytest.raises(MalformedMessage, match=f"manifest of run {other.run_id}, not of {SIGNED.run_id}"):
        SignedManifest.decode(other.publishable, SIGNED.run_id)


def forge(manifest: Manifest, signer: Identity = OWNER, **changes: object) -> bytes:
    fields = {"run": "", "kind": MANIFEST_KIND, "sequence": manifest.revision, "lifetime": MAX_LIFETIME}
    return Record.sign(signer, body=encode(manifest), **(fields | changes)).encode()  # type: ignore[arg-type]


GOOD = SIGNED.manifest


def test_a_run_of_another_protocol_number_is_one_line_with_the_remedy_and_nothing_is_lost(tmp_path: Path) -> None:
    other = forge(GOOD, kind=f"manifest {PROTOCOL + 1}")
    line = rf"^run \w{{52}} is of protocol {PROTOCOL + 1}: flockstep .* speaks protocol {PROTOCOL}$"
    with pytest.raises(OtherProtocol, match=line) as raised:
        SignedManifest.decode(other)
    assert "ask its owner" in raised.value.remedy
    (tmp_path / "manifest").write_bytes(other)
    with pytest.raises(UsageError, match="of protocol") as named:
        load_manifest(tmp_path / "manifest")
    assert named.value.remedy == raised.value.remedy
    with pytest.raises(OtherProtocol):
        Remembered(tmp_path, run_id_of(other), Telemetry()).manifest()
    assert (tmp_path / "manifest").read_bytes() == other
    with pytest.raises(MalformedMessage, match="not the record of a manifest"):
        SignedManifest.decode(forge(GOOD, kind="manifest"))


@pytest.mark.parametrize(
    "data",
    [
        forge(GOOD, OTHER),
        forge(GOOD, kind="member"),
        forge(GOOD, run="another"),
        forge(GOOD, sequence=1),
        forge(replace(GOOD, inner=Inner("sgd"))),
        forge(replace(GOOD, timing=TimingSettings(5.0, 4.0))),
        forge(replace(GOOD, model=Model("gpt", (("b", "1"), ("a", "1"))))),
        forge(replace(GOOD, model=Model("gpt", (("a", "1"), ("a", "1"))))),
        forge(replace(GOOD, model=Model("gpt", (("a b", "1"),)))),
        *(
            forge(replace(GOOD, model=Model("gpt", (("a", text),))))
            for text in ("{}", "null", "1 ", "NaN", "1e999", '"\\ud800"', "[" * 1000, "[[1]]", "")
        ),
        replace(Record.decode(SIGNED.publishable), signature=bytes(64)).encode(),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteError):
        SignedManifest.decode(data)


def test_only_the_owner_signs_and_only_what_can_be_run() -> None:
    with pytest.raises(LocalError, match="only its owner"):
        SignedManifest.sign(GOOD, OTHER)
    with pytest.raises(LocalError, match="sgd"):
        SignedManifest.sign(replace(GOOD, inner=Inner("sgd")), OWNER)


def test_results_have_no_codec_whose_zeros_are_numbers() -> None:
    refused = replace(GOOD, codec=CodecSettings(contribution="lloyd2", result="lloyd2"))
    assert [it for it in refused.faults() if "lloyd2" in it] == [
        "[codec] result must be one of int8, int4, bf16, fp32, not 'lloyd2'"
    ]


def test_a_manifest_file_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.flockstep"
    path.write_bytes(SIGNED.publishable)
    assert load_manifest(path) == SIGNED
    with pytest.raises(UsageError, match="cannot read"):
        load_manifest(tmp_path / "absent")
    path.write_bytes(SIGNED.publishable[:-1])
    with pytest.raises(UsageError, match="is not a manifest"):
        load_manifest(path)
    os.truncate(path, 1 << 42)  # More than any memory: it takes no disk.
    with pytest.raises(UsageError, match="is not a manifest"):
        load_manifest(path)


@given(st.binary(min_size=32, max_size=32), st.lists(st.sampled_from([VIA, RELAYED]), min_size=1, unique=True))
def test_a_link_survives_being_written_down(seed: bytes, via: list[str]) -> None:
    manifest = replace(GOOD, owner=(owner := Identity.from_seed(seed)).peer_id)
    link = JoinLink(SignedManifest.sign(manifest, owner).run_id, tuple(via))
    assert JoinLink.parse(str(link)) == link


def test_a_link_may_lead_through_a_hivemind_dht_whose_peers_have_ids_of_other_keys() -> None:
    elsewhere = "/ip4/1.2.3.4/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    link = JoinLink.parse(f"{LINK}&via=hivemind:{elsewhere}")
    assert (link.bootstraps, link.hivemind) == (LINK.via, (elsewhere,))
    assert JoinLink.parse(str(link)) == link


@pytest.mark.parametrize(
    "dressed",
    [
        f"  {LINK}\n",
        f'"{LINK}"',
        f"<{LINK}>.",
        f"“{LINK}”",
        f"flockstep join '{LINK}'",
        str(LINK)[:40] + "\r\n > " + str(LINK)[40:100] + "\n\t" + str(LINK)[100:],
        str(LINK).replace("&", "&amp;"),
        str(LINK).replace("/ip4/", "%2Fip4%2F"),
        str(LINK).replace(":", "%3A").replace("/", "%2f").replace("?", "%3F").replace("=", "%3D"),
        str(LINK).replace("?", "/?"),
        str(LINK).replace(LINK.run_id, LINK.run_id.upper()).replace("flockstep:", "FlockStep:"),
        str(LINK).replace("/tcp", "\u200b/tcp"),
        f"{LINK}&via={VIA}",
    ],
)
def test_a_link_is_read_as_people_paste_it(dressed: str) -> None:
    assert JoinLink.parse(dressed) == LINK


def test_a_link_names_a_certificate_and_survives_the_same_pasting() -> None:
    named = replace(LINK, at=(41, bytes(range(32))))
    assert str(named) == f"{LINK}&at=41:{bytes(range(32)).hex()}"
    for text in (str(named), str(named).replace("&", "&amp;"), str(named).replace(":", "%3A"), str(named) + "."):
        assert JoinLink.parse(text) == named
    assert JoinLink.parse(str(named).replace(named.at[1].hex(), named.at[1].hex().upper()) if named.at else "") == named


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not contain flockstep://"),
        (f"{LINK}&at=0:{bytes(32).hex()}", "is not at=, a round, a colon and 64 hexadecimal digits"),
        (f"{LINK}&at={bytes(32).hex()}", "is not at="),
        (f"{LINK}&at=1:{bytes(31).hex()}", "is not at="),
        (f"{LINK}&at={10**18}:{bytes(32).hex()}", "is not at="),
        (f"{LINK}&at=1:{bytes(32).hex()}&at=2:{bytes(32).hex()}", "names two certificates"),
        (f"https://{LINK.run_id}?via={VIA}", "does not contain flockstep://"),
        (str(LINK).replace(LINK.run_id, LINK.run_id[1:]), "51 characters instead of 52"),
        (str(LINK).replace(LINK.run_id, "1" * 52), "characters other than a to z and 2 to 7"),
        (f"flockstep://{LINK.run_id}", "no via="),
        (f"flockstep://{LINK.run_id}?via=", "is not an address"),
        (f"flockstep://{LINK.run_id}?via=1.2.3.4:4001", "is not an address"),
        (f"flockstep://{LINK.run_id}?via=/ip4/1.2.3.4/tcp/4001", "does not end in /p2p/ and a peer id"),
        (str(LINK)[:-1], "does not end in /p2p/ and a peer id"),
        (f"flockstep://{LINK.run_id}?via=/p2p/{OWNER.peer_id}", "does not end in /p2p/"),
        (f"flockstep://{LINK.run_id}?via=hivemind:/ip4/1.2.3.4/tcp/31337", "does not end in /p2p/"),
        (f"flockstep://{LINK.run_id}?via=hivemind:/ip4/1.2.3.4/tcp/1/p2p/Qm!", "is not an address"),
        (f"flockstep://{LINK.run_id}?via=ipfs:{VIA}", "is not an address"),
        (f"{LINK}&token=1", "does not know 'token'"),
        (str(LINK) + "".join(f"&via=/ip4/1.2.3.{i}/p2p/{OWNER.peer_id}" for i in range(15)), "17 via="),
    ],
)
def test_every_mistake_in_a_link_gets_one_plain_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        JoinLink.parse(text)
    assert caught.value.remedy


@given(st.text() | st.text().map(lambda text: f"flockstep://{LINK.run_id}?{text}"))
def test_no_text_does_anything_worse_than_a_usage_error(text: str) -> None:
    for read in (JoinLink.parse, parse):
        with contextlib.suppress(UsageError):
            read(text)


def member(identity: Identity, run: str = SIGNED.run_id, kind: str = "member") -> bytes:
    body = encode(MemberBody(MemberState.TRAINING))
    return Record.sign(identity, run=run, kind=kind, sequence=5, lifetime=60.0, body=body).encode()


MEMBER_KEY = member_key(SIGNED.run_id, OWNER.peer_id)
JUNK = Record.sign(OWNER, run=SIGNED.run_id, kind="member", sequence=5, lifetime=60.0, body=b"junk").encode()


def test_the_directory_keeps_what_belongs_under_its_key() -> None:
    revised = SignedManifest.sign(replace(GOOD, revision=3), OWNER)
    assert validate_published(run_key(revised.run_id), revised.publishable) == 3
    assert validate_published(MEMBER_KEY, member(OWNER)) == 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (run_key("a" * 52), SIGNED.publishable),
        (MEMBER_KEY, member(OTHER)),
        (MEMBER_KEY, member(OWNER, run="another")),
        (MEMBER_KEY, member(OWNER, kind="manifest")),
        (MEMBER_KEY, SIGNED.publishable),
        (MEMBER_KEY, JUNK),
        (run_key(SIGNED.run_id), member(OWNER)),
        (run_key(SIGNED.run_id) + "/x/y", member(OWNER)),
        ("/other/" + SIGNED.run_id, SIGNED.publishable),
        ("", b""),
    ],
)
def test_the_directory_keeps_nothing_else(key: str, value: bytes) -> None:
    with pytest.raises(RemoteError):
        validate_published(key, value)


def test_an_unknown_key_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="nothing is kept"):
        validate_published("/flockstep", b"")


@given(st.sampled_from([SIGNED.publishable, member(OWNER)]), st.integers(0, 10_000), st.binary(max_size=8))
@settings(max_examples=500)
def test_mutated_values_are_refused_in_order(value: bytes, position: int, change: bytes) -> None:
    position %= len(value) + 1
    mutant = value[:position] + change + value[position + len(change) :]
    for key in (run_key(SIGNED.run_id), MEMBER_KEY):
        try:
            validate_published(key, mutant)
        except RemoteError:
            continue
        assert mutant == value


def test_a_given_first_state_is_pinned_by_its_root_and_changes_no_other_run() -> None:
    small = parse(SMALL)
    given = replace(small, start="0a" * 32)
    signed = SignedManifest.sign(given, OWNER)
    assert SignedManifest.decode(signed.publishable).manifest == given
    assert parse("\n".join(given.describe())) == given
    for wrong in ("0a", "0A" * 32, "zz" * 32, "a" * 65):
        with pytest.raises(UsageError, match=r"start.* (is no state root|64 bytes)"):
            parse(f'start = "{wrong}"\n' + SMALL)


def test_no_manifest_names_a_path_for_the_first_state() -> None:
    text = SMALL + '[model]\nfrom = "~/old"\n'
    tables = tomllib.loads(text)
    assert start_given(tables) == "~/old"
    assert start_given(tables) == ""
    assert parse(text) == parse(SMALL)  # Only the owner reads it, before there is a manifest.
    wanting = replace(parse(SMALL), model=Model(options_json=(("from", '"/etc"'),)))
    with pytest.raises(LocalError, match="no manifest may name"):
        SignedManifest.sign(wanting, OWNER)
    record = Record.sign(OWNER, run="", kind=MANIFEST_KIND, sequence=0, lifetime=MAX_LIFETIME, body=encode(wanting))
    with pytest.raises(MalformedMessage, match="no manifest may name"):
        SignedManifest.decode(record.encode())
    for wrong in ("3", "''"):
        with pytest.raises(UsageError, match=rf"\[model\] from must be a path in quotes, not {wrong}"):
            parse(SMALL + f"[model]\nfrom = {wrong}\n")
