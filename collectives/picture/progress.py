"""How far a run is, how fast it is, and whether it goes on. Pure."""

from collections.abc import Sequence
from statistics import median_high

from ...dht.members.table import Member
from ...dht.run.manifest import Manifest, SignedManifest
from ...dht.run.revision import revised_by
from ..chain.chain import NOTHING
from ..chain.fork_choice import training
from .fold import ChainView
from .picture import CertifiedRound, RunProgress, RunState
from .votes import VotesHere

MEASURED_ROUNDS = 20
"""The last rounds by which speed is measured: a slower peer that joins shows within them."""
LEAST_MEASURED = 3
MAX_SECONDS = 1e10
"""The longest that a run is said to take, some 300 years: of more no duration could be shown."""


def progress_of(
    signed: SignedManifest,
    view: ChainView,
    members: Sequence[Member],
    votes: VotesHere | None,
    *,
    has_ended: bool = False,
) -> RunProgress:
    """Return a run's progress: measured where the reader has seen a few rounds, else by what members state.

    `has_ended` is True for one that its owner has ended.
    """
    manifest = revised_by(signed, view.revision)
    num_rounds, round_ = manifest.num_rounds, view.head.round
    if signed.manifest.admission.kind != "open" and view.head == NOTHING and training(members):
        round_ = median_high(member.body.round for member in training(members))  # Of a closed run nothing else is known.
    measured = _measured(view.rows)
    speed, seconds = measured or _stated(manifest, view.rows, members)
    if seconds is not None and not seconds * max(1, num_rounds) < MAX_SECONDS:  # Whoever states a speed can state any.
        seconds = None
    state, reason = _state_of(round_ >= num_rounds, members, votes)
    if has_ended:
        state, reason = RunState.OVER, "its owner has ended it"
    return RunProgress(
        round=round_,
        rounds=num_rounds,
        tokens=view.head.tokens,
        tokens_per_s=speed,
        seconds_left=None if seconds is None else seconds * max(0, num_rounds - round_),
        round_seconds=seconds,
        claimed=measured is None,
        state=state,
        reason=reason,
    )


def _measured(rows: Sequence[CertifiedRound]) -> tuple[float, float] | None:
    """Return tokens a second and seconds a round of the last rounds whose time is known; None if these are too few."""
    timed = [(row, row.time) for row in rows[-MEASURED_ROUNDS:] if row.time is not None]
    if len(timed) < LEAST_MEASURED:
        return None
    (first, began), (last, ended) = timed[0], timed[-1]
    seconds = ended - began
    if seconds <= 0:
        return None
    return (last.tokens - first.tokens) / seconds, seconds / (last.round - first.round)


def _stated(
    manifest: Manifest, rows: Sequence[CertifiedRound], members: Sequence[Member]
) -> tuple[float | None, float | None]:
    speed = sum(member.body.tokens_per_s for member in training(members)) or None
    seconds = manifest.inner.seconds / manifest.outer.fragments or None
    if seconds is None and speed is not None and len(rows) > 1:
        seconds = (rows[-1].tokens - rows[0].tokens) / (rows[-1].round - rows[0].round) / speed or None
    return speed, seconds


def _state_of(is_over: bool, members: Sequence[Member], votes: VotesHere | None) -> tuple[RunState, str]:
    if is_over:
        return RunState.OVER, "its last round is certified"
    if not members:
        return RunState.EMPTY, "nobody is in this run at the moment"
    if not training(members):
        return RunState.WAITING, "waits for its state: of a new run the first peer that trains makes it"
    if votes is not None and not votes.electorate.is_quorum(votes.here):
        return RunState.WAITING, f"{votes}. Nobody's work is lost"
    return RunState.TRAINING, ""
