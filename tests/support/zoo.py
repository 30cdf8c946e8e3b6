"""Tiny models of many kinds, each with a batch of its own and a loss: what trains in a swarm, by trial.

A language model of transformers is its name and the fields of its config; all others are functions.
"""

import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flockstep import PeerConfig, Swarm
from flockstep.optim.models.registry import build_model, training_loss
from flockstep.peer.log.telemetry import Event
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Animal:
    """A model, how it is fed, and how its loss is computed."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "d_model": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_layers": 2, "num_heads": 4,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "state_size": 4, "num_experts": 2, "num_local_experts": 2,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "attention_hidden_size": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Fields of configs by which a model is tiny; each architecture takes those that it has."""
LANGUAGE = (
    *("llama", "gpt2", "mixtral", "mamba"),  # In the gate.
    *("qwen3", "gemma2", "bloom"),
    *("apertus", "arcee", "bart", "bert", "biogpt", "bitnet", "blenderbot", "camembert", "cohere"),
    *("cohere2", "cwm", "diffllama", "doge", "electra", "ernie4_5", "exaone4", "falcon", "falcon_mamba"),
    *("flex_olmo", "gemma", "glm", "gemma3_text", "glm4", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite"),
    *("granitemoe", "helium", "hunyuan_v1_dense", "jetmoe", "mbart", "ministral", "mistral", "nemotron"),
    *("olmo2", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "smollm3", "stablelm", "starcoder2", "xglm"),
)


def language_model(name: str) -> Animal:
    def build() -> nn.Module:
        import transformers

        kind = transformers.AutoConfig.for_model(name)
        known = {*kind.to_dict(), *kind.attribute_map}
        return build_model(f"hf:{name}", {key: value for key, value in SMALL.items() if key in known}, seed=0)

    def batch() -> Batch:
        return {"input_ids": torch.randint(3, 64, (2, 17))}

    return Animal(build, batch, lambda model, batch: training_loss(model, batch["input_ids"]))


def head_of(config: str, kind: str, batch: Callable[[], Batch], **options: Any) -> Animal:
    """Another model of transformers, which computes its loss of labels."""

    def build() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options)
        model: nn.Module = getattr(transformers, kind)(settings)
        return model.train()

    return Animal(build, batch, lambda model, batch: model(**batch).loss)


def image() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(2, (2,))}


class Convolutions(nn.Module):
    """A batch norm, whose statistics each peer keeps to itself, channels last, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]  # of torch
        )
        self.head = nn.Linear(8, 2)
        self.body[3].requires_grad_(False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(pixel_values).mean((2, 3)))
        return logits


class Recurrent(nn.Module):
    """An LSTM whose output matrix is the tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(64, 16), nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 64, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.embed(input_ids))[0])
        return logits


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["input_ids"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def of_package(package: str, name: str, **options: Any) -> Animal:
    """A classifier of timm or torchvision, by the function that makes it."""

    def build() -> nn.Module:
        models: Any = importlib.import_module(f"{package}.models")
        model: nn.Module = getattr(models, name)(num_classes=2, **options)
        return model

    return Animal(build, image, classified)


def tokens() -> Batch:
    return {"input_ids": torch.randint(3, 64, (2, 17))}


LAYERS = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
BERT, VIT = LAYERS | {"vocab_size": 64}, LAYERS | {"image_size": 32, "patch_size": 16}
ZOO: dict[str, Animal] = {
    "own-convolutions": Animal(Convolutions, image, classified),
    "own-recurrent": Animal(Recurrent, tokens, next_token),
    "vit": head_of("ViTConfig", "ViTForImageClassification", image, **VIT),
    **{name: language_model(name) for name in LANGUAGE},
    "bert-labels": head_of(
        "BertConfig", "BertForSequenceClassification", lambda: {**tokens(), "labels": torch.randint(2, (2,))}, **BERT
    ),
    "resnet": head_of(
        "ResNetConfig", "ResNetForImageClassification", image, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "convnext": head_of(
        "ConvNextConfig", "ConvNextForImageClassification", image, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "timm-vit": of_package("timm", "test_vit", img_size=32),
    "timm-resnet": of_package("timm", "test_resnet"),
    "torchvision-mobilenet": of_package("torchvision", "mobilenet_v3_small"),
    "torchvision-shufflenet": of_package("torchvision", "shufflenet_v2_x0_5"),
}
IN_THE_GATE = tuple(ZOO)[:7]


class Tamer(threading.Thread):
    """A member that trains an animal until its run is over."""

    def __init__(self, link: str, home: Path, animal: Animal) -> None:
        super().__init__(daemon=True)  # What fails must not wait for it.
        torch.manual_seed(0)  # Peers compare what is frozen.
        self.model, self.root = animal.build(), ""
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._animal = animal
        inner = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=1e-3)
        config = PeerConfig(home=home, host="127.0.0.1", port=0)
        self._swarm = Swarm(link, self.model, inner, config=config, on_event=self.events.append)
        self._pause = threading.Event()

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that joins this one
            self.error = error

    def _train(self) -> None:
        with self._swarm as swarm:
            while not swarm.finished:
                loss = self._animal.loss(self.model, self._animal.batch())
                loss.backward()  # type: ignore[no-untyped-call]  # of torch
                swarm.step(loss)
                self._pause.wait(0.02)  # As `support.trainers` does: a step costs nothing.
            self.root = swarm.root
