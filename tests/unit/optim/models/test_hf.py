"""transformers' models by name and from folders: what is built or refused, and their loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flockstep.dht.run.manifest import Inner
from flockstep.optim.models import hf
from flockstep.optim.models.needs import check_length
from flockstep.optim.models.registry import (
    build_model,
    check_forward,
    longest_of,
    outline_of,
    size_of_model,
    training_loss,
    vocabulary_of,
)
from flockstep.optim.step.flat import FlatLayout, frozen_fingerprint
from flockstep.optim.step.inner import build_inner
from flockstep.peer.base.errors import LocalError, UsageError
from support.hub import COMMIT, REPOSITORY, StandIn, stand_in

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model."""
    folder = tmp_path_factory.mktemp("pretrained")
    model: Any = build_model("hf:llama", LLAMA, seed=7)
    model.save_pretrained(folder)
    return folder


def test_an_architecture_is_built_from_its_config_and_the_seed() -> None:
    models = [build_model("hf:llama", LLAMA, seed=seed) for seed in (1, 1, 2)]
    weights = [model.get_parameter("model.embed_tokens.weight") for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert models[0].training
    names = [tensor.name for tensor in FlatLayout.of(models[0]).tensors]
    assert "lm_head.weight" in names  # Tied: once, under the first of its names.
    assert "model.embed_tokens.weight" not in names
    assert vocabulary_of(models[0]) == 64


def test_its_loss_is_that_of_predicting_every_next_token() -> None:
    model = build_model("hf:llama", LLAMA, seed=1)
    tokens = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(training_loss(model, tokens), expected)
    before = expected.item()
    for optimizer in build_inner(model, Inner()):
        torch.autograd.backward(training_loss(model, tokens))
        optimizer.step()
    assert training_loss(model, tokens).item() < before


def test_pretrained_weights_are_the_start_in_the_dtype_asked_for(folder: Path) -> None:
    fresh = build_model("hf:llama", LLAMA, seed=7)
    loaded = build_model(f"hf:{folder}", {}, seed=0, allow_model=f"hf:{folder}")
    for name, parameter in fresh.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    low = build_model(f"hf:{folder}", {"dtype": "bfloat16"}, seed=0, allow_model=f"hf:{folder}")
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    assert loaded.training


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:lama", {}, "did you mean 'llama'"),
        ("hf:llama", {"hiden_size": 8}, "did you mean 'hidden_size'"),
        ("hf:llama", {"hidden_size": 33}, "not a multiple"),
        ("hf:llama", {"hidden_size": "many"}, "expected int"),
        ("hf:org/name", {"revision": ["main"]}, "revision is no branch"),
        ("hf:org/name", {"revision": "../../other"}, "revision is no branch"),
        ("hf:llama", {"attn_implementation": "someone/kernel"}, "no field 'attn_implementation'"),
        ("hf:llama", {"_name_or_path": "someone/code"}, "no field '_name_or_path'"),
        ("hf:llama", {"auto_map": "someone/code"}, "no field 'auto_map'"),
        ("hf:llama", {"dtype": "int8"}, "no dtype 'int8'"),
        ("hf:/there/is/none", {}, "no such folder"),
        ("hf:a/b/c", {}, "no such folder"),
    ],
)
def test_what_is_not_there_or_could_run_code_is_a_usage_error(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(name, options, seed=0, allow_model=name)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attn_implementation": "someone/kernel"}, UsageError, "custom code"),
        ({"quantization_config": {"quant_method": "fp8"}}, UsageError, "quantized"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}, LocalError, "cannot load"),
    ],
)
def test_a_folder_cannot_bring_code(
    folder: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(error, match=message):
        build_model(f"hf:{tmp_path}", {}, seed=0, allow_model=f"hf:{tmp_path}")


def test_pickled_and_missing_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(LocalError, match="cannot load"):
        build_model(f"hf:{tmp_path}", {}, seed=0, allow_model=f"hf:{tmp_path}")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"no weights for model\.norm\.weight"):
        build_model(f"hf:{tmp_path}", {}, seed=0, allow_model=f"hf:{tmp_path}")


