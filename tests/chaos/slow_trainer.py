"""A member that trains a line and thinks for a while before each step, so that its network process has little to do.

    cd tests && python -m chaos.slow_trainer LINK HOME SEED SECONDS
"""

import json
import sys
import time
from pathlib import Path

import torch
from flockstep import PeerConfig, Swarm
from flockstep.peer.telemetry import Event
from support.trainers import dataset
from torch import nn


def say(event: Event) -> None:
    """Print an event as a line of JSON, with the wall time."""
    print(json.dumps({**event, "at": time.time()}), flush=True)  # noqa: T201


def main() -> None:
    """Train until the run is finished."""
    link, home, seed, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    model = nn.Linear(3, 1, bias=False)
    inner = torch.optim.AdamW(model.parameters(), lr=0.2)
    with Swarm(link, model, inner, config=PeerConfig(home=Path(home), upnp=False), on_event=say) as swarm:
        for x, y in swarm.share_of(dataset(int(seed)), batch_size=16):
            time.sleep(float(seconds))
            loss = (model(x) - y).square().mean()
            loss.backward()
            swarm.step(loss)
            if swarm.finished:
                break


if __name__ == "__main__":
    main()
