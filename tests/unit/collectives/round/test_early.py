"""The queue of early messages: no repetition and no old attempt pushes out what is needed."""

from dataclasses import replace

from flockstep.collectives.round.early import EARLY_PER_PEER, EarlyMessages
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.wire.signed import sign

ME = Identity.from_seed(bytes(32))
SLOT = wire.Slot("a" * 52, 1, bytes(32))


def void(attempt: int) -> tuple[wire.Signed, wire.RoundMessage]:
    message = wire.Void(SLOT.at(attempt), "reason")
    return sign(ME, message), message


def result(attempt: int, value: int) -> tuple[wire.Signed, wire.RoundMessage]:
    message = wire.Result(SLOT.at(attempt), bytes([value]) * 32, 0, bytes(32))
    return sign(ME, message), message


def test_a_repeated_message_takes_no_place() -> None:
    early = EarlyMessages()
    assert early.add(*result(3, 0)) is None
    for _ in range(2 * EARLY_PER_PEER):
        assert early.add(*void(2)) is None
    assert [signed for signed, _ in early.take(1)] == [result(3, 0)[0], void(2)[0]]


def test_messages_of_earlier_attempts_give_way() -> None:
    early = EarlyMessages()
    early.add(*result(3, 0))
    losers = {early.add(*result(2, value)) for value in range(EARLY_PER_PEER)}
    assert losers == {None, ME.peer_id}
    kept = [signed for signed, _ in early.take(1)]
    assert kept == [result(3, 0)[0], *(result(2, value)[0] for value in range(1, EARLY_PER_PEER))]


def test_messages_of_later_rounds_stay_until_their_round() -> None:
    early, later = EarlyMessages(), wire.Void(replace(SLOT, round=2), "reason")
    mail = sign(ME, later)
    early.add(*void(0))
    early.add(mail, later)
    assert [signed for signed, _ in early.take(1)] == [void(0)[0]]
    assert early.num_bytes == len(mail.payload)
    assert early.take(1) == []
    assert early.take(2) == [(mail, later)]
    assert early.num_bytes == 0


def test_the_longest_roster_stays_beside_its_proposers_sketches() -> None:
    """It was dropped as the oldest once the first sketch came: who had not begun its attempt then missed the round."""
    early, roster = EarlyMessages(), wire.Sketch(SLOT, bytes(32), (), b"")
    early.add(wire.Signed(ME.peer_id, 0, bytes(wire.MAX_STATEMENT_BYTES), bytes(64)), roster)
    sketches = [wire.Sketch(SLOT, bytes([number]) * 32, (), bytes(wire.MAX_SKETCH_BYTES)) for number in range(2)]
    assert [early.add(sign(ME, sketch), sketch) for sketch in sketches] == [None, None]
    assert early.take(1)[0][1] is roster
