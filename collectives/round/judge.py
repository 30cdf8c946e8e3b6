"""JUDGE and CHECK of one cut: what each contribution counts, and whether the outputs are what follows from it. Pure.

All contributors sketch their parts under a seed that follows from the cut, the run's rule weighs them by these, and owners
sum. Once all outputs are here, everybody sketches again, under a seed that follows from them; the sum of the sketches must
be that of the output. Who was given another output than I asks under another seed, and is answered under that one as well:
else whoever holds a false output that is kept from others would wait in vain for what shows it. Whose sketches do not come,
or cannot both be of one vector, does not stay in the cut; an output that is no sum is made again by who stands in for its
owner. A rule that is blind to contributions needs none of it.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from ...peer import wire
from ...peer.transport import PeerId
from ..accountability.trust import weigh
from ..robust.checks import CHECK_COLUMNS, after_outputs, columns_of, num_bytes
from ..sketches import Sketches
from .actions import Action, CheckOutputs, Judge, Note, Setup
from .collect import Collecting
from .outputs import Harvest
from .roster import Facts, Table

MAX_SEEDS, SEEDS_OF_ONE = 8, 2
"""Under which I sketch after one cut, and how many one other may ask for: those who lie may ask for any."""


class Judgement:
    """One member's judgement of one certified cut."""

    def __init__(
        self, setup: Setup, facts: Facts, table: Table, collecting: Collecting, cut: wire.Cut, cut_hash: bytes
    ) -> None:
        self.weights: tuple[tuple[float, ...], ...] = ()
        """Of each part, in the order of the cut; none before the rule has spoken."""
        self.flagged: tuple[int, ...] = ()
        self.failure = ""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._collecting = collecting
        self._cut = cut
        self._cut_hash = cut_hash
        self._first = Sketches(facts, table, cut.contributors, cut_hash, columns_of(len(table.members)))
        self._second: Sketches | None = None
        self._seconds: dict[bytes, Sketches] = {}
        self._read = len(facts.since(wire.Sketch, 0))  # Nobody sketches twice before all have once, I among them.
        self._askers: Counter[PeerId] = Counter()
        self._asked: set[bytes] = set()
        self._checked = b""
        if not any(self._masses()):
            self.failure = "no contribution of the cut counts for anything"
        elif setup.rule.blind:
            self.weights = (self._masses(),) * len(table.members)

    def judge(self) -> list[Action]:
        """Find out what each contribution counts: by its tokens and trust, and then by the run's rule."""
        actions = self._first.advance(self._duties())
        if self._first.is_complete and self._cut_hash not in self._asked:
            self._asked.add(self._cut_hash)
            actions.append(Judge(self._cut_hash, self._masses(), self._first.tables))
        return actions

    def judged(self, weights: tuple[tuple[float, ...], ...], flagged: Mapping[int, str]) -> list[Action]:
        """The rule has spoken: the weights of each part, and who stands out, both in the order of the cut."""
        flagged = {place: flagged[place] for place, mass in enumerate(self._masses()) if mass and place in flagged}
        self.weights = weights
        self.flagged = tuple(self._cut.contributors[place] for place in sorted(flagged))
        if empty := [part for part in self._table.owners if not any(weights[part])]:
            self.failure = f"the rule leaves nothing of part {min(empty)}"
        return [Note("peer.flagged", self._peer(place), "judge", reason) for place, reason in sorted(flagged.items())]

    def check(self, harvest: Harvest) -> list[Action]:
        """Find out whether all outputs are what they should be; `is_checked` tells once they are."""
        outputs = harvest.hashes()
        if self.is_checked(outputs):
            return []
        after = after_outputs(self._cut_hash, outputs)
        self._second = self._under(after)
        actions = self.answer()
        if self._second.is_complete and after not in self._asked:
            self._asked.add(after)
            made = dict(harvest.outputs)
            actions.append(CheckOutputs(after, made, self.weights, self._first.tables, self._second.tables))
        return actions

    def answer(self) -> list[Action]:
        """Sketch under my outputs' seed and those of others, and compare what they say."""
        if self._setup.rule.blind or not self._setup.rule.linear:
            return []
        news = self._facts.since(wire.Sketch, self._read)
        self._read += len(news)
        size = num_bytes(len(self._table.members), CHECK_COLUMNS)
        for signed, sketch in news:
            asker, known = signed.sender, {self._cut_hash, *self._seconds}
            asks = sketch.slot == self._table.slot and sketch.after not in known and len(sketch.tables) == size
            if not asks or self._table.places[asker] not in self._cut.contributors:
                continue
            self._askers[asker] += 1
            if self._askers[asker] <= SEEDS_OF_ONE and len(self._seconds) < MAX_SEEDS:
                self._under(sketch.after)
        duties = self._duties()
        return [action for sketches in self._seconds.values() for action in sketches.advance(duties)]

    def _under(self, after: bytes) -> Sketches:
        if after not in self._seconds:
            order = self._cut.contributors
            self._seconds[after] = Sketches(self._facts, self._table, order, after, CHECK_COLUMNS)
        return self._seconds[after]

    def checked(self, action: CheckOutputs, false: Collection[int], doubtful: Collection[int]) -> list[Action]:
        """Which outputs are false, by part; and whose two sketches are not of one vector, in the order of the cut."""
        reason = "what it said of a part after the cut and after the outputs cannot be of one contribution"
        notes = [Note("round.sketches_differ", self._peer(place), "check", reason) for place in doubtful]
        self._collecting.refuse([self._cut.contributors[place] for place in doubtful])
        if not false and not doubtful:
            self._checked = action.after
        return list(notes)

    def is_checked(self, outputs: tuple[bytes, ...]) -> bool:
        """Whether these outputs need no check, or have passed it."""
        rule = self._setup.rule
        return rule.blind or not rule.linear or self._checked == after_outputs(self._cut_hash, outputs)

    def hasten(self) -> bool:
        """Time is up: who has said nothing of its contribution cannot stay in the cut. Whether that is worth a wait."""
        return self._collecting.refuse(self._current.missing)

    def miss(self, active: Collection[PeerId]) -> None:
        """Who is gone before it said what all need, or was convicted, cannot stay in the cut."""
        if self._setup.rule.blind or self._facts.of(wire.ResultAck, self._table.slot):
            return  # Who acknowledges the result has heard what is missing here, and tells it once the peer is lost.
        members, to_come = self._table.members, self._second is None and self._setup.rule.linear
        for index in self._cut.contributors:
            missing = to_come or index in self._current.missing or self._setup.is_banned(members[index])
            if missing and members[index] not in active:
                self._collecting.refuse([index])

    def word(self, index: int) -> wire.Signed | None:
        """The newest sketches of a contributor."""
        return self._current.word(index)

    def sketches(self, after: bytes) -> list[Sketches]:
        """The exchange under the seed that was drawn after this, if there is one."""
        return [known for known in (self._first, *self._seconds.values()) if known.after == after]

    def silent(self) -> str:
        """Whom it waits for."""
        return self._current.silent()

    @property
    def _current(self) -> Sketches:
        return self._second or self._first

    def _duties(self) -> list[int]:
        """The parts for which I answer, and hold what the cut wants of them."""
        return [part for part in self._collecting.duties if self._collecting.holds(part, self._cut.contributors)]

    def _masses(self) -> tuple[float, ...]:
        order = self._cut.contributors
        commits = [self._table.commits()[index] for index in order]
        seats = [self._table.roster.seats[index] for index in order]
        tokens, ramps = [commit.tokens for commit in commits], [commit.ramp for commit in commits]
        return weigh(tokens, ramps, seats, earned=self._setup.charter.earned)

    def _peer(self, place: int) -> PeerId:
        return self._table.members[self._cut.contributors[place]]
