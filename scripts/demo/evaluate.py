"""The held-out loss of a run's model, and a sample of its text."""

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
"""128 sequences: the standard error of their mean loss is about 1 %, far below the loss reduction of any demo."""
PROMPT_TOKENS = 64
"""A line or two, enough context to continue the text in kind."""
NEWLINE = ord("\n")
SAMPLE_TOKENS = 320
"""A paragraph: long enough to see words and indentation."""
TEMPERATURE = 0.8
"""Between 1, where a small model emits noise, and 0, where it repeats itself (Holtzman et al., 2020)."""


class Evaluation:
    """The built-in model of a run, freshly initialized from the run's seed, and its held-out text.

    It sets torch to one thread for the whole process: two threads spin while they wait for each other, and beside one
    busy process they were 25 times slower than one (docs/log.md).
    """

    def __init__(self, manifest: Manifest) -> None:
        torch.set_num_threads(1)
        source = open_data(manifest.data, PeerConfig(), mine=True)
        self._batches = list(heldout_batches(source, batch_size=BATCH_SIZE, num_batches=NUM_BATCHES))
        self._seed = manifest.seed
        self._model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed)

    @property
    def num_parameters(self) -> int:
        """The number of trainable parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def load(self, path: Path) -> None:
        """Load the parameters that a peer saved. Raises `LocalError` if they do not fit this model."""
        try:
            load_model(self._model, path)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise LocalError(f"{path} does not hold the run's model: {error}") from error

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean cross-entropy per token, in nats."""
        return statistics.fmean(float(self._model(batch[:, :-1], batch[:, 1:])) for batch in self._batches)

    def sample(self) -> tuple[str, str]:
        """Return a prompt from the held-out text and the model's continuation, without control characters."""
        text = self._batches[0][0]
        start = text.tolist().index(NEWLINE) + 1 if NEWLINE in text[:PROMPT_TOKENS] else 0  # Not in mid-line.
        prompt = text[start : start + PROMPT_TOKENS]
        assert isinstance(self._model, GPT)
        generator = torch.Generator().manual_seed(self._seed)
        tokens = self._model.generate(prompt, SAMPLE_TOKENS, temperature=TEMPERATURE, generator=generator)
        return _readable(prompt), _readable(tokens)


def _readable(tokens: torch.Tensor) -> str:
    """Decode bytes to text without control characters, since a model may emit a terminal's escape sequences."""
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)
