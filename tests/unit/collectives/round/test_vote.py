"""A vote: what a Ready states counts once its proof is here."""

from flockstep.collectives.agreement.actions import AgreementTiming
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.allreduce.actions import VoteSetup
from flockstep.collectives.chain.certificate import genesis, value_hash
from flockstep.collectives.round.vote import Vote
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.wire.signed import sign, verify_signed
from support.certificates import proven, seats
from support.swarm import RUN, identities

A, B, C, D, E = VOTERS = sorted(identities(5), key=lambda identity: identity.peer_id)
IDS = tuple(voter.peer_id for voter in VOTERS)
FIRST = wire.Slot(RUN, 1, genesis(RUN))
VALUE = wire.Value(
    *FIRST.decision, bytes(32), IDS, (0, 1, 2, 3, 4, 5), seats(5), b"c" * 32, (0,), (b"o" * 32,) * 5, b"n" * 32, 9,
    credit=(9,),
)


def ready_of(slot: wire.Slot, *lock: wire.Lock) -> wire.Ready:
    return wire.Ready(slot, bytes(32), 1, 1e6, 1e6, bytes(32), lock=lock)


def signed_by_c(message: wire.RoundMessage, lock: wire.Proof | None = None) -> wire.Signed:
    return sign(C, message)


def test_a_ready_that_states_a_lock_counts_once_its_proof_is_here() -> None:
    vote = Vote(
        VoteSetup(
            me=C.peer_id,
            slot=FIRST.at(1),
            electorate=Electorate(dict.fromkeys(IDS, 1)),
            charter=Charter(RUN, founders=frozenset(IDS)),
            timing=AgreementTiming(control=1.0, attempt=10.0),
            sign=signed_by_c,
            verify=verify_signed,
        )
    )
    vote.begin(ready_of(FIRST), IDS, 0.0)
    proof = proven(VALUE, FIRST, VOTERS[:4])
    for voter in (A, B, D):
        lock = [wire.Lock(0, value_hash(proof.value))] if voter is D else []
        said = ready_of(FIRST.at(1), *lock)
        vote.receive(sign(voter, said), said, 2.0)
    assert vote.since is None
    vote.learn(proof, 3.0)
    assert vote.since == 3.0
