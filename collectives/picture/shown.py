"""What members claim of themselves, made plain and joined with what the chain shows of them. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ...dht.members.body import MemberState
from ...dht.members.evaluation import MAX_STATED_LOSS
from ...dht.members.table import Member
from ...dht.run.statements import OwnerStatements, OwnerVerb
from ...peer.base.plain import shortened
from ...peer.base.transport import PeerId
from ..accountability.credit import PeerCredit
from ..accountability.signing import FAR
from ..accountability.trust import TrustRecord
from ..agreement.electorate import Electorate
from ..chain.fork_choice import is_keeper
from .fold import MAX_RECENT, ChainView
from .picture import NOT_COUNTED, Credit, MemberShown, RecentRound, RunTrouble, TroubleKind
from .votes import VotesHere

MAX_MEMBERS_SHOWN = 512
"""Members that are shown; keys are free, so voters and the last rosters come first."""
KEEPING = "keeping"
"""The state of a keeper that takes part."""
MAX_NAME_SHOWN = 64
"""Characters of a name that a member gives itself."""
MAX_TROUBLES = 200
SHOWN_VERBS = (OwnerVerb.BAN, OwnerVerb.PARDON, OwnerVerb.REVOKE)
"""Statements that are shown as troubles: who is vouched for shows in the votes, and revised settings in the progress."""
REASON_SHOWN = 200
"""Characters of a reason that somebody else wrote."""


def shown_members(
    members: Sequence[Member],
    electorate: Electorate,
    trust: Mapping[PeerId, TrustRecord],
    here: Mapping[PeerId, bool],
    credit: Sequence[PeerCredit] = (),
) -> tuple[MemberShown, ...]:
    """Return the members as the picture shows them, in the order of their ids; `here` has those that were asked."""
    tokens = {one.peer: one.tokens for one in credit}
    order = sorted(members, key=lambda member: (member.peer not in electorate.votes, member.peer not in trust, member.peer))
    kept = sorted(order[:MAX_MEMBERS_SHOWN], key=lambda member: member.peer)
    shown = (_shown(member, electorate, trust.get(member.peer), here.get(member.peer)) for member in kept)
    return tuple(replace(one, credit=tokens.get(one.peer, 0)) for one in shown)


def shown_credit(
    credit: Sequence[PeerCredit], members: Sequence[Member], called: Mapping[PeerId, str]
) -> tuple[Credit, ...]:
    """Return the first contributors, in the order of `credit`, with the names that they call themselves or were `called`."""
    names = dict(called) | {member.peer: shortened(member.body.name, MAX_NAME_SHOWN) for member in members}
    most = credit[:MAX_MEMBERS_SHOWN]
    return tuple(Credit(one.peer, names.get(one.peer, ""), one.tokens, one.rounds) for one in most)


def _shown(member: Member, electorate: Electorate, record: TrustRecord | None, here: bool | None) -> MemberShown:
    body = member.body
    return MemberShown(
        peer=member.peer,
        name=shortened(body.name, MAX_NAME_SHOWN),
        state=state_of(member),
        device=shortened(body.device, 64),
        version=shortened(body.version, 32),
        round=body.round,
        step=body.step,
        tokens=body.tokens,
        tokens_per_s=body.tokens_per_s,
        loss=stated_loss(member),
        rung=body.rung,
        up=body.up,
        down=body.down,
        sent=body.sent,
        received=body.received,
        root=body.root.hex(),
        votes=electorate.votes.get(member.peer, 0),
        here=here,
        trust=None if record is None else record.trust,
        rounds=None if record is None else record.rounds,
        credit=0,
    )


def state_of(member: Member) -> str:
    """Return what a member is doing, in one word."""
    return KEEPING if is_keeper(member) and member.body.state == MemberState.TRAINING else member.body.state


def stated_loss(member: Member) -> float | None:
    """Return the loss that a member states; None if it can be none."""
    loss = member.body.loss
    return loss if loss is not None and 0 <= loss <= MAX_STATED_LOSS else None


def median_loss(members: Sequence[Member], roster: Collection[PeerId] = ()) -> float | None:
    """Return the median of the losses that those which train state; None if nobody states one.

    Those of the last roster alone count, if any of them states one: keys are free, and places in a roster are not.
    """
    trained = [(member.peer, stated_loss(member)) for member in members if not is_keeper(member)]
    stated = [(peer, loss) for peer, loss in trained if loss is not None]
    losses = [loss for peer, loss in stated if peer in roster] or [loss for _, loss in stated]
    return median(losses) if losses else None


def troubles_of(recent: Sequence[RecentRound], times: Mapping[int, float | None]) -> list[RunTrouble]:
    """Return what went wrong in these rounds, as far as their certificates show it."""
    found: list[RunTrouble] = []
    for row in recent:
        time = times.get(row.round)
        found += [RunTrouble(row.round, time, TroubleKind.FLAG, peer, NOT_COUNTED) for peer in row.flagged]
        if row.attempt:
            attempts = "attempt" if row.attempt == 1 else "attempts"
            reason = f"{row.attempt} {attempts} without effect before the one that counts"
            if row.attempt >= FAR:  # A place far ahead, and no count.
                reason = "a voter that had lost its record of what it signed voted far ahead of all attempts before"
            found.append(RunTrouble(row.round, time, TroubleKind.VOID, "", reason))
    return found


def all_troubles(
    view: ChainView,
    votes: VotesHere | None,
    notes: Iterable[RunTrouble],
    statements: OwnerStatements,
) -> tuple[RunTrouble, ...]:
    """Return what goes wrong now, then what went wrong by round, the newest first, then what the owner has stated.

    `notes` is what the reader has met itself, in order.
    """
    times = {row.round: row.time for row in view.rows[-MAX_RECENT:]}
    events = [*reversed(tuple(notes)), *troubles_of(view.recent, times)]
    events.sort(key=lambda trouble: -trouble.round)
    stalled = votes is not None and not votes.electorate.is_quorum(votes.here)
    now = [RunTrouble(view.head.round + 1, None, TroubleKind.STALL, "", str(votes))] if stalled else []
    return (*now, *events[:MAX_TROUBLES], *troubles_stated(statements)[:MAX_TROUBLES])


def troubles_stated(statements: OwnerStatements) -> list[RunTrouble]:
    """Return the bans, pardons and withdrawals that the owner has stated, the newest first."""
    return [
        RunTrouble(stated.until_round, None, TroubleKind(stated.verb), stated.peer, shortened(stated.reason, REASON_SHOWN))
        for stated in reversed(tuple(statements.in_force.values()))
        if stated.verb in SHOWN_VERBS
    ]
