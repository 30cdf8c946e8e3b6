"""Branches of a run's chain after their last common certificate, and which of two holds. Pure.

Theory of operation. A certified round is final for whoever holds it: two quorums of one electorate share an honest voter,
so two certificates of it prove that voters with more than a third of the votes signed twice, and none of them is better.
Only where a round was decided in different terms, as on the two sides of a partition, does one branch give way. It is
decided at the first certificates after the parting alone, by the electorate that both branches share: the one whose
roster held more of its votes wins, at equal votes the one with the smaller hash. Where not those decide that are present
(`[admission] stall`), the later term wins. What comes later on a branch, its length and its tokens decide nothing, since
a branch of a few can be as long as they like.

Of the members that a later term's roster names, those count that were appointed: a quorum of the appointed has signed, and
nobody signs for others. So voters that hold less than a third count as less than a half, whatever they sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.errors import ProtocolViolation
from ..agreement.electorate import LIAR_PROOF, Electorate
from .certificate import certificate_hash, check_votes, value_of, why_not_revised
from .voters import appointed, electorate_after, is_owner, open_appointment


@dataclass(frozen=True, slots=True)
class Step:
    """One certificate of a branch, as far as it decides between two branches."""

    round: int
    hash: bytes
    votes: int
    """How many votes the roster held, of the electorate that the certificate before determines."""
    ballot: bytes
    """The hash of the voters that decided."""
    weight: int
    """What decides between two branches that part here; the greater one wins."""
    doubted: Electorate | None
    """The electorate, if half of its votes or more are outside of the roster: they may have decided otherwise."""


Branch: TypeAlias = Sequence[Step]
"""The certificates after a common ancestor, in order."""


class Relation(Enum):
    """How another chain relates to mine."""

    EXTENDS = "it continues my chain"
    WINS = "it parts from my chain, and its roster held more of the votes there"
    LOSES = "it parts from my chain, and its roster held fewer of the votes there"
    TWICE = "it parts from my chain by the same voters: more than a third of them signed twice, and I keep mine"
    APART = "it shares no certificate with my chain that I hold"
    OLDER = "it ends before the first certificate that I know"


def steps_of(certificates: Sequence[wire.Certificate], before: wire.Certificate | None, charter: Charter) -> list[Step]:
    """Return the steps of consecutive certificates after `before`, which `packed.checked` has validated."""
    steps: list[Step] = []
    for certificate in certificates:
        first = electorate_after(None if before is None else value_of(before), charter)
        steps.append(_step(certificate, first, charter))
        before = certificate
    return steps


def _step(certificate: wire.Certificate, first: Electorate, charter: Charter) -> Step:
    slot, value = certificate.slot, value_of(certificate)
    decided = appointed(certificate, first, charter)
    votes = first.votes_of(set(value.members) & decided.votes.keys())
    by_owner = bool(certificate.appointment) and is_owner(open_appointment(certificate.appointment)[0].sender, charter)
    is_backed = not slot.term or by_owner or len(first.votes) < LIAR_PROOF
    return Step(
        round=value.round,
        hash=certificate_hash(certificate),
        votes=votes,
        ballot=keyed("voters of a ballot", *(voter.encode() for voter in decided.voters)),
        weight=votes if charter.stall == "present" else slot.term,
        doubted=None if is_backed or 2 * votes > first.total else first,
    )


def why_not_next(
    certificate: wire.Certificate, decision: tuple[wire.RunId, int, bytes], before: wire.Certificate | None, charter: Charter
) -> str:
    """Return why a validated certificate does not decide this (run, round, previous) after `before`; empty if it does."""
    if certificate.slot.round != decision[1]:
        return f"my round is {decision[1]}"
    if certificate.slot.decision != decision:
        return "it continues another chain than mine"
    last = None if before is None else value_of(before)
    if why_not := why_not_revised(last, value_of(certificate), charter):
        return why_not
    first = electorate_after(last, charter)
    try:
        check_votes(certificate, first, charter)
    except ProtocolViolation as error:
        return str(error)
    (step,) = steps_of([certificate], before, charter)
    if step.doubted is not None:
        return f"{step.votes} of {first.total} votes decided it in term {certificate.slot.term}: the others still may"
    return ""


def order(step: Step) -> tuple[int, bytes]:
    """Return the sort key of steps after one common certificate: that of the branch that wins is the smallest."""
    return -step.weight, step.hash


def rank_of(branch: Branch) -> tuple[tuple[int, bytes], ...]:
    """Return the sort key of branches after one common certificate; one that goes on comes before its own beginning."""
    return *(order(step) for step in branch), (1, b"")


def relation(mine: Step | None, other: Step, charter: Charter) -> Relation:
    """Return how a branch relates to mine, by the first certificate of each after their last common one.

    `mine` is None if the common one is my head.
    """
    if mine is None:
        return Relation.EXTENDS
    if charter.authority is not None or mine.ballot == other.ballot:
        return Relation.TWICE
    return Relation.WINS if order(other) < order(mine) else Relation.LOSES
