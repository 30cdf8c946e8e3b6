"""Coroutines in real time, over real sockets."""

from collections.abc import Awaitable, Callable

import trio

HANG_SECONDS = 120.0
"""Only bounds how long a broken build hangs."""


def over_sockets(test: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine, for two minutes at most."""

    async def guarded() -> None:
        with trio.fail_after(HANG_SECONDS):
            await test()

    trio.run(guarded)
