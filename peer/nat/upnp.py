"""UPnP port mapping: asks the home's router for a port that strangers can dial.

Theory of operation. No router is asked before a bootstrap's dialback to my observed address has failed, and that
address is not my own. Then the router, if one answers, is asked to map a port of its own to mine: the same number if it
is free, else the next one. The mapping is a lease of `LEASE` seconds, so that no port stays open after a killed peer,
and is renewed at half of it. A mapping is no proof (there may be a second NAT behind the first): the port enters my
addresses only after a bootstrap's dialback, like any other (`bootstraps`).

What routers are asked, and how little of their answers is believed: `gateway`.
"""

from collections.abc import Callable
from ipaddress import IPv4Address

import trio

from ..base.errors import NetworkError
from ..base.plain import shortened
from ..base.transport import Address
from ..log.telemetry import Telemetry
from .gateway import GROUP, MAX_TEXT, Gateway, find_gateway

LEASE = 1800
"""Seconds. A router that lost the mapping in a restart is asked again within half of it."""

PERMANENT = 0
"""The lease that routers of IGD v1 insist on (error 725); such a port is closed only when this peer leaves."""

RETRY = 600.0
"""Seconds between retries if the router refuses or none answers: somebody may enable UPnP."""

NUM_MAPPED_PORTS = 8
"""Outside ports that are tried: one for each computer of a home that runs several peers."""

MAPPING_DESCRIPTION = "flockstep"
"""The description that the router's own page shows."""


class PortMapping:
    """One peer's mapped port. `opened(port)` is called when it is open, and with 0 when it is not any more."""

    def __init__(self, telemetry: Telemetry, opened: Callable[[int], None], group: tuple[str, int] = GROUP) -> None:
        self._telemetry = telemetry
        self._opened = opened
        self._group = group
        self._wanted = trio.Event()
        self._seen = ""
        self._gateway: Gateway | None = None
        self._outside = 0
        self._outcome = ""

    def want(self, address: Address) -> None:
        """Request a mapping, since strangers do not reach me at this observed address."""
        ip = address.split("/")[2]
        if ip != self._seen:  # Once per network: what has failed there fails again.
            self._seen = ip
            self._wanted.set()

    async def keep(self, port: int) -> None:
        """Map an outside port to `port` once requested, and renew it, until cancelled."""
        await self._wanted.wait()
        while True:
            self._wanted = trio.Event()
            try:
                gateway = await find_gateway(self._group)
                outside = await _open(gateway, port, self._outside)
            except NetworkError as error:
                self._gateway, outside, outcome, pause = None, 0, str(error), RETRY
            else:
                self._gateway, outcome, pause = gateway, "", LEASE / 2
            self._report(outside, outcome)
            with trio.move_on_after(pause):
                await self._wanted.wait()

    async def close(self) -> None:
        """Delete the mapping."""
        gateway, port, self._gateway = self._gateway, self._outside, None
        if gateway is None:
            return
        try:
            await gateway.unmap(port)
        except NetworkError as error:
            self._telemetry.emit("upnp.failed", step="close", reason=str(error), port=port)
        else:
            self._telemetry.emit("upnp.closed", step="close", port=port)

    def _report(self, outside: int, outcome: str) -> None:
        if outcome and outcome != self._outcome:
            self._telemetry.emit("upnp.failed", step="open", reason=outcome)
        if outside and outside != self._outside:
            self._telemetry.emit("upnp.opened", step="open", port=outside)
        changed, self._outside, self._outcome = outside != self._outside, outside, outcome
        if changed:
            self._opened(outside)


async def find_router(group: tuple[str, int] = GROUP) -> IPv4Address:
    """Return the outside IP of the router that answers, 0.0.0.0 if it has none; opens no port. Raises `NetworkError`."""
    gateway = await find_gateway(group)
    try:
        return IPv4Address(await gateway.outside_ip() or 0)
    except (NetworkError, ValueError) as error:
        raise NetworkError(f"the router answers, but gives no outside address: {error}") from error


async def _open(gateway: Gateway, port: int, held: int) -> int:
    """Map a port of the router, `held` if possible, and return it. Raises `NetworkError`."""
    refusal = ""
    ports: list[int] = [held] * bool(held) + list(range(port, min(port + NUM_MAPPED_PORTS, 65536)))
    for outside in dict.fromkeys(ports):
        # Some routers refuse a port that another computer holds, others take it away from it.
        taken = await gateway.mapped(outside)
        if taken is not None and taken != (gateway.here, str(port)):
            refusal = f"port {outside} leads to {shortened(taken[0], MAX_TEXT)}"
            continue
        for lease in (LEASE, PERMANENT):
            try:
                await gateway.map(outside, port, MAPPING_DESCRIPTION, lease)
            except NetworkError as error:
                refusal = str(error)
            else:
                return outside
    raise NetworkError(f"the router opens no port: {refusal}")
