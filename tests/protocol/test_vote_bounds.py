"""What a vote keeps is bounded by its voters, whatever a liar sends. Signatures are hashes."""

import random
from dataclasses import replace

from flockstep.collectives.chain.certificate import value_hash
from flockstep.collectives.round.vote import Vote
from flockstep.peer import wire
from flockstep.peer.base.errors import RemoteError
from flockstep.peer.wire.schema import encode
from support.rounds import PEERS, SLOT, a_ready, a_vote, signed

VOTERS, LIAR = PEERS[:4], PEERS[3]
NUM_MESSAGES = 3000
MOST_OF_ONE = 20
"""The newest of each kind as it arrived, as a statement, among those that are equal, and waiting for a proof."""


def a_value(number: int) -> bytes:
    value = wire.Value(
        *(SLOT.run, SLOT.round, SLOT.previous, bytes(32), tuple(VOTERS), (0, 3, 6, 9, 12)),
        (wire.Seat(0.5, 3),) * 4,
        *(bytes(32), (0, 1, 2, 3), (bytes(32),) * 4, number.to_bytes(32), 10, ()),
        credit=(10, 0, 0, 0),
    )
    return encode(value)


def num_kept(thing: object, depth: int = 4) -> int:
    """Return the number of entries in all collections of an object and of those that it owns, whatever their names."""
    if not depth or isinstance(thing, str | bytes):
        return 0
    if isinstance(thing, dict):
        return len(thing) + sum(num_kept(value, depth - 1) for value in thing.values())
    if isinstance(thing, set | list):
        return len(thing)
    if type(thing).__name__ in ("Vote", "VoterMachine", "NewestStatements"):
        return sum(num_kept(value, depth) for value in vars(thing).values())
    return 0


def flood(vote: Vote, chance: random.Random) -> int:
    """Send what a liar may sign, of any slot of this round; returns the most that was kept at any time."""
    most = 0
    for number in range(NUM_MESSAGES):
        slot = SLOT.at(chance.randrange(wire.MAX_ATTEMPT))
        lock = (wire.Lock(chance.randrange(wire.MAX_ATTEMPT), chance.randbytes(32)),)
        messages: list[wire.VoteMessage] = [
            a_ready(slot=slot, lock=lock),
            replace(a_ready(slot=slot), nonce_hash=chance.randbytes(32)),
            wire.Propose(slot, a_value(number), chance.randbytes(32)),
            wire.Prevote(slot, chance.randbytes(32)),
            wire.Precommit(slot, chance.randbytes(32)),
        ]
        message = chance.choice(messages)
        try:
            vote.receive(signed(LIAR, message), message, float(number))
        except RemoteError:
            continue
        most = max(most, num_kept(vote))
    return most


def test_a_liar_fills_no_more_than_its_places() -> None:
    for seed in range(3):
        vote = a_vote(PEERS[0], VOTERS)
        vote.begin(a_ready(), VOTERS, 0.0)
        before = num_kept(vote)
        assert flood(vote, random.Random(seed)) - before <= MOST_OF_ONE


def test_proofs_of_many_attempts_are_no_more_than_voters_unless_a_ready_states_them() -> None:
    vote = a_vote(PEERS[0], VOTERS)
    vote.begin(a_ready(), VOTERS, 0.0)
    by = tuple(sorted(VOTERS)), (bytes(64),) * len(VOTERS)
    proofs = [wire.Proof(SLOT.at(number), a_value(number), *by) for number in range(50)]
    vote.learn(proofs[0], 0.0)
    stated = a_ready(lock=(wire.Lock(0, value_hash(proofs[0].value)),))
    vote.receive(signed(VOTERS[1], stated), stated, 0.0)
    before = num_kept(vote)
    for proof in proofs[1:]:
        vote.learn(proof, 0.0)
    assert num_kept(vote) - before <= len(VOTERS)
    kept = [proof for proof in proofs if vote.value(value_hash(proof.value)) is not None]
    assert kept == [proofs[0], *proofs[-len(VOTERS) :]]
