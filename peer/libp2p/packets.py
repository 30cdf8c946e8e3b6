"""The secured channel: Noise with AES-GCM in packets of up to 256 KiB, a protocol of our own, and libp2p's `/noise` faster.

Theory of operation. libp2p's Noise encrypts at most 64 kB at a time, with ChaCha20-Poly1305, and Python pays for each. Here
the handshake is the library's own: Noise XX, in which the peer's identity key signs its Noise key. Only the cipher
differs, and so the protocol name that both ends hash. After it, what is sent is a sequence of packets:

    length     4 bytes, big-endian: of what follows, 17 to `MAX_PACKET_BYTES` + 16
    sealed     AES-256-GCM of 1 to `MAX_PACKET_BYTES` bytes under the key of this direction, from Noise's Split()

The nonce is the number of the packet (Noise, section 12.4) and is never sent: a packet that was changed, dropped, repeated,
moved or sent back fails, and so does everything after it, which ends the connection. An end between two packets looks
like a close here, and like a reset to streams that were not finished. Keys come of fresh ephemerals, so no nonce
repeats after a reconnect, and both ends replace a key after `REKEY_PACKETS` packets (Noise, section 11.3).

With a peer that has only `/noise` the channel differs from the library's in speed: one call to the socket takes all messages
that are there, and all frames that wait leave in one. Measured: half the CPU of a transfer (`docs/log.md`).

A length is checked before anything of its packet is kept, and memory grows with the bytes that arrive, not with those
that are announced. It is given back once the line rests, and half a packet has `PACKET_SECONDS`. Multistream chooses
the protocol in the clear, as in all of libp2p: somebody on the line can make two peers use `/noise`, which is slower,
not weaker.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import DecryptionFailedException, IncompleteReadError
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, SIZE_NOISE_MESSAGE_LEN, NoiseTransportReadWriter
from libp2p.security.noise.patterns import IPattern, PatternXX
from libp2p.security.noise.transport import Transport as NoiseTransport

from ..yamux.machine import HEADER
from .tcp import TunedStream

PlainBytes: TypeAlias = bytes | memoryview

PACKETS = TProtocol("/flockstep/noise-aesgcm/1")

MAX_PACKET_BYTES = 1 << 18
"""Each connection may hold one that is not whole. Measured: packets of 64 kB cost 1.6 times the CPU of these, those of 1 MiB
as much; `FrameWriter` sends shorter ones on a slow line."""

SOCKET_BYTES = 1 << 18
"""Read from a socket at a time on a connection with libp2p's Noise: four messages. More gains nothing there."""

PACKET_LENGTH_BYTES, CIPHER_TAG_BYTES = 4, 16

SMALL_BYTES = 1 << 12
"""Pieces below this are copied into one packet: a packet of its own costs as much as copying some kilobytes."""

LEAST_ROOM = 1 << 14
"""The buffer of a connection on which only messages arrive, or nothing."""

REST_SECONDS = 10.0
"""The silence after which a connection gives its buffer back."""

PACKET_SECONDS = 60.0
"""The time for a packet, which `FrameWriter` makes so long that the line takes it in 50 ms: a stranger that sends half of one
holds as much."""

MOST_ROOM = MAX_PACKET_BYTES + (1 << 16)
"""The longest packet and what follows it."""

REKEY_PACKETS = 1 << 16
"""At most 16 GiB under one key. TLS 1.3 allows 2^24.5 records of 16 kB (RFC 8446, section 5.5), 24 times as many bytes."""

_REKEY_NONCE = 2**64 - 1
"""Reserved for this by Noise."""


