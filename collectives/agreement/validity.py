"""The reasons to refuse a statement, whatever my own state is. Pure.

All honest voters of a decision know its electorate, so they agree on these reasons.
"""

from ...peer.base.transport import PeerId
from ...peer.wire import Slot
from .electorate import Electorate
from .statements import Propose, QuorumCertificate, Statement, VoterReady


def certificate_fault(certificate: QuorumCertificate, slot: Slot, electorate: Electorate) -> str | None:
    """Return what is wrong with a quorum certificate in the decision of `slot`, or None."""
    if certificate.slot.decision != slot.decision:
        return "a certificate of another decision"
    if certificate.slot.attempt < 0:
        return "a negative attempt"
    voters = certificate.voters
    if len(set(voters)) != len(voters):
        return "a certificate that counts a voter twice"
    if not electorate.votes.keys() >= set(voters):
        return "a certificate by others than voters"
    return None if electorate.is_quorum(voters) else "a certificate without a quorum"


def statement_fault(voter: PeerId, statement: Statement, slot: Slot, electorate: Electorate) -> str | None:
    """Return what is wrong with a voter's statement in the decision of `slot`, or None."""
    if statement.slot.decision != slot.decision:
        return "a statement on another chain"
    if statement.slot.attempt < 0:
        return "a negative attempt"
    if voter not in electorate.votes:
        return "it is no voter of this decision"
    if isinstance(statement, VoterReady) and statement.proof is not None:
        return certificate_fault(statement.proof, slot, electorate)
    return _proposal_fault(voter, statement, electorate) if isinstance(statement, Propose) else None


def _proposal_fault(voter: PeerId, propose: Propose, electorate: Electorate) -> str | None:
    slot, shown = propose.slot, [ready[0] for ready in propose.readys]
    if voter != electorate.proposer(slot.round, slot.attempt):
        return "a proposal by another voter than the proposer"
    if len(set(shown)) != len(shown):
        return "a proposal that shows two Readys of one voter"
    if not electorate.votes.keys() >= set(shown) or not electorate.is_quorum(shown):
        return "a proposal without the Readys of a quorum"
    faults = (certificate_fault(proof, slot, electorate) for _, proof in propose.readys if proof is not None)
    if (why := next((fault for fault in faults if fault is not None), None)) is not None:
        return why
    proof = propose.newest_proof
    if proof is not None and proof.value != propose.value:
        return "a proposal of another value than the newest proof that it shows"
    return None
