"""The invariants of a run, held against everything that the peers of a simulation do.

    equal states       all who end a round end it with the same certified result and the state root that it names
    all or nothing     a result is, bit for bit, what the run's rule makes of its cut, and among peers whom nothing has
                       hit an attempt is not certified for some and void for one whom these have not seen giving up
    reasons            no attempt ends without effect and without a reason
    honest peers       nobody is charged with a breach of the rules, caught in a lie, or banned
    progress           rounds come to an end, and at the end all who live hold one state

While a partition lasts, and two rounds after (DESIGN §8), each group may have a chain of its own; so may a peer that
was stalled or cut off, which to itself is a group of one. Of who attacks nothing is expected: only what honest peers
end, hold and say of honest ones is looked at.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field

from ...collectives.averager import Averaged, Contribution
from ...collectives.codec import Floats
from ...collectives.robust.rule import Rule
from ...collectives.round.actions import Outcome, OutcomeKind
from ...peer.telemetry import Event
from .options import Partition
from .peer import SimulatedPeer

HEALING_ROUNDS = 2
"""How many rounds after a partition there may still be two chains."""
GUILTY = frozenset(
    {
        *("peer.charged", "peer.banned", "round.equivocation", "round.result_differs", "state.drift"),
        *("round.output_false", "round.sketches_differ"),
    }
)
"""Events that no honest peer gives cause for."""
KEPT_ROUNDS = 3
"""For how long contributions are kept to be averaged anew: a quarter of a megabyte each."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, where, and how."""

    invariant: str
    text: str


@dataclass(slots=True)
class RoundRow:
    """What is known of one round."""

    number: int
    began: float
    """When the first peer was ready."""
    certified: float = 0.0
    """When the first one ended it."""
    results: dict[bytes, Outcome] = field(default_factory=dict)
    """By the hash of its certificate: more than one where there is more than one chain."""
    holders: dict[str, bytes] = field(default_factory=dict)
    """The certificate of the state that each peer had after the round."""
    served: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    """How often a peer has given the bytes of a hash to others, that they may end this round or catch up with it."""
    done: set[tuple[int, str]] = field(default_factory=set)
    void: dict[tuple[int, str], tuple[str, str]] = field(default_factory=dict)
    """(attempt, name) → the peer's id and the reason."""
    gave_up: set[tuple[int, str]] = field(default_factory=set)
    """(attempt, peer's id) of who gave up what others have certified: these went on without it, and told it the result."""


