"""The result of an evaluation: the median of the losses that the drawn members have stated. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile, zip_longest

from ...dht.members.evaluation import EvaluationBody
from ...peer.base.plain import plain_lines, plain_text
from ...peer.base.transport import PeerId


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What is known of the shared model after a round."""

    round: int
    loss: float
    """The median of the stated losses, nats per token."""
    by: tuple[PeerId, ...]
    """Who has stated one."""
    samples: tuple[tuple[str, str], ...]
    """Each prompt with its continuation as far as two members state the same, or if one alone was drawn; texts are plain."""

    def figures(self) -> dict[str, object]:
        """Return the same for programs."""
        samples = [{"prompt": prompt, "text": text} for prompt, text in self.samples]
        return {"round": self.round, "loss": self.loss, "by": list(self.by), "samples": samples}


def result_of(stated: Mapping[PeerId, EvaluationBody], prompts: Sequence[str], num_drawn: int) -> EvaluationResult:
    """Return the result of an evaluation that some of the drawn members have stated, each checked (`DueEvaluation.open`).

    The model writes the likeliest tokens, so honest members mostly state the same, each as far as its time has reached. What
    one alone states may be a lie: a liar needs no time to evaluate, and may be the first of those that were drawn, or the
    only one. No liar shortens what two others have in common.
    """
    order = sorted(stated, key=lambda peer: (stated[peer].loss, peer))
    needed = min(2, num_drawn)
    samples = []
    for prompt, *texts in zip_longest(prompts, *(stated[peer].samples for peer in order)):
        said = [text for text in texts if text]
        text = max((_beginning_of(alike) for alike in combinations(said, needed)), key=len, default="")
        if prompt is not None and text:
            samples.append((plain_text(prompt), plain_lines(text)))
    loss = statistics.median(stated[peer].loss for peer in order)
    return EvaluationResult(stated[order[0]].round, loss, tuple(sorted(stated)), tuple(samples))


def _beginning_of(texts: Sequence[str]) -> str:
    """Return what all these texts begin with."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return texts[0][: sum(1 for _ in same)]
