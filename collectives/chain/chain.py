"""The hash chain of a run's certificates, and a state's position on it. Pure.

Theory of operation. A certificate names its predecessor by hash, so certificates from the first round on are a chain.
A certified round is final: two certificates of one round show that voters with more than a third of the votes have
signed twice. The tokens, which rosters sign, each as many as count (`trust.credit_of`), are a figure and decide nothing.

A chain need not begin with the first round. A late joiner holds it from the certificate of the state that it took.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ...dht.run.admission import OPEN, Charter
from ...peer import wire
from ...peer.base.digest import DIGEST_BYTES
from ...peer.base.errors import ProtocolViolation
from ...peer.wire.signed import verify_signed
from .certificate import certificate_hash, check_certificate, genesis, value_of


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a chain: its last round, the hash of that round's certificate, all tokens up to it."""

    round: int
    hash: bytes
    tokens: int


NOTHING = Head(0, bytes(DIGEST_BYTES), 0)
"""The head of a run without a certified round."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One link of the chain: the head that a certificate makes, and the hash of its predecessor."""

    head: Head
    previous: bytes
    credit: int
    """The tokens of all contributors that count."""

    @classmethod
    def of(cls, certificate: wire.Certificate) -> "ChainLink":
        """Return the link of a validated certificate."""
        value = value_of(certificate)
        return cls(Head(value.round, certificate_hash(certificate), value.tokens), value.previous, sum(value.credit))


def check_consecutive(links: Sequence[ChainLink]) -> None:
    """Raise `ProtocolViolation` unless each link follows its predecessor."""
    for before, link in pairwise(links):
        _check_next(before.head, link)


class Chain:
    """The links that a peer holds, 48 bytes a round: hashes, tokens, and the file offsets of the certificates."""

    def __init__(self, run: str) -> None:
        self._origin = Head(0, genesis(run), 0)
        self.first = 1
        """The first round of the chain held here."""
        self._hashes = bytearray()
        self._tokens = array("Q")
        self._places = array("Q")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def head(self) -> Head:
        """The head of the last link; `NOTHING` if there is none."""
        return self.at(self.first + len(self) - 1) or NOTHING

    def at(self, round_: int) -> Head | None:
        """Return the head after a round; None if that round is not held."""
        index = round_ - self.first
        if not 0 <= index < len(self):
            return None
        return Head(round_, bytes(self._hashes[index * DIGEST_BYTES :][:DIGEST_BYTES]), self._tokens[index])

    def place(self, round_: int) -> int:
        """Return the file offset of a held round's certificate, as passed to `attach`, `put` or `move`."""
        return self._places[round_ - self.first]

    def joins(self, link: ChainLink) -> bool:
        """Return True if a link's predecessor is held: cut back to it, the chain could take the link."""
        before = self._origin if link.head.round == 1 else self.at(link.head.round - 1)
        return before is not None and before.hash == link.previous and before.tokens <= link.head.tokens

    def attach(self, link: ChainLink, place: int) -> None:
        """Append a link. Raises `ProtocolViolation` unless it follows the head."""
        _check_next(self.head if len(self) else self._origin, link)
        self._hashes += link.head.hash
        self._tokens.append(link.head.tokens)
        self._places.append(place)

    def put(self, link: ChainLink, place: int) -> None:
        """Reorganize: cut the chain back to a link's predecessor and append it; if that is not held, begin anew with it."""
        if self.joins(link):
            self.cut(link.head.round - 1)
            self.attach(link, place)
        else:
            self.first = link.head.round
            self._hashes, self._tokens, self._places = bytearray(link.head.hash), array("Q"), array("Q")
            self._tokens.append(link.head.tokens)
            self._places.append(place)

    def cut(self, round_: int) -> None:
        """Drop every link after a round."""
        kept = min(max(0, round_ + 1 - self.first), len(self))
        if not kept:
            self.first = 1
        del self._hashes[kept * DIGEST_BYTES :]
        del self._tokens[kept:]
        del self._places[kept:]

    def move(self, round_: int, place: int) -> None:
        """Set the file offset of a held round's certificate."""
        self._places[round_ - self.first] = place


def _check_next(before: Head, link: ChainLink) -> None:
    if link.head.round != before.round + 1:
        raise ProtocolViolation(f"the certificate of round {link.head.round} does not follow round {before.round}")
    if link.previous != before.hash:
        raise ProtocolViolation(
            f"the certificate of round {link.head.round} follows another one of round {before.round}"
        )
    if link.head.tokens < before.tokens:
        raise ProtocolViolation(f"the certificate of round {link.head.round} takes tokens away")
    if link.head.tokens != min(before.tokens + link.credit, wire.MAX_COUNT):
        added = link.head.tokens - before.tokens
        raise ProtocolViolation(f"the certificate of round {link.head.round} credits {link.credit} tokens and adds {added}")


@dataclass(frozen=True, slots=True)
class HeldChain:
    """What a reader holds of a chain at one moment."""

    head: Head
    """The head; `NOTHING` before the first certificate."""
    first: int
    """The first round that can be compared; up to 1 if all can."""
    at: Callable[[int], Head | None]
    """Returns the head after a round; None if it is not known."""
    certificate: Callable[[int], wire.Certificate | None]
    """Returns the certificate of a round, perhaps from the disk; None if it is not here."""

    @classmethod
    def of(cls, certificates: Sequence[wire.Certificate], head: Head) -> "HeldChain":
        """Return a chain of which these consecutive certificates are here, up to its head."""
        by_round = {certificate.slot.round: certificate for certificate in certificates}

        def at(round_: int) -> Head | None:
            return head if round_ == head.round else ChainLink.of(by_round[round_]).head if round_ in by_round else None

        return cls(head, min(by_round, default=head.round), at, by_round.get)


@dataclass(frozen=True, slots=True)
class ChainPosition:
    """A state's position on the chain: `round` rounds were applied, the last one as `certificate` proves."""

    round: int
    root: bytes
    tokens: int
    certificate: wire.Certificate | None

    @property
    def head(self) -> Head:
        """The head of the chain of certificates that leads to this state."""
        if self.certificate is None:
            return NOTHING
        return Head(self.round, certificate_hash(self.certificate), self.tokens)

    @property
    def certified(self) -> bytes | None:
        """The certified state root; None at the start of a run, where no certificate exists."""
        return None if self.certificate is None else value_of(self.certificate).next_root

    @property
    def is_certified(self) -> bool:
        """Whether a certificate proves the state: not at a run's start, nor after an outer step that led elsewhere."""
        return self.root == self.certified


StatedPosition: TypeAlias = tuple[int, bytes, bytes]
"""A position as a peer states it (`wire.StateOffer`): round, root, packed certificate."""


def start_of_run(root: bytes) -> ChainPosition:
    """Return the position of a state before the first round."""
    return ChainPosition(0, root, 0, None)


def position_after(certificate: wire.Certificate, run: str, charter: Charter = OPEN) -> ChainPosition:
    """Return the position that a certificate of this run states. Raises `RemoteError`, as `check_certificate` does."""
    value = check_certificate(certificate, verify_signed, charter=charter)
    if certificate.slot.run != run:
        raise ProtocolViolation("a certificate of another run")
    return ChainPosition(value.round, value.next_root, value.tokens, certificate)