class Checks:
    """Told of all that honest peers do and see, it collects what must not be.

    `named` puts names for the peer ids in a text; `attackers` are those of whom ill may be said.
    """

    def __init__(
        self,
        partitions: Iterable[Partition],
        named: Callable[[str], str],
        rule: Rule,
        attackers: Container[object] = (),
    ) -> None:
        self.rows: dict[int, RoundRow] = {}
        self.violations: list[Violation] = []
        self.hit: set[str] = set()
        """Peers that are, or once were, killed, stalled or cut off: nobody can expect of these to know it all."""
        self._named = named
        self._rule = rule
        self._attackers = attackers
        self._forks = [range(split.first, split.last + 1 + HEALING_ROUNDS) for split in partitions]
        self._brought: dict[tuple[str, int], tuple[Floats, int]] = {}

    def blame(self, invariant: str, text: str) -> None:
        """An invariant does not hold."""
        self.violations.append(Violation(invariant, self._named(text)))

    def row(self, number: int, now: float) -> RoundRow:
        """The row of a round, new if nobody was ready for it before."""
        return self.rows.setdefault(number, RoundRow(number, now))

    def event(self, name: str, event: Event) -> None:
        """A peer has emitted an event."""
        if event["event"] in GUILTY and event.get("peer") not in self._attackers:
            text = f"{name} says {event['event']} of {event.get('peer', '')}: {event.get('reason', '')}"
            self.blame("honest peers", text)

    def started(self, peer: SimulatedPeer, contribution: Contribution) -> None:
        """A peer brings something into an attempt."""
        self._brought[peer.peer, contribution.round] = contribution.vector, contribution.tokens
        self._brought.pop((peer.peer, contribution.round - KEPT_ROUNDS), None)

    def cut(self, outcome: Outcome) -> list[tuple[Floats, int]]:
        """What those in a cut have brought, and their tokens; without those who brought nothing."""
        cut = [self._brought.get((member, outcome.slot.round)) for member in outcome.cut]
        return [brought for brought in cut if brought is not None]

    def ended(self, peer: SimulatedPeer, averaged: Averaged, now: float) -> None:
        """An attempt has ended for a peer."""
        outcome = averaged.outcome
        row = self.row(outcome.slot.round, now)
        place = outcome.slot.attempt, peer.name
        if outcome.kind is OutcomeKind.DONE:
            row.certified = row.certified or now
            row.done.add(place)
            self._done(row, peer, outcome)
        elif not outcome.reason:
            self.blame("reasons", f"{peer.name} ended round {row.number} as {outcome.kind} and does not say why")
        elif outcome.kind is OutcomeKind.VOID:
            row.void[place] = peer.peer, self._named(outcome.reason)

    def served(self, giver: str, key: bytes, taker: SimulatedPeer, now: float) -> None:
        """A peer has fetched something from another one."""
        self.row(taker.place.round + 1, now).served[giver, key] += 1

    def moved(self, peer: SimulatedPeer, now: float) -> None:
        """A peer holds a state that it took from another."""
        place = peer.place
        if place.round:
            row = self.row(place.round, now)
            row.holders[peer.name] = place.head.hash
            result = row.results.get(place.head.hash)
            if result is None or result.root != place.root:
                self.blame("equal states", f"{peer.name} took a state of round {row.number} that nobody certified")

    def finish(self, living: Collection[SimulatedPeer]) -> None:
        """The last state of all who live."""
        ends = Counter((peer.place.round, peer.place.root.hex()[:8]) for peer in living)
        if len(ends) > 1:
            held = ", ".join(f"{count} hold {root} of round {number}" for (number, root), count in ends.most_common())
            self.blame("progress", f"the living end apart: {held}")
        for row in self.rows.values():
            if self._may_fork(row):
                continue
            rosters = {(r.slot.attempt, member) for r in row.results.values() for member in r.members}
            for (attempt, name), (peer, why) in sorted(row.void.items()):
                rest = sorted(n for a, n in row.done if a == attempt and n not in self.hit)
                if rest and (attempt, peer) in rosters - row.gave_up and name not in self.hit:
                    text = f"round {row.number} attempt {attempt} is void for {name} ({why}) and done for {rest[0]}"
                    self.blame("all or nothing", text)

    def _done(self, row: RoundRow, peer: SimulatedPeer, outcome: Outcome) -> None:
        place = peer.place
        row.holders[peer.name] = place.head.hash
        row.gave_up |= {(outcome.slot.attempt, quitter) for quitter in outcome.gave_up}
        where = f"{peer.name} in round {row.number}"
        if place.root != outcome.root:
            self.blame("equal states", f"{where} holds {place.root.hex()[:8]}, certified is {outcome.root.hex()[:8]}")
        known = row.results.setdefault(place.head.hash, outcome)
        if known is outcome:
            self._first(row, where, peer, outcome)
        elif _result(known) != _result(outcome):
            self.blame("equal states", f"{where} has the certificate of others, and another result")

    def _first(self, row: RoundRow, where: str, peer: SimulatedPeer, outcome: Outcome) -> None:
        """A result that is new: is it the only one, and is it right?"""
        if len(row.results) > 1 and not (self.hit or self._may_fork(row)):
            roots = ", ".join(result.root.hex()[:8] for result in row.results.values())
            self.blame("equal states", f"{where} ends with another result than others: {roots}")
        cut = self.cut(outcome)
        if len(cut) < len(outcome.cut):
            self.blame("all or nothing", f"{where}: somebody is in the cut who brought nothing")
        elif peer.state.expected(self._rule, outcome, cut) != outcome.outputs:
            self.blame("all or nothing", f"{where}: the outputs are not what the rule makes of the cut")

    def _may_fork(self, row: RoundRow) -> bool:
        return any(row.number in fork for fork in self._forks)


def _result(outcome: Outcome) -> tuple[object, ...]:
    return outcome.root, outcome.cut, outcome.bounds, outcome.outputs
