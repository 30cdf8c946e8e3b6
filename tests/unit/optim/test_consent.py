"""What a stranger's manifest opens on this computer, and what only its user's word opens."""

import json
import os
from pathlib import Path

import pytest
from flockstep.optim.consent import check_public_model, hide_secrets
from flockstep.optim.models.hf import check_base
from flockstep.optim.models.registry import build_model
from flockstep.peer.base.errors import LocalError, UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a volunteer."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_manifest_alone_opens_weights_of_the_hub_at_a_commit_only(home: Path) -> None:
    for revision in (None, "main", COMMIT[1:], f"{COMMIT}\n"):
        with pytest.raises(UsageError, match="nobody here has agreed"):
            check_public_model("an-org/a-model", revision)
    check_public_model("an-org/a-model", COMMIT)


def test_no_secret_is_in_the_environment_of_a_process_that_opens_a_strangers_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "db_password", "NPM_AUTH", "AWS_SESSION_TOKENS")
    kept = ("PATH", "HF_HOME", "KEYBOARD", "AUTHOR", "TOKENIZERS_PARALLELISM")
    for name in (*hidden, *kept):
        monkeypatch.setenv(name, "1")
    hide_secrets()
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