class PacketKey:
    """The key of one direction, and the number of the next packet."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0

    def seal(self, plain: PlainBytes, into: memoryview) -> None:
        """Encrypt a packet into a buffer that is `CIPHER_TAG_BYTES` longer."""
        self._aead.encrypt_into(_nonce(self._number), plain, None, into)
        self._count()

    def open(self, sealed: PlainBytes) -> bytes:
        """Decrypt the next packet. Raises `DecryptionFailedException`; then no later one can be decrypted either."""
        try:
            plain = self._aead.decrypt(_nonce(self._number), sealed, None)
        except InvalidTag:
            raise DecryptionFailedException(f"packet {self._number} is not what the other side sealed") from None
        self._count()
        return plain

    def _count(self) -> None:
        self._number += 1
        if self._number % REKEY_PACKETS == 0:
            self._aead = AESGCM(self._aead.encrypt(_nonce(_REKEY_NONCE), bytes(32), None)[:32])


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


class NoiseChannel(NoiseTransportReadWriter):
    """A secured connection: plain bytes on this side, Noise messages on the socket's. Takes a finished handshake."""

    frame_bytes = MAX_PLAINTEXT_LENGTH - HEADER.size
    """The body of a frame that fills a message; with one byte more it costs two."""

    def __init__(self, conn: IRawConnection, noise: Any) -> None:
        super().__init__(conn, noise)
        self._arrived = bytearray()

    def sealed(self, pieces: Sequence[PlainBytes]) -> bytes | bytearray:
        """Return the messages that carry these bytes."""
        plain, messages = b"".join(pieces), list[bytes]()
        for start in range(0, len(plain), MAX_PLAINTEXT_LENGTH):
            cipher = self.encrypt(plain[start : start + MAX_PLAINTEXT_LENGTH])
            messages += (len(cipher).to_bytes(SIZE_NOISE_MESSAGE_LEN, "big"), cipher)
        return b"".join(messages)

    async def read_msg(self, prefix_encoded: bool = False) -> bytes:
        """Return the next message's bytes. Raises `IncompleteReadError`, or as the cipher and the socket do."""
        arrived, size = self._arrived, SIZE_NOISE_MESSAGE_LEN
        while len(arrived) < size or len(arrived) < size + int.from_bytes(arrived[:size], "big"):
            data = await self.read_writer.read_write_closer.read(SOCKET_BYTES)
            if not data:
                raise IncompleteReadError("the connection was closed", size, len(arrived))
            arrived += data
        end = size + int.from_bytes(arrived[:size], "big")
        message = bytes(arrived[size:end])
        del arrived[:end]
        return bytes(self.decrypt(message))


