"""The packet protocol: what arrives is what was sent, up to the first byte that somebody touched."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import packets
from flockstep.peer.libp2p.packets import (
    CIPHER_TAG_BYTES,
    LEAST_ROOM,
    MAX_PACKET_BYTES,
    MOST_ROOM,
    PACKET_LENGTH_BYTES,
    PACKET_SECONDS,
    REST_SECONDS,
    SMALL_BYTES,
    NoiseChannel,
    PacketChannel,
    PacketKey,
    PacketTransport,
)
from flockstep.peer.libp2p.tcp import TunedStream
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.exceptions import DecryptionFailedException, IncompleteReadError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import Transport as NoiseTransport

OURS, THEIRS = b"o" * 32, b"t" * 32
OVERHEAD = PACKET_LENGTH_BYTES + CIPHER_TAG_BYTES


class Wire:
    """Gives `incoming` in pieces of at most `piece` bytes, then the end; notes how much was asked for."""

    def __init__(self, incoming: bytes = b"", piece: int = 1 << 30) -> None:
        self._incoming, self._piece = incoming, piece
        self.asked: list[int] = []
        self.written = b""

    async def read(self, n: int) -> bytes:
        self.asked.append(n)
        data, self._incoming = self._incoming[: min(n, self._piece)], self._incoming[min(n, self._piece) :]
        return data

    async def write(self, data: bytes | bytearray) -> None:
        self.written += data


def channel(wire: Wire, sending: bytes = THEIRS, receiving: bytes = OURS) -> PacketChannel:
    keys = SimpleNamespace(cipher_state_encrypt=SimpleNamespace(k=sending), cipher_state_decrypt=SimpleNamespace(k=receiving))
    raw: Any = wire
    return PacketChannel(raw, SimpleNamespace(noise_protocol=keys))


def sealed(*pieces: bytes | memoryview) -> bytes:
    """Their end sends with the key under which ours receives."""
    return bytes(channel(Wire(), sending=OURS, receiving=THEIRS).sealed(pieces))


def read_all(reader: PacketChannel) -> tuple[list[bytes], Exception]:
    """Return the packets that arrive, and the error that ends them."""
    arrived: list[bytes] = []

    async def main() -> Exception:
        try:
            while True:
                arrived.append(await reader.read_msg())
        except (DecryptionFailedException, IncompleteReadError) as error:
            return error

    return arrived, trio.run(main)


def test_a_record_is_what_it_says() -> None:
    first = AESGCM(OURS).encrypt(bytes(12), b"one", None)
    second = AESGCM(OURS).encrypt(bytes(11) + b"\1", bytes(SMALL_BYTES), None)
    wire = len(first).to_bytes(4, "big") + first + len(second).to_bytes(4, "big") + second
    assert sealed(b"one", bytes(SMALL_BYTES)) == wire


sizes = st.integers(1, 40) | st.integers(SMALL_BYTES - 2, 2 * SMALL_BYTES) | st.just(MAX_PACKET_BYTES + 1)


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(sizes, max_size=6), piece=st.integers(1, 50) | st.integers(1000, 2 * MOST_ROOM))
def test_all_bytes_arrive_in_order_however_they_were_cut(sizes: list[int], piece: int) -> None:
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    wire = sealed(*pieces)
    if len(wire) > 10_000:
        piece = max(piece, 1000)
    arrived, error = read_all(channel(Wire(wire, piece)))
    assert b"".join(arrived) == b"".join(pieces)
    assert isinstance(error, IncompleteReadError)
    assert error.is_clean_close
    assert all(1 <= len(packet) <= MAX_PACKET_BYTES for packet in arrived)
    assert len(wire) == sum(sizes) + OVERHEAD * len(arrived)
    assert len(arrived) <= 1 + 3 * sum(size >= SMALL_BYTES for size in sizes)  # Small ones share a packet.


@settings(deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_what_somebody_on_the_line_does_is_never_taken_for_what_was_sent(data: st.DataObject, sizes: list[int]) -> None:
    sender = channel(Wire(), sending=OURS)
    plain = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    sent = [bytes(sender.sealed([piece])) for piece in plain]
    own = channel(Wire(), sending=THEIRS)
    lines = [*sent, *(bytes(own.sealed([piece])) for piece in plain), data.draw(st.binary(max_size=60))]
    mixed = b"".join(data.draw(st.lists(st.sampled_from(lines), max_size=8)))
    wire = bytearray(data.draw(st.sampled_from([mixed, b"".join(sent)])))
    for _ in range(data.draw(st.integers(0, 2))):
        if wire:
            wire[data.draw(st.integers(0, len(wire) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    reader = channel(Wire(bytes(wire[: data.draw(st.integers(0, len(wire)))])))
    arrived, _ = read_all(reader)
    assert arrived == plain[: len(arrived)]
    assert read_all(reader)[0] == []  # After an error nothing arrives any more.


def test_an_end_within_a_record_is_not_a_clean_one() -> None:
    for cut in (1, PACKET_LENGTH_BYTES, PACKET_LENGTH_BYTES + 1, OVERHEAD + 2):
        _, error = read_all(channel(Wire(sealed(b"one")[:cut])))
        assert isinstance(error, IncompleteReadError)
        assert not error.is_clean_close


@pytest.mark.parametrize("size", [0, 1, CIPHER_TAG_BYTES, MAX_PACKET_BYTES + CIPHER_TAG_BYTES + 1, 2**32 - 1])
def test_a_wrong_length_is_refused_before_more_is_read(size: int) -> None:
    wire = Wire(size.to_bytes(PACKET_LENGTH_BYTES, "big"))
    _, error = read_all(channel(wire))
    assert isinstance(error, DecryptionFailedException)
    assert len(wire.asked) == 1


def test_memory_follows_what_arrives_not_what_is_announced_and_goes_again() -> None:
    longest = sealed(bytes(MAX_PACKET_BYTES), b"rest")
    wire = Wire(longest, piece=1000)
    reader = channel(wire)
    arrived, _ = read_all(reader)
    assert [len(packet) for packet in arrived] == [MAX_PACKET_BYTES, 4]
    assert max(wire.asked[:10]) <= LEAST_ROOM
    got = 0
    for asked in wire.asked[: len(longest) // 1000]:
        assert asked <= max(LEAST_ROOM, 4 * got)
        got += 1000

    fast = Wire(sealed(*(bytes(MAX_PACKET_BYTES) for _ in range(4))))
    read_all(channel(fast))
    assert max(fast.asked) <= MOST_ROOM
    assert len(fast.asked) <= 16

    sender = channel(Wire(), sending=OURS)
    large, small = bytes(sender.sealed([bytes(MAX_PACKET_BYTES)] * 2)), [bytes(sender.sealed([b"beat"])) for _ in range(9)]
    last = Bursts([large, *small])
    read_all(channel(last))
    assert max(last.asked) > MAX_PACKET_BYTES // 2
    assert last.asked[-1] <= LEAST_ROOM


class Bursts(Wire):
    """Gives each of some messages in reads of its own."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        super().__init__()
        self._messages = list(messages)

    async def read(self, n: int) -> bytes:
        if not self._incoming and self._messages:
            self._incoming = self._messages.pop(0)
        return await super().read(n)


