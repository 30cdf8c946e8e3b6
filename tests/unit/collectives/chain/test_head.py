"""The head of a run in its directory: which certificates are valid, and which of two wins."""

from dataclasses import replace

import pytest
import trio
from flockstep.collectives.chain.certificate import open_value
from flockstep.collectives.chain.chain import NOTHING, ChainLink, Head
from flockstep.collectives.chain.head import HEAD_PERIOD, Heads, validate_run_value
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.keys import head_key, member_key
from flockstep.dht.run.admission import OPEN, Charter
from flockstep.peer import wire
from flockstep.peer.base.errors import NetworkError, RemoteError
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import run_virtual
from support.certificates import LONE, RUN, certify, decided, grow

run_test = run_virtual


def test_of_two_heads_the_later_round_is_stored_whatever_tokens_the_other_claims() -> None:
    rich, later = certify(None, 10**9), grow(certify(None, 1), 1)[0]
    sequences = [validate_run_value(head_key(RUN), pack_certificate(certificate)) for certificate in (rich, later)]
    assert sequences == [1, 2]


def test_the_first_certificate_of_founders_is_a_head_though_the_directory_does_not_know_them() -> None:
    first = certify(None, 1)
    by_founders = decided(open_value(first.value), first.slot.at(0), [LONE])
    assert validate_run_value(head_key(RUN), pack_certificate(by_founders)) == 1


def test_nothing_but_a_valid_certificate_of_the_run_may_be_its_head() -> None:
    good = certify(None, 1)
    unsigned = replace(good, signatures=(good.signatures[0][::-1],))
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


async def test_the_newest_head_is_published_now_and_then_and_tells_who_comes_alone() -> None:
    board, events = MemoryBoard(), list[Event]()
    chain = grow(None, 5)

    telemetry = Telemetry(clock=trio.current_time)
    telemetry.subscribe(events.append)
    heads = Heads(MemoryDirectory(board, "me", (), validate_run_value), RUN, OPEN, telemetry)
    await heads.look(NOTHING)
    assert not events
    await heads.publish(chain[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heads.publish, chain[2])
        await trio.sleep(HEAD_PERIOD / 2)
        await heads.publish(chain[3])
        assert board.values[head_key(RUN)] == pack_certificate(chain[1])
        await heads.look(ChainLink.of(chain[1]).head)
        assert not events
        await heads.look(NOTHING)
        assert [(event["event"], event["round"]) for event in events] == [("head.ahead", 2)]
        assert heads.ahead == ChainLink.of(chain[1]).head
    assert trio.current_time() == HEAD_PERIOD
    assert board.values[head_key(RUN)] == pack_certificate(chain[3])
    await heads.publish(chain[4], is_last=True)
    assert trio.current_time() == HEAD_PERIOD
    assert board.values[head_key(RUN)] == pack_certificate(chain[4])
    board.up = False
    await heads.publish(chain[2])
    await heads.look(Head(9, bytes(32), 900))
    assert [event["event"] for event in events[1:]] == ["head.unpublished", "directory.failed"]
    with pytest.raises(NetworkError):
        await MemoryDirectory(board, "me", (), validate_run_value).get(head_key(RUN))


@pytest.mark.parametrize(
    ("charter", "is_believed"),
    [
        (OPEN, True),  # Every member votes, and anybody may be one: nothing shows that this is a lie.
        (Charter(keepers=frozenset([LONE.peer_id])), True),
        (Charter(keepers=frozenset(["somebody else"])), False),
        (Charter(kind="allow", allowed=frozenset(["somebody else"])), False),
    ],
)
async def test_a_head_by_keys_that_may_not_vote_keeps_no_run_from_starting(charter: Charter, is_believed: bool) -> None:
    """The directory takes any certificate that is valid in itself, which one free key can make."""
    board, events = MemoryBoard(), list[Event]()
    false = certify(None, 1)

    telemetry = Telemetry(clock=trio.current_time)
    telemetry.subscribe(events.append)
    directory = MemoryDirectory(board, "me", (), validate_run_value)
    await directory.put(head_key(RUN), pack_certificate(false))
    heads = Heads(directory, RUN, charter, telemetry)
    await heads.look(NOTHING)
    assert (heads.ahead is not None) is is_believed
    assert [event["event"] for event in events] == ["head.ahead" if is_believed else "head.refused"]
    assert heads.looked.is_set()
