"""Successions: how its owner ends a run, and has it go on as another one from the same state. Pure.

Theory of operation. A succession is two statements of the owner about its run (`statements`, verb `succeed`). The first one
names no run: it *ends* this one. A member that holds it makes no further round and stands still: it writes its state to its
disk, and its record names that log of statements from then on (`optim.member`). Hence whoever asks the members knows which
states stay as they are, and the newest of these is where the run ends. The second statement names the run that goes on from
there. Its manifest pins the state root, the certificate that proves it, and what the members have earned
(`manifest.Follows`).

Neither takes a vote, so a run whose voters are gone for good goes on all the same. No member can choose where the run ends,
since a state counts only with its certificate. The owner cannot lead the members to other code or data, which
`why_not_follow` compares, and it cannot lead them to two runs: the first statement that names a run holds, and another one
is an alarm.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...peer.base.transport import Address, PeerId
from .link import JoinLink, is_run_id
from .manifest import Earned, Follows, Manifest, SignedManifest
from .revision import REVISABLE, UNREVISED, Revision, revised, settings_of
from .statements import OwnerStatement, OwnerStatements, OwnerVerb

ENDED = "the run's owner has ended it, and it goes on as another one: this peer follows by itself"
"""Why a member makes no further round."""
SUCCEEDED = "succeeded"
"""Why a membership ended whose run goes on as another one."""
RETRY_SECONDS = 10.0
"""Seconds until the run that goes on is tried again, where it could not be reached."""
_CARRIED = (OwnerVerb.VOUCH, OwnerVerb.REVOKE, OwnerVerb.BAN)
"""The verbs of statements that hold in the next run, too; a pardon is of rounds, of which that one has others."""


def is_ending(statements: OwnerStatements) -> bool:
    """Return True if the owner has ended the run, whether or not the next one is named."""
    return any(stated.verb == OwnerVerb.SUCCEED for stated in statements.statements)


def successor_of(statements: OwnerStatements) -> str:
    """Return the id of the run that this one goes on as: the first that its owner has named; empty while none is."""
    return next(iter(_named(statements)), "")


def alarm_of(statements: OwnerStatements) -> str:
    """Return which other run the owner has named beside the successor, for people; empty if there is none."""
    first, *others = [*_named(statements)] or [""]
    return f"its owner has named a second run to go on as, {others[0]}: all follow the first one, {first}" if others else ""


def describe_succession(signed: SignedManifest, statements: OwnerStatements, via: tuple[Address, ...]) -> str:
    """Return as which run a run goes on, and from which one, for people, after "it"; empty where it does neither."""
    follows, run = signed.manifest.follows, successor_of(statements)
    parts = [f"goes on from run {follows.run}, after its round {follows.round:,}"] if follows.run else []
    if run:
        parts.append(f"goes on as {JoinLink(run, via)}")
    elif is_ending(statements):
        parts.append("has ended: its members stand still until its owner names the run that it goes on as")
    return "; ".join((*parts, *filter(None, [alarm_of(statements)])))


def _named(statements: OwnerStatements) -> Mapping[str, None]:
    stated = [it.settings for it in statements.statements if it.verb == OwnerVerb.SUCCEED]
    return dict.fromkeys(run for run in stated if is_run_id(run))


def manifest_after(
    before: SignedManifest,
    now: Manifest,
    at: tuple[int, bytes],
    root: bytes,
    keepers: Iterable[PeerId],
    earned: Iterable[Earned],
) -> Manifest:
    """Return the manifest of the run that goes on from the state `root` of a run, certified `at` a round with a hash.

    `now` are the run's settings as its owner has revised them, and `earned` is what its members have earned. It has as many
    rounds as were left, at least one.
    """
    round_, hash_ = at
    follows, outer = before.manifest.follows, now.outer
    left = -(-max(1, now.num_rounds - round_) // outer.fragments)
    first = tuple(sorted({*keepers} - {now.owner}))
    return replace(
        now,
        outer=replace(outer, rounds=left),
        admission=replace(now.admission, keepers=" ".join(first), voters="keepers" if first else now.admission.voters),
        start=root.hex(),
        follows=Follows.of(before.line, before.run_id, round_, hash_, follows.rounds + round_, earned),
    )


def carried(statements: OwnerStatements, keepers: Iterable[PeerId]) -> list[OwnerStatement]:
    """Return the statements of a run that its owner makes again for the next one, whose first voters are these keepers."""
    known = {(OwnerVerb.VOUCH, peer) for peer in keepers}
    return [it for it in statements.in_force.values() if it.verb in _CARRIED and (it.verb, it.peer) not in known]


def why_not_follow(before: SignedManifest, after: SignedManifest) -> str:
    """Return why a run does not go on as another one, whatever its owner states; empty if it does.

    Its members have agreed to this owner, model and data: only who votes first, and what a revision can change, may differ.
    """
    one, other, follows = before.manifest, after.manifest, after.manifest.follows
    if one.owner != other.owner:
        return "it has another owner"
    if follows.run != before.run_id or follows.first != before.line:
        return "its manifest does not say that it goes on from this one"
    if one.layout != other.layout:
        return "it trains another model: its layout differs"
    for name in ("name", "data", "seed", "model", "defence", "timing", "by", "contact"):
        if getattr(one, name) != getattr(other, name):
            return f"its {name} differs"
    if replace(one.admission, keepers="", voters="") != replace(other.admission, keepers="", voters=""):
        return "it admits others"
    for section, keys in REVISABLE.items():
        was, now = getattr(one, section), getattr(other, section)
        if replace(now, **{key: getattr(was, key) for key in keys}) != was:
            return f"its [{section}] differs in what no revision can change"
    return ""


def with_settings(manifest: Manifest, changes: Mapping[str, object]) -> Manifest:
    """Return a manifest with changed settings by `section.key`, those that a revision can change. Raises `UsageError`."""
    return revised(manifest, Revision(1, settings_of(manifest, UNREVISED, changes)))
