"""A roster with its members' messages: owners, deputies, commits, holdings. Pure."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from ...peer import wire
from ...peer.transport import PeerId
from ...peer.wire.schema import encode
from ..robust.checks import commitment
from .actions import Forward
from .facts import _M, MessageLog

MAX_TOKENS = 1 << 50
"""The most that one contribution may claim: 35 years at a million a second. More would overflow the run's `Count`."""
DEPUTIES = 2
"""Deputies of an owner (failover). Two: the loss of an owner and both of its deputies in one round may void it."""


class RosterView:
    """A roster as one member sees it: the owner and deputies of each part, and the contribution of each member."""

    def __init__(self, signed: wire.Signed, roster: wire.Roster, me: PeerId, facts: MessageLog) -> None:
        self.signed = signed
        self.roster = roster
        self.slot = roster.slot
        self.members = roster.members
        self.hash = signed.hash
        self.me = roster.members.index(me)
        self.owners = frozenset(index for index in range(len(roster.members)) if self.cells(index))
        self.places = {peer: index for index, peer in enumerate(roster.members)}
        """The index of each member."""
        self._facts = facts
        self._deputies = _ring_deputies(len(roster.members), self.owners)
        self.deputized = frozenset(part for part in self.owners if self.me in self._deputies[part])
        """The parts that I am a deputy of."""
        self._commits: dict[int, wire.Commit] = {}
        self._commits_signed: dict[int, wire.Signed] = {}
        self._haves: dict[int, wire.Have] = {}
        self._held: dict[tuple[int, int], tuple[wire.Have, frozenset[int]]] = {}
        self._read = {wire.Commit: 0, wire.Have: 0}

    def cells(self, part: int) -> int:
        """Return the number of cells of a part."""
        return self.roster.bounds[part + 1] - self.roster.bounds[part]

    def convener(self, active: Collection[PeerId]) -> int | None:
        """Return the convener, which sequences the attempt: the first living member; None if none lives."""
        return next((index for index, peer in enumerate(self.members) if peer in active), None)

    def deputies(self, part: int) -> tuple[int, ...]:
        """Return a part's deputies: the next members in the roster's ring, owners before those that own nothing."""
        return self._deputies[part]

    def holder(self, part: int, active: Collection[PeerId]) -> int | None:
        """Return the holder of a part: its owner, else its first living deputy (failover); None if all are lost."""
        return next((index for index in (part, *self.deputies(part)) if self.members[index] in active), None)

    def readers(self) -> tuple[tuple[PeerId, ...], ...]:
        """Return the peers that may fetch each of my parts before the cut: its owner and the owner's deputies."""
        return tuple(
            tuple(self.members[index] for index in (part, *self.deputies(part))) for part in range(len(self.members))
        )

    def commits(self) -> Mapping[int, wire.Commit]:
        """Return the valid commits by roster index, in the order of arrival."""
        if self._read[wire.Commit] == self._facts.num_ever(wire.Commit):
            return self._commits
        for signed, commit in self._news(wire.Commit):
            fits = commit.roster == self.hash and len(commit.parts) == len(self.members)
            if fits and commit.tokens <= MAX_TOKENS:
                index = self.places[signed.sender]
                self._commits[index], self._commits_signed[index] = commit, signed
        return self._commits

    def commits_signed(self, order: Iterable[int]) -> list[wire.Signed]:
        """Return the signed commits of these members."""
        return [self._commits_signed[index] for index in order]

    def haves(self) -> Mapping[int, wire.Have]:
        """Return each member's Have, by roster index."""
        if self._read[wire.Have] == self._facts.num_ever(wire.Have):
            return self._haves
        for signed, have in self._news(wire.Have):
            if have.roster == self.hash:
                self._haves[self.places[signed.sender]] = have
        return self._haves

    def held(self, index: int, part: int) -> frozenset[int] | None:
        """Return the contributors whose part a member states to hold; None if it has stated nothing about that part."""
        have = self.haves().get(index)
        if have is None:
            return None
        known = self._held.get((index, part))
        if known is None or known[0] is not have:  # Computed lazily: most of it does not concern me.
            found = [frozenset(held) for number, held in have.parts if number == part]
            if not found:
                return None
            known = self._held[index, part] = (have, found[-1])
        return known[1]

    def certificate(self, cut: wire.Signed, acks: Iterable[wire.Signed]) -> wire.Certificate:
        """Build the round's certificate from its cut and a quorum of equal acknowledgements."""
        return wire.Certificate(self.slot, encode(self.signed), encode(cut), tuple(map(_packed, acks)))

    def shown_to(self, sender: PeerId, message: wire.RoundMessage) -> list[Forward]:
        """Forward my roster or cuts to a member that acknowledges others: that exposes an equivocating convener."""
        if message.slot != self.slot or sender == self.members[self.me]:
            return []
        if isinstance(message, wire.RosterAck) and message.roster != self.hash:
            return [Forward((sender,), self.signed)]
        if isinstance(message, wire.CutAck):
            cuts = [signed for signed, _ in self._facts.every(wire.Cut, self.slot)]
            if all(signed.hash != message.cut for signed in cuts):
                return [Forward((sender,), signed) for signed in cuts]
        return []

    def cut_of(self, result: wire.ResultAck) -> wire.Signed | None:
        """Return the cut of a result; None if I have not received it."""
        cuts = (signed for signed, _ in self._facts.every(wire.Cut, self.slot))
        return next((signed for signed in cuts if signed.hash == result.cut), None)

    def why_not_cut(self, cut: wire.Cut, least: int) -> str | None:
        """Return why a cut does not fit this roster; None if it does."""
        order = cut.contributors
        if cut.roster != self.hash or list(order) != sorted(set(order)) or order[-1] >= len(self.members):
            return "a cut that does not fit its roster"
        if len(order) < least:
            return f"a cut of {len(order)} contributions where {least} are needed"
        opened, readies = dict(cut.nonces), self._facts.of(wire.Ready)
        if 3 * len(opened) <= len(self.owners) or max(opened) >= len(self.members):
            return "a cut with the nonces of a third of the owners, or fewer"
        for index, nonce in opened.items():
            ready = readies.get(self.members[index])
            if ready is not None and ready.slot == self.slot and commitment(nonce) != ready.nonce_hash:
                return f"a cut with a nonce that {self.members[index]} has not committed to"
        return None

    def _news(self, kind: type[_M]) -> list[tuple[wire.Signed, _M]]:
        """Return the messages of a kind about this slot that arrived since the last call."""
        news = self._facts.since(kind, self._read[kind])
        self._read[kind] += len(news)
        return [entry for entry in news if entry[1].slot == self.slot]


_packed = lru_cache(maxsize=256)(encode)
"""Encodes acknowledgements for a certificate. Cached, since in a simulation all members encode the same ones."""


@lru_cache(maxsize=8)  # In a simulation all members of a roster share one process.
def _ring_deputies(count: int, owners: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return each part's deputies: the next in the ring of `count` members, owners first."""
    deputies: list[tuple[int, ...]] = []
    for part in range(count):
        ring = [*range(part + 1, count), *range(part)]
        owning = itertools.islice((index for index in ring if index in owners), DEPUTIES)
        rest = (index for index in ring if index not in owners)
        deputies.append(tuple(itertools.islice(itertools.chain(owning, rest), DEPUTIES)))
    return tuple(deputies)
