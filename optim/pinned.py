"""What a manifest pins about averaging, as `collectives` needs it."""

from ..collectives.averager import Spec
from ..collectives.codec import codec_named
from ..dht.runs import SignedManifest


def spec_of(signed: SignedManifest, num_cells: int) -> Spec:
    """The averaging of a run, for a model of so many cells."""
    manifest = signed.manifest
    return Spec(
        run=signed.run_id,
        num_cells=num_cells,
        contribution=codec_named(manifest.codec.contribution),
        output=codec_named(manifest.codec.result),
        min_peers=manifest.admission.min_peers,
        floor=manifest.timing.floor,
        ceiling=manifest.timing.ceiling,
        owner=manifest.owner if manifest.admission.authority == "owner" else None,
    )
