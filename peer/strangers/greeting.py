"""The first words of a stranger: its identity key, and the lines by which protocols are chosen.

Theory of operation. Both come from peers that have proven nothing yet, and py-libp2p 0.8.1 believes what they announce:

- an identity key may be RSA, in 64 kB, and its two primes are tested in the event loop: 4 s for each connection. All peers
  of a run and all servers of its directory have ed25519 keys, so no other kind is read;
- a line of multistream has the length that its sender states, and is kept as it comes, before any handshake: 170 MB for each
  socket. Here it has `MAX_LINE_BYTES`;
- proposals of unknown protocols are answered for half a minute: 60 kB/s take a whole core. Here `MAX_LINES` of them are;
- a socket that has ended within a message is read a hundred times more. Here its end is the end of the message.
  `tests/unit/peer/wire/test_ends.py` tells when that is no longer needed.
"""

from typing import Any

import libp2p.crypto.keys
import libp2p.crypto.serialization
import libp2p.io.msgio
import libp2p.protocol_muxer.multiselect_communicator
import libp2p.utils.varint
from libp2p.io.abc import Reader
from libp2p.io.exceptions import IncompleteReadError, IOException
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError

# A type checker forbids an assignment to a class or a module, which is what `limit_greetings` does.
_msgio: Any = libp2p.io.msgio
_varint: Any = libp2p.utils.varint
_serialization: Any = libp2p.crypto.serialization
_communicator: Any = libp2p.protocol_muxer.multiselect_communicator.MultiselectCommunicator
_KeyType: Any = libp2p.crypto.keys.KeyType

MAX_LINE_BYTES = 1024
"""Names of protocols have 40; two bytes of a varint state up to 16 kB."""

MAX_LINES = 8
"""The greeting, and the protocols that one side proposes: ours propose two at most, other libp2p programs three or four. Each
that is refused takes 0.2 ms."""

MAX_PIECES = 101
"""Pieces in which one value may arrive, as in the library: more are a drip, and each read of it takes 20 µs."""


def limit_greetings() -> None:
    """Put these limits into the library, once per process."""
    readers = _serialization.key_type_to_public_key_deserializer
    for kind in [kind for kind in readers if kind != _KeyType.Ed25519.value]:
        del readers[kind]
    _communicator.read = read_line
    _msgio.read_exactly = _varint.read_exactly = read_exactly


async def read_exactly(reader: Reader, count: int) -> bytes:
    """Read exactly `count` bytes. Replaces the library's, and raises `IncompleteReadError` at the end of the socket."""
    found = bytearray()
    for _ in range(MAX_PIECES):
        found += (piece := await reader.read(count - len(found)))
        if len(found) == count:
            return bytes(found)
        if not piece:
            break
    raise IncompleteReadError("the connection was closed, or drips", expected_bytes=count, received_bytes=len(found))


async def read_line(self: Any) -> str:
    """Read the next line of a negotiation. Replaces `MultiselectCommunicator.read`, and raises what it does."""
    num_lines = self.__dict__["num_lines"] = self.__dict__.get("num_lines", 0) + 1
    if num_lines > MAX_LINES:
        raise MultiselectCommunicatorError(f"more than {MAX_LINES} lines in one negotiation")
    try:
        (size,) = await read_exactly(self.read_writer, 1)
        if size >= 0x80:
            (high,) = await read_exactly(self.read_writer, 1)
            size += (high - 1) << 7
        if not 0 < size <= MAX_LINE_BYTES:
            raise MultiselectCommunicatorError(f"a line of {size} bytes")
        line = (await read_exactly(self.read_writer, size)).decode()
    except (IOException, UnicodeDecodeError) as error:
        raise MultiselectCommunicatorError("no line of a negotiation") from error
    if not line.endswith("\n"):
        raise MultiselectCommunicatorError("a line without its end")
    return line.removesuffix("\n")
