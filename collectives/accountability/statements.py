"""The table of statements: their subjects, and which of them prove equivocation. Pure.

All readers share this table. The log of a round keeps the first statement on a subject, or the newest if the kind is an
update. The witness takes two different ones as equivocation. The signing guard persists the slot before a peer signs a
convicting one (`signing`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ...peer import wire

MAX_SKETCHES = 48
"""The limit of one peer in a round: one after each cut, and one after each set of outputs that a member has. 24 kB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementKind:
    """The rules for statements of one message class."""

    subject: Callable[[Any], object] = lambda message: None
    """Returns the subject of a message; a member signs one statement on each subject in a slot."""
    convicts: bool
    """True if two different statements on one subject prove equivocation: no honest peer ever signs both."""
    newest_counts: bool = False
    """True if a later statement replaces an earlier one. Such a kind is an update, and convicts nobody."""
    most: int = wire.MAX_ROSTER * (wire.MAX_RECUTS + 1)
    """The limit of one member's kept statements in a round: at most it needs a result for each part of each cut."""


STATEMENTS: Mapping[type, StatementKind] = {
    wire.Ready: StatementKind(convicts=True),
    wire.Heard: StatementKind(convicts=False),
    wire.Roster: StatementKind(convicts=True),
    wire.Commit: StatementKind(convicts=True),
    wire.Have: StatementKind(convicts=False, newest_counts=True),
    wire.Cut: StatementKind(subject=attrgetter("version"), convicts=True),
    wire.CutAck: StatementKind(subject=attrgetter("cut"), convicts=False),
    wire.Sketch: StatementKind(subject=attrgetter("cut", "outputs"), convicts=True, most=MAX_SKETCHES),
    wire.Result: StatementKind(subject=attrgetter("cut", "part"), convicts=True),
    wire.Propose: StatementKind(convicts=True),
    wire.Prevote: StatementKind(convicts=True),
    wire.Precommit: StatementKind(convicts=True),
    wire.Appointment: StatementKind(convicts=True),
    wire.Void: StatementKind(convicts=False),
}
"""Every message of a round."""
