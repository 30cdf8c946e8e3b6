"""UPnP port mapping: asks the home's router for a port that strangers can dial.

Theory of operation. No router is asked before a bootstrap's dialback to my observed address has failed, and that
address is not my own. Then the router, if one answers, is asked to map a port of its own to mine: the same number if it
is free, else the next one. The mapping is a lease of `LEASE` seconds, so that no port stays open after a killed peer,
and is renewed at half of it. A mapping is no proof (there may be a second NAT behind the first): the port enters my
addresses only after a bootstrap's dialback, like any other (`bootstraps`).

UPnP IGD v1 and v2 are miniupnpc's, which py-libp2p depends on; its calls block, so each one runs in a thread.
"""

from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Any

import miniupnpc
import trio

from ..errors import NetworkError
from ..telemetry import Telemetry
from ..transport import Address

LEASE = 1800
"""Seconds. A router that lost the mapping in a restart is asked again within half of it."""

PERMANENT = 0
"""The lease that routers of IGD v1 insist on (error 725); such a port is closed only when this peer leaves."""

RETRY = 600.0
"""Seconds between retries if the router refuses or none answers: somebody may enable UPnP."""

ANSWER_MS = 2000
"""The timeout of the search in ms; IGD v2 lets routers answer within 2 s (UPnP Device Architecture, 1.3.2)."""

NUM_MAPPED_PORTS = 8
"""Outside ports that are tried: one for each computer of a home that runs several peers."""

MAPPING_DESCRIPTION = "flockstep"
"""The description that the router's own page shows."""


class PortMapping:
    """One peer's mapped port. `opened(port)` is called when it is open, and with 0 when it is not any more."""

    def __init__(self, telemetry: Telemetry, opened: Callable[[int], None]) -> None:
        self._telemetry = telemetry
        self._opened = opened
        self._wanted = trio.Event()
        self._seen = ""
        self._gateway: Any = None
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
                found = await _in_thread(_open, port, self._outside)
            except Exception as error:  # noqa: BLE001  A router's answer may be anything, to the library, too.
                self._gateway, outside, outcome, pause = None, 0, str(error) or repr(error), RETRY
            else:
                (self._gateway, outside), outcome, pause = found, "", LEASE / 2
            self._report(outside, outcome)
            with trio.move_on_after(pause):
                await self._wanted.wait()

    async def close(self) -> None:
        """Delete the mapping."""
        gateway, port, self._gateway = self._gateway, self._outside, None
        if gateway is None:
            return
        try:
            await _in_thread(gateway.deleteportmapping, port, "TCP")
        except Exception as error:  # noqa: BLE001  The library raises nothing more particular.
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


async def find_router() -> IPv4Address:
    """Return the outside IP of the router that answers, 0.0.0.0 if it has none; opens no port. Raises `NetworkError`."""
    gateway = await _in_thread(_find)
    try:
        return IPv4Address(await _in_thread(gateway.externalipaddress) or 0)
    except Exception as error:  # As in `keep`.
        raise NetworkError(f"the router answers, but gives no outside address: {error!r}") from error


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking call in a thread, abandoned on cancellation: leaving does not wait for a router."""
    # The type stubs that py-libp2p brings are those of an older trio.
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)  # type: ignore[call-arg]


def _find() -> Any:
    """Find the router. Raises `NetworkError`. Blocks for seconds."""
    gateway = miniupnpc.UPnP()
    gateway.discoverdelay = ANSWER_MS
    with suppress(Exception):  # It also raises if it finds nothing, and on some systems it raises "Success".
        gateway.discover()
    try:
        gateway.selectigd()
    except Exception as error:
        raise NetworkError("no router that speaks UPnP answers in this network") from error
    return gateway


def _open(port: int, held: int) -> tuple[Any, int]:
    """Map a port; returns the router and its port, `held` if possible. Raises `NetworkError`. Blocks for seconds."""
    gateway = _find()
    refusal = ""
    for outside in dict.fromkeys(filter(None, (held, *range(port, min(port + NUM_MAPPED_PORTS, 65536))))):
        # Some routers refuse a port that another computer holds, others take it away from it.
        taken = gateway.getspecificportmapping(outside, "TCP")
        if taken is not None and tuple(taken[:2]) != (gateway.lanaddr, port):
            refusal = f"port {outside} leads to {taken[0]}"
            continue
        for lease in (LEASE, PERMANENT):
            try:
                gateway.addportmapping(outside, "TCP", gateway.lanaddr, port, MAPPING_DESCRIPTION, "", lease)
            except Exception as error:  # noqa: BLE001  The library raises nothing more particular.
                refusal = str(error)
            else:
                return gateway, outside
    raise NetworkError(f"the router opens no port: {refusal}")
