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
        """The other bootstraps: their connections may be idle and stay, and their frames do not count for their networks.
        A reservation anybody may have for the asking."""
        self.refusals = Refusals(telemetry, trio.current_time, "bootstrap.refused")
        self.relay = RelayServer(host, limits, self.refusals)
        self.gate = Gate(limits.gate, self.refusals, host.get_network(), self._is_needed, self.friends.__contains__)

    def _is_needed(self, peer: PeerId) -> bool:
        return peer in self.friends or self.relay.serves(peer)
