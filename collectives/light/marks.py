"""The hashes by which a bootstrap names a chain, and what several bootstraps agree on. Pure.

Theory of operation. Two bootstraps rarely have the same head: one of them has heard of a round later. So a bootstrap
names more than its head: a *mark*, round and hash, of each of the last 32 rounds, of every 8th of the last 8 · 32, of
every 64th of the last 64 · 32, and so on to the first. That is 28 marks more for each factor of eight, and two honest
lists have a mark in common that is about as far behind the older head as that is behind the newer one.

Two lists are *compatible* if they have a mark in common and no two hashes for one round. A newcomer starts from the latest
mark that more than half of the lists have. Where no list is compatible with more than half of them, itself included, the
bootstraps disagree: the newcomer cannot know which of them lie.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from ...peer import wire
from ...peer.base.errors import MalformedMessage
from ...peer.base.transport import PeerId
from ...peer.wire.fields import Count, Hash
from ...peer.wire.schema import Size, decode

MARKS_EACH = 32
"""Marks of each spacing: rounds that one bootstrap may be behind another while both still name all later ones."""
SPACING = 8
"""Each list of a wider spacing reaches eight times as far back."""
MAX_MARKS = 1024
"""More than any chain has: its rounds have 62 bits, and each three of them take at most `MARKS_EACH` marks."""
MAX_MARKS_BYTES = 64_000
"""The bytes of a list, with its run: a mark takes up to 45."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A round of a chain, and the hash of its certificate; round 0 has the hash that the first one names before it."""

    round: Count
    hash: Hash

    def __str__(self) -> str:
        return f"{self.round}:{self.hash.hex()}"


@dataclass(frozen=True, slots=True)
class Marks:
    """The chain of a run as a bootstrap names it, the newest mark last."""

    run: wire.RunId
    marks: Annotated[tuple[Mark, ...], Size(MAX_MARKS, least=1)]

    @property
    def head(self) -> Mark:
        """The newest mark."""
        return self.marks[-1]

    def is_compatible(self, other: "Marks") -> bool:
        """Return True if one chain can have all marks of both, and they share one."""
        mine, theirs = ({mark.round: mark.hash for mark in marks.marks} for marks in (self, other))
        shared = mine.keys() & theirs.keys()
        return bool(shared) and all(mine[round_] == theirs[round_] for round_ in shared)


def decode_marks(data: bytes, run: str) -> Marks:
    """Decode what a bootstrap names. Raises `MalformedMessage`."""
    marks = decode(Marks, data, max_bytes=MAX_MARKS_BYTES)
    rounds = [mark.round for mark in marks.marks]
    if marks.run != run or rounds != sorted(set(rounds)):
        raise MalformedMessage("marks of another run, or not in order")
    return marks


def thinned(marks: Iterable[Mark], head: int) -> tuple[Mark, ...]:
    """Return the marks that are kept once round `head` is the newest."""
    return tuple(mark for mark in marks if _is_kept(mark.round, head))


def _is_kept(round_: int, head: int) -> bool:
    spacing = 1
    while round_ % spacing == 0:
        if head - round_ < MARKS_EACH * spacing:
            return True
        spacing *= SPACING
    return False


@dataclass(frozen=True, slots=True)
class CommonStart:
    """What several bootstraps name."""

    start: Mark | None
    """The latest mark that more than half of them name; None if they disagree."""
    outvoted: tuple[PeerId, ...]
    """Those whose chain is another one than that, in order."""


def agreement_of(named: Mapping[PeerId, Marks]) -> CommonStart:
    """Return what more than half of the bootstraps agree on; `named` has the list of each, of one at least."""
    most = max(sum(one.is_compatible(other) for other in named.values()) for one in named.values())
    count = Counter(mark for marks in named.values() for mark in marks.marks)
    shared = sorted((mark for mark in count if 2 * count[mark] > len(named)), key=lambda mark: mark.round)
    if 2 * most <= len(named) or not shared:
        return CommonStart(None, ())
    chain = Marks(next(iter(named.values())).run, tuple(shared))
    return CommonStart(chain.head, tuple(sorted(peer for peer, marks in named.items() if not marks.is_compatible(chain))))
