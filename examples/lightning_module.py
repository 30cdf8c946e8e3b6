"""Train a LightningModule with others: Lightning's Trainer gets one callback.

    python examples/lightning_module.py          # publishes a run on this computer, and prints the link to it
    python examples/lightning_module.py LINK     # in other terminals: joins that run

Needs `pip install '.[lightning]'`.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from flockstep import PeerConfig, Swarm, local_run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning
    from flockstep.lightning import SwarmCallback
except ImportError as error:
    print(f"this example needs pip install '.[lightning]': {error}", file=sys.stderr)
    sys.exit(2)

RUN = """
name = "lightning"
[data]
source = "own"
[inner]
steps = 20                # Steps of the module's optimizer between two rounds.
[outer]
rounds = 5
lr = 1.0
momentum = 0.0
"""


class Sine(lightning.LightningModule):
    """Learns the sine of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return (self.layers(x) - y).square().mean()

    def configure_optimizers(self) -> dict[str, object]:
        """Make the optimizer and its scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(link: str) -> nn.Module:
    """Train until the run is finished."""
    torch.set_num_threads(1)
    x = torch.linspace(-3, 3, 1024)[:, None]
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=64, shuffle=True)
    module = Sine()
    trainer = lightning.Trainer(
        max_epochs=-1,  # Until the run ends.
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[SwarmCallback(link, config=PeerConfig(home=Path(tempfile.mkdtemp()), port=0))],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    print(f"after {trainer.global_step} steps: error {(module.layers(x) - x.sin()).square().mean().item():.4f}")
    return module


def main() -> None:
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else local_run(RUN, Swarm.layout_of(Sine())) as link:
        print(f"join with: python {sys.argv[0]} '{link}'", flush=True)
        train(link)


if __name__ == "__main__":
    main()
