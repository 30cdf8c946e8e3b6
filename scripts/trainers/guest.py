"""Guest: one `Swarm` inside of a loop that belongs to another library.

The loop calls `enter` before its first step, `after_step` after each step of its optimizer, and `leave` at its end. A loop
that raised never came to its end; the next `enter` leaves for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from ...optim.train.swarm import Swarm, tokens_in
from ...peer.base.config import PeerConfig
from ...peer.base.digest import keyed
from ...peer.log.telemetry import Event


class Guest:
    """A membership in a run for as long as another library's loop trains."""

    def __init__(self, link: str, config: PeerConfig | None, on_event: Callable[[Event], None] | None) -> None:
        self._link = link
        self._config = config
        self._on_event = on_event
        self._is_in = False
        self.swarm: Swarm | None = None
        """The membership while training runs, and the last one afterwards."""

    def enter(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loader: object) -> None:
        """Join the run with a model that is on its device, restored and with its optimizers. Raises `FlockstepError`."""
        self.leave()
        swarm = Swarm(self._link, model, optimizers, config=self._config, on_event=self._on_event)
        self.swarm, self._is_in = swarm.__enter__(), True
        swarm.telemetry.emit("data.order", step="share", reason=reorder(loader, swarm.peer_id))

    def after_step(self, loss: Tensor | None, tokens: int) -> bool:
        """Count a step of the optimizer. Returns whether the run is finished, so that the loop should end."""
        if self.swarm is None or not self._is_in:
            return True
        self.swarm.after_step(loss, tokens=tokens)
        return self.swarm.finished

    def leave(self) -> None:
        """Leave the run; nothing, if that was done."""
        is_in, self._is_in = self._is_in, False
        if self.swarm is not None and is_in:
            self.swarm.__exit__(None, None, None)


def count_tokens(batch: Any) -> int:
    """Count what a batch weighs: the targets of its sequences of tokens, or its samples."""
    return tokens_in(batch["input_ids"] if isinstance(batch, dict) and "input_ids" in batch else batch)


def reorder(loader: object, peer_id: str) -> str:
    """Give a loader's random samplers an order of this peer's own; return what was done, for a person.

    Libraries seed every process alike, so that all peers would train on the same samples in the same order.
    """
    seed = int.from_bytes(keyed("data order", peer_id.encode())[:4], "big")
    kinds = sorted({type(sampler).__name__ for sampler in _samplers(loader) if _reseed(sampler, seed)})
    if kinds:
        return f"this peer draws its samples in an order of its own ({', '.join(kinds)})"
    return "the data loader draws no random order: peers with the same data train on the same samples at the same time"


def _samplers(loader: object) -> Iterator[object]:
    """Yield the samplers inside of a data loader, and of what libraries wrap it in."""
    found, seen = [loader], set[int]()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        names = ("batch_sampler", "sampler", "base_dataloader", "_data_source")
        found += [vars(one).get(name) for name in names if hasattr(one, "__dict__")]
        found += [getattr(one, "flattened", None)] if not isinstance(one, nn.Module) else []
        if isinstance(one, (list, tuple)):
            found += one


def _reseed(sampler: object, seed: int) -> bool:
    """Add `seed` to the seed of a sampler, if it has one."""
    for name in ("initial_seed", "seed"):  # Of Accelerate's SeedableRandomSampler; of torch's DistributedSampler.
        if isinstance(own := vars(sampler).get(name) if hasattr(sampler, "__dict__") else None, int):
            setattr(sampler, name, own + seed)
            return True
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator) and not hasattr(sampler, "dataset"):
        generator.manual_seed(generator.initial_seed() + seed)
        return True
    if isinstance(sampler, RandomSampler):
        sampler.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**62 + seed)
        return True
    return False
