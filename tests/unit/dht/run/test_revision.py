"""Revisions: what they may change, what they look like, and which may follow which."""

import json
from dataclasses import replace

import pytest
from flockstep.dht.records import MAX_LIFETIME, Record
from flockstep.dht.run.manifest import Data, EvalSettings, Inner, Manifest, Outer, SignedManifest
from flockstep.dht.run.revision import (
    UNREVISED,
    Revision,
    describe_revision,
    open_revision,
    revised,
    revised_by,
    settings_of,
    why_not_revise,
)
from flockstep.dht.run.statements import (
    MAX_OWNER_STATEMENTS,
    MAX_REVISION_SETTINGS_BYTES,
    MAX_STATED_REASON,
    OWNER_KIND,
    STATEMENTS_PER_PAGE,
    OwnerStatement,
    OwnerStatements,
)
from flockstep.peer.base.errors import MalformedMessage, RemoteError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.wire import MAX_COUNT, MAX_REVISION_BYTES
from flockstep.peer.wire.schema import encode
from hypothesis import given
from hypothesis import strategies as st

OWNER, ANNA = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2))
MANIFEST = Manifest(owner=OWNER.peer_id, name="run", data=Data(source="own"), outer=Outer(rounds=30))
SIGNED = SignedManifest.sign(MANIFEST, OWNER)


def stated(text: str, sequence: int = 1, run: str = SIGNED.run_id, by: Identity = OWNER, verb: str = "revise") -> bytes:
    body = encode(OwnerStatement(verb, by.peer_id, settings=text))
    return Record.sign(by, run=run, kind=OWNER_KIND, sequence=sequence, lifetime=MAX_LIFETIME, body=body).encode()


def test_a_revision_changes_what_it_names_and_nothing_else() -> None:
    text = settings_of(MANIFEST, UNREVISED, {"outer.rounds": 60, "inner.lr": 1, "inner.schedule": "linear"})
    assert text == '{"inner.lr":1.0,"inner.schedule":"linear","outer.rounds":60}'
    after = revised_by(SIGNED, stated(text))
    inner, outer = replace(Inner(), lr=1.0, schedule="linear"), replace(MANIFEST.outer, rounds=60)
    assert after == replace(MANIFEST, inner=inner, outer=outer)
    assert revised_by(SIGNED, b"") == MANIFEST
    back = settings_of(MANIFEST, Revision(1, text), {"inner.lr": MANIFEST.inner.lr, "outer.rounds": 30})
    assert back == '{"inner.schedule":"linear"}'  # What equals the manifest again is not named.
    assert list(describe_revision(MANIFEST, Revision(2, back))) == ['[inner] schedule = "linear" (published with "cosine")']


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("model.name", "gpt", "model.name cannot change while a run trains: the state has its shape"),
        ("seed", 3, "seed cannot change while a run trains: all have begun from it"),
        ("admission.allow", "x", "flockstep run invite"),
        ("admission.voters", "members", "vouch, revoke and ban, or"),
        ("outer.mode", "streaming", "outer.mode cannot change"),
        ("outer.fragments", 2, "outer.fragments cannot change while a run trains: it says which cells"),
        ("outer.lr", 0.0, r"lr must be in \(0, 2\]"),
        ("outer.momentum", 1.0, "momentum must be between"),
        ("data.tokenizer", "x.json", "the model has learned its tokens"),
        ("data.source", "text:{stdlib}", "data.source cannot change while a run trains: volunteers have agreed to it"),
        ("data.batch_size", 4, "data.batch_size cannot change"),
        ("codec.result", "zip", "result must be one of"),
        ("codec.choices", "int4", "choices: 'int4' is not one more codec"),
        ("eval.prompts", ["Once"], "evaluates|prompts are for runs"),
        ("eval.every", 5, "evaluates language models"),
        ("eval.prompts", "Once", "prompts must be a list"),
        ("eval.prompts", [1], "must be a number, a text, true, false or a list of texts"),
        ("inner.steps", 10, "inner.steps cannot change"),
        ("rounds", 10, "rounds cannot change"),
        ("inner.lr", -1.0, "inner.* lr must be between"),
        ("inner.lr", "fast", "lr must be a number"),
        ("inner.lr", float("nan"), "inner.lr must be a number"),
        ("inner.lr", [1.0], "inner.lr must be a number"),
        ("inner.lr", ["fast"], "lr must be a number"),
        ("inner.schedule", "steps", "schedule must be one of"),
        ("outer.rounds", 0, "rounds must be between"),
        ("outer.rounds", 1.5, "rounds must be a whole number"),
        ("outer.rounds", True, "rounds must be a whole number"),
    ],
)
def test_what_cannot_change_says_so(name: str, value: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        settings_of(MANIFEST, UNREVISED, {name: value})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"inner.lr": 1.0}', '{"outer.rounds":60,"inner.lr":1.0}', '{"inner.lr":1.0,"inner.lr":1.0}'),
        *('{"inner.lr":[1.0]}', '{"inner.lr":null}', '{"inner.lr":NaN}', '{"inner.lr":1e400}', '{"a b":1}', '{"":1}'),
        "[" * 400,
    ],
)
def test_settings_have_one_spelling(text: str) -> None:
    with pytest.raises(MalformedMessage):
        open_revision(stated(text), SIGNED.run_id, OWNER.peer_id)


