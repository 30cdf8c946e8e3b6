"""Every decoder of strangers' bytes: any input gives a value or the decoder's own error.

Other files test frames and messages (`test_messages`, `test_schema`), directory values (`test_manifest`), descriptions of
checkpoints (`test_checkpoint_file`), invitations (`test_admission`), claims (`test_evidence`), and on real sockets the
protocols of relays, punching and dial-back (`test_libp2p_junk`, `test_libp2p_rate`).
"""

import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import trio
from flockstep.collectives.accountability.evidence import claim_of, judge_claim
from flockstep.collectives.chain.certificate import check_proof, open_value, value_of
from flockstep.collectives.chain.head import validate_run_value
from flockstep.collectives.chain.packed import checked, pack_certificate, unpack_certificate
from flockstep.collectives.spec import Terms
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.directory import messages
from flockstep.dht.keys import head_key, member_key, statements_key
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import MemberTable
from flockstep.dht.records import Record
from flockstep.dht.run.admission import Charter
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import CODEC_NAMES
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements, unpack_statements
from flockstep.peer import address, wire
from flockstep.peer.base.errors import MalformedMessage, RemoteError, UsageError
from flockstep.peer.base.transport import Stream
from flockstep.peer.identity import Identity, is_peer_id
from flockstep.peer.nat.dialback import MAX_DIALBACK_BYTES, DialbackAnswer, Question
from flockstep.peer.node.session import message_packet, unpack_message
from flockstep.peer.wire import Claim
from flockstep.peer.wire.framing import MAX_FRAME_BYTES, FrameBuffer, frame
from flockstep.peer.wire.schema import decode, encode
from flockstep.peer.wire.signed import open_signed, verify_signed
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from support.certificates import LONE, RUN, certify, grow, proven, signed

ANNA = Identity.from_seed(bytes([3]) * 32)
SLOT = wire.Slot(RUN, 1, bytes(32))
CERTIFICATE = certify(None, 100, roster=(LONE, ANNA))
FOUNDED = Charter(founders=frozenset((LONE.peer_id, ANNA.peer_id)))
PROOF = proven(value_of(CERTIFICATE), CERTIFICATE.slot.at(3), (LONE, ANNA))
READY = wire.Ready(SLOT, bytes(32), 1, 1e6, 1e6, bytes(32))
MEMBER = MemberTable(RUN, ANNA.peer_id).update_own(ANNA, MemberBody(state=MemberState.TRAINING), 0.0)
STATED = OwnerStatements(RUN, ANNA.peer_id).sign(ANNA, OwnerStatement("ban", LONE.peer_id, "noise"))
CLAIM = claim_of(RUN, (signed(ANNA, READY), signed(ANNA, replace(READY, tokens=2))))
INT8 = codec_named("int8")
TERMS = Terms(RUN, 8, INT8, INT8)
LINK = JoinLink(RUN, (f"/ip4/192.0.2.1/tcp/4001/p2p/{ANNA.peer_id}",))


def merge(data: bytes) -> None:
    MemberTable(RUN, LONE.peer_id).merge(Record.decode(data), 0.0)


def a_kademlia_message() -> bytes:
    message = messages.about_value(member_key(RUN, ANNA.peer_id), b"value")
    entry = message.closerPeers.add()
    entry.id, entry.addrs[:] = ID.from_base58(ANNA.peer_id).to_bytes(), [b"\x04\xc0\x00\x02\x01\x06\x0f\xa1", b"\xff"]
    return bytes(message.SerializeToString())


DECODERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "a packet of a session": (unpack_message, message_packet(wire.Beat(True))),
    "a signed word": (
        lambda data: open_signed(decode(wire.Signed, data, max_bytes=10_000)),
        encode(signed(ANNA, READY)),
    ),
    "a packed certificate": (unpack_certificate, pack_certificate(CERTIFICATE)),
    "a page of the ledger": (
        lambda data: checked([unpack_certificate(data)], RUN, verify_signed, charter=FOUNDED),
        pack_certificate(CERTIFICATE),
    ),
    "a published head": (lambda data: validate_run_value(head_key(RUN), data), pack_certificate(CERTIFICATE)),
    "a member's record in the directory": (
        lambda data: validate_run_value(member_key(RUN, ANNA.peer_id), data),
        MEMBER.encode(),
    ),
    "a member's record": (merge, MEMBER.encode()),
    "a page of an owner's statements": (
        lambda data: validate_run_value(statements_key(RUN, ANNA.peer_id, 0), data),
        STATED.packed,
    ),
    "an owner's statements of a member": (
        lambda data: OwnerStatements(RUN, ANNA.peer_id).merge(unpack_statements(data)),
        STATED.packed,
    ),
    "the value of a proposal": (open_value, CERTIFICATE.value),
    "the lock on the disk, or a proof": (
        lambda data: check_proof(decode(wire.Proof, data, max_bytes=100_000), verify_signed),
        encode(PROOF),
    ),
    "a claim": (
        lambda data: judge_claim(LONE.peer_id, decode(Claim, data, max_bytes=100_000), TERMS, verify_signed),
        encode(CLAIM),
    ),
    "the statements of a claim": (
        lambda data: judge_claim(LONE.peer_id, Claim(RUN, (data, CLAIM.statements[1]), 0), TERMS, verify_signed),
        CLAIM.statements[0],
    ),
    "a question for a dial-back": (
        lambda data: decode(Question, data, max_bytes=MAX_DIALBACK_BYTES),
        encode(Question(4001)),
    ),
    "the answer of a dial-back": (
        lambda data: decode(DialbackAnswer, data, max_bytes=MAX_DIALBACK_BYTES),
        encode(DialbackAnswer("/ip4/192.0.2.1/tcp/4001", True, "", 1.0)),
    ),
}

