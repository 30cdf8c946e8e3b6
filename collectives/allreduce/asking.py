"""Whom I ask for what others have not sent me, in one attempt of a round. Pure.

Who withholds a message from a few could else waste the attempts of all proposers. A question is about an author, not about a
message: who is asked passes on all that the author signs in this round. It goes to two that may have it, since one of them
may lie; where nothing comes, to the next two.
"""

from collections.abc import Iterable, Mapping

from ...peer.base.transport import PeerId
from .actions import Action, AskFor

ASKED_OF, PASSED_ON = 2, 8
"""Members that I ask for what another one withholds. So many authors a relay serves one reader with."""


class Asking:
    """The questions that one member has asked in an attempt."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._asked: set[tuple[object, PeerId]] = set()
        """At which moments I have asked about whom."""
        self._questions: set[tuple[object, PeerId, PeerId]] = set()
        """In which phase I have asked about whom, and whom."""
        self._authors: dict[PeerId, set[PeerId]] = {}
        """By whom I have asked, about whom: it passes on the messages of a few."""

    def ask(
        self, wanted: Mapping[PeerId, Iterable[PeerId]], moment: object, phase: object, *, again: bool = False
    ) -> list[Action]:
        """Ask about authors at a moment, each two of those that may have its messages: once, in a phase nobody twice.

        `again`: about those that were asked about at that moment already, the next two.
        """
        actions: list[Action] = []
        for author, others in sorted(wanted.items()):
            if author == self._me or ((moment, author) in self._asked) != again:
                continue
            self._asked.add((moment, author))
            all_ = [other for other in dict.fromkeys(others) if other not in (author, self._me)]
            all_.sort(key=lambda other: len(self._authors.get(other, set()) | {author}) > PASSED_ON)
            to = [other for other in all_ if (phase, author, other) not in self._questions] or ([] if again else all_)
            for other in to[:ASKED_OF]:
                self._questions.add((phase, author, other))
                self._authors.setdefault(other, set()).add(author)
            actions += [AskFor(tuple(to[:ASKED_OF]), author)] if to else []
        return actions
