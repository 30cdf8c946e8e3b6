"""The statements, and the two quorum certificates: proof and decision. Pure.

Prevote and Precommit are those of the wire; Ready and Propose are here without what they say about data. A statement arrives
with the voter that signed it; the driver has verified the signature. A quorum certificate holds its slot and value once and
lists voters: its parts are equal by construction. The driver has verified for each listed voter the signature under that very
statement; voters and votes are checked here (`validity`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ...peer.base.transport import PeerId
from ...peer.wire import Precommit, Prevote, Slot


@dataclass(frozen=True, slots=True)
class QuorumCertificate:
    """Equal statements by a quorum in one slot. `voters` is sorted."""

    slot: Slot
    value: bytes
    voters: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class PrevoteQuorum(QuorumCertificate):
    """A quorum of Prevotes. No other value has one in this slot, and more than 1/3 honest votes hold the value's bytes."""


@dataclass(frozen=True, slots=True)
class Decision(QuorumCertificate):
    """A quorum of Precommits: the value is decided."""


@dataclass(frozen=True, slots=True)
class VoterReady:
    """The voter has entered the slot; `proof` is the newest that it knows."""

    slot: Slot
    proof: PrevoteQuorum | None = None


Shown: TypeAlias = tuple[tuple[PeerId, PrevoteQuorum | None], ...]
"""Readys that justify a proposal: of each the voter and its proof, by voter."""


@dataclass(frozen=True, slots=True)
class Propose:
    """The proposer's proposal, justified by Readys of a quorum in its slot.

    The newest proof among the Readys determines the value; without one the value is new. Hence a proposal has no proof
    of its own.
    """

    slot: Slot
    value: bytes
    readys: Shown

    @property
    def newest_proof(self) -> PrevoteQuorum | None:
        """The newest proof among the Readys."""
        return newest(proof for _, proof in self.readys)


Statement: TypeAlias = VoterReady | Propose | Prevote | Precommit


def newest(proofs: Iterable[PrevoteQuorum | None]) -> PrevoteQuorum | None:
    """Return the proof of the latest attempt."""
    return max((proof for proof in proofs if proof is not None), key=lambda proof: proof.slot.attempt, default=None)
