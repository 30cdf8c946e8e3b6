"""The home folder of a run's owner as version 0.1 left it, killed after round 7 of 500: checkpoints of rounds 5 and 0.

It was made by that version: two peers trained a `gpt` of 560 parameters. The key in it has no other use.
"""

import json
import zipfile
from pathlib import Path

from flockstep.collectives.spec import Spec, spec_of
from flockstep.dht.run.manifest import SignedManifest

STORED = Path(__file__).parents[1] / "golden" / "version-0.1.zip"
ROUND = 5
ROOT = bytes.fromhex("7d25853813e5017b90b4aa2e6b1e9a0854c90397b2d1bfc69d90316462c94d45")
TOKENS = 3200
CELLS = 32


def unpack_home(home: Path) -> Path:
    """Write it to a folder. Returns that of its run."""
    with zipfile.ZipFile(STORED) as stored:
        stored.extractall(home)
    (run,) = (home / "runs").iterdir()
    return run


def manifest_in(run: Path) -> SignedManifest:
    return SignedManifest.decode((run / "manifest").read_bytes())


def spec_in(run: Path) -> Spec:
    return spec_of(manifest_in(run), CELLS, b"")


def certificate_in(run: Path) -> bytes:
    """The certificate of its checkpoint."""
    description = json.loads((run / "checkpoints" / str(ROUND) / "checkpoint.json").read_text())
    return bytes.fromhex(description["certificate"])
