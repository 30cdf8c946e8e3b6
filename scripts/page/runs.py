"""The pages of the runs that a bootstrap serves: a list, and each run as a visitor of its members sees it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio

from ...collectives.watcher import RunWatcher
from ...dht.directory.interface import Directory
from ...dht.keys import run_key
from ...dht.rendezvous import find_manifest, open_bootstraps
from ...dht.run.link import MAX_VIA, JoinLink
from ...peer.background import background
from ...peer.config import PeerConfig
from ...peer.errors import FlockstepError, NetworkError, RemoteError, sole_error
from ...peer.identity import Identity
from ...peer.node.node import Node
from ...peer.telemetry import Telemetry
from ...peer.transport import Address
from ..voters import who_decides
from .delta import JsonValue
from .page import RETRY_PERIOD, show_run, unseen
from .server import PageServer

MAX_RUNS_SHOWN = 8
"""Runs that are watched at once: anybody may publish one, and each costs a question to its members every two seconds."""
RUNS_PERIOD = 5.0
"""Seconds between two looks at the bootstrap's directory."""
LISTED = ("run", "name", "model")
LISTED_PROGRESS = ("round", "rounds", "state")


def run_ids(keys: Iterable[bytes]) -> list[str]:
    """Return the ids of the runs whose manifests are among the keys of a directory, each once."""
    prefix = run_key("").encode()
    found = (key.removeprefix(prefix).decode() for key in keys if key.startswith(prefix))
    return list(dict.fromkeys(run for run in found if "/" not in run))


async def serve_runs(
    server: PageServer,
    runs: Callable[[], Sequence[str]],
    via: Sequence[Address],
    config: PeerConfig,
    telemetry: Telemetry,
) -> None:
    """Show the first `MAX_RUNS_SHOWN` of the runs, as they come and go, until cancelled."""
    me = Identity.generate()  # Watching is nothing that a bootstrap's own key should do.
    here = tuple(via[:MAX_VIA])
    pictures: dict[str, JsonValue] = {}

    def show(run: str, picture: JsonValue) -> None:
        pictures[run] = picture
        server.publish(picture, run)

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
        while True:
            wanted = list(runs())[:MAX_RUNS_SHOWN]
            for run in [run for run in scopes if run not in wanted]:
                scopes.pop(run).cancel()
                pictures.pop(run, None)
                server.forget(run)
            for run in [run for run in wanted if run not in scopes]:
                scopes[run] = trio.CancelScope()
                show(run, unseen(JoinLink(run, here), "looking for its members"))
                nursery.start_soon(watch, run, scopes[run], node, directory)
            server.publish({"runs": [run_line(pictures[run]) for run in wanted]})
            await trio.sleep(RUNS_PERIOD)


def run_line(picture: JsonValue) -> JsonValue:
    """Return what the list shows of a run."""
    return {name: picture[name] for name in LISTED if name in picture} | {
        name: picture["progress"][name] for name in LISTED_PROGRESS if name in picture["progress"]
    }
