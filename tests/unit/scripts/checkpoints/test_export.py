"""From a checkpoint to a model for other programs: equal logits for every kind of model."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from flockstep.dht.run.manifest import Data, Manifest, Model, SignedManifest
from flockstep.optim.models.gpt import GPT
from flockstep.optim.models.kept import keep_buffers, parts_of
from flockstep.optim.models.registry import build_model
from flockstep.optim.shards.opening import keep_tokenizer, open_tokens
from flockstep.optim.shards.packed import pinned_data
from flockstep.optim.shards.tokenizer_config import encode_config
from flockstep.optim.step.flat import FlatLayout
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.scripts.checkpoints.export import export
from flockstep.scripts.checkpoints.newest import find_checkpoint
from safetensors.torch import load_file
from support.homes import home_of
from support.packed import packed, train_tokenizer
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
README = Path(__file__).parents[4] / "README.md"
TOKENS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))


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


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def test_the_settings_of_generation_that_a_pretrained_model_came_with_are_kept(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model: Any = build_model("hf:llama", LLAMA, seed=1)
    export(home_of(model, tmp_path / "a"), tmp_path / "derived", quiet)
    assert not [*tmp_path.glob("a/runs/*/model/generation_config.json")]
    model.generation_config = transformers.GenerationConfig(eos_token_id=[1, 2], do_sample=True, temperature=0.6)
    export(home_of(model, tmp_path / "b"), tmp_path / "own", quiet)
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "own")
    assert (found.eos_token_id, found.do_sample, found.temperature) == ([1, 2], True, 0.6)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_tokenizer_of_packed_data_comes_with_the_model(tmp_path: Path, keeps: bool) -> None:
    transformers = pytest.importorskip("transformers")
    content = train_tokenizer(tmp_path / "tokenizer.json")
    texts = encode_config({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"})
    packed(tmp_path / "p", tokenizer=content, config=texts)
    options = LLAMA | {"vocab_size": 300, "bos_token_id": 7, "eos_token_id": 8}
    model = build_model("hf:llama", options, seed=1)
    data, _ = pinned_data(Data(source=f"tokens:{tmp_path}/p"), "run.toml", tmp_path / "owner")
    packed_options = tuple(sorted((key, json.dumps(value)) for key, value in options.items()))
    signed = manifest_of(data.source, model=Model("hf:llama", packed_options))
    home = home_of(model, tmp_path, keeper=signed if keeps else None)
    (run,) = (home / "runs").iterdir()
    if keeps:  # The owner, which provides the pack.
        (tmp_path / "owner" / "seeds").rename(home / "seeds")
    else:
        keep_tokenizer(open_tokens(data, PeerConfig(home=home, data=f"{tmp_path}/p")), home, run / "model")
    export(home, tmp_path / "out", quiet)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi<|endoftext|>"
    assert tokenizer.encode("once upon") == tokenizers.Tokenizer.from_buffer(content).encode("once upon").ids
    settings = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (settings.bos_token_id, settings.eos_token_id) == (None, tokenizer.convert_tokens_to_ids("<|endoftext|>"))


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
    build_model("hf:llama", {**LLAMA, "num_hidden_layers": 1}, seed=1).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"has no place for .*layers\.1\."):
        export(tmp_path, tmp_path / "lost", quiet, base=str(tmp_path / "small"))
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
    monkeypatch.setattr("flockstep.scripts.checkpoints.upload.find_spec", lambda name: None)
    with pytest.raises(LocalError, match="needs the package boto3") as refused:
        export(home_of(nn.Linear(2, 2), tmp_path / "home"), tmp_path / "out", quiet, to="s3://bucket/prefix")
    assert ".[s3]" in refused.value.remedy


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


class Tied(nn.Module):
    """A tied head, a transposed tie, a parameter without elements, one with strides, a frozen and a shared buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.back = nn.Parameter(self.embed.weight.data.T)
        self.empty, self.none = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(2, 0))
        self.conv = nn.Conv2d(3, 2, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(1, 2)[:, :1], requires_grad=False)
        self.also_frozen = nn.Parameter(self.embed.weight.data, requires_grad=False)
        mean = torch.randn(3)
        self.register_buffer("mean", mean)
        self.register_buffer("shared", mean)

    def get_extra_state(self) -> str:
        return "no tensor"

    def set_extra_state(self, state: str) -> None:
        pass


