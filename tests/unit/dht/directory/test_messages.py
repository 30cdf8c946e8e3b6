"""Kademlia's messages on a stream: however the bytes arrive, whole messages come out, and none beyond the limit is read."""

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import pytest
import trio
from flockstep.dht.directory.messages import Message, MessageReader, about_value, send
from flockstep.peer.base.errors import MalformedMessage, StreamClosed
from flockstep.peer.base.transport import Stream
from hypothesis import given
from hypothesis import strategies as st
from libp2p.utils.varint import encode_varint_prefixed

PUT = about_value("/flockstep/run", bytes(300))
ASK = Message(type=Message.FIND_NODE, key=b"key")
BOTH = b"".join(encode_varint_prefixed(message.SerializeToString()) for message in (PUT, ASK))


class Pieces:
    """A stream whose bytes arrive in given pieces; it keeps what is sent and counts what is read."""

    remote = "a peer"

    def __init__(self, pieces: Iterable[bytes] = ()) -> None:
        self.sent = b""
        self._pieces = iter([*pieces, b""])

    async def send_all(self, data: bytes) -> None:
        self.sent += data

    async def receive_some(self, max_bytes: int) -> bytes:
        return next(self._pieces)


def read(pieces: Iterable[bytes], max_bytes: int = 1000) -> list[Message]:
    async def main() -> list[Message]:
        reader, found = MessageReader(cast(Stream, Pieces(pieces)), max_bytes), []
        while message := await reader.next():
            found.append(message)
        return found

    return trio.run(main)


@given(st.lists(st.integers(1, len(BOTH) - 1), max_size=6))
def test_messages_come_out_whole_however_their_bytes_arrive(cuts: list[int]) -> None:
    places = [0, *sorted(set(cuts)), len(BOTH)]
    assert read(BOTH[start:end] for start, end in pairwise(places)) == [PUT, ASK]


def test_what_is_sent_is_what_is_read() -> None:
    stream = Pieces()
    trio.run(send, cast(Stream, stream), PUT)
    assert read([stream.sent]) == [PUT]


@pytest.mark.parametrize("length", [b"\xe9\x07", b"\xff" * 8 + b"\x7f", b"\xff" * 40])
def test_a_message_beyond_the_limit_is_refused_by_its_length_alone(length: bytes) -> None:
    with pytest.raises(MalformedMessage, match="too many bytes"):
        read([length])  # 1001 and more: not one byte of it has to arrive.


def test_a_length_that_never_ends_is_no_message() -> None:
    with pytest.raises(MalformedMessage, match="not a Kademlia message"):
        read([b"\x80" * 40])


@pytest.mark.parametrize("end", [1, 2, 100])
def test_a_stream_that_ends_within_a_message_is_closed(end: int) -> None:
    with pytest.raises(StreamClosed, match="within a message"):
        read([BOTH[:end]])
