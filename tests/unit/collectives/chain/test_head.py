"""The head of a run in its directory: which certificates are valid, and which of two wins."""

import pytest
import trio
from flockstep.collectives.chain.certificate import check_certificate, settled_result
from flockstep.collectives.chain.chain import NOTHING, ChainLink, Head
from flockstep.collectives.chain.head import HEAD_PERIOD, Heads, validate_run_value
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.chain.quorum import suffices
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.keys import head_key, member_key
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.errors import NetworkError, ProtocolViolation, RemoteError
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.telemetry import Event, Telemetry
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from support.certificates import LONE, RUN, certify, grow

FLOCK = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 5)]
IDS = [identity.peer_id for identity in FLOCK]


def test_heads_are_ordered_by_tokens_then_by_rounds() -> None:
    few, many = certify(None, 100), certify(None, 200)
    later = grow(few, 1)[0]
    sequences = [validate_run_value(head_key(RUN), pack_certificate(certificate)) for certificate in (few, many, later)]
    assert sequences == sorted(sequences)
    assert len(set(sequences)) == 3


def test_nothing_but_a_valid_certificate_of_the_run_may_be_its_head() -> None:
    good = certify(None, 1)
    unsigned = wire.Certificate(good.slot, good.roster, good.cut, (good.acks[0][:-1] + b"\0",))
    for value in (
        b"",
        b"junk",
        pack_certificate(unsigned),
        pack_certificate(certify(None, 1, run="b" * 52)),
        bytes(wire.MAX_PACKED_BYTES + 1),
    ):
        with pytest.raises(RemoteError):
            validate_run_value(head_key(RUN), value)
    with pytest.raises(RemoteError, match=f"at most {wire.MAX_PACKED_BYTES}"):
        validate_run_value(head_key(RUN), bytes(wire.MAX_PACKED_BYTES + 1))
    for key in (member_key(RUN, LONE.peer_id), head_key(RUN) + "/x"):
        with pytest.raises(RemoteError):
            validate_run_value(key, pack_certificate(good))


def test_the_newest_head_is_published_now_and_then_and_tells_who_comes_alone() -> None:
    board, events = MemoryBoard(), list[Event]()
    chain = grow(None, 3)

    async def main() -> None:
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(events.append)
        heads = Heads(MemoryDirectory(board, "me", (), validate_run_value), RUN, telemetry)
        await heads.look(NOTHING)
        assert not events
        await heads.publish(chain[1])
        await heads.publish(chain[2])
        assert board.values[head_key(RUN)] == pack_certificate(chain[1])
        await heads.look(ChainLink.of(chain[1]).head)
        assert not events
        await heads.look(NOTHING)
        assert [(event["event"], event["round"]) for event in events] == [("head.ahead", 2)]
        assert heads.ahead == ChainLink.of(chain[1]).head
        await trio.sleep(HEAD_PERIOD)
        await heads.publish(chain[2])
        assert board.values[head_key(RUN)] == pack_certificate(chain[2])
        await trio.sleep(HEAD_PERIOD)
        board.up = False
        await heads.publish(chain[2])
        await heads.look(Head(9, bytes(32), 900))
        assert [event["event"] for event in events[1:]] == ["head.unpublished", "directory.failed"]
        with pytest.raises(NetworkError):
            await MemoryDirectory(board, "me", (), validate_run_value).get(head_key(RUN))

    run_virtual(main)


def test_a_quorum_suffices_but_not_without_the_owner_who_has_the_authority() -> None:
    assert suffices(IDS[:3], IDS)
    assert not suffices(IDS[:2], IDS)
    assert not suffices([*IDS[:2], "a stranger"], IDS)
    assert suffices(IDS[:3], IDS, IDS[0])
    assert not suffices(IDS[:3], IDS, IDS[3])
    certificate = certify(None, 1, roster=FLOCK, signers=FLOCK[:3])
    check_certificate(certificate, verify_signed, charter=Charter(authority=IDS[0]))
    with pytest.raises(ProtocolViolation, match="owner"):
        check_certificate(certificate, verify_signed, charter=Charter(authority=IDS[3]))


def test_what_voids_carry_settles_a_round_only_with_the_owner_who_has_the_authority() -> None:
    certificate = certify(None, 1, roster=FLOCK)
    acks = {identity.peer_id: ack for identity, ack in zip(FLOCK, certificate.acks, strict=True)}
    voids = {IDS[0]: wire.Void(certificate.slot, "why", tuple(acks[peer] for peer in IDS[:3]))}
    agreement = settled_result(voids, certificate.slot, IDS, verify_signed, owner=IDS[0])
    assert agreement is not None
    assert {encode(signed) for signed in agreement[0]} == set(certificate.acks[:3])
    assert settled_result(voids, certificate.slot, IDS, verify_signed, owner=IDS[3]) is None
