"""How good a run's model is on text that no peer trained on, and what it writes."""

import statistics
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model

from ...dht.run.manifest import Manifest
from ...optim.data.sources import heldout_batches, open_data
from ...optim.models.gpt import GPT
from ...optim.models.registry import build_model
from ...peer.config import PeerConfig
from ...peer.errors import LocalError

NUM_BATCHES, BATCH_SIZE = 8, 16
"""128 sequences: the standard error of their mean loss is about 1 %, a fraction of what any demo learns."""
PROMPT_TOKENS = 64
"""A line or two: enough for the model to see what kind of text it is to write."""
NEWLINE = ord("\n")
SAMPLE_TOKENS = 320
"""A paragraph: long enough to see words and indentation."""
TEMPERATURE = 0.8
"""Between 1, where a small model stammers noise, and 0, where it repeats itself (Holtzman et al., 2020)."""


class Evaluation:
    """The built-in model of a run, freshly initialized from the run's seed, and its held-out text.

    It takes one thread of torch for the whole process: two threads wait for each other by spinning, so that beside one
    busy process they were 25 times slower than one (docs/log.md).
    """

    def __init__(self, manifest: Manifest) -> None:
        torch.set_num_threads(1)
        source = open_data(manifest.data, PeerConfig())
        self._batches = list(heldout_batches(source, batch_size=BATCH_SIZE, num_batches=NUM_BATCHES))
        self._seed = manifest.seed
        self._model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed)

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def load(self, path: Path) -> None:
        """Take the parameters that a peer saved. Raises `LocalError` if they are not this model's."""
        try:
            load_model(self._model, path)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise LocalError(f"{path} does not hold the run's model: {error}") from error

    @torch.no_grad()
    def loss(self) -> float:
        """Mean cross-entropy per token, in nats."""
        return statistics.fmean(float(self._model(batch[:, :-1], batch[:, 1:])) for batch in self._batches)

    def sample(self) -> tuple[str, str]:
        """A beginning from the held-out text, and how the model goes on; both without control characters."""
        text = self._batches[0][0]
        start = text.tolist().index(NEWLINE) + 1 if NEWLINE in text[:PROMPT_TOKENS] else 0  # Not in mid-line.
        prompt = text[start : start + PROMPT_TOKENS]
        assert isinstance(self._model, GPT)
        generator = torch.Generator().manual_seed(self._seed)
        tokens = self._model.generate(prompt, SAMPLE_TOKENS, temperature=TEMPERATURE, generator=generator)
        return _readable(prompt), _readable(tokens)


def _readable(tokens: torch.Tensor) -> str:
    """Bytes as text that is safe to print: a model may well write the escape sequences of a terminal."""
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)
