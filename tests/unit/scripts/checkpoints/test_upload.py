"""Uploads to stand-ins of the hub and of S3: resumed, and whatever a host answers is one line."""

from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.scripts.checkpoints.upload import open_target
from support.shelves import Shelf, shelf_at

TARGETS = {"s3": "s3://b/models/mine", "hf": "hf://org/name"}
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture(params=TARGETS)
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip({"s3": "boto3", "hf": "huggingface_hub"}[request.param])
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def use(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's environment."""
    for name, value in {
        "HF_ENDPOINT": shelf.endpoint,
        "HF_TOKEN": "hf_mine",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "AWS_ENDPOINT_URL": shelf.endpoint,
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)


def found(shelf: Shelf, kind: str) -> dict[str, bytes]:
    """The files that a reader finds."""
    return {name.removeprefix("models/mine/" if kind == "s3" else ""): data for name, data in shelf.files.items()}


def test_an_upload_that_was_cut_goes_on(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shelf_at(kind) as shelf:
        use(shelf, monkeypatch)
        shelf.breaks_at = "model.safetensors"
        with pytest.raises(LocalError, match="cannot upload to"):
            open_target(TARGETS[kind]).put(folder)
        assert "model.safetensors" not in found(shelf, kind)
        before, shelf.breaks_at = len(shelf.put), ""
        name = open_target(TARGETS[kind]).put(folder)
        assert found(shelf, kind) == FILES
        assert shelf.tokens == {{"s3": "mine", "hf": "hf_mine"}[kind]}
        if kind == "s3":
            assert [each.rpartition("/")[2] for each in shelf.put[before:]] == ["model.safetensors"]
        else:
            assert name == f"hf://org/name@{1:040}"


def test_whoever_may_not_write_reads_so_in_one_line(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shelf_at(kind) as shelf:
        use(shelf, monkeypatch)
        shelf.refuses = True
        with pytest.raises(LocalError, match="403") as refused:
            open_target(TARGETS[kind]).check()
        assert "\n" not in str(refused.value)
        assert "credentials" in refused.value.remedy
        assert (shelf.put, shelf.commits) == ([], [])


def test_a_host_that_is_gone_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with shelf_at(kind) as shelf:
        use(shelf, monkeypatch)
    with pytest.raises(LocalError, match=f"cannot upload to {TARGETS[kind]}: ") as refused:
        open_target(TARGETS[kind]).check()
    assert "\n" not in str(refused.value)
