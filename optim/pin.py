"""The layout of a manifest's model, printed by a process of its own: `run create` goes on as a keeper, without torch.

    echo '["gpt", {"size": "0.2m"}, 0, ""]' | python -P -m flockstep.optim.pin     # name, options, seed, folder of modules
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..peer.errors import LocalError

PIN_SECONDS = 600.0
"""A hang's limit: weights of a hub may have to be downloaded."""


def layout_of_model(name: str, options: Mapping[str, Any], seed: int, folder: str = "") -> str:
    """Return the layout of a model of one's own manifest (`FlatLayout.pin`). Raises `LocalError`.

    A function is imported from `folder`, too, if one is named: after all that is installed, so that nothing there is hidden.
    """
    if "torch" in sys.modules:
        return _pin(name, options, seed, folder)
    command = [sys.executable, "-P", "-m", __name__]
    question = json.dumps([name, dict(options), seed, folder])
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=PIN_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"the model {name} was not built in {PIN_SECONDS:g} s") from error
    if done.returncode:
        raise LocalError((done.stderr.strip().splitlines() or ["it ended without a reason"])[-1])
    return done.stdout.splitlines()[-1].strip()  # A module may print something while it is imported.


def _pin(name: str, options: Mapping[str, Any], seed: int, folder: str) -> str:
    from .flat import FlatLayout
    from .models.registry import build_model

    with _importable(folder):
        model = build_model(name, options, seed=seed, allow_model=name)
    return str(FlatLayout.of(model).pin())


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    before = list(sys.path)
    sys.path += [folder] if folder else []
    try:
        yield
    finally:
        sys.path[:] = before


if __name__ == "__main__":
    from ..peer.errors import FlockstepError

    try:
        sys.stdout.write(_pin(*json.load(sys.stdin)) + "\n")
    except FlockstepError as error:
        sys.exit(f"{error}")
