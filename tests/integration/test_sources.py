"""A run of documents with a tokenizer of its own, from `run create` to `join`'s end: packed here, and fetched by the link."""

import json
from pathlib import Path

import pytest
from flockstep.dht.run.manifest import load_manifest
from flockstep.peer.base.config import PeerConfig
from flockstep.scripts.runs.run import create_run
from support.bootstraps import kept
from support.commands import flockstep
from support.packed import STORIES, train_tokenizer

pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RUN = """
name = "packed-here"
[model]
size = "0.2m"
vocab_size = 300
[data]
source = "parquet:{folder}/*.parquet?column=story"
tokenizer = "words.json"
sequence_length = 32
batch_size = 4
[inner]
steps = 4
[outer]
rounds = 2
[admission]
kind = "invite"
voters = "members"
"""


def test_a_closed_run_packs_its_documents_and_newcomers_have_them_by_link_and_invitation(
    bootstrap_address: str, tmp_path: Path
) -> None:
    train_tokenizer(tmp_path / "words.json")
    rows = [None if index % 50 == 7 else story for index, story in enumerate(STORIES)]
    parquet.write_table(pyarrow.table({"story": rows}), tmp_path / "x.parquet", row_group_size=10)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    said: list[str] = []
    config = PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0)
    link = create_run(tmp_path / "run.toml", [bootstrap_address], config, said.append)
    left_out = f"What could not be read was left out, 8 in all, such as {tmp_path}/x.parquet: row 8 has null"
    assert [line for line in said if line.startswith(left_out)]
    manifest = load_manifest(tmp_path / "packed-here.flockstep").manifest
    assert manifest.data.source.startswith("tokens:swarm:")
    for file in ("words.json", "x.parquet"):
        (tmp_path / file).unlink()
    place = ["--home", str(tmp_path / "peer"), "--host", "127.0.0.1", "--port", "0"]
    invite = ("run", "invite", str(tmp_path / "packed-here.flockstep"), "--home", str(tmp_path / "owner"))
    place += ["--invite", flockstep(*invite, check=True).stdout.strip()]
    with kept(link, tmp_path / "owner"):
        joined = flockstep("join", link, *place, "--threads", "1", "--json", "--yes")
    assert joined.returncode == 0, joined.stderr
    events = [json.loads(line) for line in joined.stdout.splitlines()]
    assert [event["round"] for event in events if event["event"] == "round.done"] == [1, 2]
    assert list((tmp_path / "peer").rglob("model/tokenizer.json"))
