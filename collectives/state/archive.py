"""What a peer keeps of a run in its folder, and gives to others: certificates, outputs of rounds, checkpoints.

    ledger          the chain of certificates (see `ledger`)
    outputs/        the encoded outputs of the last rounds (see `outputs`)
    checkpoints/    the last two checkpoints of the state (see `checkpoints`)
    evidence/       who is banned, and what proves it (see `bans`)
    spoken          in which slots I have spoken (see `promises`)

The newest checkpoint, the outputs of the rounds after it and their certificates lead to the state of the newest round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from ...peer.node.node import Node
from ..accountability.conduct import Conduct
from ..averager import Spec
from ..chain.certificate import verify
from ..chain.kept_outputs import Outputs
from ..chain.ledger import Ledger
from ..chain.replay import serve_ledger
from .checkpoint_file import TensorAt
from .checkpoints import NUM_KEPT, Checkpoints


@dataclass(frozen=True, slots=True)
class Archive:
    """One run's folder, served by a node."""

    ledger: Ledger
    outputs: Outputs
    checkpoints: Checkpoints
    conduct: Conduct

    @classmethod
    async def open(
        cls, node: Node, spec: Spec, folder: Path, tensors: Sequence[TensorAt], *, every: int, resume: bool
    ) -> Self:
        """The archive in `folder`, of a model with these `tensors`, with a checkpoint `every` so many rounds.

        Raises nothing: what cannot be used is an event. Without `resume` no state of an earlier life is taken up.
        """
        ledger: Ledger = await node.compute(
            partial(
                Ledger.open, folder / "ledger", spec.run, verify=verify, telemetry=node.telemetry, charter=spec.charter
            )
        )
        serve_ledger(node, spec.run, ledger)
        outputs = Outputs(node, folder / "outputs", NUM_KEPT * every)
        checkpoints = Checkpoints(node, spec, folder / "checkpoints", tensors, every)
        conduct = Conduct(node, spec.terms, spec.charter, folder, ledger.certificate)
        await conduct.bans.load()
        if resume:
            await outputs.load()
            await checkpoints.load()
        return cls(ledger, outputs, checkpoints, conduct)
