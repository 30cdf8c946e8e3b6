"""One exchange of sketches under one seed: mine, those of the others, and whether those that I can check are true. Pure.

Every contributor of a cut says what its parts are under a seed that nobody knew before (`wire.Sketch`, `judging`). Whoever
answers for a part compares what is said of it with the bytes; a false sketch is evidence, and its author is soon lost.
"""

from collections.abc import Collection, Sequence

from ..peer import wire
from ..peer.transport import PeerId
from .robust.checks import num_bytes
from .round.actions import Action, CompareSketch, Note, Send, SketchParts
from .round.roster import Facts, Table


class Sketches:
    """What one member of a roster says, hears and finds true."""

    def __init__(self, facts: Facts, table: Table, contributors: Sequence[int], after: bytes, columns: int) -> None:
        self.after = after
        self._facts = facts
        self._table = table
        self._contributors = contributors
        self._columns = columns
        self._size = num_bytes(len(table.members), columns)
        self._heard: dict[int, wire.Signed] = {}
        self._said: dict[int, bytes] = {}
        self._asked = False
        self._comparing: set[tuple[int, int]] = set()
        self._true: set[tuple[int, int]] = set()
        self._read = 0

    def advance(self, duties: Collection[int]) -> list[Action]:
        """Make mine, and compare what others say of my `duties`."""
        table, actions = self._table, list[Action]()
        if not self._asked and table.me in self._contributors:
            self._asked = True
            actions.append(SketchParts(self.after, self._columns))
        news = self._facts.since(wire.Sketch, self._read)
        self._read += len(news)
        for signed, sketch in news:
            index = table.places[signed.sender]
            if sketch.slot != table.slot or sketch.after != self.after or index not in self._contributors:
                continue
            if len(sketch.tables) != self._size:
                actions.append(Note("peer.charged", signed.sender, "sketch", "sketches of another size"))
                continue
            self._heard[index], self._said[index] = signed, sketch.tables
        for index in sorted(self._said.keys() - {table.me}):
            for part in sorted(duties):
                if (part, index) not in self._comparing:
                    self._comparing.add((part, index))
                    actions.append(CompareSketch(self.after, part, index))
        return actions

    def sketched(self, tables: bytes) -> list[Action]:
        """Mine are made."""
        return [Send(self._table.members, wire.Sketch(self._table.slot, self.after, tables))]

    def is_true(self, part: int, contributor: int) -> None:
        """What a contributor says of a part fits its bytes."""
        self._true.add((part, contributor))

    def word(self, contributor: int) -> wire.Signed | None:
        """What a contributor has signed."""
        return self._heard.get(contributor)

    @property
    def missing(self) -> frozenset[int]:
        """The contributors from whom nothing has come."""
        return frozenset(self._contributors) - self._said.keys()

    @property
    def is_complete(self) -> bool:
        """Whether all have spoken, and all that I compare is true."""
        return not self.missing and self._comparing == self._true

    @property
    def tables(self) -> tuple[bytes, ...]:
        """All sketches, in the order of the cut."""
        return tuple(self._said[index] for index in self._contributors)

    def silent(self) -> str:
        """Whom it waits for."""
        peers: list[PeerId] = [self._table.members[index] for index in sorted(self.missing)]
        return f"Sketch from {', '.join(peers)}" if peers else "comparisons of sketches with bytes"
