"""What a drawn member states about the shared model after a round: the body of an `eval` record, and its limits. Pure.

The record stands in the directory under the member's key, and the next one replaces it. Whoever reads it knows from the
certificate who was drawn (`collectives.evaluation`). What it states is measured by its author alone.
"""

from dataclasses import dataclass
from typing import Annotated

from ...peer.base.digest import DIGEST_BYTES
from ...peer.base.errors import ProtocolViolation
from ...peer.wire import MAX_COUNT
from ...peer.wire.schema import Between, Size, decode
from ..records import Record
from ..run.manifest import MAX_PROMPTS

EVAL_KIND = "eval"
MAX_EVALUATION_BYTES = 6_000
EVALUATION_LIFETIME = 86_400.0
"""Seconds: longer than the rounds between two evaluations; the records of a run that has ended are gone after a day."""
MAX_SAMPLE_BYTES = 1_200
"""Of what follows one prompt: four of them fit."""
MAX_STATED_LOSS = 1e6
"""Nats per token. A uniform guess among a million tokens has 14."""


@dataclass(frozen=True, slots=True)
class EvaluationBody:
    """A member's evaluation of the state that a certificate leads to, on the run's held-out data."""

    round: Annotated[int, Between(1, MAX_COUNT)]
    certificate: Annotated[bytes, Size(DIGEST_BYTES, DIGEST_BYTES)]
    """The hash of that round's certificate."""
    loss: Annotated[float, Between(0.0, MAX_STATED_LOSS)]
    """The mean loss in nats per token."""
    tokens: Annotated[int, Between(1, MAX_COUNT)]
    """The held-out tokens that it was measured on."""
    samples: Annotated[tuple[Annotated[str, Size(MAX_SAMPLE_BYTES)], ...], Size(MAX_PROMPTS)] = ()
    """What the model continues each prompt of the manifest with, in their order; empty or fewer where time was short."""


def open_evaluation(record: Record) -> EvaluationBody:
    """Decode the body of an `eval` record and check its signature. Raises `RemoteError`."""
    if record.kind != EVAL_KIND:
        raise ProtocolViolation(f"expected an {EVAL_KIND!r} record, got {record.kind!r}")
    body = decode(EvaluationBody, record.body, max_bytes=MAX_EVALUATION_BYTES)
    if record.sequence != body.round:
        raise ProtocolViolation(f"an evaluation of round {body.round} with sequence {record.sequence}")
    record.check()
    return body
