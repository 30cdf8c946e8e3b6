"""COLLECT: commitments, the parts that I hold, and my word on them. Pure.

Theory of operation. The owner of a part fetches it from every member that has committed. Its deputies stand in: the first
of these three that is not lost holds the part. A deputy holds it, too, if the owner's word is not fit to count in it. Each
holder says what it holds once that is all that it can expect, or at the deadline; who is in follows from these words
(`words`, `stage`).

A keeper, whose Ready states no tokens, commits to nothing. It holds parts like any other member.
"""

import math
from collections.abc import Collection

from ...peer import wire
from ...peer.base.transport import PeerId
from ..agreement.actions import Note
from .actions import Action, FetchPart, HashParts, Send, Setup
from .facts import MessageLog
from .roster import RosterView
from .stage import Stage


class CollectPhase:
    """One member's state of the phase COLLECT, and what it holds from then on."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView) -> None:
        self.stage = Stage(facts, table, table.training, setup.nonce)
        self.duties: set[int] = {table.me} & table.owners
        """The parts that I hold of everybody; this set only grows."""
        self.has_committed = False
        """True once my parts are encoded, and I have committed to them."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._held: dict[int, set[int]] = {}
        self._failed: dict[tuple[int, int], str] = {}
        self._asked: set[tuple[int, int]] = set()
        self._changes = 0
        self._has_closed = False
        """True if I have said at the last deadline what I hold."""
        self._expected: frozenset[int] = frozenset()
        self._seen: dict[str, tuple[object, ...]] = {}

    def begin(self) -> list[Action]:
        """Encode my contribution, if I train."""
        return [HashParts(self._table.roster.bounds, self._table.readers())] if self._setup.ready.tokens else []

    def parts_hashed(self, parts: tuple[bytes, ...], codec: str = "") -> list[Action]:
        """Commit to my contribution, which is encoded and served; `codec` is empty for the run's usual one."""
        setup, table, tokens = self._setup, self._table, self._setup.ready.tokens
        loss = setup.loss if math.isfinite(setup.loss) else 0.0
        commit = wire.Commit(table.slot, table.hash, tokens, setup.steps, loss, parts, setup.ramp, codec)
        self.has_committed = True
        return [Send(table.receivers, commit)]

    def fetched(self, part: int, contributor: int) -> None:
        """Record a well-formed part of a contribution."""
        self._held.setdefault(part, set()).add(contributor)
        self._changes += 1

    def not_fetched(self, part: int, contributor: int, reason: str) -> list[Action]:
        """Record a failed fetch of a part."""
        self._failed[part, contributor] = reason
        self._changes += 1
        return [Note("round.part_missing", self._table.members[contributor], "collect", reason)]

    def stand_in(self, part: int, makers: Collection[int]) -> None:
        """Hold a part that these are to make, if I am one of them."""
        if self._table.me in makers and part not in self.duties:
            self.duties.add(part)
            self._changes += 1

    @property
    def is_closed(self) -> bool:
        """True once the phase is closed at its deadline."""
        return self.stage.is_late

    def close(self) -> None:
        """Close the phase at its deadline, without what has not arrived; at a later one, what was taken over since."""
        self.stage.close()
        self._has_closed = False
        self._changes += 1

    def has(self, part: int, contributor: int) -> bool:
        """Return True if I hold a part of the contribution that counts."""
        if contributor not in self._held.get(part, ()):
            return False
        found = self.stage.standing
        return found is None or found.names.get(contributor) == self._table.commit_name(contributor)

    def contributors(self, part: int) -> frozenset[int]:
        """Return the members whose contribution to a part is here."""
        return frozenset(self._held.get(part, ()))

    def holds(self, part: int, order: Collection[int]) -> bool:
        """Return True if I have a part from all of these members."""
        return all(self.has(part, index) for index in order)

    def pairs(self, among: Collection[int]) -> list[tuple[int, int]]:
        """Return what I hold of these contributors: (part, contributor), sorted."""
        found = [(part, index) for part, held in self._held.items() for index in held if index in among]
        return sorted(pair for pair in found if self.has(*pair))

    def expected(self, among: Collection[int]) -> list[tuple[int, int]]:
        """Return what I am to hold of these contributors, and can still get."""
        found, table = self.stage.standing, self._table
        commits, names = table.commits(), found.names if found is not None else {}
        among = {index for index in among if index in commits and names.get(index) in (None, table.commit_name(index))}
        return sorted({(part, index) for part in self.duties for index in among} - self._failed.keys())

    def is_too_late(self, part: int, contributor: int) -> bool:
        """Return True if a part that is on its way cannot count any more: the word of its holder is in the cut without it."""
        found = self.stage.standing
        if found is None or contributor in found.parts.get(part, ()):
            return False
        return contributor not in found.names or found.holders.get(part) == self._table.me or part not in self.duties

    def why_left_out(self, contributor: int) -> str:
        """Return why a contribution is not in the cut, as far as I know."""
        reasons = [reason for (_, index), reason in self._failed.items() if index == contributor]
        if contributor not in self._table.commits():
            return "it committed to nothing"
        return reasons[0] if reasons else "too few owners have its contribution"

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow."""
        table, is_cut, hurries = self._table, self.stage.standing is not None, self.stage.is_hurrying
        num_commits, num_words = len(table.commits()), self._facts.num_ever(wire.Have)
        if self._changed("duties", num_words, num_commits, len(active), is_cut, self.stage.num_looks):
            self._extend(active)
        actions = self._fetch() if self._changed("fetch", num_commits, is_cut, len(self.duties)) else []
        has_ended = is_cut and self.stage.has_spoken
        if has_ended or not self._changed(
            "report", num_commits, len(active), self._changes, is_cut, hurries, self.stage.num_looks
        ):
            return actions
        return [*actions, *self._report(active)]

    def _extend(self, active: Collection[PeerId]) -> None:
        """Take over what others can no longer hold, or deny to hold."""
        table = self._table
        denied = self.stage.denied(table.deputized - self.duties, table.commits())
        for part in table.deputized - self.duties:
            if table.living(part, active)[:1] == [table.me] or part in denied:
                self.duties.add(part)

    def _fetch(self) -> list[Action]:
        table, found = self._table, self.stage.standing
        commits = table.commits()
        wanted = commits.keys() if found is None else commits.keys() & found.names.keys()
        pairs = {(part, index) for part in self.duties for index in wanted}
        actions: list[Action] = []
        for part, index in sorted(pairs - self._asked):
            self._asked.add((part, index))
            cells = table.cells(part)
            source, key = table.members[index], commits[index].parts[part]
            num_bytes = self._setup.spec.part_bytes(cells, commits[index].codec)
            if num_bytes is None:
                actions += self.not_fetched(part, index, "the run lets nobody choose the codec that it states")
                continue
            others = tuple(table.members[it] for it in (part, *table.seating.deputies[part]) if it not in (table.me, index))
            actions.append(FetchPart(part, source, key, cells, num_bytes, others, contributor=index))
        return actions

    def _report(self, active: Collection[PeerId]) -> list[Action]:
        """Say what I hold once it is all that I can expect; at the deadline, and then when nothing more is on its way.

        At once if the cut came before that, so that nobody takes me for silent: its proposer may not have waited for me.
        """
        awaited = self._awaited(active)
        pairs = ((part, index) for part in self.duties for index in awaited)
        is_whole = all(index in self._held.get(part, ()) or (part, index) in self._failed for part, index in pairs)
        is_fetching = any(index not in self._held.get(part, ()) for part, index in self._asked - self._failed.keys())
        is_open = self.stage.standing is None and (not self.is_closed or (self._has_closed and is_fetching))
        if is_open and not is_whole:
            return []
        self._has_closed = self.is_closed
        mine = {part: self._named(self._held.get(part, set())) for part in self.duties}
        return self.stage.say(mine) if mine else []

    def _named(self, held: Collection[int]) -> dict[int, bytes]:
        return {index: self._table.commit_name(index) for index in held}

    def _awaited(self, active: Collection[PeerId]) -> frozenset[int]:
        """Return the contributors that a holder waits for before it says what it holds."""
        if self._changed("awaited", len(active), self.stage.is_hurrying):
            table, awaits = self._table, self._setup.conduct.awaits
            here = {index for index in table.training if table.members[index] in active}
            hurries = self.stage.is_hurrying
            self._expected = frozenset(index for index in here if not hurries or awaits(table.members[index]))
        return self._expected

    def _changed(self, step: str, *state: object) -> bool:
        """Return True if the inputs of a step have changed since its last run. Counts among them never shrink."""
        changed = self._seen.get(step) != state
        self._seen[step] = state
        return changed
