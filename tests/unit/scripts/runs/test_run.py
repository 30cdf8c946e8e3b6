"""`flockstep run`: what `run create` pins, and the link that `run info` prints."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flockstep.collectives.light.marks import Mark, Marks
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import Member
from flockstep.dht.records import Record
from flockstep.dht.run.layout import UNPINNED
from flockstep.dht.run.link import JoinLink
from flockstep.optim.shards.index import read_index
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import FlockstepError
from flockstep.peer.identity import Identity
from flockstep.scripts.runs.run import create_run, link_at_head
from support.packed import packed, train_tokenizer

PEER = Identity.from_seed(b"p" * 32).peer_id
LINK = JoinLink("a" * 52, (f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}",))
A, B = b"a" * 32, b"b" * 32
PIN = f"{'0' * 64}/1/1"


def member(name: str, round_: int, head: bytes, state: MemberState = MemberState.TRAINING) -> Member:
    body = MemberBody(state=state, round=round_, head=head, chain_tokens=7)
    return Member(Record("run", "member", name, 1, 60.0, b"", bytes(64)), body, expires=60.0)


TEXT = "a text of bytes " * 400


def refused(
    folder: Path,
    begin: str = "",
    *,
    source: str = "text:x.txt",
    data: str = "",
    options: str = "",
    model: str = "",
    lines: Any = None,
) -> str:
    """What `run create` says of a run that it does not publish: at the latest that no bootstrap is named."""
    path = folder / "run.toml"
    (folder / "x.txt").write_text(TEXT)
    source = source.replace("x.txt", f"{folder}/x.txt")
    path.write_text(f'name = "x"\n{begin}\n[data]\nsource = "{source}"\n{data}\n[model]\nsize = "0.2m"\n{options}\n')
    said = [] if lines is None else lines
    with pytest.raises(FlockstepError) as error:
        create_run(path, [], PeerConfig(home=folder), said.append, model=model)
    return f"{error.value} — {error.value.remedy}"


def test_a_run_whose_model_cannot_be_pinned_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no via=" in refused(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    for layout, source, model in (("", "text:{stdlib}", ""), ("", "own", "a:b"), (f'layout = "{PIN}"', "own", "a:b")):
        said = refused(tmp_path, layout, source=source, model=model)
        assert "torch is not installed here" in said
        assert "install it: pytorch.org" in said
    assert "has no via=" in refused(tmp_path, f'layout = "{PIN}"')  # It was computed elsewhere.


def test_a_layout_in_the_file_is_that_of_the_runs_model(tmp_path: Path) -> None:
    assert f"layout is {PIN}, but that of gpt is " in refused(tmp_path, f'layout = "{PIN}"')
    assert '--model is for runs with [data] source = "own"' in refused(tmp_path, model="a:b")
    assert "write MODULE:FUNCTION" in refused(tmp_path, source="own", model="gpt")


@pytest.mark.parametrize("source", ["text:x.txt", "tokens:PACK", "own"])
def test_a_tokenizer_that_is_larger_than_the_models_vocabulary_is_refused_before_a_manifest_is_written(
    tmp_path: Path, source: str
) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    packed(tmp_path / "pack", tokenizer=tokenizer)
    given, more = source.replace("PACK", f"{tmp_path}/pack"), 'tokenizer = "tokenizer.json"'
    said = refused(tmp_path, source=given, data=more)
    if source == "own":
        assert "has no via=" in said
    else:
        assert "has 300 tokens, the model knows 256 — give the model a larger vocab_size" in said
        assert "has no via=" in refused(tmp_path, source=given, data=more, options="vocab_size = 300")
    assert not list(tmp_path.glob("*.flockstep"))


@pytest.mark.parametrize("source", ["text:PACK.txt", "tokens:PACK"])
def test_a_run_is_created_without_torch_in_the_process_that_goes_on_as_its_keeper(tmp_path: Path, source: str) -> None:
    packed(tmp_path / "pack")
    (tmp_path / "pack.txt").write_text(TEXT)
    given = source.replace("PACK", f"{tmp_path}/pack")
    (tmp_path / "run.toml").write_text(f'name = "x"\n[data]\nsource = "{given}"\n[model]\nsize = "0.2m"\n')
    code = f"""
import sys
from pathlib import Path
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import FlockstepError
from flockstep.scripts.runs.run import create_run
try:
    create_run(Path({str(tmp_path)!r}, "run.toml"), [], PeerConfig(home=Path({str(tmp_path)!r})), print)
except FlockstepError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "has no via=" in done.stdout
    assert done.stdout.endswith(" False\n")


def test_sequences_that_exceed_the_models_positions_are_refused_before_a_manifest_is_written(tmp_path: Path) -> None:
    assert "exceeds the model's 16 positions" in refused(tmp_path, data="sequence_length = 17", options="context = 16")
    assert "has no via=" in refused(tmp_path, data="sequence_length = 16", options="context = 16")


