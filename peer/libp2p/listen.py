"""Listening: the first free port from the wished-for one on, and the addresses of this computer's interfaces.

Who listens on all addresses does so with one port on IPv4 and on IPv6, each by a socket of its own: a single one for both
would show IPv4 peers under IPv6 addresses (`::ffff:192.0.2.1`), and some systems forbid it. IPv6 may be missing.
"""

import errno
import ipaddress
import os
import socket
from typing import Any

from libp2p.utils.address_validation import get_available_interfaces
from multiaddr import Multiaddr

from ..config import PeerConfig
from ..errors import LocalError
from ..telemetry import Telemetry
from ..transport import Address

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

NUM_PORTS = 101
"""The wished-for port and the 100 after it: enough for every peer that one computer can feed."""

MAX_INTERFACES = 8
"""Addresses that are told to others: a computer full of containers has dozens, and a member record holds 16."""

ALL_IP4, ALL_IP6 = "0.0.0.0", "::"


async def listen(host: Any, config: PeerConfig, telemetry: Telemetry) -> int | LocalError:
    """Make a running host of the library listen; the port, or why there is none."""
    first = config.port
    no_ip6 = _try_to_bind(ALL_IP6, 0) if config.host == ALL_IP4 else None
    hosts = (config.host, ALL_IP6) if config.host == ALL_IP4 and no_ip6 is None else (config.host,)
    for port in range(first, min(first + NUM_PORTS, 65536)) if first else (0,):
        errors = [error for text in hosts if (error := _try_to_bind(text, port))]
        if not errors and await host.get_network().listen(_multiaddr(config.host, port)):
            chosen = int(host.get_transport_addrs()[0].value_for_protocol("tcp"))
            if chosen != first and first:
                telemetry.emit("host.port_taken", port=first, chosen=chosen)
            if len(hosts) == 2 and not await host.get_network().listen(_multiaddr(ALL_IP6, chosen)):
                no_ip6 = _try_to_bind(ALL_IP6, chosen) or OSError(errno.EADDRINUSE, "somebody else was quicker")
            if no_ip6 is not None:
                telemetry.emit("host.ipv4_only", step="listen", reason=str(no_ip6.strerror))
            return chosen
        for error in errors:
            if error.errno != errno.EADDRINUSE:
                return LocalError(
                    f"cannot listen on {config.host} port {port}: {error.strerror}",
                    remedy="choose another --port above 1023, and for the host an address of this computer",
                )
    return LocalError(
        f"no port of {first} to {first + NUM_PORTS - 1} is free on {config.host}",
        remedy="choose another --port, or --port 0 to take any",
    )


def interfaces(host: str, port: int) -> tuple[Address, ...]:
    """My addresses when I listen on `host`: public ones first, of loopback only where nothing else is there.

    Of the IPv6 addresses in one network (/64) one is enough: computers change those that they leave from every day.
    """
    ips = [ipaddress.ip_address(host)]
    if ips[0].is_unspecified:
        kinds = ("ip4", "ip6") if host == ALL_IP4 else ("ip6",)
        found = [ip for ip in map(_ip, get_available_interfaces(port)) if f"ip{ip.version}" in kinds]
        ips = list({_network(ip): ip for ip in reversed(found) if not ip.is_loopback and not ip.is_link_local}.values())
        ips = ips[::-1] or [ip for ip in found if ip.is_loopback]
    ips = sorted(ips, key=lambda ip: not ip.is_global)[:MAX_INTERFACES]
    return tuple(f"/ip{ip.version}/{ip}/tcp/{port}" for ip in ips)


def _ip(address: Multiaddr) -> _Ip:
    return ipaddress.ip_address(str(address).split("/")[2])


def _network(ip: _Ip) -> bytes:
    """What is kept of an address to tell it from those in the same network."""
    return ip.packed if ip.version == 4 else ip.packed[:8]


def _multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def _try_to_bind(host: str, port: int) -> OSError | None:
    """Why this port cannot be listened on: the library keeps the reason to itself.

    Connections of a former life that have not timed out do not count: who comes back is found where it was.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            if os.name == "posix":  # Elsewhere this means to take a port from whoever listens there.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ":" in host:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
