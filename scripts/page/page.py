"""`flockstep page`: follows a run as a light client, and serves what it sees as a web page.

The page is there before the run is found, and stays while it cannot be reached: it says why.
"""

import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from ...dht.run.link import JoinLink
from ...peer.base.config import PeerConfig
from ...peer.base.errors import NetworkError
from ...peer.base.plain import plain_text
from ...peer.log.telemetry import Telemetry, log_path
from ..watch.watching import WatchThread, show_pictures, watched
from .server import PageServer
from .shown import JsonValue, Page, PictureSplitter

if TYPE_CHECKING:
    from ...collectives.visit.watcher import RunWatcher

RETRY_PERIOD = 10.0
"""Seconds until a run is looked for again after it was not reached."""


def serve_page(
    link_text: str, config: PeerConfig, say: Callable[[str], None], *, place: str, opens: bool = False
) -> None:
    """Serve the page of a run until Ctrl-C, and open it in a browser if wanted.

    Raises `FlockstepError` if the link or the place is wrong, or if the run is not reached at first; later it is retried.
    """
    link = JoinLink.parse(link_text)
    root = unseen("looking for the run", link)
    # A log of its own: the watcher has the one of the home folder.
    with (
        closing(Telemetry(log_path(config.home / "page") if config.home.exists() else None)) as telemetry,
        PageServer(place, telemetry, root=root) as server,
    ):
        say(f"The page of the run is {server.url} until Ctrl-C.")
        if opens:
            webbrowser.open(server.url)
        _follow(link, config, server, say)


def _follow(link: JoinLink, config: PeerConfig, server: PageServer, say: Callable[[str], None]) -> None:
    """Follow a run; after a failure again."""
    last: Page | None = None
    said = ""

    def show(page: Page) -> None:
        nonlocal last
        last = page
        server.publish(page)

    while True:
        try:
            watched(link, config, partial(show_run, show))
        except NetworkError as error:
            if last is None:
                raise
            reason = plain_text(str(error))
            progress = {**last.picture["progress"], "reason": f"the run is not reached: {reason}"}
            server.publish(replace(last, picture={**last.picture, "progress": progress}))
            if reason != said:
                say(f"{reason}; looking again every {RETRY_PERIOD:.0f} s")
            said = reason
        time.sleep(RETRY_PERIOD)


class EarlyPage:
    """A context: the page of a run that is only being made, which a thread fills once there is a link."""

    def __init__(self, place: str, config: PeerConfig) -> None:
        self._config = config
        self._place = place
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # A log of its own: the watcher has the one of the home folder.
            telemetry = stack.enter_context(closing(Telemetry(log_path(self._config.home / "page"))))
            root = unseen("the run is being made; its peers join in a moment")
            self._server = stack.enter_context(PageServer(self._place, telemetry, root=root))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The address to open in a browser on this computer."""
        return self._server.url

    def follow(self, link_text: str) -> None:
        """Show the run of a link from now on. Raises `UsageError`."""
        link = JoinLink.parse(link_text)
        self._server.publish(Page(unseen("looking for the run", link)))
        self._stack.enter_context(WatchThread(link, self._config, partial(show_run, self._server.publish)))


async def show_run(show: Callable[[Page], object], watcher: "RunWatcher") -> None:
    """Show each new picture of a watcher until cancelled. Raises `NetworkError`."""
    from ... import __version__

    splitter = PictureSplitter(__version__)
    await show_pictures(lambda picture: show(splitter.split(picture)), watcher)


def unseen(reason: str, link: JoinLink | None = None) -> JsonValue:
    """Return the picture of a run of which nothing is known, perhaps not even its link."""
    if link is None:
        return {"progress": {"state": "starting", "reason": reason}}
    return {"run": link.run_id, "link": str(link), "progress": {"state": "looking", "reason": reason}}
