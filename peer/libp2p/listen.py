"""Listening sockets: the first free port, what is accepted there, and the addresses of this computer.

A peer that listens on all addresses uses one port on IPv4 and on IPv6, each with a socket of its own: a dual-stack
socket would show IPv4 peers under IPv6 addresses (`::ffff:192.0.2.1`), and some systems forbid it. IPv6 may be missing.

What is not wanted is closed before anything is made for it, and on Linux the kernel can keep networks out altogether: their
attempts to connect are dropped, and tried again by their TCP for some seconds.
"""

import ctypes
import errno
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import psutil
import trio
from libp2p.utils.address_validation import get_available_interfaces
from multiaddr import Multiaddr

from ..base.config import PeerConfig
from ..base.errors import LocalError
from ..base.transport import Address
from ..log.telemetry import Telemetry
from ..quota.packet_filter import INSTRUCTION, filter_program

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

NUM_LISTEN_PORTS = 101
"""The configured port and the 100 after it: enough for every peer that one computer can run."""

VIRTUAL = re.compile(r"docker|br-|veth|virbr|podman|cni|cali|flannel|lxc|lxd|incus|vmnet|vboxnet|vEthernet|nerdctl")
"""Interfaces of bridges to containers and virtual machines, by the names that their programs give them."""
MAX_INTERFACES = 8
"""The limit of announced addresses: a computer full of containers has dozens, and a member record holds 16."""

ALL_IP4, ALL_IP6 = "0.0.0.0", "::"

ACCEPT_QUEUE = 128
"""Connections that wait to be accepted, as the library has it: those of a flood cost something each even to be closed."""
ATTACH_FILTER, FILTER = 26, struct.Struct("@HP")
"""Linux's SO_ATTACH_FILTER, which Python does not name, and its struct sock_fprog: the number of instructions, and where."""


class SelectiveListener(trio.abc.Listener[trio.SocketStream]):
    """A listening socket that closes at once what `refuses` returns True for, by its IP address.

    It always takes those for which `spares` does, of an address or a network.
    """

    def __init__(self, listening: trio.socket.SocketType, spares: Callable[[str], bool] = lambda where: False) -> None:
        self.socket = listening
        self._spares = spares
        self.refuses: Callable[[str], bool] = lambda ip: False

    async def accept(self) -> trio.SocketStream:
        """Wait for the next connection that is not refused. Raises `ClosedResourceError` once this is closed."""
        while True:
            try:
                accepted, (ip, *_) = await self.socket.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.ENOTSOCK):
                    raise trio.ClosedResourceError from None
                raise
            if self._spares(ip) or not self.refuses(ip):
                return trio.SocketStream(accepted)
            accepted.close()

    def keep_out(self, networks: Collection[str]) -> None:
        """Let the kernel drop attempts to connect from these networks, and from no others any more; on Linux alone."""
        if sys.platform != "linux":
            return
        networks = [network for network in networks if not self._spares(network)]
        program = filter_program(networks, 6 if self.socket.family == socket.AF_INET6 else 4)
        memory = ctypes.create_string_buffer(program)  # The kernel copies it.
        described = FILTER.pack(len(program) // INSTRUCTION.size, ctypes.addressof(memory))
        with suppress(OSError):  # It is closed, or a sandbox forbids it: `refuses` is slower and does the same.
            self.socket.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, described)

    async def aclose(self) -> None:
        """Close it."""
        self.socket.close()
        await trio.lowlevel.checkpoint()


async def listen(
    host: Any, config: PeerConfig, telemetry: Telemetry, num_ports: int = NUM_LISTEN_PORTS
) -> int | LocalError:
    """Make a running host of the library listen on the first free one of `num_ports` ports; returns it, or the error."""
    first = config.port
    no_ip6 = _try_to_bind(ALL_IP6, 0) if config.host == ALL_IP4 else None
    hosts = (config.host, ALL_IP6) if config.host == ALL_IP4 and no_ip6 is None else (config.host,)
    for port in range(first, min(first + num_ports, 65536)) if first else (0,):
        errors = [error for text in hosts if (error := _try_to_bind(text, port))]
        if not errors and await host.get_network().listen(_multiaddr(config.host, port)):
            chosen = int(host.get_transport_addrs()[0].value_for_protocol("tcp"))
            if chosen != first and first:
                telemetry.emit("host.port_taken", port=first, chosen=chosen)
            if len(hosts) == 2 and not await host.get_network().listen(_multiaddr(ALL_IP6, chosen)):
                no_ip6 = _try_to_bind(ALL_IP6, chosen) or OSError(errno.EADDRINUSE, "another process has just taken the port")
            if no_ip6 is not None:
                telemetry.emit("host.ipv4_only", step="listen", reason=str(no_ip6.strerror))
            return chosen
        for error in errors:
            if error.errno != errno.EADDRINUSE:
                return LocalError(
                    f"cannot listen on {config.host} port {port}: {error.strerror}",
                    remedy="choose another --port above 1023, and for the host an address of this computer",
                )
    if num_ports == 1:
        remedy = "end the program that listens there, or choose another --port, which links then name; 0 takes any"
        return LocalError(f"port {first} is taken on {config.host}", remedy=remedy)
    return LocalError(
        f"no port of {first} to {first + num_ports - 1} is free on {config.host}",
        remedy="choose another --port, or --port 0 to take any",
    )


def interfaces(host: str, port: int) -> tuple[Address, ...]:
    """Return my addresses when I listen on `host`: public ones first, those of bridges to containers last.

    Loopback is there only if there are no others.

    One IPv6 address per network (/64) is enough: computers change their source addresses daily (privacy
    extensions).
    """
    ips = [ipaddress.ip_address(host)]
    if ips[0].is_unspecified:
        kinds = ("ip4", "ip6") if host == ALL_IP4 else ("ip6",)
        found = [ip for ip in map(_ip, get_available_interfaces(port)) if f"ip{ip.version}" in kinds]
        ips = list({_network(ip): ip for ip in reversed(found) if not ip.is_loopback and not ip.is_link_local}.values())
        ips = ips[::-1] or [ip for ip in found if ip.is_loopback]
    bridges = {each.address for name, held in psutil.net_if_addrs().items() if VIRTUAL.match(name) for each in held}
    ips = sorted(ips, key=lambda ip: (not ip.is_global, str(ip) in bridges))[:MAX_INTERFACES]
    return tuple(f"/ip{ip.version}/{ip}/tcp/{port}" for ip in ips)


def _ip(address: Multiaddr) -> _Ip:
    return ipaddress.ip_address(str(address).split("/")[2])


def _network(ip: _Ip) -> bytes:
    """Return the network of an address: an IPv4 address itself, the /64 of an IPv6 address."""
    return ip.packed if ip.version == 4 else ip.packed[:8]


def _multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def _try_to_bind(host: str, port: int) -> OSError | None:
    """Bind a port and close it; returns the error, which the library does not report, or None.

    Connections of an earlier process that have not timed out do not count: a restarted peer keeps its port.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            if os.name == "posix":  # Elsewhere this option takes a port from the process that listens there.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ":" in host:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
