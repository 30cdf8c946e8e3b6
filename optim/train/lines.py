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
    name, line = event.get("event"), ""
    if name == "run.joined":
        line = f"joined the run at round {event.get('round')}; peers that train in it now: {event.get('peers')}"
    elif name == "round.done" and isinstance(cut := event.get("cut"), list):
        line = f"round {event.get('round')}: averaged the work of {len(cut)} peer{'' if len(cut) == 1 else 's'}"
    elif name == "run.finished":
        line = "the run is finished"
    elif name in SAID:
        line = str(event.get("reason"))
    if line:
        sys.stderr.write(plain_text(f"flockstep: {line}") + "\n")


def end_in_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a program by one line where flockstep says what is wrong, or its user pressed Ctrl-C (`sys.excepthook`)."""
    if isinstance(error, FlockstepError):
        remedy = f" — {error.remedy}" if error.remedy else ""
        sys.stderr.write(plain_text(f"flockstep: {error}{remedy}") + "\n")
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
