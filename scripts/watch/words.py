"""A picture of a run in words: the lines that `status` and `run info` show of it."""

import time
from collections.abc import Iterator

from ...collectives.picture.picture import MemberShown, Picture, RunState, RunTrouble, TroubleKind
from ...collectives.picture.votes import VotesHere
from ...peer.base.plain import SHORT_ID
from ...peer.base.transport import Rung
from .story import PeerStory, count_of

TROUBLES_SHOWN = 5


def heading(picture: Picture) -> str:
    """Return what the run is, in a line."""
    params = f", {short_number(picture.params)} parameters" if picture.params else ""
    return f"{picture.name}: {picture.model}{params}, run {picture.run[:SHORT_ID]}"


def progress_words(picture: Picture) -> str:
    """Return how far the run is, in a line; without the time that is left while it waits, since nobody knows that."""
    progress = picture.progress
    rounds = max(progress.rounds, progress.round)  # One that its owner has shortened may be beyond its end.
    share = f" ({100 * progress.round // rounds} %)" if rounds else ""
    about = "about " if progress.claimed else ""
    is_known = progress.seconds_left and progress.state is not RunState.WAITING
    parts = [
        f"round {progress.round:,} of {rounds:,}{share}",
        f"{short_number(progress.tokens)} tokens" if progress.tokens else "",
        f"{about}{progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else "",
        f"{about}{span(progress.seconds_left or 0.0)} left" if is_known else "",
    ]
    return ", ".join(part for part in parts if part)


def state_words(picture: Picture) -> str:
    """Return what the run is doing, in a line."""
    progress, reason = picture.progress, picture.progress.reason
    match progress.state:
        case RunState.EMPTY:
            return "Nobody is in this run at the moment."
        case RunState.OVER:
            return f"The run is over: {reason}."
        case RunState.WAITING:
            return f"It {reason}."
    count = sum(member.state == "training" and member.here is not False for member in picture.members)
    return "1 peer trains." if count == 1 else f"{count} peers train."


def member_story(member: MemberShown, votes: VotesHere | None = None) -> PeerStory:
    """Return a member as the facts that the tables show; one that has not answered is missing, whatever it states."""
    is_missing = member.here is False or (votes is not None and member.peer in votes.missing)
    return PeerStory(
        member.peer[-SHORT_ID:],
        member.peer,
        state="missing" if is_missing else member.state,
        device=member.device,
        step=member.step,
        round=member.round,
        tokens=member.tokens,
        tokens_per_s=member.tokens_per_s,
        loss=member.loss,
        sent=member.sent,
        received=member.received,
        root=member.root,
        rung=Rung(member.rung) if member.rung else None,
        called=member.name,
    )


def trouble_words(trouble: RunTrouble) -> str:
    """Return what went wrong, in a line."""
    when = time.strftime("%H:%M:%S ", time.localtime(trouble.time)) if trouble.time is not None else ""
    round_ = f"round {trouble.round}: " if trouble.round else ""
    peer = f" {trouble.peer[-SHORT_ID:]}" if trouble.peer else ""
    kind = "not counted" if trouble.kind is TroubleKind.FLAG else trouble.kind
    return f"{when}{round_}{kind}{peer}: {trouble.reason or 'no reason given'}"


def evaluation_words(round_: object, loss: object, by: object) -> str:
    """Return a held-out loss in a line, from fields of an event or of a picture."""
    measured = f"{loss:.3f}, as {count_of(by, 'peer')} measured" if isinstance(loss, float) else "unknown"
    return f"after round {round_}: held-out loss {measured}"


def describe_picture(picture: Picture) -> Iterator[str]:
    """Yield a picture's lines below its table of members; why the run waits stands above it already."""
    waits = picture.progress.state is RunState.WAITING
    yield from (evaluation_words(each.round, each.loss, each.by) for each in picture.evaluations[-1:])
    if picture.votes is not None and not waits:
        yield f"votes: {picture.votes}"
    elif picture.votes is not None:
        yield "It goes on by itself once enough of them are back; what each can do: docs/stopped.md"
    troubles = [trouble for trouble in picture.troubles if trouble.kind != TroubleKind.STALL or not waits]
    yield from map(trouble_words, troubles[:TROUBLES_SHOWN])
    if (left := len(troubles) - TROUBLES_SHOWN) > 0:
        yield f"and {left} more troubles: --json has them, and `flockstep page` shows them"
    if picture.goes_on:
        yield f"It {picture.goes_on}"
    yield f"verified: {picture.verified}"
    if picture.joining:
        yield picture.joining


def short_number(number: float) -> str:
    """Return a count as people write it: 950, 12.3 k, 4.5 M, 1.2 G."""
    for unit in ("", " k", " M", " G", " T"):
        if number < 999.5 or unit == " T":
            return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return ""


def span(seconds: float) -> str:
    """Return a duration in its two greatest units: 45 s, 3 min, 2 h 05 min, 4 d 3 h."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
