"""Reads the evaluations of a run for those who watch it: what the drawn members have stated, from the directory.

The directory holds the newest record of each member alone. So a reader that comes late sees the last evaluations, and one
that stays keeps each that it has read. What is read is signed by a member that the certificate has drawn; the loss is the
median of what these state (`evaluation.result`).
"""

from collections.abc import Sequence

from ...dht.directory.interface import Directory
from ...dht.keys import evaluation_key
from ...dht.members.evaluation import EvaluationBody
from ...dht.records import Record
from ...peer.base.errors import NetworkError, RemoteError
from ...peer.base.transport import PeerId
from ...peer.log.telemetry import Telemetry
from ..evaluation.draw import DueEvaluation
from ..evaluation.result import result_of
from ..picture.fold import MAX_DUE
from ..picture.picture import RunEvaluation, Sample

LAST_DUE = 8
"""Evaluations that are looked for: 24 keys of the directory, where the drawn peers are all different."""
SAMPLE_SHOWN = 1_200
"""Characters of a sample that are shown."""


class ScoreReader:
    """The evaluations of one run, as one reader has seen them."""

    def __init__(self, directory: Directory, run: str, telemetry: Telemetry) -> None:
        self._directory = directory
        self._run = run
        self._telemetry = telemetry
        self._stated: dict[bytes, dict[PeerId, EvaluationBody]] = {}
        """By certificate and peer, what was stated; the oldest forgotten first."""

    async def look(self, due: Sequence[DueEvaluation]) -> None:
        """Read what the members drawn for the last of these evaluations state."""
        last = {one.round: one for one in due[-LAST_DUE:]}
        drawn = {peer for one in last.values() for peer in one.evaluators if peer not in self._of(one)}
        for peer in sorted(drawn):
            try:
                value = await self._directory.get(evaluation_key(self._run, peer))
                if value is not None and (one := last.get((record := Record.decode(value)).sequence)) is not None:
                    self._stated.setdefault(one.certificate, {})[peer] = one.open(record)
            except NetworkError as error:
                self._telemetry.emit("eval.unread", peer=peer, step="watch a run", reason=str(error), round=max(last))
            except RemoteError as error:
                self._telemetry.emit("eval.refused", peer=peer, step="watch a run", reason=str(error), round=max(last))
        while len(self._stated) > MAX_DUE:
            del self._stated[next(iter(self._stated))]

    def shown(self, due: Sequence[DueEvaluation]) -> tuple[RunEvaluation, ...]:
        """Return what is known of these evaluations, in order."""
        stated = [(one, self._of(one)) for one in due]
        found = [result_of(bodies, one.prompts, len(one.evaluators)) for one, bodies in stated if bodies]
        return tuple(
            RunEvaluation(
                one.round,
                one.loss,
                one.by,
                tuple(Sample(prompt, _clipped(text)) for prompt, text in one.samples),
            )
            for one in found
        )

    def _of(self, due: DueEvaluation) -> dict[PeerId, EvaluationBody]:
        return self._stated.get(due.certificate, {})


def _clipped(text: str) -> str:
    return text if len(text) <= SAMPLE_SHOWN else text[: SAMPLE_SHOWN - 1] + "…"