damages = st.tuples(st.integers(0, 5000), st.integers(0, 12), st.binary(max_size=12))
"""Where, how many bytes are taken away there, and what is put in their place."""


def damaged(data: bytes, damage: tuple[int, int, bytes]) -> bytes:
    position, taken, put = damage
    position %= len(data) + 1
    return data[:position] + put + data[position + taken :]


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=max(1, settings.default.max_examples // 2))  # type: ignore[union-attr]  # A profile is loaded.
@given(junk=st.binary(max_size=200), damage=damages)
def test_no_bytes_raise_anything_but_the_errors_of_strangers(name: str, junk: bytes, damage: tuple[int, int, bytes]) -> None:
    read, sample = DECODERS[name]
    read(sample)
    for data in (junk, damaged(sample, damage)):
        try:
            read(data)
        except RemoteError:
            continue


@given(damage=damages, which=st.sampled_from(["value", "signature"]))
def test_what_is_wrong_inside_a_certificate_is_found_whatever_it_is(damage: tuple[int, int, bytes], which: str) -> None:
    first, *rest = CERTIFICATE.signatures
    inner = {"value": CERTIFICATE.value, "signature": first}[which]
    spoilt = damaged(inner, damage)
    fields: dict[str, Any] = {"signatures": (spoilt, *rest)} if which == "signature" else {which: spoilt}
    if spoilt != inner:
        with pytest.raises(RemoteError):
            checked([replace(CERTIFICATE, **fields)], RUN, verify_signed)


def test_certificates_of_a_page_that_do_not_follow_each_other_are_refused() -> None:
    chain = grow(None, 3)
    for wrong in ([chain[0], chain[2]], [chain[1], chain[0]], [chain[0], chain[0]]):
        with pytest.raises(RemoteError):
            checked(wrong, RUN, verify_signed)


def test_a_message_of_kademlia_names_whom_it_names() -> None:
    peers = messages.peers_of(Message.FromString(a_kademlia_message()).closerPeers)
    assert peers == {ANNA.peer_id: ("/ip4/192.0.2.1/tcp/4001",)}


@given(junk=st.binary(max_size=300), damage=damages)
def test_a_message_of_kademlia_names_peers_or_is_none(junk: bytes, damage: tuple[int, int, bytes]) -> None:
    for data in (junk, damaged(a_kademlia_message(), damage)):
        stream = _Bytes(bytes((len(data) & 127 | 128, len(data) >> 7)) + data)

        async def take(stream: _Bytes = stream) -> None:
            message = await messages.MessageReader(cast(Stream, stream), 10_000).next()
            for peers in (message.closerPeers, message.providerPeers) if message is not None else ():
                for peer, addresses in messages.peers_of(peers).items():
                    assert is_peer_id(peer)
                    assert all(map(address.valid_address, addresses))

        try:
            trio.run(take)
        except MalformedMessage:
            continue


class _Bytes:
    """A stream that ends after some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_some(self, count: int) -> bytes:
        piece, self._data = self._data[:count], self._data[count:]
        return piece


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(seed=st.integers(0, 2**32), short=st.integers(-3, 3), cells=st.integers(0, 3))
def test_a_part_that_passes_its_check_is_finite_throughout(name: str, seed: int, short: int, cells: int) -> None:
    codec = codec_named(name)
    data = np.random.default_rng(seed).bytes(max(0, codec.num_bytes(cells) + short * (seed % 3)))
    try:
        codec.check(data, cells)
    except MalformedMessage:
        return
    out = np.full(cells * CELL, np.nan, np.float32)
    codec.decode(data, out)
    assert np.isfinite(out).all()


texts = st.text(st.sampled_from("flokste:/?&=%.<0124567é\0 ip4dns6tcpvaQmz2D3K_-"), max_size=100)


@settings(max_examples=max(1, settings.default.max_examples // 2))  # type: ignore[union-attr]  # As above.
@given(st.one_of(texts, st.builds(lambda at, put: str(LINK)[:at] + put + str(LINK)[at:], st.integers(0, 150), texts)))
def test_text_is_a_link_an_address_and_a_peer_id_or_it_is_not(text: str) -> None:
    try:
        link = JoinLink.parse(text)
    except UsageError:
        link = LINK
    assert JoinLink.parse(str(link)) == link
    is_peer_id(text)
    if address.valid_address(text):
        address.rung_of(text)


@pytest.mark.parametrize(
    "read", [unpack_certificate, lambda data: validate_run_value(head_key(RUN), data)], ids=["ledger", "head"]
)
def test_a_bomb_does_not_go_off(read: Callable[[bytes], Any]) -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 64))
def test_a_buffer_never_holds_more_than_the_frame_that_it_waits_for(pieces: list[bytes], limit: int) -> None:
    buffer = FrameBuffer(limit=limit)
    try:
        for piece in pieces:
            buffer.feed(piece)
            while (payload := buffer.next_frame()) is not None:
                assert len(payload) <= limit
        assert len(buffer.rest()) < 4 + limit
    except MalformedMessage:
        return


def test_a_message_that_says_it_is_long_takes_no_memory() -> None:
    claims_to_be_long = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x9f" * 900_000]
    tracemalloc.start()
    try:
        for lie in claims_to_be_long:
            for code in wire.CODES:
                with pytest.raises(MalformedMessage):
                    wire.unpack(bytes((code,)) + lie)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_FRAME_BYTES
    finally:
        tracemalloc.stop()
    assert len(frame(b"")) == 4
