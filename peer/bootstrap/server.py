"""The server side of a bootstrap: gate, relay server, and counts of refusals."""

from typing import Any

import trio

from ..base.transport import PeerId
from ..libp2p.gate import Gate
from ..log.telemetry import Telemetry
from ..quota.limits import BootstrapLimits
from ..quota.refusals import Refusals
from .relay_server import RelayServer


class BootstrapServer:
    """One bootstrap's server side."""

    def __init__(self, host: Any, limits: BootstrapLimits, telemetry: Telemetry) -> None:
        self.limits = limits
        self.friends: set[PeerId] = set()
        """The other bootstraps, whose connections may be idle."""
        self.refusals = Refusals(telemetry, trio.current_time, "bootstrap.refused")
        self.relay = RelayServer(host, limits, self.refusals)
        friend = self._is_friend
        self.gate = Gate(limits.gate, self.refusals, host.get_network(), self._is_needed, friend, friend)

    def _is_friend(self, peer: PeerId) -> bool:
        """Return True if frames of a peer are not limited by its network: anybody may have a reservation for the asking."""
        return peer in self.friends

    def _is_needed(self, peer: PeerId) -> bool:
        return self._is_friend(peer) or self.relay.serves(peer)
