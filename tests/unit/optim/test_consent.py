"""What a stranger's manifest opens on this computer, and what only its user's word opens."""

import json
import os
from pathlib import Path

import pytest
from flockstep.dht.run.manifest import Data
from flockstep.optim.consent import check_public_model, is_public_data
from flockstep.optim.data.sources import open_data
from flockstep.optim.models.hf import check_base
from flockstep.optim.models.registry import build_model
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.base.troubles import NEEDS_PROGRAM

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "".join(f"SECRET{line:04d}\n" for line in range(300))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a volunteer who keeps a secret in several places."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for place in (".ssh/id_ed25519", "org/name/train.txt", "org/name.txt", "notes.txt", "a.u16", "{stdlib}x"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(SECRET)
    (tmp_path / "x.json").write_text(json.dumps({"text": SECRET}))
    return tmp_path


COMMIT = "0123456789abcdef0123456789abcdef01234567"
PRIVATE = [
    *("text:~/.ssh/id_*", "text:~/.ssh", "text:notes.txt", "text:{stdlib}x", "text:{stdlib}/../notes.txt", "text:", "text:."),
    *("text:/", "text:**", "tokens:a.u16", "tokens:~/notes.txt?dtype=uint16", "json:x.json", "json:~", "parquet:~/*"),
    *("hf:org/name", "hf:org", "hf:~/org", "hf:./org", "hf:.ssh/x", "hf:/etc", "hf:../x/y", "hf:a/../b", "hf:a/..", "hf:~/x"),
    *("hf:a/b/../c", "hf:a/b/", "hf://a/b", "hf:hf://a/b", "hf:a/b/c/d", "hf:a/b\n", "hf:a/b::file", "file:/etc/passwd", "x"),
    *("hf:a/b", "hf:a/b@main", f"hf:a/b@{COMMIT[1:]}", f"hf:a/b@{COMMIT}/../c", f"hf:a/b@{COMMIT}/x::y"),
    f"hf:a/b@{COMMIT}\n",
    *(f"hf:a/{'b' * 300}@{COMMIT}", f"hf:{'a' * 300}/b@{COMMIT}", f"hf:a/b@{COMMIT}/{'c' * 300}"),
]


@pytest.mark.parametrize("source", PRIVATE)
def test_a_manifest_alone_opens_nothing_on_this_computer(home: Path, source: str) -> None:
    assert not is_public_data(source)
    with pytest.raises(UsageError, match="nobody here has agreed") as refused:
        open_data(Data(source=source, sequence_length=8), PeerConfig(home=home / "flockstep"))
    assert "--allow-data" in refused.value.remedy
    for allowed in (f"{source} ", source.upper() + "x", source + "*"):
        with pytest.raises(UsageError, match="nobody here has agreed"):
            open_data(Data(source=source, sequence_length=8), PeerConfig(home=home / "flockstep", allow_data=allowed))


def test_a_run_whose_members_bring_their_own_is_joined_by_a_program(home: Path) -> None:
    for mine in (False, True):
        with pytest.raises(UsageError, match=NEEDS_PROGRAM.cause) as refused:
            open_data(Data(source="own", sequence_length=8), PeerConfig(home=home / "flockstep"), mine=mine)
        assert refused.value.remedy == NEEDS_PROGRAM.remedy


@pytest.mark.parametrize("source", ["text:~/.ssh/id_*", "text:notes.txt", "tokens:a.u16"])
def test_the_users_own_word_opens_it(home: Path, source: str) -> None:
    data, place = Data(source=source, sequence_length=8), home / "flockstep"
    for opened in (
        open_data(data, PeerConfig(home=place, allow_data=source)),
        open_data(data, PeerConfig(home=place), mine=True),
        open_data(Data(source="text:/there/is/none", sequence_length=8), PeerConfig(home=place, data=source)),
    ):
        assert opened.name == source


@pytest.mark.parametrize(
    "source", ["text:{stdlib}", f"hf:a/b@{COMMIT}/sample/10BT?split=test&column=x", f"hf:a-1/b.c_d@{COMMIT}"]
)
def test_public_data_need_no_word(home: Path, source: str) -> None:
    assert is_public_data(source)


def test_text_that_every_computer_has_is_opened(home: Path) -> None:
    assert open_data(Data(source="text:{stdlib}", sequence_length=64), PeerConfig(home=home)).name == "text:{stdlib}"


def test_a_manifest_alone_opens_weights_of_the_hub_at_a_commit_only(home: Path) -> None:
    for revision in (None, "main", COMMIT[1:], f"{COMMIT}\n"):
        with pytest.raises(UsageError, match="nobody here has agreed"):
            check_public_model("an-org/a-model", revision)
    check_public_model("an-org/a-model", COMMIT)


def test_no_secret_is_in_the_environment_of_a_process_that_opens_public_data(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "db_password", "NPM_AUTH", "AWS_SESSION_TOKENS")
    kept = ("PATH", "HF_HOME", "WANDB_API_KEY", "KEYBOARD", "AUTHOR", "TOKENIZERS_PARALLELISM")
    for name in (*hidden, *kept):
        monkeypatch.setenv(name, "1")
    open_data(Data(source="text:{stdlib}", sequence_length=64), PeerConfig(home=home), mine=True)
    assert set(hidden) <= set(os.environ)
    open_data(Data(source="text:{stdlib}", sequence_length=64), PeerConfig(home=home))
    assert not set(hidden) & set(os.environ)
    assert set(kept) <= set(os.environ)


@pytest.mark.parametrize("name", ["hf:./model", "hf:~/model", "hf:org/model", "hf:/models/x", "hf:a/b/c"])
def test_a_manifest_alone_starts_from_no_weights_on_this_computer(home: Path, name: str) -> None:
    pytest.importorskip("transformers")
    for place in ("model", "org/model"):
        (home / place).mkdir(parents=True)
    with pytest.raises(UsageError, match="nobody here has agreed") as refused:
        build_model(name, {}, seed=0, allow_model="hf:other")
    assert f"--allow-model {name}" in refused.value.remedy.replace("'", "")
    with pytest.raises(LocalError) as opened:
        build_model(name, {}, seed=0, allow_model=name)
    assert "nobody here has agreed" not in str(opened.value)


def test_an_adapter_of_the_hub_is_refused_since_its_base_may_be_any_folder(home: Path) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    (home / "model").mkdir()
    check_base(transformers, str(home / "model"), None)
    (home / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(home / ".ssh")}))
    with pytest.raises(UsageError, match="is an adapter"):
        check_base(transformers, str(home / "model"), None)


def test_a_folder_here_is_not_taken_for_an_architecture(home: Path) -> None:
    pytest.importorskip("transformers")
    (home / "llama").mkdir()
    tiny = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    assert build_model("hf:llama", tiny, seed=0) is not None
