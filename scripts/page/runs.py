"""The pages of the runs that a bootstrap serves: a list, and each run as a visitor of its members sees it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from ...collectives.visit.watcher import RunWatcher
from ...dht.directory.interface import Directory
from ...dht.keys import RUN_KEY
from ...dht.rendezvous import find_manifest, open_bootstraps
from ...dht.run.link import MAX_VIA, JoinLink
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import FlockstepError, NetworkError, RemoteError, sole_error
from ...peer.base.transport import Address
from ...peer.identity import Identity
from ...peer.log.telemetry import Telemetry
from ...peer.node.node import Node
from ..watch.voters import who_decides
from .page import RETRY_PERIOD, show_run, unseen
from .server import PageServer
from .shown import JsonValue, Page

MAX_RUNS_SHOWN = 8
"""Runs that are watched at once: anybody may publish one, and each costs a question to its members every two seconds."""
RUNS_PERIOD = 5.0
"""Seconds between two looks at the bootstrap's directory."""
PLACE_SECONDS = 3600.0
"""How long a listed run keeps its place while others wait. It ends, so that who came first does not stay for ever; meanwhile
the viewers of a page keep it, though each renewal of a listing changes the order."""
LISTED = ("run", "name", "model", "params")
LISTED_PROGRESS = ("round", "rounds", "state")


@dataclass(frozen=True, slots=True)
class OfferedRuns:
    """The runs that a bootstrap can show, all of whose manifests it has."""

    named: tuple[str, ...]
    """By its operator: they come first."""
    listed: tuple[str, ...]
    """By their owners, in the order of the bootstrap's list: networks take turns in it."""


class PagePlaces:
    """The places of the page: who has one, and since when."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def taken(self, offer: OfferedRuns, now: float) -> list[str]:
        """Return the runs to show: those named, those whose turn lasts, and others of the list where there is room."""
        lasting = (run for run, since in self._since.items() if run in offer.listed and now < since + PLACE_SECONDS)
        chosen = list(dict.fromkeys([*offer.named, *lasting, *offer.listed]))[:MAX_RUNS_SHOWN]
        begun = {run: self._since.get(run, now) for run in chosen}
        self._since = {run: since if now < since + PLACE_SECONDS else now for run, since in begun.items()}
        return chosen


def run_ids(keys: Iterable[bytes]) -> list[str]:
    """Return the ids of the runs whose manifests are among the keys of a directory's values, each once."""
    return list(dict.fromkeys(match[1].decode() for key in keys if (match := RUN_KEY.fullmatch(key))))


async def serve_runs(
    server: PageServer,
    offer: Callable[[], OfferedRuns],
    via: Sequence[Address],
    config: PeerConfig,
    telemetry: Telemetry,
) -> None:
    """Show `MAX_RUNS_SHOWN` of the runs that are offered, as they come and go, until cancelled."""
    me = Identity.generate()  # Watching is nothing that a bootstrap's own key should do.
    here = tuple(via[:MAX_VIA])
    pictures: dict[str, JsonValue] = {}

    def show(run: str, page: Page) -> None:
        pictures[run] = page.picture
        server.publish(page, run)

    async def watch(run: str, scope: trio.CancelScope, node: Node, directory: Directory) -> None:
        link = JoinLink(run, here)
        with scope:
            while True:
                try:
                    signed = await find_manifest(directory, run)
                    watcher = RunWatcher(node, directory, signed, link, decides=who_decides(signed.manifest))
                    await show_run(partial(show, run), watcher)
                except (NetworkError, RemoteError, BaseExceptionGroup) as error:
                    sole = sole_error(error)
                    if not isinstance(sole, FlockstepError):
                        raise
                    telemetry.emit("directory.failed", step=f"show run {run}", reason=str(sole))
                await trio.sleep(RETRY_PERIOD)

    visitor = JoinLink("", here)
    async with (
        open_bootstraps(me, visitor, config, telemetry) as (host, directory),
        Node(host, me, config, telemetry) as node,
        background() as nursery,
    ):
        scopes: dict[str, trio.CancelScope] = {}
        places = PagePlaces()
        try:
            while True:
                wanted = places.taken(offer(), trio.current_time())
                for run in [run for run in scopes if run not in wanted]:
                    scopes.pop(run).cancel()
                    pictures.pop(run, None)
                    server.forget(run)
                for run in [run for run in wanted if run not in scopes]:
                    scopes[run] = trio.CancelScope()
                    show(run, Page(unseen("looking for its members", JoinLink(run, here))))
                    nursery.start_soon(watch, run, scopes[run], node, directory)
                server.publish(Page({"runs": [run_line(pictures[run]) for run in wanted]}))
                await trio.sleep(RUNS_PERIOD)
        finally:
            for run in scopes:  # After a bug it begins anew, perhaps with others.
                server.forget(run)


def run_line(picture: JsonValue) -> JsonValue:
    """Return what the list shows of a run."""
    return {name: picture[name] for name in LISTED if name in picture} | {
        name: picture["progress"][name] for name in LISTED_PROGRESS if name in picture["progress"]
    }
