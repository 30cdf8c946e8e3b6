"""`flockstep.lightning`: a callback that makes Lightning's Trainer one peer of a run.

    Trainer(max_steps=-1, callbacks=[SwarmCallback(link)]).fit(module, loader)

The LightningModule keeps its optimizers, schedulers, accumulation, clipping and precision. `docs/trainers.md` says what is
honoured. One user of lightning; absolute imports, since this file is a module of `flockstep` itself by its name (see
`flockstep.__init__`).
"""

from collections.abc import Callable
from typing import Any

import torch
from flockstep.optim.train.swarm import Swarm
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event
from flockstep.scripts.trainers.guest import Guest, count_tokens
from lightning import pytorch
from torch import Tensor

WHOLE = ("SingleDeviceStrategy", "DDPStrategy")
"""The strategies that keep all weights in every process."""


class SwarmCallback(pytorch.Callback):
    """Joins the run of `link` when the training begins, and leaves it at its end.

    The module's weights become the run's state at the beginning. Without `on_event`, the most important events are
    written to stderr. `swarm` is the membership, once the training has begun.
    """

    def __init__(
        self, link: str, *, config: PeerConfig | None = None, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._guest = Guest(link, config, on_event)
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._steps = 0

    @property
    def swarm(self) -> Swarm | None:
        """The membership while training runs, and the last one afterwards."""
        return self._guest.swarm

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the run."""
        strategy = type(trainer.strategy).__name__
        if strategy not in WHOLE:
            raise UsageError(
                f"SwarmCallback does not support {strategy}, which may keep the weights to itself",
                remedy='use Trainer(strategy="ddp"), or one device',
            )
        self._steps = trainer.global_step
        self._guest.enter(pl_module, trainer.optimizers, trainer.train_dataloader)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step that the loop has made; with accumulation not every batch ends in one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and not loss.ndim:
            self._losses.append(loss.detach())
        self._tokens += count_tokens(batch)
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        losses, tokens = self._losses, self._tokens
        self._losses, self._tokens = [], 0
        loss = torch.stack(losses).sum() if losses else None
        if loss is not None and not pl_module.automatic_optimization:
            loss = loss / len(losses)  # Else the loop has divided each batch's loss by how many accumulate.
        if self._guest.after_step(loss, max(tokens, 1)):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run."""
        self._guest.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run."""
        self._guest.leave()
