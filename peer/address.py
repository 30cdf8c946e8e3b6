"""Addresses as text: validation, the peer id in them, and the rung that each one belongs to. Pure.

An address is a multiaddr of a few forms: `/ip4/192.0.2.1/tcp/4001`, or the same with a name
(`/dns/host.example/tcp/4001`), followed by `/p2p/<relay>/p2p-circuit` if it is relayed. Addresses come from links and
from strangers' records, so anything else is refused here, before a library that knows eighty protocols parses it.
"""

import ipaddress
import re
from collections.abc import Iterable

from .errors import UsageError
from .identity import is_peer_id
from .transport import Address, PeerId, Rung

_LABEL = r"[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
"""A host name (RFC 1123), with the underscores that are found in practice."""


def valid_address(text: str) -> bool:
    """Return True if `text` is an address that this network can dial."""
    parts = text.split("/")
    if len(parts) not in (5, 8) or parts[0] or parts[3] != "tcp" or not _is_port(parts[4]):
        return False
    if len(parts) == 8 and not (parts[5] == "p2p" and is_peer_id(parts[6]) and parts[7] == "p2p-circuit"):
        return False
    if parts[1] in ("ip4", "ip6"):
        return _is_ip(parts[2], version=int(parts[1][2]))
    return parts[1] in ("dns", "dns4", "dns6") and _NAME.fullmatch(parts[2]) is not None


def split_p2p(text: str) -> tuple[Address, PeerId]:
    """Split `<address>/p2p/<peer id>`. Raises `UsageError`."""
    address, _, peer = text.rpartition("/p2p/")
    if not valid_address(address) or not is_peer_id(peer):
        raise UsageError(
            f"{text!r} does not name a peer and where it is",
            remedy="write it in one piece, such as /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…",
        )
    return address, peer


def rung_of(address: Address) -> Rung:
    """Return the rung of a valid address."""
    _, kind, host, *rest = address.split("/")
    if rest[-1] == "p2p-circuit":
        return Rung.RELAYED
    if kind in ("ip4", "ip6") and not ipaddress.ip_address(host).is_global:
        return Rung.LAN
    return Rung.DIRECT


def is_ipv6(address: Address) -> bool:
    """Return True if a valid address is an IPv6 one; a plain name may resolve to both versions."""
    return address.startswith(("/ip6/", "/dns6/"))


def by_turns(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """Interleave the two versions of IP, the first address's first: one may be unreachable (RFC 8305, section 4)."""
    listed = tuple(addresses)
    ranks = {True: 0, False: 0}
    order: list[tuple[int, bool]] = []
    for address in listed:
        other = is_ipv6(address) != is_ipv6(listed[0])
        order.append((ranks[other], other))
        ranks[other] += 1
    return tuple(address for _, address in sorted(zip(order, listed, strict=True), key=lambda pair: pair[0]))


def prefix_of(addresses: Iterable[Address]) -> str:
    """Return the network of the first public address: a /16 of IPv4, a /32 of IPv6; empty if none is public.

    One owner of addresses can easily have that many; a shorter prefix would put whole providers together.
    """
    for address in addresses:
        _, kind, host, *rest = address.split("/")
        if kind in ("ip4", "ip6") and rest[-1:] != ["p2p-circuit"] and (found := ipaddress.ip_address(host)).is_global:
            return str(ipaddress.ip_network((found, 16 if found.version == 4 else 32), strict=False).network_address)
    return ""


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65535


def _is_ip(text: str, *, version: int) -> bool:
    """Return True if `text` is an IP address that means the same on every computer: not a link-local IPv6 one.

    An IPv4-mapped IPv6 address (`::ffff:192.0.2.1`) is refused too: it would seem to be on another rung than it is.
    """
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        return version == 6 and not ip.is_link_local and ip.ipv4_mapped is None and "%" not in text
    return version == 4
