"""Publishes my evaluations of the shared model, and reads those of the other drawn members until the run's result is known.

The records stand in the directory. After a round that is evaluated every member asks for them now and then, and reports the
median once all drawn ones are there, or what there is when the next evaluation begins. It decides nothing, so a directory
that does not answer costs no more than a number on a screen.
"""

import trio

from ...collectives.evaluation.draw import DueEvaluation, evaluation_after
from ...collectives.evaluation.result import result_of
from ...dht.directory.interface import Directory
from ...dht.keys import evaluation_key
from ...dht.members.evaluation import EVAL_KIND, EVALUATION_LIFETIME, MAX_SAMPLE_BYTES, EvaluationBody
from ...dht.records import Record
from ...dht.run.manifest import SignedManifest
from ...peer import wire
from ...peer.base.errors import LocalError, NetworkError, RemoteError
from ...peer.base.transport import PeerId
from ...peer.identity import Identity
from ...peer.log.telemetry import Telemetry
from ...peer.wire.schema import encode
from .border import PublishEvaluation

ASK_SECONDS = (2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds between two looks at the directory; the last one repeats."""
MOST_SECONDS = 900.0
"""Seconds after which an evaluation is reported without those that are missing: rounds may be hours apart."""


class Evaluations:
    """The evaluations of one member's run; it does nothing in a run that asks for none."""

    def __init__(self, identity: Identity, directory: Directory, signed: SignedManifest, telemetry: Telemetry) -> None:
        self._identity = identity
        self._directory = directory
        self._run = signed.run_id
        self._signed = signed
        self._telemetry = telemetry
        self._due: DueEvaluation | None = None
        """The evaluation that is being read."""
        self._next = trio.Event()
        """Set when the next one begins."""

    async def publish(self, certificate: wire.Certificate | None, command: PublishEvaluation) -> None:
        """Sign and publish what my trainer has measured of the state that this certificate leads to, if I was drawn."""
        due, me = self._due_after(certificate), self._identity.peer_id
        if due is None or due.round != command.round or me not in due.evaluators:
            reason = f"I was not drawn to evaluate my state, or it is not that of round {command.round} any more"
            self._telemetry.emit("eval.unpublished", step="sign", reason=reason, round=command.round)
            return
        samples = tuple(
            text.encode(errors="replace")[:MAX_SAMPLE_BYTES].decode(errors="ignore")
            for text in command.samples[: len(due.prompts)]
        )
        try:
            body = encode(EvaluationBody(due.round, due.certificate, command.loss, command.tokens, samples))
            signed = Record.sign(
                self._identity,
                run=self._run,
                kind=EVAL_KIND,
                sequence=due.round,
                lifetime=EVALUATION_LIFETIME,
                body=body,
            )
            await self._directory.put(evaluation_key(self._run, me), signed.encode())
        except (NetworkError, LocalError) as error:
            self._telemetry.emit("eval.unpublished", step="publish", reason=str(error), round=due.round)

    async def look(self, certificate: wire.Certificate | None) -> None:
        """After a certified round: if it is evaluated, read what the drawn members state, and report the result."""
        due = self._due_after(certificate)
        if due is None or due == self._due:
            return
        self._next.set()
        self._due, self._next = due, (following := trio.Event())
        stated: dict[PeerId, EvaluationBody] = {}
        deadline, turn = trio.current_time() + MOST_SECONDS, 0
        awaited = list(due.evaluators)
        while awaited and trio.current_time() < deadline and not following.is_set():
            with trio.move_on_after(ASK_SECONDS[min(turn, len(ASK_SECONDS) - 1)]):
                await following.wait()
            turn += 1
            awaited = [peer for peer in awaited if not await self._read(due, peer, stated)]
        missing = [peer for peer in due.evaluators if peer not in stated]
        reason = f"no record of {', '.join(missing)}" if missing else "all drawn members have stated theirs"
        if not stated:
            self._telemetry.emit("eval.none", step="evaluate", reason=reason, round=due.round)
            return
        found = result_of(stated, due.prompts, len(due.evaluators))
        prompts, texts = [prompt for prompt, _ in found.samples], [text for _, text in found.samples]
        by, loss = list(found.by), found.loss
        self._telemetry.emit(
            "eval.result", reason=reason, round=found.round, loss=loss, by=by, prompts=prompts, texts=texts
        )

    def _due_after(self, certificate: wire.Certificate | None) -> DueEvaluation | None:
        return DueEvaluation.after(certificate, evaluation_after(certificate, self._signed))

    async def _read(self, due: DueEvaluation, peer: PeerId, stated: dict[PeerId, EvaluationBody]) -> bool:
        """Read what a drawn member states; returns whether there is no more to wait for."""
        try:
            value = await self._directory.get(evaluation_key(self._run, peer))
        except NetworkError as error:
            self._telemetry.emit("eval.unread", peer=peer, step="read", reason=str(error), round=due.round)
            return False
        if value is None or (record := Record.decode(value)).sequence != due.round:
            return value is not None and record.sequence > due.round  # That of another evaluation.
        try:
            stated[peer] = due.open(record)
        except RemoteError as error:
            self._telemetry.emit("eval.refused", peer=peer, step="read", reason=str(error), round=due.round)
        return True
