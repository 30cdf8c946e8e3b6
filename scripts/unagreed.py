"""A member whose run's owner has named data to which nobody here has agreed: it keeps the run, and trains nothing.

It was asked for one source, and its owner has named another one while it trains, or while it was away. To leave would cost
the others its vote and its copy of the state, so it goes on as a keeper does, under the consent that it has for that: whoever
joins also keeps. It trains again as soon as its user agrees (`flockstep agree`, which writes a file that this one looks for),
or the run's data are again some that the user has agreed to.
"""

import threading
from collections.abc import Callable

import trio

from ..dht.run.link import JoinLink
from ..dht.run.manifest import SignedManifest
from ..peer.config import PeerConfig
from ..peer.errors import FlockstepError, sole_error
from ..peer.telemetry import Telemetry
from .keep import KEEPER_RETRY_PERIOD, LOOK_PERIOD, keep_run


def keep_until_agreed(
    link: str,
    config: PeerConfig,
    telemetry: Telemetry,
    allows: Callable[[SignedManifest], bool],
    over: threading.Event,
) -> None:
    """Keep a run until `allows` is true of it as its owner has revised it, or `over` is set."""
    trio.run(_keep, JoinLink.parse(link), config, telemetry, allows, over)


async def _keep(
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    allows: Callable[[SignedManifest], bool],
    over: threading.Event,
) -> None:
    stop = trio.Event()

    async def watch() -> None:
        while True:
            await trio.sleep(LOOK_PERIOD)
            if over.is_set():
                stop.set()
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        while not stop.is_set():
            try:
                await keep_run(link, config, telemetry, stop, is_over=allows)
            except (FlockstepError, BaseExceptionGroup) as raised:
                error = sole_error(raised)
                if not isinstance(error, FlockstepError):
                    raise
                telemetry.emit("keeper.retry", step="keep", reason=str(error))
                with trio.move_on_after(KEEPER_RETRY_PERIOD):
                    await stop.wait()
        nursery.cancel_scope.cancel()
