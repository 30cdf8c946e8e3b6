"""A few streams of each peer at a time with few unread bytes: the oldest gives way to a newer one."""

import math

import trio

from ..base.errors import StreamClosed
from ..base.transport import Stream, StreamHandler, has_socket
from ..quota.origins import NOWHERE
from ..quota.places import Places

FEW = 4
"""Bootstraps are asked on one stream of each protocol; a second is there while a connection is replaced."""

QUESTION_BYTES = 8 << 10
"""Unread bytes of one stream: a peer asks again when it has its answer. A window of 256 KiB for as long as handlers wait for
their turn took a bootstrap from 124 to 206 MB: 128 connections, and four streams in each."""


def few_of_each(handler: StreamHandler) -> StreamHandler:
    """Return a handler that serves the newest `FEW` streams of a peer, and resets others and those with many questions."""
    places = Places[trio.CancelScope](math.inf, per_peer=FEW)

    async def serve(stream: Stream) -> None:
        assert has_socket(stream)
        stream.hold_at_most(QUESTION_BYTES)
        with trio.CancelScope() as scope:
            if (oldest := places.enter(scope, NOWHERE, stream.remote)) is not None:
                oldest.cancel()
            try:
                await handler(stream)
            finally:
                places.leave(scope)
        if scope.cancelled_caught:
            raise StreamClosed(f"{stream.remote} has opened more than {FEW} such streams")

    return serve