def test_all_names_of_a_state_are_in_the_export_the_tied_and_the_empty_ones_too(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    home = home_of(model, tmp_path)
    with torch.no_grad():
        model.frozen.add_(1)  # What is not trained is as it was at the start.
    export(home, tmp_path / "out", quiet)
    written = load_file(tmp_path / "out" / "model.safetensors")
    fresh.load_state_dict({**written, "_extra_state": ""})
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    assert written.keys() == state.keys()
    assert [name for name in state if not torch.equal(written[name], state[name])] == ["frozen"]


class Odd(nn.Module):
    """State of many kinds: some a file of safetensors holds, some not, and some is made in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.register_buffer("coo", torch.eye(2).to_sparse())
        self.register_buffer("csr", torch.eye(2).to_sparse_csr())
        self.register_buffer("nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))
        self.register_buffer("int8", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
        self.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("later", torch.empty(2, device="meta"))
        self.register_buffer("lazy", UninitializedBuffer())
        self.register_buffer("absent", None)
        self.register_buffer("rotary", torch.tensor([1j, 2j]).conj())
        self.register_buffer("whole", torch.arange(4.0))
        self.register_buffer("view", self.get_buffer("whole")[1:3])
        self.register_buffer("expanded", torch.ones(1).expand(3))
        self.calls: object = {"calls": 3}

    def get_extra_state(self) -> object:
        return self.calls

    def set_extra_state(self, state: object) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*(quantize|CSR|nested).*:UserWarning")
def test_every_part_of_a_state_is_exported_or_named(tmp_path: Path) -> None:
    model, said = Odd(), list[str]()
    parts = parts_of(model)
    lost = {"coo", "csr", "nested", "int8", "wide", "_extra_state"}
    assert parts.unkept.keys() == lost | {"later", "lazy"}
    home = home_of(model, tmp_path)
    model.later, model.absent, model.calls = torch.ones(2), torch.full((1,), 2.0), torch.tensor([3])
    model.register_buffer("lazy", torch.ones(1))
    keep_buffers(model, parts, next(home.glob("runs/*")), Telemetry())
    export(home, tmp_path / "out", said.append)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {*model.state_dict()} - lost | {"_extra_state"}
    for name in ("rotary", "whole", "view", "expanded", "later", "absent", "lazy"):
        assert torch.equal(written[name], getattr(model, name)), name
    (line,) = (line for line in said if line.startswith("not in "))
    assert "5 of the model's state: coo, which has the layout sparse_coo, " in line
    model.calls = {}
    home = home_of(model, tmp_path / "again")
    said.clear()
    export(home, tmp_path / "out2", said.append)
    assert any("_extra_state, which is a dict, not a tensor" in line and line.endswith(", …") for line in said)


def test_a_model_with_a_head_of_its_own_is_exported_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )

    class Valued(transformers.GPT2LMHeadModel):  # type: ignore[misc,name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.value_head = nn.Linear(config.n_embd, 1)

    class Scored(transformers.GPT2PreTrainedModel):  # type: ignore[misc,name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.transformer, self.score = transformers.GPT2Model(config), nn.Linear(config.n_embd, 2)
            self.post_init()

    added = transformers.GPT2LMHeadModel(config)
    added.value_head = nn.Linear(16, 1)
    for number, model in enumerate((Valued(config), Scored(config), added)):
        said: list[str] = []
        out = tmp_path / f"out{number}"
        export(home_of(model, tmp_path / str(number)), out, said.append)
        written = load_file(out / "model.safetensors")
        assert written.keys() == model.state_dict().keys()
        assert "holds all by name, for from_pretrained of the class that was trained" in said[0]
        if type(model) is not transformers.GPT2LMHeadModel:
            loaded = type(model).from_pretrained(out)
            state = model.state_dict()
            assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_a_config_that_names_another_attribute_of_transformers_calls_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = build_model("hf:llama", LLAMA, seed=1)
    home = home_of(model, tmp_path)
    (config,) = home.rglob("config.json")
    fields = json.loads(config.read_text())
    for number, name in enumerate(("pipeline", "Trainer", "PreTrainedModel", "GPT2LMHeadModel", "AutoModel", 5, "")):
        config.write_text(json.dumps({**fields, "architectures": [name]}))
        said: list[str] = []
        export(home, tmp_path / f"out{number}", said.append)
        assert "holds all by name" in said[0]
        assert load_file(tmp_path / f"out{number}" / "model.safetensors").keys() == model.state_dict().keys()


def test_what_a_library_loses_while_it_writes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = pytest.importorskip("transformers").LlamaForCausalLM
    save = kind.save_pretrained

    def lose(self: Any, out: Path) -> None:
        self.model.norm.weight = nn.Parameter(torch.zeros_like(self.model.norm.weight))
        save(self, out)

    monkeypatch.setattr(kind, "save_pretrained", lose)
    home = home_of(build_model("hf:llama", LLAMA, seed=1), tmp_path)
    for dtype in ("", "bfloat16"):
        with pytest.raises(LocalError, match=r"1 of 21 trained tensors are not in .*, such as model\.norm\.weight"):
            export(home, tmp_path / f"out{dtype}", quiet, dtype=dtype)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("method", ["Lora", "IA3", "PromptTuning", "added"])
def test_a_method_of_peft_comes_back_by_peft(tmp_path: Path, method: str) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base: Any = build_model("hf:llama", LLAMA, seed=1)
    base.save_pretrained(tmp_path / "base")
    linear = {"target_modules": ["q_proj", "o_proj"]}
    options: dict[str, dict[str, Any]] = {
        "Lora": {**linear, "r": 2, "bias": "all", "modules_to_save": ["lm_head"]},
        "IA3": {**linear, "feedforward_modules": []},
        "PromptTuning": {"num_virtual_tokens": 3},
    }
    kind = getattr(peft, f"{method}Config", peft.LoraConfig)
    config = kind(task_type=peft.TaskType.CAUSAL_LM, **options.get(method, {**linear, "r": 2}))
    if method == "added":
        base.add_adapter(config)
        model = base
    else:
        model = peft.get_peft_model(base, config, adapter_name="default" if method != "IA3" else "mine")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    export(home_of(model, tmp_path / "home"), tmp_path / "out", quiet)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("method", ["PromptEncoder", "projected", "unfrozen", "two"])
def test_an_adapter_that_peft_does_not_save_whole_is_refused_before_training(method: str) -> None:
    peft = pytest.importorskip("peft")
    base: Any = build_model("hf:llama", LLAMA, seed=1)
    prompts = {"task_type": peft.TaskType.CAUSAL_LM, "num_virtual_tokens": 3, "encoder_hidden_size": 8}
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=peft.TaskType.CAUSAL_LM)
    if method == "PromptEncoder":
        model = peft.get_peft_model(base, peft.PromptEncoderConfig(**prompts))
    elif method == "projected":
        model = peft.get_peft_model(base, peft.PrefixTuningConfig(**prompts, prefix_projection=True))
    else:
        model = peft.get_peft_model(base, lora)
    if method == "unfrozen":
        base.model.norm.weight.requires_grad_(True)
    if method == "two":
        model.add_adapter("second", lora)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
    with pytest.raises(UsageError, match="is trained, and not in the file that peft writes") as refused:
        parts_of(model)
    assert "modules_to_save" in refused.value.remedy


MODEL_OF_ONES_OWN = """
from torch import nn

def make():
    return nn.Linear(3, 5)
"""


def manifest_of(source: str = "own", **changes: Any) -> SignedManifest:
    owner = Identity.from_seed(bytes(32))
    return SignedManifest.sign(Manifest(owner=owner.peer_id, name="run", data=Data(source=source), **changes), owner)


def test_a_keepers_checkpoint_is_exported_by_the_model_that_its_run_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = tuple(sorted((key, json.dumps(value)) for key, value in LLAMA.items()))
    model = build_model("hf:llama", LLAMA, seed=1)
    signed = manifest_of("text:{stdlib}", model=Model("hf:llama", options), seed=9)
    export(home_of(model, tmp_path, keeper=signed), tmp_path / "out", quiet)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_gpt_comes_back_by_the_line_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    options = {"size": "0.2m", "vocab_size": 64}
    model = build_model("gpt", options, seed=1)
    spec = Model("gpt", tuple(sorted((key, json.dumps(value)) for key, value in options.items())))
    keeper = manifest_of("text:{stdlib}", model=spec, seed=9) if keeps else None
    monkeypatch.chdir(tmp_path)
    export(home_of(model, tmp_path, keeper=keeper), Path("my-model"), quiet)
    (line,) = (line for line in README.read_text(encoding="utf-8").splitlines() if "GPT.load(" in line)
    found: dict[str, Any] = {"GPT": GPT}
    exec(line, found)
    assert torch.equal(found["model"](TOKENS), model(TOKENS))
    Path("my-model", "gpt.json").unlink()
    with pytest.raises(UsageError, match=r"my-model is not of a gpt as its gpt\.json says"):
        GPT.load("my-model")


def test_a_keepers_checkpoint_of_custom_code_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 5)
    home = home_of(model, tmp_path / "home", keeper=manifest_of(layout=str(FlatLayout.of(model).pin())))
    with pytest.raises(UsageError, match="is of a keeper, which holds θ but no names") as refused:
        export(home, tmp_path / "out", quiet)
    assert "--model MODULE:FUNCTION" in refused.value.remedy
    assert not (tmp_path / "out").exists()
    (tmp_path / "ones_own.py").write_text(MODEL_OF_ONES_OWN)
    monkeypatch.chdir(tmp_path)
    export(home, tmp_path / "out", quiet, model="ones_own:make")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["weight"], model.weight)
    (tmp_path / "another.py").write_text(MODEL_OF_ONES_OWN.replace("5", "6"))
    with pytest.raises(UsageError, match="the run trains 2 tensors with 20 parameters"):
        export(home, tmp_path / "out2", quiet, model="another:make")
