"""What `flockstep join` runs: model, data and optimizer from the manifest, and one training loop around `Swarm`."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..dht.runs import SignedManifest
from ..peer.config import PeerConfig
from ..peer.errors import UsageError
from ..peer.telemetry import Event
from .checkpoint import save_model
from .data import TokenSource, open_source
from .inner import build_inner
from .models import build_model
from .swarm import Swarm


@dataclass(frozen=True, slots=True)
class Summary:
    """How a membership ended: rounds behind the state, its root in hex, and why it ended."""

    round: int
    root: str
    reason: str


def choose_device(name: str) -> torch.device:
    """The device that a setting names; `auto` is cuda, else mps, else cpu. Raises `UsageError`."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        remedy = "use --device auto, cpu, or a device that torch finds here"
        raise UsageError(f"cannot train on {name}: {str(error).splitlines()[0]}", remedy=remedy) from error
    return device


def join_run(
    link: str,
    config: PeerConfig,
    *,
    save: Path | None,
    on_event: Callable[[Event], None],
    stop: threading.Event,
) -> Summary:
    """Train as a member of a run until all of its rounds are done or `stop` is set. Raises `FlockstepError`."""
    device = choose_device(config.device)
    prepared: list[TokenSource] = []

    def prepare(signed: SignedManifest) -> nn.Module:
        # Data before the model: a path that is wrong is said before anything takes long.
        data = signed.manifest.data
        prepared.append(
            open_source(config.data or data.source, tokenizer=data.tokenizer, sequence_length=data.sequence_length)
        )
        spec = signed.manifest.model
        return build_model(spec.name, spec.options, seed=signed.manifest.seed, allow_model=config.allow_model).to(
            device
        )

    swarm = Swarm(link, prepare, inner_of, config=config, on_event=on_event, stop=stop)
    with swarm:
        batch_size = swarm.manifest.data.batch_size
        autocast = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
        for batch in swarm.share_of(prepared[0], batch_size=batch_size):
            if swarm.finished:
                break
            check_vocabulary(batch, swarm.model)
            tokens = batch.to(device, non_blocking=True)
            with autocast:
                loss = swarm.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            swarm.step(loss)
        if save is not None:
            save_model(swarm.model, save, round_=swarm.round, root=swarm.root)
    return Summary(swarm.round, swarm.root, swarm.reason)


def check_vocabulary(batch: torch.Tensor, model: nn.Module) -> None:
    """Raise `UsageError` for a token that the model does not know: a GPU would only say that an assertion failed."""
    config = getattr(model, "config", None)
    size, largest = getattr(config, "vocab_size", None), int(batch.max())
    if size is not None and largest >= size:
        raise UsageError(
            f"the data holds token {largest}, the model knows {size}",
            remedy="check the dtype and the tokenizer of the data",
        )


def inner_of(model: nn.Module, signed: SignedManifest) -> list[torch.optim.Optimizer]:
    """The inner optimizer that the manifest pins."""
    return build_inner(model, signed.manifest.inner)
