"""Addresses as text: validation, the peer id in them, and the rung that each one belongs to. Pure.

An address is a multiaddr of a few forms: `/ip4/192.0.2.1/tcp/4001`, or the same with a name
(`/dns/host.example/tcp/4001`), followed by `/ws` if a WebSocket is accepted there, by `/tls/ws` or `/wss` if it is over TLS,
and by `/p2p/<relay>/p2p-circuit` if it is relayed. Addresses come from links and from strangers' records, so anything else is
refused here, before a library that knows eighty protocols parses it.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .base.errors import UsageError
from .base.transport import Address, PeerId, Rung
from .identity import is_peer_id

MAX_ADDRESS_BYTES = 256
"""Of one in multiaddr's binary form: that of a circuit has some 60."""

_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
"""A host name (RFC 1123): with underscores no multiaddr can be made of it."""

_WEB = (["ws"], ["wss"], ["tls", "ws"])
"""What an address of a WebSocket has behind its port; `wss` is the older form of the last one (libp2p's specification)."""

_NEVER = tuple(
    map(
        ipaddress.ip_network,
        ("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/128", "fe80::/10", "fec0::/10", "ff00::/8"),
    )
)
"""Unspecified, link-local (where clouds serve credentials), multicast and reserved addresses."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that a translator turns into IPv4 ones (RFC 6052)."""
_COMPATIBLE = ipaddress.ip_network("::/96")
"""IPv6 addresses that once stood for IPv4 ones (RFC 4291, section 2.5.5.1)."""
_METADATA = ipaddress.ip_address("fd00:ec2::254")
"""Where AWS serves them over IPv6."""
_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"))
)
"""Addresses that stand for another computer in each network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where I am, as far as I know it without trusting a member."""

    interfaces: tuple[Address, ...] = ()
    """Where I listen."""
    bootstraps: tuple[Address, ...] = ()
    """Where the bootstraps of my link are."""
    seen_at: tuple[Address, ...] = ()
    """Where they see me."""


def valid_address(text: str) -> bool:
    """Return True if `text` is an address that this network can dial."""
    parts = text.split("/")
    if len(parts) < 5 or parts[0] or parts[3] != "tcp" or not _is_port(parts[4]):
        return False
    behind = parts[5:]
    if behind[-1:] == ["p2p-circuit"]:
        if len(behind) < 3 or behind[-3] != "p2p" or not is_peer_id(behind[-2]):
            return False
        del behind[-3:]
    if behind not in ([], *_WEB):
        return False
    if parts[1] in ("ip4", "ip6"):
        return _is_ip(parts[2], version=int(parts[1][2]))
    return parts[1] in ("dns", "dns4", "dns6") and _NAME.fullmatch(parts[2]) is not None


def is_socket(text: str) -> bool:
    """Return True if `text` is a valid address of an IP and a port alone: no name, no WebSocket, no relay."""
    return valid_address(text) and text.startswith(("/ip4/", "/ip6/")) and text.count("/") == 4


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
    if kind in ("ip4", "ip6") and not is_public_ip(host):
        return Rung.LAN
    return Rung.DIRECT


def is_ipv6(address: Address) -> bool:
    """Return True if a valid address is an IPv6 one; a plain name may resolve to both versions."""
    return address.startswith(("/ip6/", "/dns6/"))


def is_web(address: Address) -> bool:
    """Return True if a valid address, or the relay of a relayed one, is a WebSocket's."""
    return address.partition("/p2p/")[0].endswith(("/ws", "/wss"))


def is_secure(address: Address) -> bool:
    """Return True if the WebSocket at an address is over TLS."""
    return address.partition("/p2p/")[0].endswith(("/tls/ws", "/wss"))


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


def why_not_dial(address: Address, theirs: Iterable[Address], here: Surroundings) -> str:
    """Return why I do not dial a resolved address that a member states among `theirs`; empty if I do.

    It may name any computer, also one that only I reach, such as this one or my router (SSRF). A private address counts if
    it is in the /24 (IPv6: /64) of an interface of mine, in the private range in which a bootstrap of my link is, or if
    the member states a public address that I have, too. Loopback counts if I or a bootstrap of my link are there.
    """
    ip = _ip_of(address)
    if any(ip in network for network in _NEVER) or ip == _METADATA:
        return "an address of no computer that a peer could be on"
    mine = [_ip_of(one) for one in here.interfaces if _is_plain(one)]
    bootstraps = [_ip_of(one) for one in here.bootstraps if _is_plain(one)]
    if ip.is_loopback:
        is_here = any(one.is_loopback for one in (*mine, *bootstraps))
        return "" if is_here else "a loopback address, which is this computer"
    block = next((network for network in _PRIVATE if ip in network), None)
    if block is None:
        return ""
    seen_at = {_ip_of(one) for one in (*here.seen_at, *here.interfaces) if _is_plain(one)}
    shared = {one for one in seen_at if one.is_global} & {_ip_of(one) for one in theirs if _is_plain(one)}
    near = any(one in block for one in bootstraps) or any(_vicinity(one) == _vicinity(ip) for one in mine)
    return "" if near or shared else "a private address of a network that I am not in"


def is_public_ip(text: str) -> bool:
    """Return True for an IP address, as the system resolves names, of the public internet: of no network of anybody's own."""
    ip = _embedded(ipaddress.ip_address(text))
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in (*_NEVER, _COMPATIBLE))


def is_loopback(text: str) -> bool:
    """Return True for an IP address of loopback."""
    return ipaddress.ip_address(text).is_loopback


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


def _is_plain(address: Address) -> bool:
    """Return True for a valid address that is an IP of the peer itself: no name, not relayed."""
    return valid_address(address) and address.startswith(("/ip4/", "/ip6/")) and rung_of(address) is not Rung.RELAYED


def _ip_of(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IP of a resolved address; of an IPv6 form of an IPv4 address that one (mapped, 6to4, NAT64)."""
    return _embedded(ipaddress.ip_address(address.split("/")[2]))


def _embedded(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ipaddress.IPv4Address(ip.packed[12:]) if ip in _NAT64 else None
        return ip.ipv4_mapped or ip.sixtofour or embedded or ip
    return ip


def _vicinity(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    """Return the /24 of an IPv4 address, the /64 of an IPv6 one."""
    return ip.packed[:3] if ip.version == 4 else ip.packed[:8]
