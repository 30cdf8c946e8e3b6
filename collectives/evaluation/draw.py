"""The members that evaluate the state after a round, drawn by its cut. Pure.

Every so many rounds a few of the contributors whose tokens counted are drawn, in the order of a hash of the certified cut and
peer. The cut binds all commits, and nonces that their owners committed to before they saw the commits. It is fixed before the
outputs: drawn by the whole certificate, the owner whose output comes last could try small lies about it until the draw
suits it. What is left is the proposer's choice of nonces. A keeper contributes nothing and is never drawn.
"""

from dataclasses import dataclass

from ...dht.members.evaluation import EvaluationBody, open_evaluation
from ...dht.records import Record
from ...dht.run.manifest import EvalSettings, SignedManifest
from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.errors import ProtocolViolation
from ...peer.base.transport import PeerId
from ..chain.certificate import certificate_hash, settings_after, value_of

EVALUATORS = 3
"""Peers of one evaluation: with three the median is one honest peer's loss, or between two of them, whatever one states."""


def evaluation_after(certificate: wire.Certificate | None, signed: SignedManifest) -> EvalSettings:
    """Return how the state after a certificate is evaluated."""
    return settings_after(certificate, signed).eval


@dataclass(frozen=True, slots=True)
class DueEvaluation:
    """An evaluation that is due after a certified round."""

    run: str
    round: int
    certificate: bytes
    """The hash of the round's certificate."""
    evaluators: tuple[PeerId, ...]
    """The drawn members, in order."""
    prompts: tuple[str, ...] = ()
    """What they have the model continue."""

    @classmethod
    def after(cls, certificate: wire.Certificate | None, settings: EvalSettings) -> "DueEvaluation | None":
        """Return the evaluation that is due after a round of a validated certificate; None if none is."""
        if certificate is None or not settings.every or certificate.slot.round % settings.every:
            return None
        value = value_of(certificate)
        credited = zip(value.contributors, value.credit, strict=True)
        peers = [value.members[index] for index, tokens in credited if tokens]
        drawn = sorted(peers, key=lambda peer: keyed("drawn to evaluate", value.cut, peer.encode()))
        return cls(value.run, value.round, certificate_hash(certificate), tuple(drawn[:EVALUATORS]), settings.prompts)

    def open(self, record: Record) -> EvaluationBody:
        """Return what a drawn member states about this evaluation. Raises `RemoteError` for any other record."""
        if record.run != self.run or record.peer not in self.evaluators:
            raise ProtocolViolation(f"an evaluation by {record.peer!r}, which was not drawn for it")
        body = open_evaluation(record)
        if (body.round, body.certificate) != (self.round, self.certificate):
            raise ProtocolViolation(f"an evaluation of another state than that of round {self.round}")
        return body
