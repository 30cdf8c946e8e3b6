"""Many kinds of models, tiny: two peers, two rounds, the same state, and an export that gives the same outputs.

    scripts/test tests/integration/test_zoo.py          # seven of them, as in the gate
    scripts/test tests/integration/test_zoo.py --zoo    # all, five minutes; of timm and torchvision where they are installed
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flockstep.scripts.checkpoints.export import export
from safetensors.torch import load_file
from support.trainers import PATIENCE, RUN
from support.zoo import IN_THE_GATE, ZOO, Animal, Batch, Tamer
from torch import nn

pytest.importorskip("transformers")


NAMES = [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.zoo) for name in ZOO]


@pytest.mark.parametrize("name", NAMES)
def test_two_peers_end_alike_and_the_export_gives_the_same_outputs(
    name: str, publish: Callable[..., str], tmp_path: Path
) -> None:
    if (package := name.partition("-")[0]) in ("timm", "torchvision"):
        pytest.importorskip(package)
    animal = ZOO[name]
    link = publish(RUN.format(rounds=2, peers=2).replace("steps = 10", "steps = 3"), "a")
    peers = [Tamer(link, tmp_path / home, animal) for home in "ab"]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(timeout=PATIENCE)
        assert [each.error for each in peers] == [None, None]
        assert not peer.is_alive(), peer.events[-5:]
    assert peers[0].root == peers[1].root != ""
    export(tmp_path / "b", tmp_path / "out", lambda line: None)
    trained, batch = peers[1].model, animal.batch()
    assert torch.equal(measured(animal, loaded(animal, tmp_path / "out", trained), batch), measured(animal, trained, batch))


def loaded(animal: Animal, folder: Path, trained: nn.Module) -> nn.Module:
    """The exported model, by the class of its library if it has one."""
    if not (folder / "config.json").exists():
        model = animal.build()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model
    kind: Any = type(trained)
    found: nn.Module = kind.from_pretrained(folder)
    return found


@torch.no_grad()
def measured(animal: Animal, model: nn.Module, batch: Batch) -> torch.Tensor:
    return animal.loss(model.eval(), batch)
