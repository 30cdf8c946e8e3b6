"""Models of Hugging Face's transformers: architectures by name, and pretrained weights.

The one user of that library. A manifest comes from a stranger, and many settings make transformers fetch code. So: no
remote code, weights in safetensors only, an attention that torch itself implements, no quantization (whose kernels are
code), no kernels from the hub, and of a config only the fields that its class documents.
"""

import contextlib
import os
import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError, did_you_mean
from ...peer.base.install import how_to_install
from ..consent import check_public_model, hide_secrets
from ..step.flat import bytes_of, state_of, storage_of
from ..step.micro_batches import out_of_memory
from . import machine
from .gpt_config import MAX_LAYERS
from .needs import gigabytes
from .quantized import load_bitsandbytes

DTYPES = ("float32", "bfloat16", "float16")
LORA = ("lora_rank", "lora_alpha", "lora_targets")
"""The options of adapters."""
MAX_LORA_RANK = 4096
MAX_TENSORS = 100_000
"""The limit of an architecture's parameters by name, twice those of 256 experts in 61 layers: a manifest may ask for any
number of tiny layers, and each costs milliseconds and kilobytes before its size is known."""
DENIED = re.compile(r"gated repo|private repository|40[13] Client Error")
"""How transformers and the hub's client say that nobody, or not this user, may read weights."""
UNREACHED = "couldn't connect to"
"""How transformers says that neither the hub nor its cache has given a file."""
REVISION = re.compile(r"[A-Za-z0-9_./-]{1,100}")
SAFE_ATTENTION = (None, "eager", "sdpa", "flex_attention")
"""The attentions that torch implements; for other names transformers would download kernels."""


def build_hf(name: str, options: Mapping[str, Any], *, trusted: bool) -> nn.Module:
    """Build a causal language model in training mode: an architecture (`llama`), a folder, or a hub id (`org/name`).

    Unless the name is `trusted`, it is never taken for a folder, and a hub id is opened without this user's token.
    The options of an architecture are fields of its config, and it is initialized from torch's random state. The only
    option of a folder or a hub id is `revision`. All take `dtype`, and `lora_rank` for adapters (LoRA, arXiv:2106.09685)
    that alone are trained and sent. Raises `UsageError`, and `LocalError` if the extra is not installed or the hub is
    unreachable.
    """
    lora = {key: value for key, value in options.items() if key in LORA}
    options = {key: value for key, value in options.items() if key not in LORA}
    if lora:
        _check_lora(lora)
    dtype = options.pop("dtype", "float32")
    if dtype not in DTYPES:
        raise UsageError(f"hf: there is no dtype {dtype!r}", remedy=f"choose one of {', '.join(DTYPES)}")
    transformers = load_transformers()
    if "/" in name or (trusted and Path(name).is_dir()):
        model = _pretrained(transformers, name, options, getattr(torch, dtype), trusted=trusted)
    else:
        config = _config(transformers, name, options)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.config.use_cache = False  # The key-value cache is for generation; in training it would fill the memory.
    module: nn.Module = _adapted(model, lora) if lora else model
    return module.train()


def _check_lora(lora: Mapping[str, Any]) -> None:
    """Raise `UsageError` for options that make no adapter; a text of targets would be a pattern, which can run for ever."""
    rank, alpha, targets = (lora.get(key) for key in LORA)
    if type(rank) is not int or not 1 <= rank <= MAX_LORA_RANK:
        raise UsageError(f"[model] lora_rank must be a whole number from 1 to {MAX_LORA_RANK}, not {rank!r}")
    if alpha is not None and (type(alpha) not in (int, float) or not 0 < alpha <= 1e6):
        raise UsageError(f"[model] lora_alpha must be a number above 0, not {alpha!r}")
    if targets is not None and not (isinstance(targets, list) and targets and all(type(name) is str for name in targets)):
        remedy = 'for example lora_targets = ["q_proj", "v_proj"]; without it, all linear layers but the last have one'
        raise UsageError("[model] lora_targets must be a list of names of layers", remedy=remedy)


