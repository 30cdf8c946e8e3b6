"""Train a small convolutional network to classify shapes, alone or with others.

    python examples/cnn.py          # publishes a run on this computer, trains it alone, and is done in seconds
    python examples/cnn.py 2        # publishes a run that waits until two train, and prints the link to it
    python examples/cnn.py LINK     # in another terminal: joins that run
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from flockstep import PeerConfig, Swarm, local_run
from torch import Tensor, nn
from torch.utils.data import TensorDataset

RUN = """
name = "shapes"
[data]
source = "own"            # Every peer has its own data: see `images`.
[inner]
optimizer = "adamw"
steps = 20                # Inner steps between two rounds.
[outer]
rounds = 6
lr = 1.0
momentum = 0.0
"""
SIZE = 16


def images(count: int, seed: int) -> TensorDataset:
    """Noisy pictures, (count, 1, 16, 16), of a horizontal bar, a vertical one, a diagonal or a square."""
    random = torch.Generator().manual_seed(seed)
    pictures = 0.5 * torch.randn(count, 1, SIZE, SIZE, generator=random)
    kinds = torch.randint(4, (count,), generator=random)
    for picture, kind in zip(pictures[:, 0], kinds, strict=True):
        x, y = torch.randint(SIZE - 6, (2,), generator=random).tolist()
        match int(kind):
            case 0:
                picture[y, x : x + 6] += 2
            case 1:
                picture[y : y + 6, x] += 2
            case 2:
                picture[range(y, y + 6), range(x, x + 6)] += 2
            case 3:
                picture[y : y + 3, x : x + 3] += 2
    return TensorDataset(pictures, kinds)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),  # Its running statistics are buffers, which are not averaged.
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def accuracy(model: nn.Module) -> float:
    pictures, kinds = images(500, seed=0).tensors
    model.eval()
    with torch.no_grad():
        right: Tensor = model(pictures).argmax(1) == kinds
    model.train()
    return float(right.float().mean())


def main() -> None:
    torch.set_num_threads(1)
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = PeerConfig(home=Path(tempfile.mkdtemp()), port=0)
    argument = sys.argv[1] if len(sys.argv) > 1 else "1"
    is_link = not argument.isdecimal()
    admission = "" if is_link else f"[admission]\nmin_peers = {int(argument) + 1}\n"  # The run's keeper is one more.
    with nullcontext(argument) if is_link else local_run(RUN + admission, Swarm.layout_of(model)) as link:
        print(f"join with: python {sys.argv[0]} '{link}'", flush=True)
        with Swarm(link, model, inner, config=config) as swarm:
            for pictures, kinds in swarm.share_of(images(2000, seed=1), batch_size=32):
                loss = F.cross_entropy(model(pictures), kinds)
                loss.backward()
                report = swarm.step(loss)
                if report.averaged:
                    print(f"round {report.round}: {accuracy(model):.1%} of unseen pictures classified correctly", flush=True)
                if swarm.finished:
                    break


if __name__ == "__main__":
    main()
