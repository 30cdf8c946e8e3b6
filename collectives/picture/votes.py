"""The voters of a run's next round, and which of them are here. Pure."""

from dataclasses import dataclass

from ...peer.base.plain import SHORT_ID
from ...peer.base.transport import PeerId
from ..agreement.electorate import Electorate


@dataclass(frozen=True, slots=True)
class VotesHere:
    """The voters of a run's next round, and which of them are here."""

    round: int
    """The last round that is certified."""
    electorate: Electorate
    here: tuple[PeerId, ...]
    """The voters that hold the run's state and have answered."""
    owner: PeerId = ""
    """The run's owner."""
    away: float = 0.0
    """Seconds since the reader has missed a quorum; 0 for one that has just begun to look."""

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """The other voters."""
        return tuple(voter for voter in self.electorate.voters if voter not in self.here)

    @property
    def figures(self) -> dict[str, object]:
        """The same for programs."""
        electorate = self.electorate
        return {
            "round": self.round,
            "voters": dict(electorate.votes),
            "here": list(self.here),
            "missing": list(self.missing),
            "votes": electorate.votes_of(self.here),
            "quorum": electorate.quorum,
            "total": electorate.total,
        }

    def __str__(self) -> str:
        electorate, minutes = self.electorate, int(self.away // 60)
        if not electorate.is_quorum(self.here):
            return electorate.awaits(self.here, self.owner, f", away for {minutes} min or longer" if minutes else "")
        missing = f"; missing: {', '.join(voter[-SHORT_ID:] for voter in self.missing)}" if self.missing else ""
        votes = f"{electorate.votes_of(self.here)} of {electorate.total} votes are here, {electorate.quorum} needed"
        return votes + missing