def _adapted(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """Freeze a model and add adapters to its layers, drawn from the seed alone, whatever loading has drawn before."""
    peft, rank = _load_peft("training an adapter"), lora["lora_rank"]
    torch.default_generator.manual_seed(torch.initial_seed())
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=lora.get("lora_alpha", 2 * rank),
        target_modules=lora.get("lora_targets", "all-linear"),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Of peft's use of transformers.
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"[model] lora_targets: {reason}", remedy="name linear layers of the model") from error
    return adapted


def _load_peft(purpose: str) -> ModuleType:
    """Import peft. Raises `LocalError` if it is not installed."""
    if find_spec("bitsandbytes") is not None:
        with contextlib.suppress(LocalError):
            load_bitsandbytes()  # Here, since peft would import it in a way that may fetch code.
    try:
        import peft
    except ImportError as error:
        raise LocalError(f"{purpose} needs peft: {error}", remedy=how_to_install("hf")) from error
    return peft


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """How peft writes an adapter."""

    config: Any
    names: dict[str, str]
    """The name in the file of each trained parameter."""
    rest: dict[str, Tensor]
    """What else stands in it, such as the frozen projections of VeRA."""


def adapter_of(model: nn.Module, trained: Mapping[str, Tensor]) -> AdapterFile | None:
    """Return how peft writes the adapter of a model; None if it has none.

    Raises `UsageError` for one of which peft's file does not hold all that is trained.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return None
    _load_peft("training an adapter")
    from peft.utils.save_and_load import get_peft_model_state_dict

    adapter = next(iter(configs))
    config, state = configs[adapter], state_of(model)
    what = f"an adapter of the kind {getattr(config.peft_type, 'value', config.peft_type)}"
    remedy = "train one adapter of a kind that peft saves as it is, such as LoRA; list other modules in modules_to_save"
    try:
        saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=False)
    except (ValueError, LookupError, AttributeError, TypeError, NotImplementedError) as error:
        raise UsageError(f"peft cannot save {what}: {error}", remedy=remedy) from error
    by_storage = {storage_of(tensor): name for name, tensor in saved.items()}
    names: dict[str, str] = {}
    for name, parameter in trained.items():
        found = by_storage.get(storage_of(parameter))
        if found is None and config.is_prompt_learning and len(trained) == len(saved) == 1:  # A copy, of the one tensor.
            found = next((name for name, tensor in saved.items() if torch.equal(tensor, parameter.to(tensor.device))), None)
        if found is None:
            raise UsageError(f"{name} is trained, and not in the file that peft writes of {what}", remedy=remedy)
        names[name] = found
    rest = {name: tensor.detach().to("cpu").clone() for name, tensor in saved.items() if name not in names.values()}
    # Of a model that transformers has added the adapter to, whose own loader leaves the prefix out.
    prefix = "" if hasattr(model, "get_base_model") else "base_model.model."
    return AdapterFile(
        config,
        {name: prefix + found for name, found in names.items()},
        {prefix + name: tensor for name, tensor in rest.items()},
    )


def save_hf(kept: Path, tensors: Mapping[str, Tensor], out: Path) -> str:
    """Write a folder for `from_pretrained`: a model of the config in `kept`, with these parameters and buffers.

    Of tied parameters one name is enough. Returns why it wrote nothing, where the class that the config names is no model of
    transformers, or has other parameters; empty otherwise.
    """
    transformers = load_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(kept, trust_remote_code=False)
        _check_code(str(kept), config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        return f"transformers knows no such config: {(str(error).splitlines() or [type(error).__name__])[0]}"
    named = config.architectures or [""]
    kind: Any = getattr(transformers, str(named[0]), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model or not isinstance(config, kind.config_class or ()):
        name = str(named[0])
        return f"transformers has no model {name!r} of this config" if name else "its class is not of transformers"
    with torch.device("meta"):
        model = kind(config)
    names: dict[str, list[str]] = {}
    whole: dict[str, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(str(id(tensor)), []).append(name)
    for tied in names.values():
        found = next((tensors[name] for name in tied if name in tensors), None)
        if found is None or found.shape != state[tied[0]].shape:
            return f"its {tied[0]} is not as the class {kind.__name__} has it"
        whole |= dict.fromkeys(tied, found)
    if more := sorted(tensors.keys() - whole.keys()):
        return f"the class {kind.__name__} has no {more[0]}"
    config.dtype = next(tensor.dtype for tensor in whole.values() if tensor.is_floating_point())
    model.load_state_dict(whole, assign=True)
    model.save_pretrained(out)
    return ""


def load_saved(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a folder that `save_hf` has written, as transformers reads them. Raises `LocalError`."""
    transformers = load_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        model = getattr(transformers, config.architectures[0]).from_pretrained(folder, use_safetensors=True)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise LocalError(f"transformers does not load {folder}: {error}") from error
    state: dict[str, Tensor] = model.state_dict()
    return state


