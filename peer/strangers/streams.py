"""A few streams of each peer at a time with few unread bytes, where nothing else limits them."""

from collections import Counter

from ..base.errors import StreamClosed
from ..base.transport import PeerId, Stream, StreamHandler, has_socket

FEW = 4
"""Bootstraps are asked on one stream of each protocol; a second is there while a connection is replaced."""

QUESTION_BYTES = 8 << 10
"""Unread bytes of one stream: a peer asks again when it has its answer. A window of 256 KiB for as long as handlers wait for
their turn took a bootstrap from 124 to 206 MB: 128 connections, and four streams in each."""


def few_of_each(handler: StreamHandler) -> StreamHandler:
    """Return a handler that serves `FEW` streams of one peer at a time, and resets others and those with many questions."""
    open_streams: Counter[PeerId] = Counter()

    async def serve(stream: Stream) -> None:
        if open_streams[stream.remote] >= FEW:
            raise StreamClosed(f"{stream.remote} has opened more than {FEW} such streams")
        assert has_socket(stream)
        stream.hold_at_most(QUESTION_BYTES)
        open_streams[stream.remote] += 1
        try:
            await handler(stream)
        finally:
            open_streams[stream.remote] -= 1
            if not open_streams[stream.remote]:
                del open_streams[stream.remote]

    return serve
