"""The settings of py-libp2p's host: Noise, Yamux, limits; no automatic dials.

Only Noise is offered, first with our packets: the library's own list ends with plaintext, where the remote may claim any
peer id. Its TLS 1.3 is not offered: with 256 kB at a time it costs half as much CPU again as packets, it writes its key to a
temporary file for every connection, and finds OpenSSL's context at a fixed offset of a CPython object.
"""

from collections.abc import Callable, Sequence
from typing import Any

from libp2p import new_host
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import ID as PING
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.rcmgr import ResourceLimits, ResourceManager
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from multiaddr import Multiaddr

from ..identity import Identity
from ..yamux.muxer import PROTOCOL as YAMUX
from ..yamux.muxer import Yamux
from .packets import PACKETS, FasterNoise, PacketTransport
from .tcp import MeteredTCP

OTHERS = 512
"""Connections beside those that the gate accepts: dialled ones, 256 relayed ones, and those of voters that gave way."""

MAX_CONNECTIONS_PER_PEER = 8

_MUXERS = {TProtocol(YAMUX): Yamux}


def make_host(identity: Identity, tcp: MeteredTCP, addresses: Callable[[], Sequence[str]], accepted: int) -> Any:
    """Build a host of the library, not yet running; `addresses` returns the addresses that it announces.

    `accepted`: the connections that its gate accepts. The library's own limits lie above, so that they never decide.
    """
    keys = create_new_key_pair(identity.private_bytes())
    noise_key = create_noise_key_pair().private_key
    limit = accepted + OTHERS
    host = new_host(
        key_pair=keys,
        sec_opt={PACKETS: PacketTransport(keys, noise_key), NOISE: FasterNoise(keys, noise_key)},  # Tried in this order.
        muxer_opt=_MUXERS,
        transports=[tcp],
        disable_identify_address_discovery=True,  # Bootstraps tell me my address; what anybody states is kept for good.
        addrs_factory=lambda _found: [Multiaddr(address) for address in addresses()],
        connection_config=ConnectionConfig(
            max_connections=limit, high_watermark=limit, min_connections=0, low_watermark=0
        ),
        # Its circuit breaker refuses all peers for a minute after five refusals, which any stranger can cause.
        resource_manager=ResourceManager(
            limits=ResourceLimits(max_connections=2 * limit),  # A connection counts twice during its handshake.
            connection_limits=ConnectionLimits(max_established_per_peer=MAX_CONNECTIONS_PER_PEER),
            enable_metrics=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
        ),
    )
    host.get_mux().remove_handler(PING)  # It answers as fast as it is asked: 0.4 MB/s take a whole core (`strangers.ping`).
    host.get_mux().remove_handler(ID_PUSH)  # Nobody of us pushes, and half a message waited 10 s on each of 128 streams.
    swarm: Any = host.get_network()
    swarm.upgrader.muxer_multistream = _Muxers(_MUXERS)
    swarm.retry_config = RetryConfig(max_retries=0)  # Of what the library dials by itself.
    return host


class _Muxers(MuxerMultistream):
    """The library's own makes its own Yamux, whatever `muxer_opt` names (`stream_muxer/muxer_multistream.py:135`)."""

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Agree on a multiplexer and return the connection with it. Raises `MultiselectError`."""
        protocol, muxer = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(muxer(conn, peer_id), conn, protocol)
