"""Home folders as peers and keepers leave them, without a run."""

from pathlib import Path

import numpy as np
from flockstep.collectives.chain.chain import ChainPosition, start_of_run
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.spec import charter_of
from flockstep.collectives.state import merkle
from flockstep.collectives.state.archive import LEDGER_FILE
from flockstep.collectives.state.checkpoint_file import Draft
from flockstep.dht.run.manifest import SignedManifest
from flockstep.optim.models.kept import keep_buffers, keep_model, parts_of
from flockstep.optim.models.registry import build_model
from flockstep.optim.step.flat import FlatLayout
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.signed import verify_signed
from support.certificates import certify
from torch import nn


def home_of(
    model: nn.Module, home: Path, *, run: str = "a" * 52, round_: int = 10, keeper: SignedManifest | None = None
) -> Path:
    """A home folder in which a peer has trained this model, or a keeper of this run has kept it."""
    folder = home / "runs" / run
    leaves, draft = _draft(model, folder / "checkpoints" / str(round_))
    described = FlatLayout.of(model).describe() if keeper is None else ()
    draft.finish(run, start_of_run(merkle.root(leaves)), described, leaves)
    if keeper is not None:
        (folder / "manifest").write_bytes(keeper.publishable)
        return home
    parts = parts_of(model)
    keep_model(model, parts, folder, Telemetry())
    keep_buffers(model, parts, folder, Telemetry())
    return home


def kept_home(signed: SignedManifest, owner: Identity, home: Path, rounds: int) -> list[wire.Certificate]:
    """The home folder of an owner that has kept its run for so many rounds, each of 100 tokens; the certificates.

    The state after a round is the model as it begins with the round's number as seed.
    """
    folder = home / "runs" / signed.run_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest").write_bytes(signed.publishable)
    chain: list[wire.Certificate] = []
    for number in range(1, rounds + 1):
        model = build_model(signed.manifest.model.name, signed.manifest.model.options, seed=number)
        leaves, draft = _draft(model, folder / "checkpoints" / str(number))
        before, root = chain[-1] if chain else None, merkle.root(leaves)
        # The mark of a certificate is its state root.
        chain.append(certify(before, 100, roster=(owner,), run=signed.run_id, mark=root, credit=(100,)))
    draft.finish(signed.run_id, ChainPosition(rounds, root, 100 * rounds, chain[-1]), (), leaves)
    ledger = Ledger.open(
        folder / LEDGER_FILE, signed.run_id, verify=verify_signed, telemetry=Telemetry(), charter=charter_of(signed)
    )
    for certificate in chain[ledger.head.round :]:
        ledger.append(certificate)
    return chain


def _draft(model: nn.Module, folder: Path) -> tuple[list[bytes], Draft]:
    layout = FlatLayout.of(model)
    theta, momentum = np.empty(layout.size, np.float32), np.zeros(layout.size, np.float32)
    layout.gather(model, theta)
    leaves = [*merkle.leaves(theta), *merkle.leaves(momentum)]
    draft = Draft(folder, layout.size)
    spans = [
        merkle.leaf_bytes(vector, *span) for vector in (theta, momentum) for span in merkle.leaf_spans(layout.size)
    ]
    for index, data in enumerate(spans):
        draft.put(index, bytes(data))
    return leaves, draft
