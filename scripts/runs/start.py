"""`[model] from` of a `run.toml`: a run's first state from a checkpoint or an export, put where its owner's peer finds it.

The manifest pins the state root; the state itself becomes the owner's checkpoint of round 0. Its peer restores that and
provides it, and the others take it from members as they take any state (`optim.member.catch_up`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...collectives.chain.chain import start_of_run
from ...collectives.state import merkle
from ...collectives.state.checkpoint_file import Draft
from ...collectives.vector.arrays import Floats
from ...dht.run.manifest import Model
from ...optim.models.gpt_config import gpt_config
from ...optim.models.kept import MODEL, load_tensors
from ...optim.models.registry import build_model
from ...optim.step.flat import FlatLayout
from ...peer.base.errors import UsageError
from ..checkpoints.newest import manifest_beside, open_newest


@dataclass(frozen=True, slots=True, eq=False)
class FirstState:
    """The state that a run starts from: given parameters, and m zero."""

    theta: Floats
    layout: FlatLayout
    leaves: tuple[bytes, ...]
    """The hashes of θ's leaves, then of m's."""

    @property
    def root(self) -> bytes:
        """Its state root."""
        return merkle.root(self.leaves)

    def keep(self, run: str, run_folder: Path) -> Path:
        """Write it as the checkpoint of round 0 of a run. Returns the checkpoint's folder; raises `LocalError`."""
        folder = run_folder / "checkpoints" / "0"
        draft = Draft(folder, self.theta.size)
        try:
            vectors = self.theta, np.zeros_like(self.theta)
            spans = [(vector, *span) for vector in vectors for span in merkle.leaf_spans(vector.size)]
            for index, span in enumerate(spans):
                draft.put(index, merkle.leaf_bytes(*span))
            draft.finish(run, start_of_run(self.root), self.layout.describe(), self.leaves)
        finally:
            draft.close()
        return folder


def read_first_state(source: Path, model: Model) -> FirstState:
    """Read the parameters of a model from a checkpoint (see `newest.find_checkpoint`) or an export. Raises `LocalError`."""
    where = f"[model] from {source}"
    if model.name != "gpt":
        remedy = 'leave it out: name = "hf:FOLDER" starts from the weights in a folder'
        raise UsageError(f"{where}: {model.name} is no gpt", remedy=remedy)
    layout = FlatLayout.of(build_model(model.name, model.options, seed=0))
    given = _parameters_in(source, model, layout, where)
    wanted = {tensor.name: tensor.shape for tensor in layout.tensors}
    found = {name: tuple(tensor.shape) for name, tensor in given.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UsageError(
                f"{where} holds another model: {name} {_described(found.get(name))} there, and "
                f"{_described(wanted.get(name))} in this one",
                remedy="give [model] the options of the run that it comes from",
            )
    theta = np.zeros(layout.size, np.float32)
    for tensor in layout.tensors:
        theta[tensor.start : tensor.stop] = given[tensor.name].to(torch.float32).numpy().ravel()
    if (broken := layout.diverged(theta)) is not None:
        raise UsageError(f"{where}: {broken} is not finite, or enormous", remedy="name an earlier checkpoint or export")
    leaves = merkle.leaves(theta) + merkle.leaves(np.zeros_like(theta))
    return FirstState(theta, layout, tuple(leaves))


def _described(shape: tuple[int, ...] | None) -> str:
    return "is missing" if shape is None else f"has the shape {shape}"


def _parameters_in(source: Path, model: Model, layout: FlatLayout, where: str) -> Mapping[str, Tensor]:
    file = source / MODEL if source.is_dir() else source
    if file.is_file():
        return load_tensors(file)
    if not source.is_dir():
        remedy = "name a home folder, a run's folder in it, a checkpoint, or what `flockstep export` has written"
        raise UsageError(f"{where}: there is no such file or folder", remedy=remedy)
    checkpoint, theta = open_newest(source)
    tensors = checkpoint.tensors
    if not tensors:  # A keeper wrote it, which knows no names: they are those of its run's model.
        kept = manifest_beside(checkpoint.folder).manifest.model
        if kept.name != model.name or gpt_config(kept.options) != gpt_config(model.options):
            raise UsageError(f"{where} holds another model", remedy="give [model] the options of the run that it comes from")
        tensors = layout.describe()
    return {
        item.name: torch.from_numpy(theta[item.offset : item.offset + prod(item.shape)]).view(item.shape) for item in tensors
    }
