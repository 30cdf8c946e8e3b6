"""A run's folder on disk: ledger, outputs, checkpoints, evidence and signing guard.

    ledger          the chain of certificates (see `chain.ledger`)
    losses          the loss of each round, as it was seen here (see `chain.losses`)
    outputs/        the encoded outputs of the last rounds (see `chain.kept_outputs`)
    checkpoints/    the last checkpoint of the state (see `checkpoints`)
    evidence/       the bans and their evidence (see `accountability.bans`)
    spoken          the slots that I signed in (see `accountability.signing`)

Recovery starts from the checkpoint and replays the outputs of the rounds after it, by their certificates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from ...dht.members.remembered import Remembered
from ...dht.run.admission import OPEN, Charter
from ...dht.run.link import is_run_id
from ...peer.log.telemetry import Telemetry
from ...peer.node.node import Node
from ...peer.wire.signed import verify_signed
from ..accountability.conduct import Conduct
from ..chain.kept_outputs import Outputs
from ..chain.ledger import Ledger
from ..chain.losses import Losses
from ..chain.replay import serve_ledger
from ..spec import Spec
from .checkpoint_file import TensorAt
from .checkpoints import Checkpoints

LEDGER_FILE = "ledger"
"""The ledger's file in a run's folder; a peer without it holds nothing of the run."""
LOSSES_FILE = "losses"
OUTPUTS_FOLDER = "outputs"
CHECKPOINTS_FOLDER = "checkpoints"


def has_ledger(folder: Path) -> bool:
    """Return True if a run's folder holds certificates of the run: its peer is no newcomer, and its chain binds it."""
    ledger = folder / LEDGER_FILE
    return ledger.exists() and ledger.stat().st_size > 0


class EarlierLedgers:
    """The ledgers of the runs that a run goes on from, beside its `folder`, read when somebody asks for them."""

    def __init__(self, folder: Path, charter: Charter, telemetry: Telemetry) -> None:
        self._folder, self._charter, self._telemetry = folder, charter, telemetry
        self._found: dict[str, Ledger | None] = {}

    def of(self, run: str) -> Ledger | None:
        """Return the ledger of a run of the same line (`manifest.Follows`); None for another run, and if it is not here."""
        folder = self._folder.parent / run
        if run not in self._found and is_run_id(run) and (folder / LEDGER_FILE).exists():
            signed = Remembered(folder, run, self._telemetry).manifest()
            if signed is not None and (signed.line, signed.manifest.owner) == (self._charter.line, self._charter.owner):
                charter = replace(OPEN, run=run)  # It was validated when it was written.
                self._found[run] = Ledger.beside(folder / LEDGER_FILE, charter, verify_signed, self._telemetry)
        return self._found.get(run)


@dataclass(frozen=True, slots=True)
class Archive:
    """One run's folder, served by a node."""

    ledger: Ledger
    outputs: Outputs
    checkpoints: Checkpoints
    conduct: Conduct
    losses: Losses

    @classmethod
    async def open(
        cls,
        node: Node,
        spec: Spec,
        folder: Path,
        tensors: Sequence[TensorAt],
        *,
        every: int,
        resume: bool,
    ) -> Self:
        """Open the archive in `folder`, of a model with these `tensors`, with a checkpoint `every` so many rounds.

        Without `resume` no state of an earlier process is restored, and its chain does not bind this one. What cannot be
        used is an event.
        """
        ledger: Ledger = await node.compute(
            partial(
                Ledger.open,
                folder / LEDGER_FILE,
                spec.run,
                verify=verify_signed,
                telemetry=node.telemetry,
                charter=spec.charter,
            )
        )
        losses = Losses(folder / LOSSES_FILE, node.telemetry)
        serve_ledger(node, spec.run, ledger, losses, EarlierLedgers(folder, spec.charter, node.telemetry).of)
        outputs = Outputs(node, folder / OUTPUTS_FOLDER, every + 1)  # One more: a checkpoint is written while a round runs.
        checkpoints = Checkpoints(node, spec, folder / CHECKPOINTS_FOLDER, tensors, every, outputs)
        is_known = ledger.head.round > 0
        conduct = Conduct(node, spec.terms, spec.charter, folder, ledger.certificate, is_known=is_known)
        await conduct.bans.load()
        if resume:
            await outputs.load()
            await checkpoints.load()
        else:
            await node.compute(ledger.follow, ())
        return cls(ledger, outputs, checkpoints, conduct, losses)
