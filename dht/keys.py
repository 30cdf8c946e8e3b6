"""The keys of the directory: of a run's manifest, its member records and its head."""

from ..peer.transport import PeerId


def run_key(run_id: str) -> str:
    """Return the key of a run's manifest."""
    return f"/flockstep/{run_id}"


def member_key(run_id: str, peer: PeerId) -> str:
    """Return the key of a member's record."""
    return f"/flockstep/{run_id}/{peer}"


def head_key(run_id: str) -> str:
    """Return the key of a run's newest certificate."""
    return f"/flockstep/{run_id}/head"
