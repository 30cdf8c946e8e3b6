"""An attempt at a member that contributes and judges nothing: beyond the first `MAX_PARTS` of a roster. Pure.

It commits, serves its parts, and sketches under the seeds of the proposer's cut and outputs, as every contributor does. What
is in and what comes out is for the judges to say: it follows their certificate. So whatever else the proposer tells it costs
it its place in this attempt and nothing more: it names the cut and the outputs that it has sketched for, and judges with
other ones do not count that. It waits for nobody, and the voters end the attempt.
"""

from collections.abc import Collection

from ...peer import wire
from ...peer.base.transport import PeerId
from .actions import Action, Phase, Setup
from .exchange import RosterRound
from .facts import MessageLog
from .judge import SketchExchange
from .roster import RosterView


class ContributorRound(RosterRound):
    """One member's state of an attempt that it only contributes to."""

    def __init__(self, setup: Setup, facts: MessageLog, table: RosterView) -> None:
        super().__init__(setup, facts, table)
        self._cuts: dict[bool, bytes] = {}
        """The hashes of the first and of the second cut."""
        self._made: dict[bytes, SketchExchange] = {}
        """By seed, the sketches that I have made."""
        self._is_named = False
        """True once the proposer has named outputs."""

    @property
    def phase(self) -> Phase:
        """The current phase, as far as the proposer has said."""
        return Phase.CHECK if self._is_named else Phase.JUDGE if self.is_cut else Phase.COLLECT

    @property
    def is_cut(self) -> bool:
        """True once the first cut is here: others count on my part."""
        return bool(self._cuts)

    @property
    def cut(self) -> bytes:
        """The hash of the first cut; empty before it is here."""
        return self._cuts.get(False, b"")

    @property
    def providers(self) -> tuple[PeerId, ...]:
        """Whom to ask for certified outputs, one after the other: all judges, each contributor another one first."""
        judges = self.table.judges
        turn = self.table.me % len(judges)
        return (*judges[turn:], *judges[:turn])

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Sketch under each seed that the proposer's messages allow now."""
        table, rule = self.table, self._setup.rule
        proposer, slot = table.members[0], table.slot
        cuts = [it for it in self._facts.every(wire.Cut, slot) if it[0].sender == proposer]
        self._cuts |= {bool(cut.before): signed.hash for signed, cut in cuts}
        last = self._cuts.get(not rule.blind)
        named = [it for signed, it in self._facts.every(wire.Outputs, slot) if signed.sender == proposer and it.cut == last]
        self._is_named = bool(named)
        if rule.blind or not self.collect_phase.has_committed:  # The proposer may name a cut whatever I have sent.
            return []
        exchanges = [SketchExchange(self._facts, table, {table.me}, self.cut)] if self.cut else []
        for outputs in named if rule.linear else ():
            exchanges.append(SketchExchange(self._facts, table, {table.me}, outputs.cut, outputs.outputs))
        actions: list[Action] = []
        for exchange in exchanges:
            if exchange.seed not in self._made:
                self._made[exchange.seed] = exchange
                actions += exchange.advance(())
        return actions

    def _sketches(self, seed: bytes) -> list[SketchExchange]:
        return [self._made[seed]] if seed in self._made else []