class SilentWire(Wire):
    """Has no end: once it has given all it is silent, but for a byte now and then of `drops`."""

    def __init__(self, incoming: bytes, drops: bytes = b"") -> None:
        super().__init__(incoming, 1 << 16)
        self._drops = drops

    async def read(self, n: int) -> bytes:
        if data := await super().read(n):
            return data
        if not self._drops:
            await trio.sleep_forever()
        await trio.sleep(9)
        drop, self._drops = self._drops[:1], self._drops[1:]
        return drop


def test_a_connection_that_rests_gives_its_buffer_back_and_reads_on() -> None:
    last = sealed(bytes(MAX_PACKET_BYTES), b"last")[-(OVERHEAD + len(b"last")) :]
    reader = channel(SilentWire(sealed(bytes(MAX_PACKET_BYTES))))

    async def main() -> None:
        assert len(await reader.read_msg()) == MAX_PACKET_BYTES
        assert len(reader._arrived) > LEAST_ROOM
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.read_msg)
            await trio.sleep(REST_SECONDS + 1)
            assert len(reader._arrived) == LEAST_ROOM
            nursery.cancel_scope.cancel()
        reader._raw = Wire(last)
        assert await reader.read_msg() == b"last"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_half_a_packet_ends_its_connection_after_a_minute_also_where_bytes_drip() -> None:
    for drops in (b"", bytes(100)):
        reader = channel(SilentWire(sealed(bytes(MAX_PACKET_BYTES))[:-200], drops))

        async def main(reader: PacketChannel = reader) -> float:
            with pytest.raises(IncompleteReadError, match="a packet was not whole after 60 s"):
                await reader.read_msg()
            return trio.current_time()

        assert trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) == PACKET_SECONDS


