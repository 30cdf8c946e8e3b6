"""The origins of peers, an IP address and its network, and rates for each. Pure."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

MAX_REMEMBERED = 4096
"""The limit of addresses that are counted, some 300 bytes each; beyond, the one quiet for the longest is evicted."""

ROUNDING = 1e-6
"""Seconds by which sums of floats may exceed a limit: a burst of three is three, though 3 · (1/0.3) is more than 10."""

BURST_SECONDS = 4.0
"""The burst, in seconds of a rate: a member publishes its record, its provider record and a head at once."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a connection or a record."""

    address: str
    """The IP address; of IPv6 the /64."""
    network: str
    """The /24 of IPv4, the /48 of IPv6."""
    exempt: bool
    """True if only the limits in total apply to it."""


UNKNOWN = Origin("unknown", "unknown", exempt=False)
"""The origin of closed and of relayed connections: all of them count together."""


NOWHERE = Origin("", "", exempt=True)
"""In place of an origin that is not known, as on the network in memory: only the limits in total are left."""


class Origins:
    """Maps IP addresses to origins; `exempt` are networks such as `10.0.0.0/8`."""

    def __init__(self, exempt: Sequence[str]) -> None:
        self._exempt = [ipaddress.ip_network(network) for network in exempt]

    def of(self, ip: str) -> Origin:
        """Return the origin of an IP address; `UNKNOWN` for an invalid one."""
        try:
            address = ipaddress.ip_address(ip)
        except ValueError:
            return UNKNOWN
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        narrow, wide = (32, 24) if address.version == 4 else (64, 48)
        return Origin(
            str(address) if narrow == 32 else _around(address, narrow),
            _around(address, wide),
            exempt=any(address in network for network in self._exempt),
        )


class Rates:
    """Rate limits per address: a leaky bucket of `rate` a second that holds `burst_seconds` of it."""

    def __init__(self, rate: float, burst_seconds: float = BURST_SECONDS) -> None:
        self._rate = rate
        self._burst_seconds = burst_seconds
        self._dry_at: dict[str, float] = {}
        """When the bucket of each address will be empty: the time until then is its level."""

    def take(self, origin: Origin, now: float, amount: float = 1.0) -> bool:
        """Count one, or so many; return True if they are within the rate."""
        if self.spend(origin, now, amount) <= ROUNDING:
            return True
        self._dry_at[origin.address] -= amount / self._rate
        return False

    def spend(self, origin: Origin, now: float, amount: float) -> float:
        """Count so many, whatever was counted before; return the seconds until they are within the rate."""
        if origin.exempt:
            return 0.0
        dry_at = self._dry_at[origin.address] = max(now, self._dry_at.pop(origin.address, now)) + amount / self._rate
        if len(self._dry_at) > MAX_REMEMBERED:
            del self._dry_at[next(iter(self._dry_at))]
        return max(0.0, dry_at - now - self._burst_seconds)


def _around(address: ipaddress.IPv4Address | ipaddress.IPv6Address, prefix: int) -> str:
    return str(ipaddress.ip_network(f"{address}/{prefix}", strict=False))
