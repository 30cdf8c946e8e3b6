"""Turns for costly work: those of one address or network wait for each other, others not for them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import trio

from .origins import Origin


class Turns:
    """Lets so many of all work at a time, fewer of one network and of one address; further ones wait.

    A queue of all alone would be that of the one who asks most. Here each network has `per_network` in it at most.
    """

    def __init__(self, in_all: int, per_address: int, per_network: int) -> None:
        self._in_all = trio.CapacityLimiter(in_all)
        self._per_address = per_address
        self._per_network = per_network
        self._limiters: WeakValueDictionary[str, trio.CapacityLimiter] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, origin: Origin) -> AsyncIterator[None]:
        """Wait for a turn, and hold it."""
        of_address = self._limiter(f"address {origin.address}", self._per_address)
        of_network = self._limiter(f"network {origin.network}", self._per_network)
        async with of_address, of_network, self._in_all:
            yield

    def _limiter(self, name: str, most: int) -> trio.CapacityLimiter:
        return self._limiters.setdefault(name, trio.CapacityLimiter(most))
