"""From a checkpoint to a model for other programs: equal logits for every kind of model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flockstep.collectives.chain.chain import start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import Draft
from flockstep.optim.flat import FlatLayout
from flockstep.optim.models.kept import keep_buffers, keep_model
from flockstep.optim.models.registry import build_model
from flockstep.peer.errors import LocalError, UsageError
from flockstep.peer.telemetry import Telemetry
from flockstep.scripts.export import export
from flockstep.scripts.newest import find_checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))


def home_of(model: nn.Module, home: Path, *, run: str = "a" * 52, round_: int = 10) -> Path:
    """A home folder in which a peer has trained this model: its checkpoint, and what is kept beside it."""
    folder = home / "runs" / run
    layout = FlatLayout.of(model)
    theta, momentum = np.empty(layout.size, np.float32), np.zeros(layout.size, np.float32)
    layout.gather(model, theta)
    leaves = [*merkle.leaves(theta), *merkle.leaves(momentum)]
    draft = Draft(folder / "checkpoints" / str(round_), layout.size)
    spans = [merkle.leaf_bytes(vector, *span) for vector in (theta, momentum) for span in merkle.leaf_spans(layout.size)]
    for index, data in enumerate(spans):
        draft.put(index, bytes(data))
    draft.finish(run, start_of_run(merkle.root(leaves)), layout.describe(), leaves)
    keep_model(model, folder, Telemetry())
    keep_buffers(model, folder, Telemetry())
    return home


def quiet(line: str) -> None:
    pass


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        result: Tensor = model(input_ids=TOKENS).logits
    return result


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_comes_back_with_the_same_logits(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = build_model("hf:llama", {**LLAMA, "tie_word_embeddings": tied}, seed=1)
    said: list[str] = []
    export(home_of(model, tmp_path), tmp_path / "out", said.append)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.use_cache
    assert "round 0" in said[0]

    export(tmp_path, tmp_path / "low", quiet, dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(loaded).float(), logits(model), atol=0.05, rtol=0.05)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers.
def test_an_adapter_comes_back_by_itself_or_merged_into_its_base(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base: Any = build_model("hf:llama", LLAMA, seed=1)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type=peft.TaskType.CAUSAL_LM)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    export(home_of(model, tmp_path), tmp_path / "adapter", quiet)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.equal(logits(fresh), logits(model))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")), logits(model))

    export(tmp_path, tmp_path / "merged", quiet, base=str(tmp_path / "base"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-4)


def test_any_other_model_comes_back_with_its_buffers_and_frozen_parameters(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))

    model, pictures = network(), torch.randn(5, 1, 8, 8)
    model.get_submodule("0").requires_grad_(False)
    model(pictures)
    export(home_of(model, tmp_path), tmp_path / "out", quiet)
    fresh = network()
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(fresh.eval()(pictures), model.eval()(pictures))


def test_the_newest_checkpoint_is_found_and_what_is_not_clear_is_asked(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for round_ in (2, 10):
        home_of(model, tmp_path, round_=round_)
    newest = tmp_path / "runs" / ("a" * 52) / "checkpoints" / "10"
    for source in (tmp_path, newest.parent.parent, newest):
        assert find_checkpoint(source) == newest
    home_of(model, tmp_path, run="b" * 52)
    with pytest.raises(UsageError, match="2 runs") as refused:
        find_checkpoint(tmp_path)
    assert "b" * 52 in refused.value.remedy
    with pytest.raises(UsageError, match="no checkpoint"):
        find_checkpoint(tmp_path / "out")


def test_what_cannot_be_exported_is_said_before_anything_is_written(tmp_path: Path) -> None:
    home = home_of(nn.Linear(2, 2), tmp_path / "home")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    wrong: list[tuple[Path, dict[str, str], str]] = [
        (tmp_path / "full", {}, "exists and is not empty"),
        (tmp_path / "out", {"dtype": "int8"}, "no dtype 'int8'"),
        (tmp_path / "out", {"base": "org/name"}, "trains no adapter"),
        (tmp_path / "out", {"to": "ftp://somewhere"}, "cannot upload to 'ftp://somewhere'"),
        (tmp_path / "out", {"to": "hf://user"}, "cannot upload to 'hf://user'"),
    ]
    for out, options, message in wrong:
        with pytest.raises(UsageError, match=message):
            export(home, out, quiet, **options)
    assert not (tmp_path / "out").exists()


def test_an_upload_without_its_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.scripts.export.find_spec", lambda name: None)
    with pytest.raises(LocalError, match="needs the package boto3") as refused:
        export(home_of(nn.Linear(2, 2), tmp_path / "home"), tmp_path / "out", quiet, to="s3://bucket/prefix")
    assert "flockstep[s3]" in refused.value.remedy


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    home = home_of(nn.Linear(2, 2), tmp_path / "home")
    (state,) = home.rglob("state.safetensors")
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    with pytest.raises(LocalError, match="not a whole checkpoint"):
        export(home, tmp_path / "out", quiet)


def test_a_checkpoint_with_a_foreign_dtype_damaged_parts_or_no_place_to_go_is_one_line(tmp_path: Path) -> None:
    home = home_of(nn.BatchNorm1d(2), tmp_path / "home")
    (about,), (buffers,) = home.rglob("checkpoint.json"), home.rglob("buffers.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="cannot write"):
        export(home, tmp_path / "file" / "out", quiet)
    buffers.write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    with pytest.raises(UsageError, match=r"cannot read .*buffers"):
        export(home, tmp_path / "out", quiet)
    text = about.read_text()
    for foreign in ("load", "no_such", ""):
        about.write_text(text.replace('"float32"', f'"{foreign}"'))
        with pytest.raises(LocalError, match=f"no dtype, but '{foreign}'"):
            export(home, tmp_path / "out", quiet)
