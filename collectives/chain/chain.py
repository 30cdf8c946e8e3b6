"""The chain of a run's certificates as numbers: what follows what, and which of two chains stands for more training. Pure.

Theory of operation. A certificate names the one before it, so certificates from the first round on are a chain, and two
halves of a parted swarm grow two chains from where they parted. Of chains that as many members are on (`standing`)
the one whose head has more tokens is the run's (DESIGN §8): it stands for more training. Its tokens are those that its
rosters signed; every round adds some, so a longer chain is always better than what it began with. At equal tokens the
smaller hash decides, so that all decide alike.

A chain need not begin with the first round: who joins late holds it from the certificate of the state that it took.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...peer import wire
from ...peer.digest import DIGEST_BYTES
from ...peer.errors import ProtocolViolation
from .certificate import certificate_hash, genesis, result_of


@dataclass(frozen=True, slots=True)
class Head:
    """How far a chain has come: its last round, the hash of that round's certificate, all tokens up to it."""

    round: int
    hash: bytes
    tokens: int


NOTHING = Head(0, bytes(DIGEST_BYTES), 0)
"""The head of a run of which no round is certified."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a certificate says about its place in the chain."""

    head: Head
    previous: bytes

    @classmethod
    def of(cls, certificate: wire.Certificate) -> "Link":
        """The link that a certificate, checked before, is."""
        result = result_of(certificate)
        return cls(Head(result.slot.round, certificate_hash(certificate), result.tokens), result.previous)


def rank(head: Head) -> tuple[int, bytes]:
    """What the best chain's head has least of."""
    return -head.tokens, head.hash


def better(one: Head, other: Head) -> bool:
    """Whether the chain with head `one` stands for more training than that with head `other`."""
    return rank(one) < rank(other)


def check_trail(links: Sequence[Link]) -> None:
    """Raise `ProtocolViolation` unless each link follows the one before it."""
    for before, link in pairwise(links):
        _check_next(before.head, link)


class Chain:
    """The links that a peer holds, 48 bytes a round: their hashes, their tokens, and where their certificates are."""

    def __init__(self, run: str) -> None:
        self._origin = Head(0, genesis(run), 0)
        self._first = 1
        self._hashes = bytearray()
        self._tokens = array("Q")
        self._places = array("Q")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def first(self) -> int:
        """The first round whose certificate is here."""
        return self._first

    @property
    def head(self) -> Head:
        """The last link; `NOTHING` where there is none."""
        return self.at(self._first + len(self) - 1) or NOTHING

    def at(self, round_: int) -> Head | None:
        """The link of a round."""
        index = round_ - self._first
        if not 0 <= index < len(self):
            return None
        return Head(round_, bytes(self._hashes[index * DIGEST_BYTES :][:DIGEST_BYTES]), self._tokens[index])

    def place(self, round_: int) -> int:
        """Where the certificate of a round that is here is kept, as `attach` was told."""
        return self._places[round_ - self._first]

    def joins(self, link: Link) -> bool:
        """Whether what a link follows is here: it could be attached once the chain is cut back to it."""
        before = self._origin if link.head.round == 1 else self.at(link.head.round - 1)
        return before is not None and before.hash == link.previous and before.tokens < link.head.tokens

    def attach(self, link: Link, place: int) -> None:
        """Make the chain one longer. Raises `ProtocolViolation` where the link is not its next one."""
        _check_next(self.head if len(self) else self._origin, link)
        self._hashes += link.head.hash
        self._tokens.append(link.head.tokens)
        self._places.append(place)

    def put(self, link: Link, place: int) -> None:
        """Cut the chain back to where a link joins it and attach it; where it joins nowhere, begin anew with it."""
        if self.joins(link):
            self.cut(link.head.round - 1)
            self.attach(link, place)
        else:
            self._first = link.head.round
            self._hashes, self._tokens, self._places = bytearray(link.head.hash), array("Q"), array("Q")
            self._tokens.append(link.head.tokens)
            self._places.append(place)

    def cut(self, round_: int) -> None:
        """Forget every link after a round."""
        kept = min(max(0, round_ + 1 - self._first), len(self))
        if not kept:
            self._first = 1
        del self._hashes[kept * DIGEST_BYTES :]
        del self._tokens[kept:]
        del self._places[kept:]

    def move(self, round_: int, place: int) -> None:
        """The certificate of a round that is here is kept somewhere else now."""
        self._places[round_ - self._first] = place


def _check_next(before: Head, link: Link) -> None:
    if link.head.round != before.round + 1:
        raise ProtocolViolation(f"the certificate of round {link.head.round} does not follow round {before.round}")
    if link.previous != before.hash:
        raise ProtocolViolation(
            f"the certificate of round {link.head.round} follows another one of round {before.round}"
        )
    if link.head.tokens <= before.tokens:
        raise ProtocolViolation(f"the certificate of round {link.head.round} adds no tokens")
