"""UPnP: asking the home's router for a port that strangers can dial, until this peer leaves.

Theory of operation. Nobody is asked before a bootstrap has failed to get through to me from where it sees me, and that
address is another one than my own. Then the router, if one answers, is asked to pass a port of its own on to mine: the
same number if it is free, else the next one. It promises that for `LEASE` seconds, so that nothing stays open after a
peer that was killed, and is asked again at half of them. A promise is no proof (there may be a second router behind the
first): the port goes into my addresses only after a bootstrap has dialled it, as any other (`libp2p_bootstraps`).

UPnP IGD v1 and v2 by miniupnpc, which py-libp2p brings along; its calls block, so that each runs in a thread.
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
"""Seconds. A router that was restarted, and has forgotten, is asked again within half of it."""

PERMANENT = 0
"""The lease that routers of IGD v1 insist on (error 725); such a port is closed on leaving alone."""

RETRY = 600.0
"""Seconds between attempts where the router refuses or none answers: somebody may switch UPnP on."""

ANSWER_MS = 2000
"""How long routers may take to answer the search; IGD v2 has them answer within 2 s (UPnP Device Architecture, 1.3.2)."""

NUM_PORTS = 8
"""Outside ports that are tried: one for each computer of a home that lends several."""

DESCRIPTION = "flockstep"
"""What the router's own page shows."""


class PortMapping:
    """One peer's port on its router. `opened(port)` is called when it is open, with 0 when it is not any more."""

    def __init__(self, telemetry: Telemetry, opened: Callable[[int], None]) -> None:
        self._telemetry = telemetry
        self._opened = opened
        self._wanted = trio.Event()
        self._seen = ""
        self._gateway: Any = None
        self._outside = 0
        self._outcome = ""

    def want(self, address: Address) -> None:
        """Strangers do not reach me at the address where they see me."""
        ip = address.split("/")[2]
        if ip != self._seen:  # Once for each network that I am in: what has failed there fails again.
            self._seen = ip
            self._wanted.set()

    async def keep(self, port: int) -> None:
        """Have a port outside lead to `port` here as soon as one is wanted, until cancelled."""
        await self._wanted.wait()
        while True:
            self._wanted = trio.Event()
            try:
                found = await _in_thread(_open, port, self._outside)
            except Exception as error:  # noqa: BLE001  A router's answer may be anything, to the library, too.
                self._gateway, outside, outcome, pause = None, 0, str(error) or repr(error), RETRY
            else:
                (self._gateway, outside), outcome, pause = found, "", LEASE / 2
            self._tell(outside, outcome)
            with trio.move_on_after(pause):
                await self._wanted.wait()

    async def close(self) -> None:
        """Give the port back."""
        gateway, port, self._gateway = self._gateway, self._outside, None
        if gateway is None:
            return
        try:
            await _in_thread(gateway.deleteportmapping, port, "TCP")
        except Exception as error:  # noqa: BLE001  The library raises nothing more particular.
            self._telemetry.emit("upnp.failed", step="close", reason=str(error), port=port)
        else:
            self._telemetry.emit("upnp.closed", step="close", port=port)

    def _tell(self, outside: int, outcome: str) -> None:
        if outcome and outcome != self._outcome:
            self._telemetry.emit("upnp.failed", step="open", reason=outcome)
        if outside and outside != self._outside:
            self._telemetry.emit("upnp.opened", step="open", port=outside)
        changed, self._outside, self._outcome = outside != self._outside, outside, outcome
        if changed:
            self._opened(outside)


async def find_router() -> IPv4Address:
    """The outside IP of the router that answers, 0.0.0.0 where it has none; opens no port. Raises `NetworkError`."""
    gateway = await _in_thread(_find)
    try:
        return IPv4Address(await _in_thread(gateway.externalipaddress) or 0)
    except Exception as error:  # As in `keep`.
        raise NetworkError(f"the router answers, and tells no address: {error!r}") from error


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Leaving does not wait for a router: the thread then ends behind our back."""
    # The type stubs that py-libp2p brings are those of an older trio.
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)  # type: ignore[call-arg]


def _find() -> Any:
    """The router. Raises `NetworkError`. Blocks for seconds."""
    gateway = miniupnpc.UPnP()
    gateway.discoverdelay = ANSWER_MS
    with suppress(Exception):  # It also raises where it has found nothing, and some systems make it raise "Success".
        gateway.discover()
    try:
        gateway.selectigd()
    except Exception as error:
        raise NetworkError("no router that speaks UPnP answers in this network") from error
    return gateway


def _open(port: int, held: int) -> tuple[Any, int]:
    """The router and its port that now leads to mine, `held` if possible. Raises `NetworkError`. Blocks for seconds."""
    gateway = _find()
    refusal = ""
    for outside in dict.fromkeys(filter(None, (held, *range(port, min(port + NUM_PORTS, 65536))))):
        # Routers differ in whether they refuse a port that somebody has, or take it away.
        taken = gateway.getspecificportmapping(outside, "TCP")
        if taken is not None and tuple(taken[:2]) != (gateway.lanaddr, port):
            refusal = f"port {outside} leads to {taken[0]}"
            continue
        for lease in (LEASE, PERMANENT):
            try:
                gateway.addportmapping(outside, "TCP", gateway.lanaddr, port, DESCRIPTION, "", lease)
            except Exception as error:  # noqa: BLE001  The library raises nothing more particular.
                refusal = str(error)
            else:
                return gateway, outside
    raise NetworkError(f"the router opens no port: {refusal}")
