"""`flockstep.transformers`: a callback that makes Hugging Face's Trainer one peer of a run.

    Trainer(model, args, train_dataset=data, callbacks=[SwarmCallback(link)]).train()

Trainer keeps its optimizer, scheduler, clipping, accumulation and precision; its end, and the run's, end the training.
`docs/trainers.md` says what is honoured. One user of transformers; absolute imports, since this file is a module of
`flockstep` itself by its name (see `flockstep.__init__`).
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from flockstep.optim.train.swarm import Swarm
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event
from flockstep.scripts.trainers.guest import Guest, count_tokens
from torch import Tensor, nn


class SwarmCallback(transformers.TrainerCallback):
    """Joins the run of `link` when the training begins, and leaves it at its end.

    The model's weights become the run's state at the beginning. Without `on_event`, the most important events are
    written to stderr. `swarm` is the membership, once the training has begun.
    """

    def __init__(
        self, link: str, *, config: PeerConfig | None = None, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._guest = Guest(link, config, on_event)
        self._hook: Any = None
        self._losses: list[Tensor] = []
        self._is_share = False
        """Whether the model returns a micro-batch's share of the step's loss, not its mean."""
        self._tokens = 0

    @property
    def swarm(self) -> Swarm | None:
        """The membership while training runs, and the last one afterwards."""
        return self._guest.swarm

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the run."""
        check_arguments(args)
        model = kwargs["model"]
        self._guest.enter(model, [kwargs["optimizer"]], kwargs["train_dataloader"])
        if self._hook is not None:
            self._hook.remove()
        self._hook = model.register_forward_hook(self._watch, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step that Trainer has made."""
        losses, tokens = self._losses, self._tokens
        self._losses, self._tokens = [], 0
        loss = None
        if losses:
            loss = torch.stack(losses).sum() if self._is_share else torch.stack(losses).mean()
        if self._guest.after_step(loss, max(tokens, 1)):
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the run."""
        if self._hook is not None:
            self._hook.remove()
        self._guest.leave()

    def _watch(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note the loss and the tokens of a training pass: Trainer tells neither to its callbacks."""
        if not model.training or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and not loss.ndim:
            self._losses.append(loss.detach())
        self._is_share = named.get("num_items_in_batch") is not None
        self._tokens += count_tokens(named or inputs)


def check_arguments(args: Any) -> None:
    """Raise `UsageError` for what `SwarmCallback` does not support."""
    remedy = "start Trainer with torchrun and without it: every process then holds the model"
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise UsageError(f"SwarmCallback does not support {name}, which keeps the weights to itself", remedy=remedy)
    if args.n_gpu > 1:
        raise UsageError(
            f"SwarmCallback does not support DataParallel over {args.n_gpu} GPUs",
            remedy="start with torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES=0",
        )
