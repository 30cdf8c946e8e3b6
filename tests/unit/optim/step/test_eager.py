"""torch's optimizers without its compiler."""

import subprocess
import sys

import torch
from flockstep.optim.step.eager import AdamW
from torch import nn

STEP = """
import sys
from flockstep.dht.run.manifest import Inner
from flockstep.optim.step.inner import InnerOptimizers, build_inner
from flockstep.optim.models.registry import build_model
import torch
model = build_model("gpt", {"size": "0.2m"}, seed=0)
inner = InnerOptimizers(build_inner(model, Inner()))
tokens = torch.zeros(1, 9, dtype=torch.long)
model(tokens[:, :-1], tokens[:, 1:]).backward()
inner.step()
print("torch.optim.adamw" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_a_training_step_does_not_load_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_adamw_makes_the_steps_of_torchs() -> None:
    ours, theirs = (nn.Linear(3, 4) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    made = [
        kind(model.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
        for kind, model in ((AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    seen: list[torch.optim.Optimizer] = []
    for optimizer in made:
        optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    for number in range(3):
        for optimizer, model in zip(made, (ours, theirs), strict=True):

            def closure(model: nn.Module = model, number: int = number) -> torch.Tensor:
                loss: torch.Tensor = model(torch.full((2, 3), float(number))).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]  # of torch
                return loss

            with torch.no_grad():
                expected = model(torch.full((2, 3), float(number))).square().sum()
            assert torch.equal(optimizer.step(closure), expected)
            optimizer.zero_grad()
    assert seen == made * 3
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None