def safetensors(header: object, body: bytes = bytes(4)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


HOSTILE: dict[str, tuple[str, bytes | str]] = {
    "no heads": ("config.json", json.dumps({**LLAMA, "model_type": "llama", "num_attention_heads": 0})),
    "a width of letters": ("config.json", json.dumps({**LLAMA, "model_type": "llama", "hidden_size": "a"})),
    "another width": ("config.json", json.dumps({**LLAMA, "model_type": "llama", "hidden_size": 64})),
    "a dtype of no tensor": ("config.json", json.dumps({**LLAMA, "model_type": "llama", "dtype": "os.system"})),
    "a thousand layers": ("config.json", json.dumps({**LLAMA, "model_type": "llama", "num_hidden_layers": 1000})),
    "layers in a list": ("config.json", json.dumps({**LLAMA, "model_type": "gemma2", "num_hidden_layers": 10**9})),
    "a deep config": ("config.json", "[" * 100_000),
    "a header of 2^60 bytes": ("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
    "a zip": ("model.safetensors", b"PK\x03\x04" + bytes(1000)),
    "a shape of 2^80": (
        "model.safetensors",
        safetensors({"model.norm.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}),
    ),
    "an index that leads out": (
        "model.safetensors.index.json",
        json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": "../../../etc/passwd"}}),
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_weights_and_configs_that_lie_are_refused_in_one_line(
    folder: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "MAX_TENSORS", 100)
    place, content = HOSTILE[what]
    for name in {"config.json", "model.safetensors"} - ({"model.safetensors"} if place.endswith("index.json") else set()):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / place).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(LocalError, match=r"cannot load|more than 100 parameters|at most 10000") as refused:
        build_model(f"hf:{tmp_path}", {}, seed=0, allow_model=f"hf:{tmp_path}")
    assert "\n" not in str(refused.value)


def test_weights_that_no_memory_holds_are_refused_before_any_is_made(folder: Path, tmp_path: Path) -> None:
    """Those that no file has are made from the config: 1.3 TB of an embedding."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "llama", "vocab_size": 10**10}))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"__metadata__": {"format": "pt"}}, b""))
    with pytest.raises(LocalError, match=r"have 1\.3 TB, this computer has .* of memory"):
        build_model(f"hf:{tmp_path}", {}, seed=0, allow_model=f"hf:{tmp_path}")


def test_gated_weights_are_one_line_that_says_how_to_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hf:{REPOSITORY}"
    with stand_in(StandIn({}, is_model=True, denies=True)) as hub:
        files = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        for allowed, remedy in ((name, "`hf auth login`"), ("", f"`hf auth login`, and pass --allow-model {name}")):
            with pytest.raises(LocalError, match="gated repo") as refused:
                build_model(name, {"revision": COMMIT}, seed=0, allow_model=allowed)
            assert "\n" not in str(refused.value)
            assert refused.value.remedy.endswith(remedy)


def test_a_hub_that_is_not_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = f"hf:{REPOSITORY}"
    with pytest.raises(LocalError, match="couldn't connect") as refused:
        build_model(name, {"revision": COMMIT}, seed=0, allow_model=name)
    assert "reaches the hub" in refused.value.remedy
    assert "\n" not in str(refused.value)


def test_sequences_must_fit_the_model() -> None:
    for name, options, most in (("hf:llama", LLAMA, 31), ("gpt", {"size": "0.2m", "context": 16}, 16)):
        longest = longest_of(build_model(name, options, seed=0))
        check_length(most, longest)
        with pytest.raises(UsageError, match=f"{most + 1} exceeds the model's {most}"):
            check_length(most + 1, longest)
    check_length(10**6, longest_of(torch.nn.Linear(1, 1)))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers.
@pytest.mark.parametrize(
    ("name", "options"),
    [("hf:llama", LLAMA), ("hf:llama", {**LLAMA, "lora_rank": 4}), ("hf:gpt2", {}), ("gpt", {"size": "0.2m"})],
)
def test_the_outline_of_a_model_has_its_layout_without_its_memory(name: str, options: dict[str, Any]) -> None:
    outline = outline_of(name, options)
    assert outline is not None
    assert all(tensor.is_meta for tensor in outline.parameters())
    assert FlatLayout.of(outline, of_values=False) == FlatLayout.of(build_model(name, options, seed=0))
    with pytest.raises(UsageError, match="has no values yet"):
        FlatLayout.of(outline)
    assert outline_of("hf:org/name", {}) is outline_of("package.module:function", {}) is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers.
def test_of_a_lora_model_only_the_adapter_is_exchanged_and_the_base_is_told_by_its_hash() -> None:
    peft = pytest.importorskip("peft")

    def lora(seed: int) -> torch.nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"])
        model: torch.nn.Module = peft.get_peft_model(build_model("hf:llama", LLAMA, seed=seed), config)
        return model

    model = lora(1)
    names = [tensor.name for tensor in FlatLayout.of(model).tensors]
    assert len(names) == 2
    assert all("lora_" in name for name in names)
    assert frozen_fingerprint(model) == frozen_fingerprint(lora(1))
    assert frozen_fingerprint(model) != frozen_fingerprint(lora(2))
    assert training_loss(model, torch.randint(64, (2, 5))).requires_grad
    assert vocabulary_of(model) == 64


def test_a_model_that_returns_no_loss_is_told_how_to() -> None:
    class Logits(torch.nn.Module):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return inputs.float()

    with pytest.raises(UsageError, match="instead of its loss") as refused:
        training_loss(Logits(), torch.zeros(2, 3, dtype=torch.int64))
    assert "labels" in refused.value.remedy


def test_a_model_that_takes_no_targets_is_told_how_to_before_it_trains() -> None:
    class Inputs(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    class Named(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(UsageError, match=r"Inputs\.forward.* takes no inputs and targets") as refused:
        check_forward(Inputs())
    assert "labels" in refused.value.remedy
    for model in (Named(), build_model("gpt", {"size": "0.2m"}, seed=0), build_model("hf:llama", LLAMA, seed=0)):
        check_forward(model)


LORA = {**LLAMA, "lora_rank": 2, "lora_targets": ["q_proj", "v_proj"]}


def test_adapters_alone_are_trained_and_come_from_the_seed(folder: Path) -> None:
    pytest.importorskip("peft")
    name, options = f"hf:{folder}", {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj"]}
    models = [build_model(name, options, seed=seed, allow_model=name) for seed in (1, 1, 2)]
    names = [tensor.name for tensor in FlatLayout.of(models[0]).tensors]
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    first = next(name for name in names if "lora_A" in name)
    values = [model.get_parameter(first) for model in models]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert len({frozen_fingerprint(model) for model in models}) == 1
    assert (vocabulary_of(models[0]), models[0].training) == (64, True)
    tokens = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(0))
    base = training_loss(build_model(name, {}, seed=1, allow_model=name), tokens)
    torch.testing.assert_close(training_loss(models[0], tokens), base)  # They begin as nothing.
    size = size_of_model("hf:llama", LORA)
    assert size is not None
    assert size.num_trained == sum(models[0].get_parameter(name).numel() for name in names)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lora_rank": 0}, "lora_rank must be a whole number"),
        ({"lora_rank": True}, "lora_rank must be a whole number"),
        ({"lora_alpha": 4}, "lora_rank must be a whole number"),
        ({"lora_rank": 2, "lora_alpha": 0}, "lora_alpha must be a number above 0"),
        ({"lora_rank": 2, "lora_targets": "(a+)+$"}, "lora_targets must be a list of names"),
        ({"lora_rank": 2, "lora_targets": []}, "lora_targets must be a list of names"),
        ({"lora_rank": 2, "lora_targets": ["nowhere"]}, "lora_targets"),
    ],
)
def test_what_makes_no_adapter_is_refused_in_one_line(options: dict[str, Any], why: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(UsageError, match=why) as raised:
        build_model("hf:llama", {**LLAMA, **options}, seed=1)
    assert "\n" not in str(raised.value)


def test_a_number_of_layers_is_looked_at_before_a_config_makes_a_list_of_them() -> None:
    with pytest.raises(UsageError, match="num_hidden_layers must be at most 10000, not 1000000000"):
        size_of_model("hf:gemma2", {"num_hidden_layers": 10**9})


def test_an_architecture_of_too_many_parameters_by_name_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "MAX_TENSORS", 20)
    with pytest.raises(UsageError, match="more than 20 parameters by name"):
        size_of_model("hf:llama", LLAMA | {"num_hidden_layers": 10_000})
    assert size_of_model("hf:llama", LLAMA) is not None
