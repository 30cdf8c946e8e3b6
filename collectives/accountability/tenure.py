"""Tenure: for whom the owner's own peer vouches by itself, from the chain of certificates and its own statements. Pure.

Theory of operation. A run whose owner alone votes ends with the owner's computer. So the owner's peer vouches by itself for
members that have been in `vouch_after` certified rosters (docs/trust.md). A key is free, and patience is cheap; this is
therefore limited: one statement in `VOUCH_PERIOD` rounds, one peer of a network, as the owner's peer sees it, and peers that
hold a state and serve it; keepers first. What was stated stands in the owner's log, network and round included
(`EarnedVote`), so that a restart changes nothing.

A first voter beside the owner would make things worse: of two the loss of either stops the run. Two are vouched for at once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ...dht.run.statements import MAX_OWNER_STATEMENTS, EarnedVote, OwnerStatements
from ...peer import wire
from ...peer.digest import DIGEST_BYTES
from ...peer.transport import PeerId
from ..chain.certificate import certificate_hash, value_of
from .trust import TRUST_WINDOW

VOUCH_PERIOD = 5
"""Rounds for each voter that was vouched for, before the next: a cartel of patient keys comes in one by one."""
MAX_SELF_MADE = 40
"""Voters above which none is added: 24 of the 64 seats stay for those that only train."""
MAX_STATED = MAX_OWNER_STATEMENTS // 2
"""Statements in the owner's log above which it vouches by hand only: there must be room for bans."""
MAX_RECOUNTED = 2048
"""Certificates that a restart reads again: a few seconds of reading, beside the rounds."""


class Tenure:
    """In how many certified rosters each peer has been without being flagged; a flagged round halves the number.

    A peer that is in none of the last `TRUST_WINDOW` rosters begins anew, as its trust does.
    """

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[int, int]] = {}
        self.head = bytes(DIGEST_BYTES)
        """The hash of the newest certificate that was counted."""

    def advance(self, certificate: wire.Certificate, history: Callable[[int], wire.Certificate | None]) -> None:
        """Count up to a validated certificate; if it is not the next one, recount as far back as `history` shows it."""
        if certificate_hash(certificate) == self.head:
            return
        trail = [certificate]
        while value_of(trail[-1]).previous != self.head and len(trail) < MAX_RECOUNTED:
            before = history(value_of(trail[-1]).round - 1)
            if before is None or certificate_hash(before) != value_of(trail[-1]).previous:
                break
            trail.append(before)
        if value_of(trail[-1]).previous != self.head:
            self._known = {}
        for each in reversed(trail):
            self._take(each)

    def of(self, peer: PeerId) -> int:
        """Return the rounds of a peer."""
        return self._known.get(peer, (0, 0))[1]

    def _take(self, certificate: wire.Certificate) -> None:
        value = value_of(certificate)
        for index, peer in enumerate(value.members):
            rounds = self.of(peer)
            self._known[peer] = value.round, rounds // 2 if index in value.flagged else rounds + 1
        self._known = {peer: known for peer, known in self._known.items() if value.round - known[0] < TRUST_WINDOW}
        self.head = certificate_hash(certificate)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member that is here and says that it holds the run's state."""

    peer: PeerId
    rounds: int
    """Its tenure."""
    keeps: bool
    """True if it trains nothing."""
    network: str
    """The network in which I see it; empty while I do not, as at a relay."""


def num_due(round_: int, voters: Collection[PeerId], statements: OwnerStatements) -> int:
    """Return for how many members the owner's peer may vouch after a round with these next voters: 0, 1, or 2 at once."""
    stated_in = [earned.round for _, earned in statements.earned]
    last = max(stated_in, default=0)
    if stated_in and round_ < last + VOUCH_PERIOD * stated_in.count(last):
        return 0
    if len(voters) >= MAX_SELF_MADE or len(statements) >= MAX_STATED:
        return 0
    return 2 if len(voters) < 2 else 1


def in_order(candidates: Iterable[Candidate], vouch_after: int) -> list[Candidate]:
    """Return those with enough rounds: keepers first, then by their rounds."""
    found = [candidate for candidate in candidates if candidate.rounds >= vouch_after]
    return sorted(found, key=lambda candidate: (not candidate.keeps, -candidate.rounds, candidate.peer))


def why_not_vouch(
    candidate: Candidate, statements: OwnerStatements, networks: Mapping[str, PeerId], chosen: Iterable[Candidate]
) -> str:
    """Return why the owner's peer does not vouch for a member; empty if it may. `networks` are those of the voters here."""
    if candidate.peer in statements.revoked:
        return "the owner has revoked what it was vouched for"
    if not candidate.network:
        return "its network is not known: it is reached through a relay"
    taken = dict(networks)
    taken |= {earned.network: stated.peer for stated, earned in statements.earned}  # Those taken back since, too.
    taken |= {other.network: other.peer for other in chosen}
    if candidate.network in taken:
        return f"of its network, {candidate.network}, another one counts: {taken[candidate.network]}"
    return ""


def earned_vote(candidate: Candidate, round_: int) -> EarnedVote:
    """Return the reason of the statement that vouches for a candidate after a round."""
    return EarnedVote(candidate.rounds, round_, candidate.network)
