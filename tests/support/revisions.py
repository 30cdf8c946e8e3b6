"""Values of every setting that a revision may name: a new one without values fails the tests that walk through all."""

from typing import Any

from flockstep.dht.run.revision import REVISABLE

WALKED: dict[str, tuple[Any, ...]] = {
    "outer.rounds": (900, 1, 1_000_000),
    "outer.lr": (0.5, 1e-6, 2.0),
    "outer.momentum": (0.25, 0.0, 0.999),
    "outer.momentum_warmup": (7, 0, 100_000),
    "inner.lr": (0.5, 0.0, 10.0),
    "inner.adamw_lr": (0.5, 0.0, 10.0),
    "inner.weight_decay": (0.5, 0.0, 10.0),
    "inner.momentum": (0.5, 0.0, 0.999),
    "inner.warmup_steps": (5, 0, 1_000_000),
    "inner.schedule": ("linear", "constant"),
    "inner.clip": (0.5, 0.0, 1e6),
    "inner.ramp": (2, 1, 8),
    "codec.contribution": ("bf16", "lloyd2", "fp32", "int8"),
    "codec.result": ("int8", "bf16", "fp32"),
    "codec.choices": ("bf16", "lloyd2 int8 bf16 fp32"),
    "eval.every": (2, 1000),
    "eval.prompts": (["Twice"], []),
}
"""For each setting what the walk through a run takes, and then the ends of its range."""
NAMES = [f"{section}.{key}" for section, keys in REVISABLE.items() for key in keys]
