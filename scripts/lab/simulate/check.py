"""The invariants of a run, checked on everything that the peers of a simulation do.

    equal states       all peers that end a round hold the same certified result and the state root that it names
    all or nothing     a result is, bit for bit, what the run's rule computes from its cut, and among peers without a
                       fault no attempt is certified for some and void for one that these have not seen give up
    reasons            no attempt ends without effect and without a reason
    honest peers       no honest peer is charged with a breach of the protocol, caught in a lie, or banned
    progress           rounds end, and at the end all living peers hold one state

There is one chain, whatever is cut off from what. Attackers are not checked: the invariants are about what honest peers
end, hold and emit about honest ones.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field

from ....collectives.allreduce.actions import Outcome, OutcomeKind
from ....collectives.driver.contribution import Averaged, Contribution
from ....collectives.robust.rule import Rule
from ....collectives.vector.arrays import Floats
from ....peer.log.events import Fault, faults_of
from ....peer.log.telemetry import Event
from .peer import SimulatedPeer

GUILTY = faults_of(Fault.COMMISSION)
"""Events that no honest peer causes."""
CHECKED_ROUNDS = 3
"""Rounds for which contributions are kept to be averaged anew: a quarter of a megabyte each."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant, and where."""

    invariant: str
    text: str


@dataclass(slots=True)
class RoundRow:
    """The observations of one round."""

    number: int
    began: float
    """Time of the first Ready."""
    certified: float = 0.0
    """Time of the first certificate."""
    results: dict[bytes, Outcome] = field(default_factory=dict)
    """By the hash of its certificate: more than one violate an invariant."""
    holders: dict[str, bytes] = field(default_factory=dict)
    """The certificate of the state that each peer had after the round."""
    done: set[int] = field(default_factory=set)
    """The attempt of each certificate."""
    stalled: dict[str, str] = field(default_factory=dict)
    """Why the round stalled, by the name of the peer that says so."""
    void: dict[tuple[int, str], str] = field(default_factory=dict)
    """The reason, by attempt and the name of the peer that gave it up."""


class Checks:
    """Collects violations from the actions and events of honest peers.

    `named` replaces peer ids in a text by names; events about `attackers` are no violations. What those in `covered` are
    judged by is not what they contribute, so outputs are not compared in rounds with one of them.
    """

    def __init__(
        self,
        named: Callable[[str], str],
        rule: Rule,
        attackers: Container[object] = (),
        covered: Container[object] = (),
    ) -> None:
        self.rows: dict[int, RoundRow] = {}
        self.violations: list[Violation] = []
        self._named = named
        self._rule = rule
        self._attackers, self._covered = attackers, covered
        self._contributions: dict[tuple[str, int], tuple[Floats, int]] = {}

    def blame(self, invariant: str, text: str) -> None:
        """Record a violation."""
        self.violations.append(Violation(invariant, self._named(text)))

    def row(self, number: int, now: float) -> RoundRow:
        """Return the row of a round; create it at the first Ready."""
        return self.rows.setdefault(number, RoundRow(number, now))

    def event(self, name: str, event: Event) -> None:
        """Check an event that an honest peer has emitted."""
        if event["event"] == "agreement.stalled" and isinstance(round_ := event["round"], int) and round_ in self.rows:
            self.rows[round_].stalled[name] = self._named(str(event["reason"]))
        if event["event"] in GUILTY and event.get("peer") not in self._attackers:
            text = f"{name} emitted {event['event']} about {event.get('peer', '')}: {event.get('reason', '')}"
            self.blame("honest peers", text)

    def started(self, peer: SimulatedPeer, contribution: Contribution) -> None:
        """Keep what a peer contributes to an attempt; one that leaves contributes nothing."""
        if contribution.vector is None:
            return
        self._contributions[peer.peer, contribution.round] = contribution.vector.whole(), contribution.tokens
        self._contributions.pop((peer.peer, contribution.round - CHECKED_ROUNDS), None)

    def ended(self, peer: SimulatedPeer, averaged: Averaged, now: float) -> None:
        """Check the end of an attempt at a peer."""
        outcome = averaged.outcome
        row = self.row(outcome.slot.round, now)
        if outcome.kind is OutcomeKind.DONE:
            row.certified = row.certified or now
            row.done.add(outcome.slot.attempt)
            self._done(row, peer, outcome)
        elif not outcome.reason:
            self.blame("reasons", f"{peer.name} ended round {row.number} as {outcome.kind} without a reason")
        elif outcome.kind is OutcomeKind.VOID:
            row.void[outcome.slot.attempt, peer.name] = self._named(outcome.reason)

    def moved(self, peer: SimulatedPeer, now: float) -> None:
        """Check a state that a peer took from another."""
        place = peer.place
        if place.round and peer.peer not in self._attackers:
            row = self.row(place.round, now)
            row.holders[peer.name] = place.head.hash
            result = row.results.get(place.head.hash)
            if result is None or result.value.next_root != place.root:
                self.blame("equal states", f"{peer.name} took a state of round {row.number} that no peer certified")

    def finish(self, living: Collection[SimulatedPeer]) -> None:
        """Check the final states of all living peers."""
        ends = Counter((peer.place.round, peer.place.root.hex()[:8]) for peer in living)
        if len(ends) > 1:
            held = ", ".join(f"{count} hold {root} of round {number}" for (number, root), count in ends.most_common())
            self.blame("progress", f"the living peers end with different states: {held}")

    def _done(self, row: RoundRow, peer: SimulatedPeer, outcome: Outcome) -> None:
        place = peer.place
        row.holders[peer.name] = place.head.hash
        where = f"{peer.name} in round {row.number}"
        if place.root != (root := outcome.value.next_root):
            self.blame("equal states", f"{where} holds {place.root.hex()[:8]}, certified is {root.hex()[:8]}")
        known = row.results.setdefault(place.head.hash, outcome)
        if known is outcome:
            self._first(row, where, peer, outcome)
        elif _result(known) != _result(outcome):
            self.blame("equal states", f"{where} has the certificate of others, and another result")

    def _first(self, row: RoundRow, where: str, peer: SimulatedPeer, outcome: Outcome) -> None:
        """Check that a new result is the only one, and correct."""
        if len(row.results) > 1:
            roots = ", ".join(result.value.next_root.hex()[:8] for result in row.results.values())
            self.blame("equal states", f"{where} ends with another result than others: {roots}")
        found = (self._contributions.get((member, outcome.slot.round)) for member in outcome.cut)
        cut = [contribution for contribution in found if contribution is not None]
        if len(cut) < len(outcome.cut):
            self.blame("all or nothing", f"{where}: a peer is in the cut that contributed nothing")
            return
        is_known = outcome.counted and not any(it in self._covered for it in outcome.cut)
        if is_known and peer.state.expected(self._rule, outcome, cut) != outcome.value.outputs:
            self.blame("all or nothing", f"{where}: the outputs are not what the rule makes of the cut")


def _result(outcome: Outcome) -> tuple[object, ...]:
    return outcome.value.next_root, outcome.cut, outcome.value.bounds, outcome.value.outputs
