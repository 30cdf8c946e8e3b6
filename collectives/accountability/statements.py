"""The table of statements: their subjects, and which of them prove equivocation. Pure.

All readers share this table. The log of a round keeps the first statement on a subject. The witness takes two
different ones as equivocation. The signing guard persists the slot before a peer signs a convicting one (`signing`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...peer import wire

MAX_SKETCHES = 48
"""The limit of one peer in a round: one after each cut, and one after each set of outputs. 24 kB each."""
MAX_WORDS = 16
"""The limit of one holder in an attempt: its words change as others are lost and it stands in for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementKind:
    """The rules for statements of one message class."""

    subject: Callable[[Any], object] = lambda message: None
    """Returns the subject of a message; a member signs one statement on each subject in a slot."""
    convicts: bool
    """True if two different statements on one subject prove equivocation: no honest peer ever signs both."""
    most: int = wire.MAX_PARTS
    """The limit of one member's kept statements in an attempt."""


STATEMENTS: Mapping[type, StatementKind] = {
    wire.Ready: StatementKind(convicts=True),
    wire.Heard: StatementKind(convicts=False),
    wire.Basis: StatementKind(convicts=False),
    wire.Roster: StatementKind(convicts=True),
    wire.Commit: StatementKind(convicts=True),
    wire.Have: StatementKind(subject=lambda have: have, convicts=False, most=MAX_WORDS),
    wire.Cut: StatementKind(subject=lambda cut: bool(cut.before), convicts=True),
    wire.Sketch: StatementKind(subject=lambda it: (it.cut, it.outputs), convicts=True, most=1 + wire.MAX_OUTPUTS),
    wire.Weigh: StatementKind(subject=lambda weigh: (weigh.cut, weigh.part), convicts=False),
    wire.Result: StatementKind(subject=lambda result: (result.cut, result.part), convicts=True, most=2 * wire.MAX_PARTS),
    wire.Outputs: StatementKind(subject=lambda outputs: (outputs.cut, outputs.number), convicts=True),
    wire.Propose: StatementKind(convicts=True),
    wire.Prevote: StatementKind(convicts=True),
    wire.Precommit: StatementKind(convicts=True),
    wire.Void: StatementKind(convicts=False),
}
"""Every message of a round."""
