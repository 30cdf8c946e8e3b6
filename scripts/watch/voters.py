"""Who votes in a run: in words for whoever publishes or joins it, and as its members are now."""

from ...collectives.agreement.electorate import Electorate
from ...collectives.picture.votes import VotesHere
from ...dht.run.manifest import Manifest
from ...peer.base.plain import SHORT_ID
from ...peer.base.transport import PeerId


def why_votes(peer: PeerId, manifest: Manifest) -> str:
    """Return in a few words why a voter of a run may vote."""
    admission = manifest.admission
    if peer == manifest.owner:
        return "owns the run"
    if not admission.keepers_decide:
        return "is a member"
    if peer in admission.keeper_ids:
        return "is listed in the manifest"
    return "the owner vouched for it"


def describe_voters(votes: VotesHere, manifest: Manifest) -> list[str]:
    """Return a line for each voter: whether it is here, and why it may vote."""
    return [
        f"{voter[-SHORT_ID:]}  {'here' if voter in votes.here else 'away'}  {why_votes(voter, manifest)}"
        for voter in votes.electorate.voters
    ]


def who_decides(manifest: Manifest) -> str:
    """Return in one line who decides a run's rounds, and what their loss means."""
    admission = manifest.admission
    if admission.voters != "keepers":
        is_listed = admission.kind == "allow"
        return "all members decide, one vote each" + ("" if is_listed else "; its owner alone in the first round")
    count = len({manifest.owner, *admission.keeper_ids})
    quorum = Electorate({str(index): 1 for index in range(count)}).quorum
    lost = count - quorum
    if not lost:
        loss = "while it is away" if count == 1 else "while one of them is away"
    else:
        loss = f"while more than {lost} of them {'is' if lost == 1 else 'are'} away"
    waiting = "no round ends, and all wait for it"
    return f"{_keepers(count)}, {quorum} of {count} votes; {loss}, {waiting}"


def how_to_share(manifest: Manifest, link: str) -> str:
    """Return in one line how a run whose owner decides alone gets more keepers; empty where it does not."""
    admission = manifest.admission
    if not admission.keepers_decide or {manifest.owner, *admission.keeper_ids} != {manifest.owner}:
        return ""
    keep, vouch = f"`flockstep keep '{link}'` there prints its id", f"`flockstep run vouch '{link}' ID` gives it a vote"
    return f"With two more keepers one of the three may be away: {keep}, and {vouch}."


def _keepers(count: int) -> str:
    return "its owner decides, as its only keeper" if count == 1 else f"its {count} keepers decide"
