"""What a program with a `Swarm` writes to stderr where it takes no events itself: lines for a person, and no tracebacks."""

import sys
from types import TracebackType

from ...peer.base.errors import FlockstepError
from ...peer.base.plain import plain_text
from ...peer.log.telemetry import Event

SAID = (
    *("layout.unpinned", "model.not_kept", "inner.own_optimizer", "data.order"),
    *("state.awaited", "round.awaited", "round.void", "round.missed", "round.abstained"),
)
"""The events whose reason the person in front of the screen reads, where no `on_event` is given."""


def say_event(event: Event) -> None:
    """Write an event's line to stderr, if a person should read it."""
    round_, cut = event.get("round"), event.get("cut")
    num = len(cut) if isinstance(cut, list) else 0
    lines = dict.fromkeys(SAID, str(event.get("reason"))) | {
        "run.joined": f"joined the run at round {round_}; peers that train in it now: {event.get('peers')}",
        "round.done": f"round {round_}: averaged the work of {num} peer{'' if num == 1 else 's'}",
        "run.finished": "the run is finished",
    }
    if line := lines.get(str(event["event"])):
        sys.stderr.write(plain_text(f"flockstep: {line}") + "\n")


def end_in_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a program by one line where flockstep says what is wrong, or its user pressed Ctrl-C (`sys.excepthook`)."""
    if isinstance(error, FlockstepError):
        remedy = f" — {error.remedy}" if error.remedy else ""
        sys.stderr.write(plain_text(f"flockstep: {error}{remedy}") + "\n")
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
