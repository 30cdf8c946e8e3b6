"""Diagnosis of a bootstrap that did not answer, by probing other ports of its host.

A failed dial alone does not distinguish a bootstrap that is down from a link with a wrong port, nor a firewall from a
host that is down. So the default port of bootstraps is probed for the wanted peer id, and also ports that hosts and
firewalls usually leave open: a refused connection also proves that the host was reached.
"""

import socket
from collections.abc import Sequence

import trio

from ..address import is_web
from ..base.config import DEFAULT_PORT
from ..base.errors import NetworkError
from ..base.transport import Address, PeerId
from ..base.troubles import BLOCKED, DOWN, GONE, MUTE, NOT_NOISE, REFUSED, SILENT, STUCK, WRONG_PORT
from ..libp2p.tcp import resolve
from .dialback import Probe

DIAGNOSE_TIMEOUT = 2.0
"""The timeout of the probes in seconds: a lost first packet is retransmitted after one."""

OTHER_PORTS = (443, 80)


async def diagnose(peer: PeerId, address: Address, cause: str, probe: Probe) -> str:
    """Return why a bootstrap did not answer at its address, more precisely than `cause`, the failure of the dial."""
    if address.endswith("/p2p-circuit") or is_web(address):
        return cause  # The relay's ports show nothing about the bootstrap; TLS and HTTP say more than ports do.
    start, _, port = address.rpartition("/tcp/")
    if cause.startswith((REFUSED.cause, NOT_NOISE.cause)):
        if port != str(DEFAULT_PORT) and not await probe(peer, f"{start}/tcp/{DEFAULT_PORT}", DIAGNOSE_TIMEOUT):
            return WRONG_PORT.with_details(f"it is {port}, the bootstrap listens on {DEFAULT_PORT}").cause
        if cause.startswith(REFUSED.cause):
            return DOWN.with_details(f"connection refused, nothing listens on port {port} of its computer").cause
    if cause.startswith(MUTE.cause):
        return STUCK.with_details(f"port {port} accepts connections, but nothing is received").cause
    if cause.startswith(SILENT.cause):
        answers = await _probe_ports(start, (int(port), *OTHER_PORTS))
        if answers.get(int(port)):
            return STUCK.with_details(f"port {port} accepts connections, but nothing is received").cause
        answering = next(iter(answers), None)
        if answering is None:
            return GONE.with_details(f"neither from port {port} nor from others").cause
        return BLOCKED.with_details(f"{port} is silent, though the host answers on port {answering}").cause
    return cause


async def _probe_ports(start: Address, ports: Sequence[int]) -> dict[int, bool]:
    """Probe ports of the host at `/ip4/…` or `/dns/…`; returns those that answer, with True if they accept."""
    answers: dict[int, bool] = {}

    async def probe_port(port: int) -> None:
        try:
            resolved = await resolve(f"{start}/tcp/{port}")
            ip = str(resolved.value_for_protocol(resolved.protocols()[0].code))
            with trio.socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM) as probing:
                await probing.connect((ip, port))
            answers[port] = True
        except ConnectionRefusedError:
            answers[port] = False
        except (OSError, NetworkError):
            return

    with trio.move_on_after(DIAGNOSE_TIMEOUT):
        async with trio.open_nursery() as nursery:
            for port in ports:
                nursery.start_soon(probe_port, port)
    return answers
