"""The keys of the directory: of a run's manifest, member records, heads, listing, and its owner's statements."""

import re

from ..peer.base.transport import PeerId

RUNS_KEY = "/flockstep/runs"
"""The key under which a bootstrap answers with its list of runs; nobody can publish anything there."""

RUN_KEY = re.compile(rb"/flockstep/([a-z2-7]{52})")
"""A run's key, with its id: of its manifest, and of its providers."""


def run_key(run_id: str) -> str:
    """Return the key of a run's manifest."""
    return f"/flockstep/{run_id}"


def member_key(run_id: str, peer: PeerId) -> str:
    """Return the key of a member's record."""
    return f"/flockstep/{run_id}/{peer}"


def head_key(run_id: str) -> str:
    """Return the key of a run's newest certificate."""
    return f"/flockstep/{run_id}/head"


def named_key(run_id: str) -> str:
    """Return the key under which a bootstrap names the head that it follows; nobody can publish anything there."""
    return f"/flockstep/{run_id}/named"


def statements_key(run_id: str, owner: PeerId, page: int) -> str:
    """Return the key of a page of the owner's statements (`run.statements`)."""
    return f"/flockstep/{run_id}/owner/{owner}/{page}"


def evaluation_key(run_id: str, peer: PeerId) -> str:
    """Return the key of a member's newest evaluation of the shared model."""
    return f"/flockstep/{run_id}/eval/{peer}"


def listing_key(run_id: str, owner: PeerId) -> str:
    """Return the key of a listing of a run by a peer, its owner (`run.listing`): so no other can take its place."""
    return f"/flockstep/{run_id}/listing/{owner}"
