"""A vote in later terms: what a voter takes from terms that it skipped."""

from dataclasses import replace

import pytest
from flockstep.collectives.agreement.actions import AgreementTiming, Note
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.allreduce.actions import VoteSetup
from flockstep.collectives.chain.certificate import genesis, value_hash
from flockstep.collectives.round.vote import Vote
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign, verify_signed
from support.certificates import proven, seats
from support.swarm import RUN, identities

OWNER, *VOTERS = sorted(identities(6), key=lambda identity: identity.peer_id)
A, B, C, D, E = VOTERS
IDS = tuple(voter.peer_id for voter in VOTERS)
CHARTER = Charter(RUN, OWNER.peer_id, founders=frozenset(IDS), keepers=frozenset(IDS), stall="wait")
FIRST = wire.Slot(RUN, 1, genesis(RUN))
VALUE = wire.Value(
    *FIRST.decision, bytes(32), IDS, (0, 1, 2, 3, 4, 5), seats(5), b"c" * 32, (0,), (b"o" * 32,) * 5, b"n" * 32, 9,
    credit=(9,),
)
TIMING = AgreementTiming(control=1.0, attempt=10.0)


def appointment(author: Identity, term: int, *voters: Identity) -> wire.Signed:
    return sign(author, wire.Appointment(FIRST.at(term, 0), tuple(voter.peer_id for voter in voters)))


def ready_of(slot: wire.Slot, *lock: wire.Lock) -> wire.Ready:
    return wire.Ready(slot, bytes(32), 1, 1e6, 1e6, bytes(32), lock=lock)


def signed_by_c(message: wire.RoundMessage, lock: wire.Proof | None = None) -> wire.Signed:
    return sign(C, message)


def in_term_2(charter: Charter) -> Vote:
    """Voter C in a term 2 of C and D, which came after a term 1 that C has not been in."""
    vote = Vote(
        VoteSetup(
            me=C.peer_id,
            slot=FIRST,
            electorate=Electorate(dict.fromkeys(IDS, 1)),
            charter=charter,
            timing=TIMING,
            sign=signed_by_c,
            verify=verify_signed,
        )
    )
    vote.begin(ready_of(FIRST), IDS, 0.0)
    later = appointment(OWNER, 2, C, D)
    vote.receive(later, wire.opened(later), 0.0)  # type: ignore[arg-type]  # It is an appointment.
    vote.stall(IDS, (), 1.0)
    assert (vote.slot.ballot, vote.electorate.voters) == ((2, 0), (C.peer_id, D.peer_id))
    return vote


@pytest.mark.parametrize(("author", "counts"), [(OWNER, True), (D, False)])
def test_a_proof_of_a_skipped_term_counts_if_the_owner_has_appointed_its_voters(author: Identity, counts: bool) -> None:
    vote = in_term_2(CHARTER)
    proof = replace(proven(VALUE, FIRST.at(1, 0), [D], appointed=[D]), appointment=encode(appointment(author, 1, D)))
    locked = sign(D, ready_of(FIRST.at(2, 0), wire.Lock(1, 0, value_hash(proof.value))))
    vote.receive(locked, wire.opened(locked), 2.0)  # type: ignore[arg-type]  # It is a Ready.
    assert vote.since is None  # Its proof is not here yet.
    refused = [
        action for action in vote.learn(proof, 3.0) if isinstance(action, Note) and action.event == "agreement.refused"
    ]
    assert (vote.since, bool(refused)) == ((3.0, False) if counts else (None, True))
    assert vote.slot.ballot == (2, 0)
