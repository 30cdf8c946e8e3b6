"""COLLECT: commitments, the parts that I hold, and the cut that follows. Pure.

Theory of operation. Every part has a holder: its owner, or the first living deputy once the owner is lost (failover). A
holder fetches the part from every member that has committed, and sends what it holds (Have). The proposer, the first
member of the roster, cuts to what every holder has, so that a contribution enters all parts or none. If a holder later
cannot get a contribution of the cut, it sends a new Have, and the proposer cuts again, at most twice.

A keeper, whose Ready states no tokens, commits to nothing. It holds parts and acknowledges cuts like any other member.

Censorship. If an owner's Have leaves out a living member that has committed, its two deputies verify it: they fetch the
part themselves. If both hold what the owner denies, the one that holds more takes the part over.
"""

import math
from collections.abc import Collection

from ...peer import wire
from ...peer.transport import PeerId
from ..accountability.trust import YOUNG_ROUNDS, are_most
from ..agreement.actions import Note
from ..chain.certificate import commits_hash
from .actions import Action, FetchPart, HashParts, Send, Setup
from .facts import MessageLog
from .roster import RosterView

KNOWN_ROUNDS = (YOUNG_ROUNDS, 1)
"""Contributions to certified cuts that the last re-cut asks of a member; the second where too few have the first."""