class PacketChannel(NoiseChannel):
    """The same with packets. Takes the keys of a finished handshake."""

    frame_bytes = MAX_PACKET_BYTES

    def __init__(self, conn: IRawConnection, noise: Any) -> None:
        super().__init__(conn, noise)
        keys = noise.noise_protocol
        self._sending, self._receiving = PacketKey(keys.cipher_state_encrypt.k), PacketKey(keys.cipher_state_decrypt.k)
        self._raw: Any = conn
        self._start = self._end = 0
        """Between them are the bytes of `_arrived` that were not decrypted yet; behind them is room."""
        self._due = math.inf
        """When the packet that has begun must be whole."""
        self._was_filled = True
        """Whether the last read took all the room there was."""

    def encrypt(self, data: bytes) -> bytes:
        """Never: Noise would use a number of a packet again, under the same key."""
        raise NotImplementedError

    def decrypt(self, data: bytes) -> bytes:
        """Never, as `encrypt`."""
        raise NotImplementedError

    def sealed(self, pieces: Sequence[PlainBytes]) -> bytearray:
        """Return the packets that carry these bytes, one piece after the other."""
        plain = list(_of_packet_size(pieces))
        packets = bytearray(sum(map(len, plain)) + len(plain) * (PACKET_LENGTH_BYTES + CIPHER_TAG_BYTES))
        start = 0
        with memoryview(packets) as view:
            for piece in plain:
                body = start + PACKET_LENGTH_BYTES
                end = body + len(piece) + CIPHER_TAG_BYTES
                view[start:body] = (end - body).to_bytes(PACKET_LENGTH_BYTES, "big")
                with view[body:end] as into:
                    self._sending.seal(piece, into)
                start = end
        return packets

    async def write_msg(self, msg: bytes, prefix_encoded: bool = False) -> None:
        """Send bytes. Only until the connection has a multiplexer, whose `FrameWriter` does it from then on."""
        await self._raw.write(self.sealed([msg]))

    async def read_msg(self, prefix_encoded: bool = False) -> bytes:
        """Return the next packet's bytes. Raises `DecryptionFailedException`, `IncompleteReadError`, or as the socket."""
        while True:
            body = self._start + PACKET_LENGTH_BYTES
            missing = body - self._end
            if missing <= 0:
                size = int.from_bytes(self._arrived[self._start : body], "big")
                if not CIPHER_TAG_BYTES < size <= MAX_PACKET_BYTES + CIPHER_TAG_BYTES:
                    raise DecryptionFailedException(f"a packet announces {size} bytes")
                end = body + size
                missing = end - self._end
                if missing <= 0:
                    with memoryview(self._arrived) as view, view[body:end] as sealed:
                        plain = self._receiving.open(sealed)
                    self._start, self._due = end, trio.current_time() + PACKET_SECONDS
                    return plain
            self._make_room(missing)
            if not await self._receive():
                raise IncompleteReadError("the connection was closed", PACKET_LENGTH_BYTES, self._end - self._start)

    def _make_room(self, missing: int) -> None:
        """Resize the buffer, and move what is left to its start if `missing` bytes do not fit behind it.

        It grows only after it was filled, and shrinks once little arrives: a connection that rests holds `LEAST_ROOM`.
        """
        left, size = self._end - self._start, len(self._arrived)
        if self._was_filled and size < MOST_ROOM:
            resized = min(max(4 * size, LEAST_ROOM), MOST_ROOM)
        elif not left and self._end < size // 16 and size > LEAST_ROOM:
            resized = max(size // 4, LEAST_ROOM)
        elif left and (not self._start or missing <= size - self._end):
            return
        else:
            resized = size
        waiting = self._arrived[self._start : self._end]
        if resized != size:
            self._arrived = bytearray(resized)
        self._arrived[:left] = waiting
        self._start, self._end = 0, left

    async def _receive(self) -> int:
        """Take what comes, into a small buffer once the line rests; 0 at the end. Raises as `read_msg`."""
        if self._end > self._start:
            with trio.move_on_at(self._due):
                return await self._take()
            reason = f"a packet was not whole after {PACKET_SECONDS:g} s"
            raise IncompleteReadError(reason, PACKET_LENGTH_BYTES, self._end - self._start)
        received = 0
        with trio.move_on_after(REST_SECONDS if len(self._arrived) > LEAST_ROOM else math.inf) as resting:
            received = await self._take()
        if resting.cancelled_caught:
            self._arrived, self._start, self._end, self._was_filled = bytearray(LEAST_ROOM), 0, 0, False
            received = await self._take()
        self._due = trio.current_time() + PACKET_SECONDS
        return received

    async def _take(self) -> int:
        """Take what is there from the socket, as far as there is room; 0 at the end."""
        with memoryview(self._arrived) as view, view[self._end :] as room:
            below = getattr(self._raw, "stream", None)
            if isinstance(below, TunedStream):
                received = await below.receive_into(room)
            else:  # A relayed connection: a stream of another one.
                data = await self._raw.read(len(room))
                received = len(data)
                room[:received] = data
            self._was_filled = received == len(room)
        self._end += received
        return received


def _of_packet_size(pieces: Sequence[PlainBytes]) -> Iterator[PlainBytes]:
    """Join small pieces and cut large ones."""
    small: list[PlainBytes] = []
    for piece in pieces:
        if len(piece) < SMALL_BYTES:
            small.append(piece)
            continue
        yield from _cut(b"".join(small))
        small = []
        yield from _cut(piece)
    yield from _cut(b"".join(small))


def _cut(piece: PlainBytes) -> Iterator[PlainBytes]:
    for start in range(0, len(piece), MAX_PACKET_BYTES):
        yield piece[start : start + MAX_PACKET_BYTES]


class FasterNoise(NoiseTransport):
    """libp2p's `/noise` of a host."""

    channel: type[NoiseChannel] = NoiseChannel

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Shake hands with the peer that dialled. Raises what the library's Noise does."""
        return self._with_channel(conn, await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Shake hands with the peer that was dialled, which must be `peer_id`. Raises what the library's Noise does."""
        return self._with_channel(conn, await super().secure_outbound(conn, peer_id))

    def _with_channel(self, conn: IRawConnection, session: Any) -> ISecureConn:
        session.conn = self.channel(conn, session.conn.noise_state)
        secured: ISecureConn = session
        return secured


class _AesPattern(PatternXX):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.protocol_name = b"Noise_XX_25519_AESGCM_SHA256"


class PacketTransport(FasterNoise):
    """The security protocol `PACKETS` of a host."""

    channel = PacketChannel

    def get_pattern(self) -> IPattern:
        """Return the handshake: the library's, with another cipher."""
        return _AesPattern(self.local_peer, self.libp2p_privkey, self.noise_privkey)
