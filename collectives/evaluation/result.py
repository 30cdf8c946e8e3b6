"""The result of an evaluation: the median of the losses that the drawn members have stated. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Each prompt with its continuation, of the member whose loss is the median or next below it; texts are plain."""

    def figures(self) -> dict[str, object]:
        """Return the same for programs."""
        samples = [{"prompt": prompt, "text": text} for prompt, text in self.samples]
        return {"round": self.round, "loss": self.loss, "by": list(self.by), "samples": samples}


def result_of(stated: Mapping[PeerId, EvaluationBody], prompts: Sequence[str]) -> EvaluationResult:
    """Return the result of an evaluation that at least one drawn member has stated, each checked (`DueEvaluation.open`)."""
    order = sorted(stated, key=lambda peer: (stated[peer].loss, peer))
    middle = stated[order[(len(order) - 1) // 2]]
    samples = tuple(
        (plain_text(prompt), plain_text(text)) for prompt, text in zip(prompts, middle.samples, strict=False)
    )
    loss = statistics.median(stated[peer].loss for peer in order)
    return EvaluationResult(middle.round, loss, tuple(sorted(stated)), samples)