@pytest.mark.parametrize(
    "data",
    [
        b"junk",
        stated("{}", run="b" * 52),
        stated("{}", by=ANNA),
        stated("{}", sequence=0),
        stated("{}", sequence=MAX_OWNER_STATEMENTS + 1),
        stated("{}")[:-1] + b"\0",
        OwnerStatements(SIGNED.run_id, OWNER.peer_id).sign(OWNER, OwnerStatement("ban", ANNA.peer_id)).records[0].encode(),
    ],
)
def test_only_the_owner_of_the_run_revises_it(data: bytes) -> None:
    with pytest.raises(RemoteError):
        open_revision(data, SIGNED.run_id, OWNER.peer_id)
    assert why_not_revise(SIGNED, data, b"")


def test_codecs_outer_rates_and_evaluation_are_revised() -> None:
    changes = {"eval.every": 3, "eval.prompts": ["Once", "def "], "codec.result": "int8"}
    published = replace(MANIFEST, data=Data(source="text:before"))
    signed = SignedManifest.sign(published, OWNER)
    text = settings_of(published, UNREVISED, changes | {"outer.lr": 1, "outer.momentum": 0.5})
    after = revised_by(signed, stated(text, run=signed.run_id))
    assert after.eval == EvalSettings(3, ("Once", "def "))
    assert (after.codec.result, after.codec.contribution, after.outer.lr) == ("int8", "int4", 1.0)
    assert '[eval] prompts = ["Once", "def "] (published with [])' in describe_revision(published, Revision(1, text))
    assert settings_of(published, Revision(1, text), {"eval.prompts": []} | dict.fromkeys(["eval.every"], 0)) == (
        '{"codec.result":"int8","outer.lr":1.0,"outer.momentum":0.5}'
    )


def test_a_revision_follows_only_those_of_smaller_numbers() -> None:
    first, second, other = stated("{}", 1), stated('{"inner.lr":0.5}', 2), stated('{"inner.lr":0.25}', 2)
    for data, before in ((first, b""), (second, first), (second, b""), (second, second)):
        assert why_not_revise(SIGNED, data, before) == ""
    assert "revision 2 after revision 2" in why_not_revise(SIGNED, other, second)
    assert "revision 1 after revision 2" in why_not_revise(SIGNED, first, second)
    assert "revision 0 after revision 2" in why_not_revise(SIGNED, b"", second)


def test_settings_beyond_their_limits_and_unknown_ones_make_no_revision() -> None:
    for text, why in (
        ('{"inner.lr":-1.0}', "lr must be between"),
        ('{"inner.lr":0.5,"outer.warp":9}', "settings that can change"),
        ('{"data.batch_size":9}', "settings that can change"),
    ):
        assert why in why_not_revise(SIGNED, stated(text), b"")


@given(st.text(max_size=60))
def test_any_text_is_malformed_or_reads_in_one_way(text: str) -> None:
    try:
        opened = open_revision(stated(text), SIGNED.run_id, OWNER.peer_id)
    except MalformedMessage:
        return
    assert json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False, separators=(",", ":")) == text
    try:
        revised(MANIFEST, opened)
    except UsageError:
        return
    assert json.loads(text) == {}


def test_the_longest_revision_fits_into_a_certificate_and_a_page_of_them_into_the_directory() -> None:
    text = json.dumps({"inner.schedule": "x" * (MAX_REVISION_SETTINGS_BYTES - 21)}, separators=(",", ":"))
    assert len(text) == MAX_REVISION_SETTINGS_BYTES
    body = encode(OwnerStatement("revise", OWNER.peer_id, "x" * MAX_STATED_REASON, MAX_COUNT, text))
    record = Record.sign(
        OWNER, run="r" * 64, kind=OWNER_KIND, sequence=MAX_OWNER_STATEMENTS, lifetime=MAX_LIFETIME, body=body
    )
    assert len(record.encode()) <= MAX_REVISION_BYTES
    assert open_revision(record.encode(), "r" * 64, OWNER.peer_id).settings == text
    assert STATEMENTS_PER_PAGE * (MAX_REVISION_BYTES + 3) < 64_000
    with pytest.raises(UsageError, match="at most 480 fit"):
        settings_of(MANIFEST, UNREVISED, {"inner.schedule": "x" * 480})