class CollectPhase:
    """One member's state of the phase COLLECT."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView) -> None:
        self.failure = ""
        self.duties: set[int] = {table.me} & table.owners
        """The parts that I answer for; this set only grows."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._held: dict[int, set[int]] = {}
        self._failed: dict[tuple[int, int], str] = {}
        self._asked: dict[int, set[int]] = {}
        self._changes = 0
        refused = {table.places[peer] for peer in setup.left_out if peer in table.places}
        # Those of earlier attempts stay out, unless no cut is possible without them: a proposer's loss may be the reason.
        self._earlier = refused if table.is_enough(table.training - refused) else set[int]()
        self._refused = set(self._earlier)
        self._closed = False
        self._excused: frozenset[int] = frozenset()
        """The duties that I report even if incomplete: those that were mine at the timeout."""
        self._sent_have: wire.Have | None = None
        self._proposed: wire.Cut | None = None
        self._disowned: dict[int, int] = {}
        self._living: frozenset[int] = frozenset()
        self._seen: dict[str, tuple[object, ...]] = {}
        self._denials: dict[int, tuple[tuple[object, ...], frozenset[int]]] = {}
        self._worth: float | None = None

    def begin(self) -> list[Action]:
        """Encode my contribution, if I train."""
        return [HashParts(self._table.roster.bounds, self._table.readers())] if self._setup.ready.tokens else []

    def parts_hashed(self, parts: tuple[bytes, ...], codec: str = "") -> list[Action]:
        """Commit to my contribution, which is encoded and served; `codec` is empty for the run's usual one."""
        setup, table, tokens = self._setup, self._table, self._setup.ready.tokens
        loss = setup.loss if math.isfinite(setup.loss) else 0.0
        commit = wire.Commit(table.slot, table.hash, tokens, setup.steps, loss, parts, setup.ramp, codec)
        return [Send(table.members, commit)]

    def fetched(self, part: int, contributor: int) -> bool:
        """Record a well-formed part of a contribution. Return False if too little is here for anything to follow."""
        held = self._held.setdefault(part, set())
        held.add(contributor)
        self._changes += 1
        return self._closed or bool(self._failed) or self._table.is_enough(held)

    def not_fetched(self, part: int, contributor: int, reason: str) -> list[Action]:
        """Record a failed fetch of a part."""
        self._failed[part, contributor] = reason
        self._changes += 1
        return [Note("round.part_missing", self._table.members[contributor], "collect", reason)]

    def stand_in(self, part: int) -> None:
        """Fail over a part whose output is withheld: if I am a deputy of its owner, I make it."""
        if part in self._table.deputized and part not in self.duties:
            self.duties.add(part)
            self._changes += 1

    def refuse(self, contributors: Collection[int]) -> bool:
        """Exclude contributors: the proposer cuts again without them. Return True if any is new."""
        news = set(contributors) - self._refused
        self._refused |= news
        self._changes += len(news)
        return bool(news)

    @property
    def refused(self) -> tuple[PeerId, ...]:
        """The contributors that were removed from a cut, in this attempt or an earlier one of the round."""
        return tuple(self._table.members[index] for index in sorted(self._refused))

    @property
    def is_closed(self) -> bool:
        """True once the phase is closed at its timeout."""
        return self._closed

    def close(self) -> bool:
        """Close the phase at its timeout, without what has not arrived. Return True if that changed anything."""
        if self._closed:
            return False
        self._closed = True
        self._excused = frozenset(self.duties)
        self._changes += 1
        return True

    def worth_waiting(self, active: Collection[PeerId]) -> float | None:
        """Return for how many seconds waiting for the rest costs less than leaving it out; None if that does not apply.

        While members wait, they do not train: that costs the tokens that I hold, per time that they took. So once I
        hold a quorum's contributions, the rest is worth waiting for as long as its own tokens took, shared among all
        waiting.
        """
        # A member without a part needs only the commit of a contribution.
        progress = self._changes if self.duties else self._facts.num_ever(wire.Commit)
        if self._changed("worth", progress, len(self.duties), len(active), self._closed):
            self._worth = self._weigh(active)
        return self._worth

    def _weigh(self, active: Collection[PeerId]) -> float | None:
        table = self._table
        if self._closed or not all(table.is_enough(self._held.get(part, ())) for part in self.duties):
            return None
        held = set(table.commits()).intersection(*(self._held[part] for part in self.duties))
        rest = [peer for index in table.training - held if (peer := table.members[index]) in active]
        if not table.is_enough(held) or not rest:
            return None
        here = sum(table.readies[table.members[index]].tokens for index in held)
        waited_for = sum(table.readies[peer].tokens for peer in rest)
        return self._setup.phase_seconds * waited_for / max(1, here)

    def holds(self, part: int, order: Collection[int]) -> bool:
        """Return True if I have a part from all of these members."""
        return self._held.get(part, set()).issuperset(order)

    def why_left_out(self, contributor: int) -> str:
        """Return why a contribution is not in the cut, as far as I know."""
        reasons = [reason for (_, index), reason in self._failed.items() if index == contributor]
        if contributor not in self._table.commits():
            return "it committed to nothing"
        return reasons[0] if reasons else "not every holder has its contribution"

    def needs_have_of(self, sender: PeerId) -> bool:
        """Return True if a member's Have concerns me: the proposer needs all, a deputy those of its owners."""
        return self._table.places[sender] in self._table.deputized or self._table.me == 0

    def is_shared(
        self, order: Collection[int], version: int, active: Collection[PeerId], mute: Collection[int] = ()
    ) -> bool:
        """Return True if a cut has most of the contributions, by weight, that all holders state to have, as far as I know.

        Else a proposer could decide on the contribution of a key of its own alone, where those that train have no vote.
        The `mute` are those that are to be removed from a cut, since their sketches are missing.
        """
        table, commits = self._table, self._table.commits()
        held = {index for index in commits if table.members[index] in active}
        held -= {*mute, *(self._refused - self._earlier)}
        for part in table.owners:
            holder = table.holder(part, active)
            theirs = table.held(holder, part) if holder is not None else None
            held &= held if theirs is None else theirs
        if version == wire.MAX_RECUTS:
            held &= {*self._known_in(tuple(sorted(held)))}
        stated = {index: (commits[index].tokens, table.roster.seats[index]) for index in held}
        return are_most(order, stated, earned=self._setup.charter.earned)

    def advance(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        """Return all actions that the messages allow; `cut` is the newest valid one, None before the first."""
        if self._proposed is not None and (cut is None or self._proposed.version > cut.version):
            cut = self._proposed  # Not yet delivered to me: another one of the same version would be an equivocation.
        num_messages = self._facts.num_ever(wire.Commit), self._facts.num_ever(wire.Have)
        if not self._changed("advance", num_messages, len(active), cut, self._changes):
            return []
        return [*self._fetch(active, cut), *self._report(active, cut), *self._propose_cut(active, cut)]

    def _fetch(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        table = self._table
        commits = table.commits()
        # Before the first Have, no owner can have denied anything.
        num_messages = self._facts.num_ever(wire.Have)
        if self._changed("duties", len(active), num_messages, num_messages and len(commits)):
            for part in table.deputized - self.duties:
                if table.holder(part, active) == table.me or self._denied(part, active):
                    self.duties.add(part)
        if not self._changed("fetch", len(commits), cut, len(self.duties)):
            return []
        wanted = commits.keys() if cut is None else commits.keys() & cut.contributors
        actions: list[Action] = []
        for part in sorted(self.duties):
            asked = self._asked.setdefault(part, set())
            for index in sorted(wanted - asked):
                asked.add(index)
                cells = table.cells(part)
                source, key = table.members[index], commits[index].parts[part]
                num_bytes = self._setup.part_bytes(cells, commits[index].codec)
                if num_bytes is None:
                    actions += self.not_fetched(part, index, "the run lets nobody choose the codec that it states")
                    continue
                others = table.others_with(part, {table.me, index})
                actions.append(FetchPart(part, source, key, cells, num_bytes, others, contributor=index))
        return actions

    def _denied(self, part: int, active: Collection[PeerId]) -> frozenset[int]:
        """Return the living, committed members that the living owner of a part leaves out of its Have."""
        table = self._table
        stated = table.held(part, part)
        if stated is None or table.members[part] not in active:
            return frozenset()
        commits = table.commits()
        known, denied = self._denials.get(part, ((), frozenset()))
        state = (stated, len(commits), len(active))
        if known != state:
            denied = frozenset(index for index in commits if table.members[index] in active) - stated
            self._denials[part] = (state, denied)
        return denied

    def _report(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        """Send my Have once it is all that I can expect, and again when it changes, as by a new duty."""
        table = self._table
        awaited = self._awaited(active, cut)
        fewest = min([len(self._held.get(part, ())) for part in self.duties], default=0)
        if fewest + len(self._failed) < len(awaited) and not self._closed:
            return []
        reportable = {
            part
            for part in self.duties
            if part in self._excused
            or self._held.get(part, set()) | {index for p, index in self._failed if p == part} >= awaited
        }
        if not reportable or not (reportable == self.duties or self._closed):
            return []
        parts = tuple((part, tuple(sorted(self._held.get(part, ())))) for part in sorted(reportable))
        have = wire.Have(table.slot, table.hash, parts, self._setup.nonce)
        if have == self._sent_have:
            return []
        self._sent_have = have
        return [Send(table.members, have)]

    def _awaited(self, active: Collection[PeerId], cut: wire.Cut | None) -> frozenset[int]:
        """Return the contributors that a holder waits for before it sends its Have."""
        if cut is not None:
            return frozenset(cut.contributors)
        if self._changed("awaited", len(active)):
            self._living = frozenset(index for index in self._table.training if self._table.members[index] in active)
        return self._living

    def _propose_cut(self, active: Collection[PeerId], cut: wire.Cut | None) -> list[Action]:
        """Cut if I am the proposer: the first time, or again without what a holder lacks."""
        table = self._table
        if table.me != 0:
            return []
        notes = self._disown(active)
        held: list[frozenset[int]] = []
        nonces: dict[int, bytes] = {}
        for part in table.owners:
            holder = self._disowned.get(part, table.holder(part, active))
            theirs = table.held(holder, part) if holder is not None else None
            if holder is None or theirs is None or self._awaits_deputies(part, active):
                return notes
            held.append(theirs)
            nonces[holder] = table.haves()[holder].nonce
        commits = table.commits()
        fit = commits.keys() - self._refused
        order = tuple(sorted(index for index in fit if all(index in have for have in held)))
        if self._earlier and not self.is_shared(order, 0, active):
            self._refused, self._earlier = self._refused - self._earlier, set()
            return [*notes, *self._propose_cut(active, cut)]
        version = 0
        if cut is not None:
            kept = tuple(index for index in cut.contributors if index in order)
            order, version = (kept, cut.version) if kept == cut.contributors else (kept, cut.version + 1)
            nonces = dict(cut.nonces) if version == cut.version else nonces
            if cut.version < version == wire.MAX_RECUTS:
                order = self._known_in(order)
        if version > wire.MAX_RECUTS:
            self.failure = f"{wire.MAX_RECUTS} re-cuts were not enough"
        elif not table.is_enough(order):
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

    def _known_in(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Return the members for the last cut: those of many rounds if they suffice, else the voters.

        Three keys could void each attempt otherwise.
        """
        seats, table = self._table.roster.seats, self._table
        known = [tuple(index for index in order if seats[index].rounds >= least) for least in KNOWN_ROUNDS]
        voters = tuple(index for index in order if table.members[index] in table.electorate.votes)
        return next((some for some in (*known, voters) if table.is_enough(some)), order)

    def _awaits_deputies(self, part: int, active: Collection[PeerId]) -> bool:
        """Return True if an owner denies something, and its deputies' Haves have not all arrived."""
        if self._closed or part in self._disowned or not self._denied(part, active):
            return False
        table, deputies = self._table, self._table.deputies(part)
        living = [index for index in deputies if table.members[index] in active]
        return len(living) == len(deputies) > 1 and any(table.held(index, part) is None for index in living)

    def _disown(self, active: Collection[PeerId]) -> list[Action]:
        """Take a part from an owner that censors: it denies what both of its deputies hold.

        The deputy that holds more has it: the other one may censor, too, and one of the three may lie.
        """
        notes: list[Action] = []
        for part in self._table.owners:
            deputies = self._table.deputies(part)
            held = [self._table.held(index, part) or frozenset() for index in deputies]
            if part not in self._disowned:
                attested = self._denied(part, active).intersection(*held)
                if len(deputies) < 2 or not attested:
                    continue
                whom = ", ".join(self._table.members[index] for index in sorted(attested))
                notes.append(Note("round.disowned", self._table.members[part], "collect", f"it denies to hold {whom}"))
            self._disowned[part] = max(zip(deputies, held, strict=True), key=lambda deputy: len(deputy[1]))[0]
        return notes

    def _changed(self, step: str, *state: object) -> bool:
        """Return True if the inputs of a step have changed since its last run. Counts among them never shrink."""
        changed = self._seen.get(step) != state
        self._seen[step] = state
        return changed