def test_both_ends_change_their_keys_at_the_same_record(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = channel(Wire(), sending=OURS)
    monkeypatch.setattr(packets, "REKEY_PACKETS", 3)
    wire = b"".join(bytes(sender.sealed([bytes([number])])) for number in range(8))
    arrived, error = read_all(channel(Wire(wire)))
    assert arrived == [bytes([number]) for number in range(8)]
    assert isinstance(error, IncompleteReadError)
    monkeypatch.setattr(packets, "REKEY_PACKETS", 4)
    assert len(read_all(channel(Wire(wire)))[0]) == 3
    new = AESGCM(AESGCM(OURS).encrypt(bytes(4) + b"\xff" * 8, bytes(32), None)[:32])  # Noise's REKEY(k).
    key = PacketKey(OURS)
    monkeypatch.setattr(packets, "REKEY_PACKETS", 1)
    into = bytearray(1 + CIPHER_TAG_BYTES)
    key.seal(b"x", memoryview(into))
    key.seal(b"y", memoryview(into))
    assert new.decrypt(bytes(11) + b"\1", bytes(into), None) == b"y"


ANNA, BERT = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))


def transport(identity: Identity, kind: type[NoiseTransport] = PacketTransport) -> NoiseTransport:
    return kind(create_new_key_pair(identity.private_bytes()), create_noise_key_pair().private_key)


@asynccontextmanager
async def raw_pair() -> AsyncIterator[tuple[RawConnection, RawConnection]]:
    """The two ends of a real socket, as the host has them."""
    ends = [TunedStream(trio.SocketStream(trio.socket.from_stdlib_socket(end))) for end in socket.socketpair()]
    try:
        yield RawConnection(ends[0], True), RawConnection(ends[1], False)
    finally:
        for end in ends:
            await end.close()


async def shake_hands(
    dialling: RawConnection, accepting: RawConnection, expected: Identity, kind: type[NoiseTransport] = PacketTransport
) -> tuple[Any, Any]:
    """Anna dials, Bert accepts with this kind of transport; returns their sessions."""
    sessions: dict[str, Any] = {}
    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            sessions["accepting"] = await transport(BERT, kind).secure_inbound(accepting)

        nursery.start_soon(accept)
        sessions["dialling"] = await transport(ANNA).secure_outbound(dialling, ID.from_base58(expected.peer_id))
    return sessions["dialling"], sessions["accepting"]


async def test_the_handshake_proves_both_peers_and_gives_fresh_keys_for_each_direction() -> None:
    sent: list[bytes] = []
    for _ in range(2):
        async with raw_pair() as ends:
            anna, bert = await shake_hands(*ends, BERT)
            assert (str(anna.get_remote_peer()), str(bert.get_remote_peer())) == (BERT.peer_id, ANNA.peer_id)
            for one, other in ((anna, bert), (bert, anna)):
                await one.write(b"hello")
                assert await other.conn.read_msg() == b"hello"
            sent += [bytes(end.conn.sealed([b"same"])) for end in (anna, bert)]
    assert len(set(sent)) == 4


async def test_a_peer_that_is_not_the_one_that_was_dialled_is_refused() -> None:
    async with raw_pair() as ends:
        with pytest.RaisesGroup(PeerIDMismatchesPubkey):
            await shake_hands(*ends, ANNA)


async def test_a_handshake_for_libp2ps_noise_is_none_for_packets() -> None:
    async with raw_pair() as ends:
        with pytest.RaisesGroup(InvalidTag):
            await shake_hands(*ends, BERT, NoiseTransport)


@pytest.mark.parametrize("closing", ["remote", "local"])
async def test_the_end_of_a_socket_ends_the_reader(closing: str) -> None:
    async with raw_pair() as ends:
        anna, bert = await shake_hands(*ends, BERT)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(IncompleteReadError):
                    await bert.conn.read_msg()

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await (anna if closing == "remote" else bert).close()


class Reversing:
    """In the place of Noise's ciphers: they turn bytes round."""

    def encrypt(self, data: bytes) -> bytes:
        return data[::-1]

    decrypt = encrypt


def noise_channel(wire: Wire) -> NoiseChannel:
    raw: Any = wire
    return NoiseChannel(raw, Reversing())


def message(plain: bytes) -> bytes:
    return len(plain).to_bytes(2, "big") + plain[::-1]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
async def test_messages_of_noise_arrive_whole_however_they_were_cut(piece: int) -> None:
    channel = noise_channel(Wire(message(b"one") + message(b"") + message(b"three"), piece))
    assert [await channel.read_msg() for _ in range(3)] == [b"one", b"", b"three"]
    with pytest.raises(IncompleteReadError) as raised:
        await channel.read_msg()
    assert raised.value.is_clean_close
    with pytest.raises(IncompleteReadError) as raised:
        await noise_channel(Wire(message(b"whole")[:-1])).read_msg()
    assert not raised.value.is_clean_close


def test_pieces_share_messages_of_noise_as_long_as_they_may_be() -> None:
    channel, most = noise_channel(Wire()), 65535 - 16
    assert channel.sealed([b"first", memoryview(b"second")]) == message(b"firstsecond")
    assert channel.sealed([bytes(most), b"x"]) == message(bytes(most)) + message(b"x")
    assert channel.frame_bytes + 12 == most
