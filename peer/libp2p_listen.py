"""Listening: the first free port from the wished-for one on, and the addresses of this computer's interfaces."""

import errno
import ipaddress
import socket
from typing import Any

from libp2p.utils.address_validation import get_available_interfaces
from multiaddr import Multiaddr

from .config import PeerConfig
from .errors import LocalError
from .telemetry import Telemetry
from .transport import Address

NUM_PORTS = 101
"""The wished-for port and the 100 after it: enough for every peer that one computer can feed."""


async def listen(host: Any, config: PeerConfig, telemetry: Telemetry) -> int | LocalError:
    """Make a running host of the library listen; the port, or why there is none."""
    first = config.port
    for port in range(first, min(first + NUM_PORTS, 65536)) if first else (0,):
        if await host.get_network().listen(Multiaddr(f"/ip4/{config.host}/tcp/{port}")):
            chosen = int(host.get_transport_addrs()[0].value_for_protocol("tcp"))
            if chosen != first and first:
                telemetry.emit("host.port_taken", port=first, chosen=chosen)
            return chosen
        if (error := _try_to_bind(config.host, port)) and error.errno != errno.EADDRINUSE:
            return LocalError(
                f"cannot listen on {config.host} port {port}: {error.strerror}",
                remedy="choose another --port above 1023, and for the host an address of this computer",
            )
    return LocalError(
        f"no port of {first} to {first + NUM_PORTS - 1} is free on {config.host}",
        remedy="choose another --port, or --port 0 to take any",
    )


def interfaces(host: str, port: int) -> tuple[Address, ...]:
    """My addresses when I listen on `host`: public ones first, of loopback only where nothing else is there."""
    ips = [ipaddress.ip_address(host)]
    if ips[0].is_unspecified:
        found = (address.value_for_protocol("ip4") for address in _ip4_interfaces(port))
        ips = [ipaddress.ip_address(text) for text in found]
        ips = [ip for ip in ips if not ip.is_loopback and not ip.is_link_local] or ips
    return tuple(f"/ip4/{ip}/tcp/{port}" for ip in sorted(ips, key=lambda ip: not ip.is_global))


def _ip4_interfaces(port: int) -> list[Multiaddr]:
    return [address for address in get_available_interfaces(port) if "ip4" in str(address)]


def _try_to_bind(host: str, port: int) -> OSError | None:
    """Why this port cannot be listened on: the library keeps the reason to itself."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
