"""Train with Hugging Face's Accelerate and with others: the loop of its documentation, and one line after each step.

    python examples/accelerate_loop.py          # publishes a run on this computer, and prints the link to it
    python examples/accelerate_loop.py LINK     # in other terminals: joins that run

Needs `pip install '.[hf]'`.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from flockstep import PeerConfig, Swarm, local_run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator
except ImportError as error:
    print(f"this example needs pip install '.[hf]': {error}", file=sys.stderr)
    sys.exit(2)

RUN = """
name = "accelerate"
[data]
source = "own"
[inner]
steps = 20                # Steps of the loop's optimizer between two rounds.
[outer]
rounds = 5
lr = 1.0
momentum = 0.0
"""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))


def train(link: str) -> nn.Module:
    """Train until the run is finished."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.linspace(-3, 3, 1024)[:, None]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=64, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    with Swarm(link, model, optimizer, config=PeerConfig(home=Path(tempfile.mkdtemp()), port=0)) as swarm:
        while not swarm.finished:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = (model(inputs) - targets).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    swarm.after_step(loss, tokens=2 * len(inputs))
                    if swarm.finished:
                        break
    print(f"after round {swarm.round}: error {(model(x) - x.sin()).square().mean().item():.4f}")
    return model


def main() -> None:
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else local_run(RUN, Swarm.layout_of(network())) as link:
        print(f"join with: python {sys.argv[0]} '{link}'", flush=True)
        train(link)


if __name__ == "__main__":
    main()
