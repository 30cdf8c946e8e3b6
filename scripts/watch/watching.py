"""Looking at a run from outside: what `status`, `page` and `run info` have in common."""

import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TYPE_CHECKING, Self, TypeVar

import trio

from ...collectives.picture.picture import Picture
from ...dht.directory.interface import Directory
from ...dht.run.link import JoinLink
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import FlockstepError
from ...peer.identity import Identity
from ...peer.log.telemetry import Telemetry, log_path
from ...peer.node.node import Node
from .voters import who_decides

if TYPE_CHECKING:
    from ...collectives.visit.watcher import RunWatcher

_T = TypeVar("_T")

SHOW_PERIOD = 1.0
"""Seconds between two pictures at least; each takes 3 ms for 64 peers."""
STILL_PERIOD = 10.0
"""Seconds between two pictures of a run in which nothing happens: members' records age."""
END_SECONDS = 5.0
"""The longest wait for a thread to close its connections."""


def watched(
    link: JoinLink, config: PeerConfig, errand: Callable[["RunWatcher"], Awaitable[_T]], identity: Identity | None = None
) -> _T:
    """Run an errand with a watcher of a link's run, under an identity of its own or this one. Raises `FlockstepError`."""
    from ...collectives.light.own_ledger import OwnLedger
    from ...collectives.spec import charter_of
    from ...collectives.visit.watcher import RunWatcher
    from ...dht.rendezvous import find_manifest, visit

    async def watch(node: Node, directory: Directory) -> _T:
        signed = await find_manifest(directory, link.run_id)
        charter, folder = charter_of(signed), config.home / "runs" / link.run_id
        own = None if charter.kind == "open" else OwnLedger.of(folder, charter, telemetry)
        return await errand(RunWatcher(node, directory, signed, link, decides=who_decides(signed.manifest), own=own))

    with closing(Telemetry(log_path(config.home) if config.home.exists() else None)) as telemetry:
        return visit(link, config, telemetry, watch, identity)


def picture_of(link: JoinLink, config: PeerConfig) -> Picture:
    """Look at a link's run once. Raises `FlockstepError`."""

    async def look(watcher: "RunWatcher") -> Picture:
        await watcher.look()
        return watcher.picture()

    return watched(link, config, look)


async def show_pictures(show: Callable[[Picture], object], watcher: "RunWatcher") -> None:
    """Show each new picture of a watcher until cancelled. Raises `NetworkError`."""
    seen, at = -1, 0.0
    async with background() as nursery:
        nursery.start_soon(watcher.run)
        while True:
            now = trio.current_time()
            if watcher.revision != seen or now >= at + STILL_PERIOD:
                seen, at = watcher.revision, now
                if seen:  # Before the first look there is nothing to show.
                    show(watcher.picture())
            await trio.sleep(SHOW_PERIOD)


class WatchThread:
    """A context in which a thread follows a run by an errand, beside the work of the caller."""

    def __init__(self, link: JoinLink, config: PeerConfig, errand: Callable[["RunWatcher"], Awaitable[object]]) -> None:
        self._link, self._config, self._errand = link, config, errand
        self._thread = threading.Thread(target=self._run, name="watch a run", daemon=True)
        self._stopped = threading.Event()
        self._end: Callable[[], object] = lambda: None
        self.error: FlockstepError | None = None
        """Why it follows no longer; None while it does."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._end()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            watched(self._link, self._config, self._until_ended)
        except FlockstepError as error:
            self.error = error

    async def _until_ended(self, watcher: "RunWatcher") -> None:
        token, scope = trio.lowlevel.current_trio_token(), trio.CancelScope()
        self._end = lambda: token.run_sync_soon(scope.cancel)
        if self._stopped.is_set():  # Before there was anything to end.
            return
        with scope:
            await self._errand(watcher)
