"""libp2p's pings (`/ipfs/ping/1.0.0`), answered at a bootstrap, within a rate.

Theory of operation. js-libp2p's Kademlia takes no server into its routing table that has not answered a ping, so without
them its clients find no run. py-libp2p's own handler answers as fast as it is asked: 0.4 MB/s take a whole core. Here the
pings of an address have a rate, and a stream beyond it is reset.
"""

import trio

from ..base.errors import NetworkError
from ..base.transport import Stream, has_socket
from ..quota.origins import Origins
from ..quota.shares import Shares

PING_PROTOCOL = "/ipfs/ping/1.0.0"
PING_BYTES = 32
"""Random bytes, which come back (libp2p's specification of ping)."""

PINGS_PER_SECOND, PINGS_BURST_SECONDS = 4.0, 16.0
"""Of one address, in a burst 64: go-libp2p and js-libp2p ping once a second, and a Kademlia client once for each server."""


class Pings:
    """Answers the pings of all streams of one host."""

    def __init__(self) -> None:
        self._origins = Origins(())
        self._pings = Shares(PINGS_PER_SECOND, PINGS_BURST_SECONDS)

    async def serve(self, stream: Stream) -> None:
        """Answer the pings of one stream until it ends. Raises `NetworkError` for one too many."""
        assert has_socket(stream)
        origin = self._origins.of(stream.remote_socket()[0])
        ping = b""
        while data := await stream.receive_some(PING_BYTES - len(ping)):
            ping += data
            if len(ping) < PING_BYTES:
                continue
            if whose := self._pings.exceeded(origin, trio.current_time()):
                raise NetworkError(f"too many pings a second from {whose}")
            await stream.send_all(ping)
            ping = b""
