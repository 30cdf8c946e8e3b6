"""Home folders as peers and keepers leave them, without a run."""

from pathlib import Path

import numpy as np
from flockstep.collectives.chain.chain import start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import Draft
from flockstep.dht.run.manifest import SignedManifest
from flockstep.optim.models.kept import keep_buffers, keep_model, parts_of
from flockstep.optim.step.flat import FlatLayout
from flockstep.peer.log.telemetry import Telemetry
from torch import nn


def home_of(
    model: nn.Module, home: Path, *, run: str = "a" * 52, round_: int = 10, keeper: SignedManifest | None = None
) -> Path:
    """A home folder in which a peer has trained this model, or a keeper of this run has kept it."""
    folder = home / "runs" / run
    leaves, draft = _draft(model, folder / "checkpoints" / str(round_))
    described = FlatLayout.of(model).describe() if keeper is None else ()
    draft.finish(run, start_of_run(merkle.root(leaves)), described, leaves)
    if keeper is not None:
        (folder / "manifest").write_bytes(keeper.publishable)
        return home
    parts = parts_of(model)
    keep_model(model, parts, folder, Telemetry())
    keep_buffers(model, parts, folder, Telemetry())
    return home


def _draft(model: nn.Module, folder: Path) -> tuple[list[bytes], Draft]:
    layout = FlatLayout.of(model)
    theta, momentum = np.empty(layout.size, np.float32), np.zeros(layout.size, np.float32)
    layout.gather(model, theta)
    leaves = [*merkle.leaves(theta), *merkle.leaves(momentum)]
    draft = Draft(folder, layout.size)
    spans = [
        merkle.leaf_bytes(vector, *span) for vector in (theta, momentum) for span in merkle.leaf_spans(layout.size)
    ]
    for index, data in enumerate(spans):
        draft.put(index, bytes(data))
    return leaves, draft
