"""A plain PyTorch training loop, as in any tutorial; `after.py` is the same one with others.

    python examples/loop/before.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.set_num_threads(1)
    x = torch.linspace(-3, 3, 1024)[:, None]
    dataset = TensorDataset(x, x.sin())
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    for _ in range(20):
        for inputs, targets in DataLoader(dataset, batch_size=64, shuffle=True):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    print(f"error {(model(x) - x.sin()).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
