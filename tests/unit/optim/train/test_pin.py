"""The layout of a manifest's model, computed without torch in the process that asks."""

import subprocess
import sys
from pathlib import Path

import pytest
from flockstep.optim.train.pin import pin_model
from flockstep.peer.base.errors import FlockstepError

OWN = """
from flockstep.optim.models.registry import build_model

print("a module may say what it likes")

def make():
    return build_model("gpt", {"size": "0.2m"}, seed=1)
"""


def test_a_process_without_torch_gets_the_same_layout_and_the_same_reasons(tmp_path: Path) -> None:
    (tmp_path / "lent_gpt.py").write_text(OWN)
    code = f"""
import sys
from flockstep.optim.train.pin import pin_model
print(*pin_model("lent_gpt:make", {{}}, 0, {str(tmp_path)!r}))
try:
    pin_model("gpt", {{"size": "tiny"}}, 0)
except Exception as error:
    print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    layout, reason, has_torch = done.stdout.splitlines()
    assert layout.split() == [str(each) for each in pin_model("gpt", {"size": "0.2m"}, 0)]
    assert has_torch == "False"
    with pytest.raises(FlockstepError) as refused:
        pin_model("gpt", {"size": "tiny"}, 0)
    assert str(refused.value) == reason