def merge_adapter(base: str, out: Path) -> None:
    """Merge the adapter in the folder `out` into its base, a folder or a hub id. Raises `FlockstepError`."""
    model = build_hf(base, {}, trusted=True)
    peft = _load_peft("merging an adapter")
    try:
        adapted = peft.PeftModel.from_pretrained(model, out)
        found = adapter_of(adapted.train(), {})
        assert found is not None
        with safe_open(out / "adapter_model.safetensors", "pt") as file:
            if lost := sorted(set(file.keys()) - found.rest.keys()):
                raise UsageError(f"{base} has no place for {lost[0]}", remedy="name the base that the adapter was trained on")
        merged = adapted.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError, RuntimeError) as error:
        raise UsageError(f"peft cannot merge this adapter: {error}", remedy="export it without --merge") from error
    for path in out.iterdir():
        path.unlink()
    merged.config.use_cache = True
    merged.save_pretrained(out)


def save_tokenizer(source: str, out: Path, revision: str | None = None) -> None:
    """Save a tokenizer, from a `tokenizer.json`, a folder or a hub id, beside a model; do nothing if there is none.

    With a `revision`, that of a stranger's manifest, it is a public repository of the hub, opened without the user's token.
    """
    if not source:
        return
    transformers = load_transformers()
    try:
        if Path(source).is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=source)
        else:
            public = {} if revision is None else {"revision": revision, "token": False}
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **public)
    except (OSError, ValueError, KeyError):
        return  # Weights without a tokenizer, such as those of a byte-level model.
    tokenizer.save_pretrained(out)


def end_generation(out: Path) -> None:
    """Let a model in a folder end its texts with the tokens that the tokenizer beside it names, if it writes any."""
    if (out / "generation_config.json").exists():
        transformers = load_transformers()
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(out)
        settings = transformers.GenerationConfig.from_pretrained(out)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(settings, name, getattr(tokenizer, name))
        settings.save_pretrained(out)


def load_transformers() -> ModuleType:
    """Import the library. Raises `LocalError` if it is not installed."""
    os.environ["USE_HUB_KERNELS"] = "0"  # Read at its import: some architectures fetch kernels by themselves.
    try:
        import transformers
    except ImportError as error:
        raise LocalError(
            f"models named hf:… need transformers: {error}", remedy=how_to_install("hf")
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _config(transformers: ModuleType, name: str, options: Mapping[str, Any]) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as architectures

    if name not in architectures:
        raise UsageError(
            f"transformers has no causal language model {name!r}{did_you_mean(name, architectures)}",
            remedy="name an architecture such as hf:llama, a folder, or a hub id with its slash: hf:org/name",
        )
    kind = transformers.AutoConfig.for_model(name)
    known = {key for key in (*kind.to_dict(), *kind.attribute_map) if not key.startswith("_")}
    for option in options:
        if option not in known:
            raise UsageError(
                f"hf:{name}: its config has no field {option!r}{did_you_mean(option, known)}",
                remedy=f"the fields are those of transformers' {type(kind).__name__}",
            )
    # Its validators raise errors of many classes; all are about the manifest's options.
    try:
        _check_layers(options)
        config = transformers.AutoConfig.for_model(name, **options)
        _outline(transformers, config)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"hf:{name}: {reason}", remedy="check the options of [model]") from error
    return config


