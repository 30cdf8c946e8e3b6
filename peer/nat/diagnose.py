"""A second look at a bootstrap that did not answer: which thing it was, by what other ports of its host say.

The failure of a dial alone does not tell a bootstrap that is down from a link with a wrong port, nor a firewall from a host
that is away. So the port on which bootstraps usually listen is tried for the peer that is sought, and ports that hosts and
firewalls leave open if any: whoever refuses a connection there has been reached, too.
"""

import socket
from collections.abc import Sequence

import trio

from ..config import DEFAULT_PORT
from ..errors import NetworkError
from ..libp2p.tcp import resolve
from ..transport import Address, PeerId
from ..troubles import BLOCKED, DOWN, GONE, MUTE, NOT_NOISE, REFUSED, SILENT, STUCK, WRONG_PORT
from .dialback import Probe

SECOND_LOOK = 2.0
"""Seconds for the other ports to answer: a first packet that is lost is sent again after one."""

OTHER_PORTS = (443, 80)


async def second_look(peer: PeerId, address: Address, cause: str, probe: Probe) -> str:
    """Why a bootstrap did not answer at its address, in words that tell more than `cause`, the failure of the dial."""
    if address.endswith("/p2p-circuit"):
        return cause  # The relay's ports say nothing of the bootstrap.
    start, _, port = address.rpartition("/tcp/")
    if cause.startswith((REFUSED.cause, NOT_NOISE.cause)):
        if port != str(DEFAULT_PORT) and not await probe(peer, f"{start}/tcp/{DEFAULT_PORT}", SECOND_LOOK):
            return WRONG_PORT.with_details(f"it is {port}, the bootstrap listens on {DEFAULT_PORT}").cause
        if cause.startswith(REFUSED.cause):
            return DOWN.with_details(f"connection refused, nothing listens on port {port} of its computer").cause
    if cause.startswith(MUTE.cause):
        return STUCK.with_details(f"port {port} takes connections, and nothing comes over them").cause
    if cause.startswith(SILENT.cause):
        answers = await _knock(start, (int(port), *OTHER_PORTS))
        if answers.get(int(port)):
            return STUCK.with_details(f"port {port} takes connections, and nothing comes over them").cause
        answering = next(iter(answers), None)
        if answering is None:
            return GONE.with_details(f"neither from port {port} nor from others").cause
        return BLOCKED.with_details(f"{port} is silent, though the host answers on port {answering}").cause
    return cause


async def _knock(start: Address, ports: Sequence[int]) -> dict[int, bool]:
    """The ports on which the host at `/ip4/…` or `/dns/…` gives any answer, and whether each takes connections."""
    answers: dict[int, bool] = {}

    async def knock(port: int) -> None:
        try:
            resolved = await resolve(f"{start}/tcp/{port}")
            ip = str(resolved.value_for_protocol(resolved.protocols()[0].code))
            with trio.socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM) as knocking:
                await knocking.connect((ip, port))
            answers[port] = True
        except ConnectionRefusedError:
            answers[port] = False
        except (OSError, NetworkError):
            return

    with trio.move_on_after(SECOND_LOOK):
        async with trio.open_nursery() as nursery:
            for port in ports:
                nursery.start_soon(knock, port)
    return answers
