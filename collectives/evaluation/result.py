"""The result of an evaluation: the median of the losses that the drawn members have stated. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ...dht.members.evaluation import EvaluationBody
from ...peer.plain import plain_text
from ...peer.transport import PeerId


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What is known of the shared model after a round."""

    round: int
    loss: float
    """The median of the stated losses, nats per token."""
    by: tuple[PeerId, ...]
    """Who has stated one."""
    samples: tuple[tuple[str, str], ...]
    """Each prompt with its continuation, if two members state the same, or one alone was drawn; texts are plain."""

    def figures(self) -> dict[str, object]:
        """Return the same for programs."""
        samples = [{"prompt": prompt, "text": text} for prompt, text in self.samples]
        return {"round": self.round, "loss": self.loss, "by": list(self.by), "samples": samples}


def result_of(stated: Mapping[PeerId, EvaluationBody], prompts: Sequence[str], num_drawn: int) -> EvaluationResult:
    """Return the result of an evaluation that some of the drawn members have stated, each checked (`DueEvaluation.open`).

    The model writes the likeliest tokens, so honest members mostly state the same; what one alone states may be a lie. A
    liar needs no time to evaluate: it may be the first of those that were drawn, or the only one.
    """
    order = sorted(stated, key=lambda peer: (stated[peer].loss, peer))
    needed = min(2, num_drawn)
    samples = []
    for prompt, *texts in zip_longest(prompts, *(stated[peer].samples for peer in order)):
        text, count = Counter(filter(None, texts)).most_common(1)[0] if any(texts) else ("", 0)
        if prompt is not None and count >= needed:
            samples.append((plain_text(prompt), plain_text(text)))
    loss = statistics.median(stated[peer].loss for peer in order)
    return EvaluationResult(stated[order[0]].round, loss, tuple(sorted(stated)), tuple(samples))
