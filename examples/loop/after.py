"""The loop of `before.py` with others: `diff before.py after.py` shows all changes.

    python examples/loop/after.py LINK

It needs the link of a run with `[data] source = "own"` that pins this model, or none: `flockstep run create` prints it.
"""

import sys

import torch
from flockstep import Swarm
from torch import nn
from torch.utils.data import TensorDataset


def main() -> None:
    if len(sys.argv) != 2:
        print("this example needs the link of a run: flockstep run create prints one", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    x = torch.linspace(-3, 3, 1024)[:, None]
    dataset = TensorDataset(x, x.sin())
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    with Swarm(sys.argv[1], model, optimizer) as swarm:
        for inputs, targets in swarm.share_of(dataset, batch_size=64):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            swarm.step(loss)
            if swarm.finished:
                break

    print(f"error {(model(x) - x.sin()).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