def test_a_sequence_that_no_shard_holds_is_refused_before_a_manifest_is_written(tmp_path: Path) -> None:
    longest = max(shard.num_tokens for shard in packed(tmp_path / "pack").shards)
    given = {"source": f"tokens:{tmp_path}/pack", "options": "context = 65536"}
    said = refused(tmp_path, data=f"sequence_length = {longest}", **given)
    assert f"pack: no shard has {longest + 1} tokens, the longest has {longest} — lower sequence_length" in said
    assert "has no via=" in refused(tmp_path, data=f"sequence_length = {longest - 1}", **given)
    assert not list(tmp_path.glob("*.flockstep"))


def test_a_run_whose_members_bring_the_model_is_told_how_to_pin_it(tmp_path: Path) -> None:
    lines: list[str] = []
    assert "has no via=" in refused(tmp_path, f'layout = "{PIN}"', source="own", lines=lines)
    assert lines == []
    refused(tmp_path, source="own", lines=lines)
    (line,) = lines
    assert UNPINNED in line
    assert "--model MODULE:FUNCTION, or in run.toml the layout that Swarm.layout_of(model) returns" in line


def test_the_link_names_the_head_that_most_members_train_on() -> None:
    newcomers = [member(f"newcomer {n}", 9, B, MemberState.SYNCING) for n in range(3)]
    most = [member("a", 4, A), member("b", 4, A), member("c", 9, B), *newcomers]
    assert link_at_head(LINK, most, {}) == replace(LINK, at=(4, A))
    assert link_at_head(LINK, [member("a", 4, A), member("c", 9, B)], {}) == replace(LINK, at=(9, B))
    assert JoinLink.parse(str(link_at_head(LINK, most, {}))) == replace(LINK, at=(4, A))


def test_the_link_names_what_most_bootstraps_name_whatever_members_state() -> None:
    strangers = [member(f"stranger {n}", 9, B) for n in range(9)]
    one, other = (Marks(LINK.run_id, (Mark(5, A), Mark(round_, hash_))) for round_, hash_ in ((6, B), (7, A)))
    assert link_at_head(LINK, strangers, {"x": one, "y": other, "z": None}) == replace(LINK, at=(5, A))
    assert link_at_head(LINK, strangers, {"z": None}) == replace(LINK, at=(9, B))
    beginning = Marks(LINK.run_id, (Mark(0, A),))
    assert link_at_head(LINK, strangers, {"x": beginning}) == replace(LINK, at=(9, B))


def test_a_run_without_a_certified_round_has_its_link_as_it_is() -> None:
    start = member("a", 0, bytes(32))
    start = replace(start, body=replace(start.body, chain_tokens=0))
    assert link_at_head(LINK, [], {}) == link_at_head(LINK, [start], {}) == LINK


def test_a_source_is_packed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    lines: list[str] = []
    assert "has no via=" in refused(tmp_path, lines=lines)
    assert lines[0].startswith("Packed 1 documents of 1 files")
    lines.clear()
    assert "has no via=" in create_again(tmp_path, lines)
    assert lines[0] == "The data were packed before, and are unchanged."
    (pack,) = {path for path in (tmp_path / "packs").iterdir() if str(path) in lines[-1]}
    assert "tokens, 0.0 MB" in lines[-1]
    assert read_index((pack / "index.json").read_bytes(), "x").num_documents == 1
    (tmp_path / "x.txt").write_text("another text " * 900)
    lines.clear()
    assert "has no via=" in create_again(tmp_path, lines)
    assert lines[0].startswith("Packed 1 documents")


def create_again(folder: Path, lines: list[str]) -> str:
    with pytest.raises(FlockstepError) as error:
        create_run(folder / "run.toml", [], PeerConfig(home=folder), lines.append)
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "more", "reason"),
    [
        ("csv:x.csv", "", "there is no data source 'csv:x.csv' — write text:"),
        ("text:/none/x", "", "no such file or folder"),
        ("tokens:swarm:packed", "", "write tokens:FOLDER"),
        ("tokens:http://10.0.0.1/x", "", "a run may not name"),
        ("text:x.txt", 'tokenizer = "none.json"', "cannot read the tokenizer"),
        ("text:x.txt", 'tokenizer_hash = "blake3:00"', "unknown key [data] tokenizer_hash"),
    ],
)
def test_a_source_that_cannot_be_packed_is_one_line_and_nothing_is_published(
    tmp_path: Path, source: str, more: str, reason: str
) -> None:
    said = refused(tmp_path, source=source, data=more)
    assert reason in said
    assert "\n" not in said
    assert not list(tmp_path.glob("*.flockstep"))
