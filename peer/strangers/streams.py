"""A few streams of each peer at a time, where nothing else limits them."""

from collections import Counter

from ..errors import StreamClosed
from ..transport import PeerId, Stream, StreamHandler

FEW = 4
"""Bootstraps are asked on one stream of each protocol; a second is there while a connection is replaced. Each may hold a
window of unread bytes for as long as its handler waits."""


def few_of_each(handler: StreamHandler) -> StreamHandler:
    """Return a handler that serves `FEW` streams of one peer at a time, and resets others."""
    open_streams: Counter[PeerId] = Counter()

    async def serve(stream: Stream) -> None:
        if open_streams[stream.remote] >= FEW:
            raise StreamClosed(f"{stream.remote} has opened more than {FEW} such streams")
        open_streams[stream.remote] += 1
        try:
            await handler(stream)
        finally:
            open_streams[stream.remote] -= 1
            if not open_streams[stream.remote]:
                del open_streams[stream.remote]

    return serve