def _check_layers(fields: Mapping[str, Any]) -> None:
    """Raise `UsageError` for too many layers in a config: some make a list of them before a model can be counted."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_layers(value)
        elif "layer" in name and type(value) is int and value > MAX_LAYERS:
            raise UsageError(f"{name} must be at most {MAX_LAYERS}, not {value}")


def _outline(transformers: ModuleType, config: Any, **options: Any) -> nn.Module:
    """Return the model of a config without values. Raises `UsageError` while it is built if it has too many tensors."""
    left = iter(range(MAX_TENSORS))

    def count(module: nn.Module, parameter: str, tensor: Tensor) -> None:
        if next(left, None) is None:
            raise UsageError(f"it has more than {MAX_TENSORS} parameters by name")

    counting = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
    finally:
        counting.remove()
    return model


def _pretrained(
    transformers: ModuleType, name: str, options: dict[str, Any], dtype: torch.dtype, *, trusted: bool
) -> Any:
    revision = options.pop("revision", None)
    if revision is not None and not (isinstance(revision, str) and REVISION.fullmatch(revision) and ".." not in revision):
        raise UsageError(f"hf:{name}: revision is no branch, tag or commit", remedy="letters, digits and . _ - / alone")
    if options:
        raise UsageError(
            f"hf:{name}: there is no option {min(options)!r}", remedy="a pretrained model takes dtype, revision and lora_rank"
        )
    if not trusted:
        check_public_model(name, revision)
        hide_secrets()
    folder = user_path(name)
    source = str(folder) if folder.is_dir() else name
    if not folder.is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") != 1):
        raise UsageError(f"hf:{name}: there is no such folder", remedy="check the path, or name a hub id: hf:org/name")
    safe: dict[str, Any] = {"trust_remote_code": False, "revision": revision, "token": None if trusted else False}
    try:
        if not trusted:
            check_base(transformers, name, revision)
        _check_layers(transformers.PreTrainedConfig.get_config_dict(source, **safe)[0])
        config = transformers.AutoConfig.from_pretrained(source, **safe)
        _check_code(name, config)
        _check_memory(name, _outline(transformers, config, dtype=dtype))
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **safe
        )
    except Exception as error:  # A stranger's files make the library raise errors of many classes.
        if isinstance(error, LocalError) or (isinstance(error, (RuntimeError, MemoryError)) and out_of_memory(error)):
            raise
        reason = " ".join(str(error).split())
        remedy = "it must be a causal language model in safetensors that transformers supports without remote code"
        if DENIED.search(reason):
            allow = "" if trusted else f", and pass --allow-model {shlex.quote(f'hf:{name}')}"
            remedy = f"if it is gated or private, accept its terms on its page, log in with `hf auth login`{allow}"
        elif UNREACHED in reason:
            remedy = "check that this computer reaches the hub, or has the files in its cache"
        raise LocalError(f"cannot load hf:{name}: {reason}", remedy=remedy) from error
    if missing := sorted(loading["missing_keys"]):
        raise UsageError(f"hf:{name} has no weights for {missing[0]}", remedy="choose a folder that holds the whole model")
    return model


def _check_memory(name: str, outline: nn.Module) -> None:
    """Raise `LocalError` for more weights than this computer has memory: the library makes those that no file has."""
    needed, memory = bytes_of(outline), machine.memory()
    if memory is not None and needed > memory.total:
        has = f"this computer has {gigabytes(memory.total)} of memory"
        raise LocalError(f"the weights of hf:{name} have {gigabytes(needed)}, {has}", remedy="choose a smaller model")


def check_base(transformers: ModuleType, name: str, revision: str | None) -> None:
    """Raise `UsageError` for an adapter: its description names the base, which may be any folder here."""
    if transformers.utils.find_adapter_config_file(name, token=False, revision=revision) is not None:
        raise UsageError(f"hf:{name} is an adapter, whose base may be anything", remedy="name a whole model")


def _check_code(name: str, config: Any) -> None:
    """Raise `UsageError` for a config whose model needs code besides torch and transformers."""
    attention = getattr(config, "_attn_implementation", None)
    if attention not in SAFE_ATTENTION:
        raise UsageError(f"hf:{name} needs the attention {attention!r}, which is custom code")
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"hf:{name} is quantized, which cannot be trained", remedy="name its unquantized weights")
