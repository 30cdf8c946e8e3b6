"""Happy eyeballs over the rungs of a peer's addresses: staggered dials, best rung first.

Theory of operation. Only a timeout shows that an address does not answer. A record's addresses in a local network fail
for most of its readers, as IPv6 does for those without it. So a dial does not wait for the failure of the one before
it, but starts `STAGGER` after it, or at once if that has failed ("happy eyeballs", RFC 8305). The first connection
settles the climb. Dials on better rungs go on in the background until they succeed or fail, and their connection takes
over (`nat.upgrade`); those on the same rung or a worse one are cancelled. On a rung a WebSocket is worse than the others.
Every failed dial is an event with its rung and cause.
"""

from collections.abc import Awaitable, Callable, Sequence

import trio

from ..address import by_turns, is_web, rung_of, valid_address
from ..base.errors import DialAttempt
from ..base.transport import Address, PeerId, Rung
from ..log.telemetry import Telemetry

STAGGER = 0.25
"""The delay between dials in seconds; RFC 8305, section 5, recommends 250 ms."""

MAX_CLIMBED_ADDRESSES = 16
"""As many as a member record holds."""

_ORDER = list(Rung)

Dial = Callable[[PeerId, Address, Rung], Awaitable[str]]
"""Dials one address; returns why that failed, or ""."""


class Climb:
    """One climb. `run` it in the host's nursery; `settled` is set once a connection is open, or all dials have failed."""

    def __init__(self, peer: PeerId, addresses: Sequence[Address], dial: Dial, telemetry: Telemetry) -> None:
        self.settled = trio.Event()
        self.scope = trio.CancelScope()
        self._peer = peer
        self._dial = dial
        self._telemetry = telemetry
        valid = [address for address in dict.fromkeys(addresses) if valid_address(address)]
        by_rank = [[address for address in valid if _rank(address) == rank] for rank in sorted(set(map(_rank, valid)))]
        self._steps = [address for found in by_rank for address in by_turns(found)][:MAX_CLIMBED_ADDRESSES]
        self._scopes = [trio.CancelScope() for _ in self._steps]
        self._reached: Address | None = None
        self._failures: dict[Address, DialAttempt] = {
            address: DialAttempt(address, "none", "not an address that can be dialled")
            for address in addresses
            if not valid_address(address)
        }
        self._addresses = tuple(addresses)

    @property
    def attempts(self) -> list[DialAttempt]:
        """The failed dials so far, in the order of the given addresses."""
        return [self._failures[address] for address in self._addresses if address in self._failures]

    async def run(self) -> None:
        """Climb until every dial has ended."""
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    for number, address in enumerate(self._steps):
                        if not self._is_better(address):
                            break
                        ended = trio.Event()
                        nursery.start_soon(self._try, number, ended)
                        with trio.move_on_after(STAGGER):
                            await ended.wait()
        finally:
            self.settled.set()

    async def _try(self, number: int, ended: trio.Event) -> None:
        address = self._steps[number]
        rung = rung_of(address)
        with self._scopes[number]:
            cause = await self._dial(self._peer, address, rung)
            if cause:
                self._failures[address] = DialAttempt(address, rung, cause)
                reason = f"{address}: {cause}"
                self._telemetry.emit("dial.failed", peer=self._peer, step=rung, reason=reason)
            elif self._is_better(address):
                self._reached = address
                self._end_others(number)
                self.settled.set()
        ended.set()

    def _is_better(self, address: Address) -> bool:
        return self._reached is None or _rank(address) < _rank(self._reached)

    def _end_others(self, number: int) -> None:
        for other, address in enumerate(self._steps):
            if other != number and not self._is_better(address):
                self._scopes[other].cancel()


def _rank(address: Address) -> tuple[int, bool]:
    """Return the place of an address in the order of dials: its rung, and on a rung WebSockets last."""
    return _ORDER.index(rung_of(address)), is_web(address)
