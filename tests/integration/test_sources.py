"""A run on streamed documents with its own tokenizer, from `run create` to `join`'s end."""

import json
from pathlib import Path

import pytest
from flockstep.dht.run.manifest import load_manifest
from flockstep.optim.data.tokenizer import hash_of
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.runs.run import create_run
from support.bootstraps import kept
from support.commands import flockstep

tokenizers = pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RUN = """
name = "streamed"
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
voters = "members"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A `run.toml`, its tokenizer beside it, and its documents."""
    stories = [f"once upon a time there were {index} sims that flew in step " * 5 for index in range(400)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.save(str(tmp_path / "words.json"))
    rows = [None if index % 50 == 7 else story for index, story in enumerate(stories)]
    parquet.write_table(pyarrow.table({"story": rows}), tmp_path / "x.parquet", row_group_size=10)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    return tmp_path / "run.toml"


def test_a_run_pins_its_tokenizer_and_trains_on_streamed_documents(
    toml: Path, bootstrap_address: str, tmp_path: Path
) -> None:
    said: list[str] = []
    config = PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0)
    link = create_run(toml, [bootstrap_address], config, said.append)
    sparse = f"such as {tmp_path}/x.parquet: row 8 has null in the column 'story'"
    assert [line for line in said if line.endswith(sparse)]
    data = load_manifest(tmp_path / "streamed.flockstep").manifest.data
    assert load_manifest(tmp_path / "streamed.flockstep").manifest.layout.count("/") == 2
    assert data.tokenizer_hash == hash_of((tmp_path / "words.json").read_bytes(), provided=True)
    (tmp_path / "words.json").unlink()  # It comes from the owner's keeper.
    place = ["--home", str(tmp_path / "peer"), "--host", "127.0.0.1", "--port", "0"]
    join = ["join", link, *place, "--threads", "1", "--json", "--yes"]
    refused = flockstep(*join)
    assert refused.returncode == 2
    assert f"pass --allow-data 'parquet:{tmp_path}/*.parquet?column=story'" in refused.stderr
    assert refused.stderr.count("\n") == 1
    with kept(link, tmp_path / "owner"):
        joined = flockstep(*join, "--allow-data", f"parquet:{tmp_path}/*.parquet?column=story")
    assert joined.returncode == 0, joined.stderr
    events = [json.loads(line) for line in joined.stdout.splitlines()]
    (shared,) = [event for event in events if event["event"] == "data.shared"]
    assert shared["units"] == 40
    (warned,) = [event for event in events if event["event"] == "data.sparse"]
    assert warned["reason"].endswith(sparse)
    skipped = [(event["name"], event["row"]) for event in events if event["event"] == "data.skipped"]
    assert set(skipped) <= {(f"{tmp_path}/x.parquet", row) for row in range(8, 401, 50)}
    assert len(skipped) == len(set(skipped)) > 1
    assert [event["round"] for event in events if event["event"] == "round.done"] == [1, 2]
    assert list((tmp_path / "peer").rglob("model/tokenizer.json"))


def test_a_tokenizer_that_is_another_one_than_the_file_says_is_not_published(toml: Path, tmp_path: Path) -> None:
    toml.write_text(toml.read_text().replace("[inner]", f'tokenizer_hash = "blake3:{"0" * 64}"\n[inner]'))
    with pytest.raises(UsageError, match=r"but that of words\.json is blake3:") as caught:
        create_run(toml, [], PeerConfig(home=tmp_path), print)
    assert caught.value.remedy
    (tmp_path / "words.json").unlink()
    with pytest.raises(UsageError, match="cannot read the tokenizer"):
        create_run(toml, [], PeerConfig(home=tmp_path), print)
