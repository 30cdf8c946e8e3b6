"""What a bootstrap gives, to all together and to each: every limit of it in one place. Pure.

Theory of operation. Peer ids cost nothing, IP addresses cost something, and whoever has one often has its neighbours, too.
So whatever can run out is limited in all, per IP address and per network: /24 of IPv4, /48 of IPv6, whose "address" is a
/64, since a home has one. Both are what py-libp2p's routing table and most rate limiters take. Exempt from the limits per
address and per network, never from those in all, are the loopback and private networks: a test or an office has many
peers on one address, and a stranger cannot come from one.
"""

import ipaddress
from dataclasses import dataclass, fields

from .errors import UsageError

LOCAL_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "::1/128", "fc00::/7")


MAY_BE_NONE = ("reservations", "circuits")
"""What a bootstrap need not give at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapLimits:
    """The limits of one bootstrap. Raises `UsageError` where one is out of its range."""

    connections: int = 900
    """At a time; a volunteer holds one. Most systems give a process 1024 open files."""

    connections_per_address: int = 32
    """A home or an office behind one address; some peers hold two for a moment."""

    connections_per_network: int = 128
    """At a time from one network."""

    handshakes: int = 64
    """Connections that have not yet said who they are; beyond, the oldest gives way. An honest one takes 0.3 s."""

    reservations: int = 512
    """Peers that can be reached through this relay."""

    reservations_per_address: int = 16
    """Of one IP address."""

    reservations_per_network: int = 64
    """Of one network."""

    circuits: int = 512
    """Connections through this relay at a time."""

    circuits_per_peer: int = 64
    """That begin or end at one peer: a roster has 64 members."""

    circuits_per_address: int = 128
    """That begin at one IP address."""

    circuit_rate: float = 12.5e6
    """Bytes/s of one circuit, both directions together: 100 Mbit/s, more than most homes send."""

    circuit_bytes: int = 1 << 36
    """Bytes of one circuit, both directions together, before it ends: 64 GiB. Its peers dial anew."""

    relay_rate: float = 50e6
    """Bytes/s of all circuits together; each gets its turn."""

    store_bytes: int = 64_000_000
    """Of values and provider records in memory; on disk it is twice that at most."""

    records_per_address: int = 256
    """Values and provider records that one IP address may have here; its oldest gives way to its newest."""

    records_per_network: int = 1024
    """The same of one network."""

    providers_per_network: int = 64
    """Of the providers of one run: one network cannot crowd out the others."""

    record_rate: float = 10.0
    """Values and provider records a second that one IP address may publish; four times as many in a burst."""

    exempt: tuple[str, ...] = LOCAL_NETWORKS
    """Networks to which no limit per address or per network applies."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "exempt" or value > 0 or (value == 0 and item.name in MAY_BE_NONE):
                continue
            option = "--" + item.name.replace("_", "-")
            raise UsageError(f"{option} must be positive, got {value}", remedy="leave it out for the default")
        for network in self.exempt:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise UsageError(f"--exempt {network!r} is no network: {error}", remedy="such as 192.0.2.0/24") from None
