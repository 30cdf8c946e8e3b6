"""A dataset of the hub: its files are chosen by their names at one commit, and read by range with the user's token."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from flockstep.optim.packing.encode import TokenizerFiles, take_tokenizer
from flockstep.optim.packing.hub import chosen, newest_commit
from flockstep.optim.packing.pack import pack
from flockstep.optim.packing.sources import open_source
from flockstep.optim.shards.index import INDEX
from flockstep.optim.shards.tokenizer_config import CONFIG_NAME
from flockstep.peer.base.errors import UsageError
from support.hub import COMMIT, REPOSITORY, StandIn, stand_in
from support.packed import STORIES, train_tokenizer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("huggingface_hub")


def table(texts: list[str]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), out, row_group_size=50)
    return out.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    files = {"data/train-0.parquet": table(STORIES), "data/test-0.parquet": table(STORIES[:9]), "ds.py": b"import os"}
    with stand_in(StandIn(files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_dataset_is_packed_with_the_users_token_at_the_commit_of_the_day(
    hub: StandIn, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    if kind == "jsonl":
        lines = "\n".join(json.dumps({"text": story}) for story in STORIES)
        hub.files = {"train.jsonl": lines.encode(), "test.jsonl": b"{}"}
    packed = pack(open_source(f"hf:{REPOSITORY}"), TokenizerFiles(), tmp_path / "p")
    assert (packed.index.num_documents, packed.found.skips.count) == (len(STORIES), 0)
    assert (tmp_path / "p" / INDEX).is_file()
    asked = {path for path in hub.paths if "/resolve/" in path}
    name = "data/train-0.parquet" if kind == "parquet" else "train.jsonl"
    assert asked == {f"/datasets/{REPOSITORY}/resolve/{COMMIT}/{name}"}
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}


def test_what_is_not_there_or_may_not_be_read_is_one_line(hub: StandIn) -> None:
    for source, reason in (("hf:evil/none", "cannot open hf:evil/none"), (f"hf:{REPOSITORY}/none", "has no parquet or JSON")):
        with pytest.raises(UsageError, match=reason) as refused:
            open_source(source)
        assert refused.value.remedy
        assert "\n" not in str(refused.value)
    hub.denies = True
    with pytest.raises(UsageError, match="cannot open") as refused:
        open_source(f"hf:{REPOSITORY}")
    assert "hf auth login" in str(refused.value.remedy)


def test_a_model_and_a_tokenizer_are_taken_at_a_commit(hub: StandIn, tmp_path: Path) -> None:
    hub.is_model = True
    content = train_tokenizer(tmp_path / "tokenizer.json", special_tokens=["<|stop|>"])
    hub.files = {"tokenizer.json": content, CONFIG_NAME: b'{"eos_token": "<|stop|>"}', "model.py": b"import os"}
    assert newest_commit("model", REPOSITORY) == COMMIT
    files = take_tokenizer(f"hf:{REPOSITORY}", tmp_path)
    assert (files.content, files.has_end) == (content, True)
    assert json.loads(files.config)["eos_token"] == "<|stop|>"
    assert files.open().encode(["once"])[0][-1] == 0
    assert not [path for path in hub.paths if "model.py" in path]
    with pytest.raises(UsageError, match="is no tokenizer of the hub"):
        take_tokenizer("hf:nothing", tmp_path)


def test_files_are_chosen_by_their_names_alone() -> None:
    names = ["a/train-0.parquet", "a/test-0.parquet", "b/x.parquet", "b/x.jsonl", "README.md", "trainer/x.csv"]
    assert chosen(names, "", "train", "x") == ("parquet", ["a/train-0.parquet"])
    assert chosen(names, "", "test", "x") == ("parquet", ["a/test-0.parquet"])
    assert chosen(names, "b", "train", "x") == ("parquet", ["b/x.parquet"])
    assert chosen(["y.jsonl", "x.json"], "", "train", "x") == ("json", ["x.json", "y.jsonl"])
    assert chosen(["data/validation/0.parquet"], "data", "validation", "x")[1] == ["data/validation/0.parquet"]
    for split, folder, reason in (("dev", "", "no file of the split dev"), ("train", "c", "no parquet or JSON")):
        with pytest.raises(UsageError, match=reason):
            chosen(names, folder, split, "x")
