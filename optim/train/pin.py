"""What `run create` asks of a manifest's model, by a process of its own: it goes on as a keeper, without torch.

    echo '["gpt", {"size": "0.2m"}, 0, ""]' | python -P -m flockstep.optim.train.pin  # name, options, seed, folder of modules
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...peer.base.errors import LocalError

PIN_SECONDS = 600.0
"""A hang's limit: weights of a hub may have to be downloaded."""


class PinnedModel(NamedTuple):
    """A model as it is built: its layout (`FlatLayout.pin`), and all of its weights, frozen ones included."""

    layout: str
    num_weights: int
    weight_bytes: int
    vocab_size: int | None = None
    longest: int | None = None
    """The most inputs of a sequence; None, here and above, where its config lacks it."""


def pin_model(name: str, options: Mapping[str, Any], seed: int, folder: str = "") -> PinnedModel:
    """Build the model of one's own manifest, and return what it is. Raises `LocalError`.

    A function is imported from `folder`, too, if one is named: after all that is installed, so that nothing there is hidden.
    """
    if "torch" in sys.modules:
        return _pin(name, options, seed, folder)
    return PinnedModel(*json.loads(_asked(f"the model {name} was not built", [name, dict(options), seed, folder])))


def _asked(failure: str, question: list[Any]) -> str:
    """Return the last line that the process prints for a question. Raises `LocalError`."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=PIN_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"{failure} in {PIN_SECONDS:g} s") from error
    if done.returncode:
        raise LocalError((done.stderr.strip().splitlines() or ["it ended without a reason"])[-1])
    return done.stdout.splitlines()[-1].strip()  # A module may print something while it is imported.


def _pin(name: str, options: Mapping[str, Any], seed: int, folder: str) -> PinnedModel:
    from ..models.registry import build_model, longest_of, outline_of, vocabulary_of
    from ..step.flat import FlatLayout, bytes_of

    with importable(folder):
        model = outline_of(name, options) or build_model(name, options, seed=seed, allow_model=name)
    count = sum(parameter.numel() for parameter in model.parameters())
    layout = FlatLayout.of(model, of_values=False).pin()
    return PinnedModel(str(layout), count, bytes_of(model), vocabulary_of(model), longest_of(model))


@contextmanager
def importable(folder: str) -> Iterator[None]:
    """Let modules be imported from a folder, too, after all that is installed; nothing for an empty name."""
    before = list(sys.path)
    sys.path += [folder] if folder else []
    try:
        yield
    finally:
        sys.path[:] = before


if __name__ == "__main__":
    from ...peer.base.errors import FlockstepError

    try:
        asked = json.load(sys.stdin)
        sys.stdout.write(json.dumps(_pin(*asked)) + "\n")
    except FlockstepError as error:
        sys.exit(f"{error}")
