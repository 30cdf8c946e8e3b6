"""Who votes in a run: in words for whoever publishes or joins it, and as its members are now."""

from ..collectives.agreement.electorate import Electorate
from ..collectives.chain.voters import LIAR_PROOF
from ..collectives.picture.votes import VotesHere
from ..dht.run.manifest import Manifest
from ..dht.run.statements import EarnedVote, OwnerStatements, OwnerVerb
from ..optim.keeper.steward import STEWARD_PATIENCE
from ..peer.plain import SHORT_ID
from ..peer.transport import PeerId


def why_votes(peer: PeerId, manifest: Manifest, statements: OwnerStatements) -> str:
    """Return in a few words why a voter of a run may vote."""
    admission = manifest.admission
    if peer == manifest.owner:
        return "owns the run"
    if not admission.keepers_decide:
        return "is a member"
    if peer in admission.keeper_ids:
        return "is listed in the manifest"
    vouchers = [stated for stated in statements.statements if (stated.peer, stated.verb) == (peer, OwnerVerb.VOUCH)]
    earned = EarnedVote.parse(vouchers[-1].reason) if vouchers else None
    return "the owner vouched for it by hand" if earned is None else f"the owner's peer vouched for it after {earned}"


def describe_voters(votes: VotesHere, manifest: Manifest, statements: OwnerStatements) -> list[str]:
    """Return a line for each voter: whether it is here, and why it may vote."""
    return [
        f"{voter[-SHORT_ID:]}  {'here' if voter in votes.here else 'away'}  {why_votes(voter, manifest, statements)}"
        for voter in votes.electorate.voters
    ]


def who_decides(manifest: Manifest) -> str:
    """Return in one line who decides a run's rounds, and what their loss means."""
    admission = manifest.admission
    if admission.authority == "owner":
        return "its owner alone decides: while it is away, no round is certified"
    if admission.voters == "work":
        return "members decide with the votes that their work has earned: whoever fills most seats decides within hours"
    if admission.voters != "keepers":
        is_listed = admission.kind == "allow"
        return "all members decide, one vote each" + ("" if is_listed else "; its owner alone in the first round")
    count = len({manifest.owner, *admission.keeper_ids})
    quorum = Electorate({str(index): 1 for index in range(count)}).quorum
    if admission.stall == "present" and count > 1:
        return f"{_keepers(count)}, {quorum} of {count} votes; where fewer are here, those that are here decide"
    if admission.stall == "majority" or count < LIAR_PROOF:
        quorum = count // 2 + 1
    lost = count - quorum
    if not lost:
        loss = "while it is away" if count == 1 else "while one of them is away"
    else:
        loss = f"while more than {lost} of them {'is' if lost == 1 else 'are'} away"
    steward = ""
    if admission.steward:
        minutes = f"{STEWARD_PATIENCE / 60:g} minutes"
        steward = f"; after {minutes} its steward {admission.steward} appoints those that are here, if more than half are"
    joining = f"; members with {admission.vouch_after} rounds join them" if admission.vouch_after else ""
    waiting = "no round is certified, and all train on and wait"
    return f"{_keepers(count)}, {quorum} of {count} votes; {loss}, {waiting}{steward}{joining}"


def _keepers(count: int) -> str:
    return "its owner decides, as its only keeper" if count == 1 else f"its {count} keepers decide"
