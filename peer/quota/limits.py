"""The limits of what a host gives to others: in total, per IP address and per network. Pure.

Theory of operation. Peer ids cost nothing, IP addresses cost something, and the holder of one often has its neighbours, too
(Sybil attack). So everything that can run out is limited in total, per IP address and per network: /24 of IPv4, /48 of
IPv6, whose "address" is a /64, since a home has one. Both prefixes are those of py-libp2p's routing table and of most rate
limiters. A newcomer beyond a limit gets the place of the oldest of those who have most (`places`). Nobody is exempt for
coming from loopback or a private network: behind a proxy, a container's bridge or a router that hides sources every stranger
does. The operator of a bootstrap may exempt networks from its limits per address and per network, never from those in total.

Every host has the limits of a gate (`GateLimits`). A limit of a bootstrap is one field of `BootstrapLimits`: its option of
`flockstep bootstrap`, its check and its error follow from that.
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, get_args, get_type_hints

from ..base.errors import UsageError

BOOTSTRAP_STREAMS = 32.0
"""Questions a second that a bootstrap answers to one address: a newcomer's 128 lookups fit into the burst many times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """The limits of the connections that a host accepts; the defaults are those of a member."""

    connections: int = 224
    """With as many as `libp2p.settings.OTHERS` beside them about the 300 of libp2p daemons. A full roster takes 126 at most,
    if both ends dial."""

    per_address: int = 64
    """A full roster behind one NAT."""

    per_network: int = 128

    handshakes: int = 64
    """As at a bootstrap."""

    connects_per_second: float = 2.0
    """From one address, 64 in a burst, and four times as many from one network: each handshake takes 5 ms of a core."""

    streams_per_second: float = 8.0
    """That strangers open from one address, 512 in a burst; each takes 1.5 ms of a core, and a newcomer opens a few to each
    member. A connection that exceeds this is closed."""

    exempt: tuple[str, ...] = ()
    """Networks to which no limit per address or per network applies."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The annotation of a limit."""

    meaning: str
    """What is limited, in the text of `--help` and docs/deploy.md."""
    may_be_zero: bool = False
    """True if 0 turns the service off."""


@dataclass(frozen=True, slots=True)
class LimitOption:
    """A limit as an option of the command line."""

    name: str
    """The field's name; its option is spelled with hyphens."""
    kind: type
    meaning: str
    default: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapLimits:
    """The limits of one bootstrap. Raises `UsageError` if one is out of its range."""

    connections: Annotated[int, Limit("Open connections; beyond, the oldest of the network that has most is closed")] = 900
    """A volunteer holds one. Most systems give a process 1024 open files."""

    connections_per_address: Annotated[int, Limit("Open connections of one IP address (IPv6: one /64)")] = 32
    """A home or an office behind one address; some peers hold two for a moment."""

    connections_per_network: Annotated[int, Limit("Open connections of one network (IPv4: a /24, IPv6: a /48)")] = 128

    handshakes: Annotated[int, Limit("Unfinished handshakes; beyond, the oldest is closed, and each after 10 s")] = 64
    """An honest one takes 0.3 s."""

    reservations: Annotated[int, Limit("Peers that are reached through this relay", may_be_zero=True)] = 512

    reservations_per_address: Annotated[int, Limit("Reservations of one IP address")] = 16

    reservations_per_network: Annotated[int, Limit("Reservations of one network")] = 64

    circuits: Annotated[int, Limit("Relayed connections", may_be_zero=True)] = 512

    circuits_per_peer: Annotated[int, Limit("Relayed connections from or to one peer")] = 64
    """A roster has 64 members."""

    circuits_per_address: Annotated[int, Limit("Relayed connections from one IP address")] = 128

    circuit_rate: Annotated[float, Limit("Bytes/s of relayed connections from one IP address, both directions")] = 12.5e6
    """100 Mbit/s, more than most homes send."""

    circuit_bytes: Annotated[int, Limit("Bytes of one relayed connection until it ends; its peers dial again")] = 1 << 36
    """64 GiB."""

    relay_rate: Annotated[float, Limit("Bytes/s of all relayed connections together, shared fairly")] = 50e6

    store_bytes: Annotated[int, Limit("Memory of the directory; its file has at most twice that and 1 MiB")] = 64_000_000

    records_per_address: Annotated[int, Limit("Records of one IP address; beyond, its oldest is dropped")] = 256

    records_per_network: Annotated[int, Limit("Records of one network; beyond, its oldest is dropped")] = 1024

    providers_per_network: Annotated[int, Limit("Members of one run that are listed from one network")] = 64
    """One network cannot crowd out the others."""

    record_rate: Annotated[float, Limit("Records/s that one IP address may publish; four times as many in a burst")] = 10.0

    exempt: tuple[str, ...] = ()
    """Networks to which no limit per address or per network applies."""

    def __post_init__(self) -> None:
        for name, limit in _limits().items():
            value = getattr(self, name)
            if not (value > 0 or (value == 0 and limit.may_be_zero)):
                least = "0 or more" if limit.may_be_zero else "positive"
                raise UsageError(f"{option_of(name)} must be {least}, got {value}", remedy="leave it out for the default")
        for network in self.exempt:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise UsageError(f"--exempt {network!r} is no network: {error}", remedy="such as 192.0.2.0/24") from None

    @property
    def gate(self) -> GateLimits:
        """The limits of this bootstrap's gate."""
        return GateLimits(
            connections=self.connections,
            per_address=self.connections_per_address,
            per_network=self.connections_per_network,
            handshakes=self.handshakes,
            streams_per_second=BOOTSTRAP_STREAMS,
            exempt=self.exempt,
        )


def option_of(name: str) -> str:
    """Return the spelling of a field on the command line."""
    return "--" + name.replace("_", "-")


def limit_options() -> Iterator[LimitOption]:
    """Yield every limit with its default, in the order of the fields."""
    kinds, defaults = get_type_hints(BootstrapLimits), BootstrapLimits()
    for name, limit in _limits().items():
        yield LimitOption(name, kinds[name], limit.meaning, getattr(defaults, name))


def _limits() -> dict[str, Limit]:
    hints = get_type_hints(BootstrapLimits, include_extras=True)
    return {name: note for name, hint in hints.items() for note in get_args(hint) if isinstance(note, Limit)}
