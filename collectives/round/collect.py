"""COLLECT: commitments, the parts that I answer for, what I hold of them, and the cut that follows for all.

Theory of operation. Every part has a holder: its owner, or the first living deputy once the owner is lost. A holder
fetches the part from everybody who has committed and says what it has; the convener (the first living member of the
roster) cuts to what every holder has, so that a contribution enters all parts or none. If a holder later finds that it
cannot have a contribution of the cut after all, it says so, and the convener cuts again, at most twice.

Censoring. An owner whose word leaves out a living member that has committed is checked by its two deputies, who fetch
the part themselves. If both hold what the owner denies, the first of them takes the part over.
"""

import math
from collections.abc import Collection

from ...peer import wire
from ...peer.transport import PeerId
from ..chain.certificate import commits_hash, quorum
from .actions import Action, FetchPart, HashParts, Note, Send, Setup
from .roster import Facts, Table


class Collecting:
    """One member's part in collecting contributions."""

    def __init__(self, setup: Setup, facts: Facts, table: Table) -> None:
        self.failure = ""
        self.duties: set[int] = {table.me} & table.owners
        """The parts that I answer for; it only grows."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._quorum = quorum(len(table.members))
        self._held: dict[int, set[int]] = {}
        self._failed: dict[tuple[int, int], str] = {}
        self._asked: dict[int, set[int]] = {}
        self._parts: tuple[bytes, ...] | None = None
        self._committed = False
        self._changes = 0
        self._refused: set[int] = set()
        self._closed = False
        self._excused: frozenset[int] = frozenset()
        """The duties of which I say what I hold, complete or not: those that were mine when the time was up."""
        self._said: wire.Have | None = None
        self._proposed: wire.Cut | None = None
        self._disowned: dict[int, int] = {}
        self._living: frozenset[int] = frozenset()
        self._seen: dict[str, tuple[object, ...]] = {}
        self._denials: dict[int, tuple[tuple[object, ...], frozenset[int]]] = {}
        self._worth: float | None = None

    def begin(self) -> list[Action]:
        """The roster is certified: encode my contribution."""
        return [HashParts(self._table.roster.bounds, self._table.readers())]

    def parts_hashed(self, parts: tuple[bytes, ...]) -> None:
        """My contribution is encoded and served."""
        self._parts = parts
        self._changes += 1

    def fetched(self, part: int, contributor: int) -> bool:
        """A contribution's part is here and well-formed. Whether anything can follow: less than a quorum is too few."""
        held = self._held.setdefault(part, set())
        held.add(contributor)
        self._changes += 1
        return self._closed or len(held) + len(self._failed) >= self._quorum

    def not_fetched(self, part: int, contributor: int, reason: str) -> list[Action]:
        """A contribution's part cannot be had."""
        self._failed[part, contributor] = reason
        self._changes += 1
        return [Note("round.part_missing", self._table.members[contributor], "collect", reason)]

    def stand_in(self, part: int) -> None:
        """The output of a part cannot be had from whom it should come: if I stand in for its owner, I make it."""
        if part in self._table.wards and part not in self.duties:
            self.duties.add(part)
            self._changes += 1

    def refuse(self, contributors: Collection[int]) -> bool:
        """These cannot stay in the cut: the convener cuts again without them. Whether that is new."""
        news = set(contributors) - self._refused
        self._refused |= news
        self._changes += len(news)
        return bool(news)

    def close(self) -> bool:
        """Time is up: what has not come by now is left out. Whether that changed anything."""
        if self._closed:
            return False
        self._closed = True
        self._excused = frozenset(self.duties)
        self._changes += 1
        return True

    def worth_waiting(self, active: Collection[PeerId]) -> float | None:
        """Seconds for which waiting for the rest costs less than leaving it out; None while that is not the question.

        While all wait, everybody trains nothing: that is worth the tokens that I hold, over the time that they took. So
        once I hold a quorum's, the rest is worth waiting for as long as its own tokens took, shared among all who wait.
        """
        # Who owns nothing needs no more of a contribution than its commit.
        progress = self._changes if self.duties else self._facts.num_ever(wire.Commit)
        if self._news("worth", progress, len(self.duties), len(active), self._closed):
            self._worth = self._weigh(active)
        return self._worth

    def _weigh(self, active: Collection[PeerId]) -> float | None:
        table = self._table
        if self._closed or any(len(self._held.get(part, ())) < self._quorum for part in self.duties):
            return None
        held = set(table.commits()).intersection(*(self._held[part] for part in self.duties))
        rest = [peer for index, peer in enumerate(table.members) if index not in held and peer in active]
        if len(held) < self._quorum or not rest:
            return None
        readies = self._facts.of(wire.Ready)
        here = sum(readies[table.members[index]].tokens for index in held if table.members[index] in readies)
        waited_for = sum(readies[peer].tokens for peer in rest if peer in readies)
        return self._setup.phase_seconds * waited_for / max(1, here)

    def holds(self, part: int, order: Collection[int]) -> bool:
        """Whether I have a part from all of these members."""
        return self._held.get(part, set()).issuperset(order)

    def why_left_out(self, contributor: int) -> str:
        """Why a contribution did not enter, as far as I know."""
        reasons = [reason for (_, index), reason in self._failed.items() if index == contributor]
        if contributor not in self._table.commits():
            return "it committed to nothing"
        return reasons[0] if reasons else "not every holder has its contribution"

    def listens_to(self, sender: PeerId, active: Collection[PeerId]) -> bool:
        """Whether it matters to me what a member has: the convener looks at all, others at those for whom they stand in."""
        table = self._table
        return table.places[sender] in table.wards or table.convener(active) == table.me

    def advance(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        """Everything that the facts allow; `cut` is the newest valid one, None before the first."""
        if self._proposed is not None and (cut is None or self._proposed.version > cut.version):
            cut = self._proposed  # On its way to me: another one of the same version would contradict it.
        num_words = self._facts.num_ever(wire.Commit), self._facts.num_ever(wire.Have)
        if not self._news("advance", num_words, len(active), cut, self._changes):
            return []
        return [
            *self._commit(),
            *self._fetch(active, cut),
            *self._say(active, cut),
            *self._convene(active, cut),
        ]

    def _commit(self) -> list[Action]:
        if self._parts is None or self._committed:
            return []
        self._committed = True
        setup, table = self._setup, self._table
        loss = setup.loss if math.isfinite(setup.loss) else 0.0
        commit = wire.Commit(table.slot, table.hash, setup.tokens, setup.steps, loss, self._parts, setup.ramp)
        return [Send(table.members, commit)]

    def _fetch(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        table = self._table
        commits = table.commits()
        # Before anybody has said what it holds, nobody can have denied anything.
        num_words = self._facts.num_ever(wire.Have)
        if self._news("duties", len(active), num_words, num_words and len(commits)):
            for part in table.wards - self.duties:
                if table.holder(part, active) == table.me or self._denied(part, active):
                    self.duties.add(part)
        if not self._news("fetch", len(commits), cut, len(self.duties)):
            return []
        wanted = commits.keys() if cut is None else commits.keys() & cut.contributors
        actions: list[Action] = []
        for part in sorted(self.duties):
            asked = self._asked.setdefault(part, set())
            for index in sorted(wanted - asked):
                asked.add(index)
                cells = table.cells(part)
                source, key = table.members[index], commits[index].parts[part]
                actions.append(FetchPart(part, index, source, key, cells, self._setup.part_bytes(cells)))
        return actions

    def _denied(self, part: int, active: Collection[PeerId]) -> frozenset[int]:
        """Living members who have committed, and whom the living owner of a part leaves out of what it says it holds."""
        table = self._table
        said = table.held(part, part)
        if said is None or table.members[part] not in active:
            return frozenset()
        commits = table.commits()
        known, denied = self._denials.get(part, ((), frozenset()))
        state = (said, len(commits), len(active))
        if known != state:
            denied = frozenset(index for index in commits if table.members[index] in active) - said
            self._denials[part] = (state, denied)
        return denied

    def _say(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        """What I hold, once that is all that I can expect; and again when it changes, as by a duty more."""
        table = self._table
        awaited = self._awaited(active, cut)
        fewest = min([len(self._held.get(part, ())) for part in self.duties], default=0)
        if fewest + len(self._failed) < len(awaited) and not self._closed:
            return []
        ripe = {
            part
            for part in self.duties
            if part in self._excused
            or self._held.get(part, set()) | {index for p, index in self._failed if p == part} >= awaited
        }
        if not ripe or not (ripe == self.duties or self._closed):
            return []
        parts = tuple((part, tuple(sorted(self._held.get(part, ())))) for part in sorted(ripe))
        have = wire.Have(table.slot, table.hash, parts, self._setup.nonce)
        if have == self._said:
            return []
        self._said = have
        return [Send(table.members, have)]

    def _awaited(self, active: Collection[PeerId], cut: wire.Cut | None) -> frozenset[int]:
        """Whose contributions a holder must have before it says what it has."""
        if cut is not None:
            return frozenset(cut.contributors)
        if self._news("awaited", len(active)):
            self._living = frozenset(index for index, peer in enumerate(self._table.members) if peer in active)
        return self._living

    def _convene(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        """Propose a cut where that is on me: the first one, or one without what a holder turned out to lack."""
        table = self._table
        if table.convener(active) != table.me:
            return []
        notes = self._disown(active)
        held: list[frozenset[int]] = []
        nonces: dict[int, bytes] = {}
        for part in table.owners:
            holder = self._disowned.get(part, table.holder(part, active))
            theirs = table.held(holder, part) if holder is not None else None
            if holder is None or theirs is None or self._hearing(part, active):
                return notes
            held.append(theirs)
            nonces[holder] = table.haves()[holder].nonce
        commits = table.commits()
        fit = commits.keys() - self._refused
        order = tuple(sorted(index for index in fit if all(index in have for have in held)))
        version = 0
        if cut is not None:
            kept = tuple(index for index in cut.contributors if index in order)
            # What a former convener cut is proposed again word for word, so that acknowledgements of it still count.
            order, version = (kept, cut.version) if kept == cut.contributors else (kept, cut.version + 1)
            nonces = dict(cut.nonces) if version == cut.version else nonces
        if version > wire.MAX_RECUTS:
            self.failure = f"{wire.MAX_RECUTS} re-cuts were not enough"
        elif len(order) < self._quorum:
            self.failure = f"only {len(order)} of {len(table.members)} contributions are held by every holder"
        elif not any(commits[index].tokens * commits[index].ramp for index in order):
            self.failure = "no contribution has any tokens that count"
        else:
            bound = commits_hash(table.commits_signed(order))
            opened = tuple(sorted(nonces.items()))
            proposal = wire.Cut(table.slot, table.hash, version, order, bound, opened)
            if proposal != self._proposed:
                self._proposed = proposal
                return [*notes, Send(table.members, proposal)]
        return notes

    def _hearing(self, part: int, active: Collection[PeerId]) -> bool:
        """Whether the deputies of an owner that denies something have yet to be heard."""
        if self._closed or part in self._disowned or not self._denied(part, active):
            return False
        table, deputies = self._table, self._table.deputies(part)
        living = [index for index in deputies if table.members[index] in active]
        return len(living) == len(deputies) > 1 and any(table.held(index, part) is None for index in living)

    def _disown(self, active: Collection[PeerId]) -> list[Action]:
        """Take a part from an owner that denies what both of its deputies hold."""
        notes: list[Action] = []
        for part in self._table.owners - self._disowned.keys():
            deputies = self._table.deputies(part)
            attested = self._denied(part, active)
            for index in deputies if attested else ():
                attested &= self._table.held(index, part) or frozenset()
            if len(deputies) > 1 and attested:
                self._disowned[part] = deputies[0]
                whom = ", ".join(self._table.members[index] for index in sorted(attested))
                notes.append(Note("round.disowned", self._table.members[part], "collect", f"it denies to hold {whom}"))
        return notes

    def _news(self, step: str, *state: object) -> bool:
        """Whether anything that a step depends on has changed since it was taken last. What is counted never shrinks."""
        changed = self._seen.get(step) != state
        self._seen[step] = state
        return changed
