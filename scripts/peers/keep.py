"""`flockstep keep`: holds a run's state, checks, votes and serves newcomers on this computer, without training. No torch."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import trio

from ...collectives.spec import charter_of
from ...dht.directory.interface import Directory
from ...dht.members.remembered import Remembered
from ...dht.members.table import LEFT
from ...dht.rendezvous import find_manifest, visit
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...dht.run.statements import OwnerStatements
from ...dht.run.succession import RETRY_SECONDS, SUCCEEDED
from ...optim.keeper.keeper import Keeper
from ...optim.member.reach import lead, reach_run
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import FlockstepError, NetworkError, sole_error
from ...peer.base.home_lock import home_lock
from ...peer.base.plain import SHORT_ID, plain_text
from ...peer.base.transport import Address, Host, PeerId
from ...peer.identity import Identity, identity_path
from ...peer.log.metrics import EventFigures, Figure, Figures, show_in_loop, traffic_figures
from ...peer.log.telemetry import Event, Telemetry, log_path
from ...peer.log.web import split_host_port
from ...peer.node.node import Node
from ..watch.story import KEEPER_DEVICE, RESTORED_START, ROOT_DIGITS, count_of
from ..watch.words import evaluation_words
from .agree import Agreement, Purpose, terminal_reader
from .terminal import ending_signals

KEEPER_LEAVE_SECONDS = 2.5
"""Seconds from SIGTERM, or from the last round's end, to that of the process, goodbyes included."""
KEEPER_STAY_SECONDS = 120.0
"""Seconds that a keeper whose vote may be needed stays after Ctrl-C for one more round; a second one ends it at once."""


def keep(
    link_text: str,
    config: PeerConfig,
    say: Callable[[str], None],
    *,
    via: Sequence[Address] = (),
    as_json: bool = False,
    yes: bool = False,
    metrics: str = "",
) -> None:
    """Keep a run until Ctrl-C, SIGTERM or SIGHUP. Raises `FlockstepError`, or `KeyboardInterrupt` at the end.

    Before the first time its user is asked, if there is a terminal and `yes` is not the answer already. `via` are
    addresses of further bootstraps, `metrics` is the place of a page for Prometheus.
    """
    if metrics:
        split_host_port(metrics)
    link = with_bootstraps(JoinLink.parse(link_text), via)
    reader = None if as_json else terminal_reader()
    agreement = Agreement(config, (lambda line: None) if as_json else say, reader, yes, Purpose.KEEP)
    with closing(Telemetry(log_path(config.home))) as telemetry:
        with home_lock(config.home, pid=os.getpid()):  # In use by another one: nobody is asked in vain.
            signed = _manifest_of(link, config, telemetry)
            link = link if signed.run_id == link.run_id else replace(link, run_id=signed.run_id, at=None)
            me = Identity.load_or_create(identity_path(config.home)).peer_id
            if signed.manifest.owner != me:
                telemetry.emit("run.agreed", step="keep", reason=agreement.agree(signed))
        if not as_json and (missing := voteless(signed, link, me, config, telemetry)):
            say(missing)
        telemetry.subscribe(KeepingLines(say, as_json=as_json).show)
        try:
            trio.run(_keep_until_signal, link, config, telemetry, metrics)
        except (FlockstepError, BaseExceptionGroup) as error:
            raise sole_error(error) from None
    raise KeyboardInterrupt


def with_bootstraps(link: JoinLink, via: Sequence[Address]) -> JoinLink:
    """Return a link with further bootstraps. Raises `UsageError` for what is no address of one."""
    return JoinLink.parse(str(replace(link, via=tuple(dict.fromkeys((*link.via, *via))))))


async def keep_run(
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    stop: trio.Event,
    patience: Callable[[], float] = lambda: 0.0,
    metrics: str = "",
) -> None:
    """Keep a run until `stop` is set or it goes on as another one, then leave it in order. Raises `FlockstepError`.

    `patience` returns the seconds to stay at most for a round in which my vote may be needed; `metrics` is the place of a
    page for Prometheus.
    """
    with home_lock(config.home, pid=os.getpid()):
        async with reach_run(link, config, telemetry) as reached, background() as nursery:
            keeper = Keeper(reached, config, version("flockstep"))
            telemetry.emit("peer.start", peer=reached.node.peer_id, device=KEEPER_DEVICE, version=version("flockstep"))
            nursery.start_soon(keeper.run)
            if metrics:
                await nursery.start(show_in_loop, metrics, keeper_figures(reached.host, telemetry), telemetry)
            await first_of(stop, keeper.succeeded)
            reason = "left" if stop.is_set() else SUCCEEDED
            await keeper.leave(reason, patience() if stop.is_set() else 0.0)
            telemetry.emit("peer.leave", reason=reason)


async def first_of(*events: trio.Event) -> None:
    """Wait until one of these is set."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)


def keeper_figures(host: Host, telemetry: Telemetry) -> Figures:
    """Return what reads the figures of a keeper from now on."""
    seen = EventFigures()
    telemetry.subscribe(seen.take)

    def read() -> Iterator[Figure]:
        yield from seen.figures()
        yield from traffic_figures(host.traffic())

    return read


async def _keep_until_signal(link: JoinLink, config: PeerConfig, telemetry: Telemetry, metrics: str) -> None:
    stop, patience = trio.Event(), KEEPER_STAY_SECONDS
    with trio.CancelScope() as scope:
        async with background() as nursery:

            async def leave_on_signal(*, task_status: Any) -> None:
                nonlocal patience
                with trio.open_signal_receiver(*ending_signals()) as signals:
                    task_status.started()
                    async for number in signals:
                        if stop.is_set():
                            scope.cancel()
                        patience = KEEPER_STAY_SECONDS if number == signal.SIGINT else 0.0
                        stop.set()
                        scope.deadline = trio.current_time() + patience + KEEPER_LEAVE_SECONDS

            await nursery.start(leave_on_signal)
            has_kept = False
            while not stop.is_set():  # A run that goes on as another one is reached by the same link.
                try:
                    await keep_run(link, config, telemetry, stop, lambda: patience, metrics)
                    has_kept = True
                except (NetworkError, BaseExceptionGroup) as raised:
                    if not has_kept or not isinstance(error := sole_error(raised), NetworkError):
                        raise
                    telemetry.emit("succession.retry", step="reach the run that goes on", reason=str(error))
                    await trio.sleep(RETRY_SECONDS)


def _manifest_of(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> SignedManifest:
    """Read the manifest from my disk, or find that of the run that it goes on as by now. Raises `FlockstepError`."""
    kept = Remembered(config.home / "runs" / link.run_id, link.run_id, telemetry).manifest()

    async def find(node: Node, directory: Directory) -> SignedManifest:
        return await find_manifest(directory, await lead(directory, config.home, link.run_id, telemetry))

    return kept or visit(link, config, telemetry, find)


def voteless(signed: SignedManifest, link: JoinLink, me: PeerId, config: PeerConfig, telemetry: Telemetry) -> str:
    """Return how a keeper comes by a vote, in a line; empty if it has one as far as its disk knows, or can have none."""
    remembered = Remembered(config.home / "runs" / link.run_id, link.run_id, telemetry)
    stated = remembered.statements(OwnerStatements(link.run_id, signed.manifest.owner))
    charter = charter_of(signed).amended(stated)
    if charter.keepers is None or me in charter.keepers | charter.vouched:
        return ""
    return f"has no vote yet; the run's owner gives it one: flockstep run vouch '{link}' {me}"


class KeepingLines:
    """What a keeper's user reads: each event as JSON, or in words; of the votes only what has changed."""

    def __init__(self, say: Callable[[str], None], *, as_json: bool) -> None:
        self._say = say
        self._as_json = as_json
        self._votes: tuple[object, ...] = ()

    def show(self, event: Event) -> None:
        """Show an event."""
        if self._as_json:
            self._say(json.dumps(event))
            return
        if event.get("event") == "run.votes":
            before, self._votes = self._votes, tuple(event.get(name) for name in ("peers", "votes", "total", "reason"))
            if before == self._votes:
                return
        if line := describe_keeping(event):
            self._say(plain_text(line))


def describe_keeping(event: Event) -> str:
    """Return the text of a keeper's event for a person; empty for events that only programs read."""
    match event.get("event"):
        case "peer.start":
            return f"keeps the run as {event.get('peer')}; Ctrl-C ends it"
        case "state.synced":
            source = str(event.get("peer") or "")[-SHORT_ID:]
            return f"holds the state of round {event.get('round')}" + (f", from {source}" if source else "")
        case "state.restored" if event.get("round") == 0:
            return RESTORED_START
        case "state.restored":
            return f"continues from round {event.get('round')}, restored from this computer's disk"
        case "state.awaited":
            return f"{event.get('reason')}: waiting for one; of a new run the first peer that trains makes it"
        case "layout.unpinned" | "checkpoint.unwritten" | "checkpoint.damaged" | "promise.unwritten":
            return f"{event.get('reason')}"
        case "round.done":
            root = str(event.get("root"))[:ROOT_DIGITS]
            cut = event.get("cut")
            return f"round {event.get('round')}: the work of {count_of(cut, 'peer')}, root {root}"
        case "round.void" | "round.missed" | "round.behind":
            return f"round {event.get('round')}: {event.get('reason')}"
        case "round.awaited":
            return f"round {event.get('round')} cannot be tried: {event.get('reason')}"
        case "run.votes":
            votes = f"{event.get('votes')} of {event.get('total')} votes, {event.get('quorum')} needed"
            members = "1 member is" if event.get("peers") == 1 else f"{event.get('peers')} members are"
            return f"after round {event.get('round')}: {members} here, {votes}; {event.get('reason')}"
        case "eval.result":
            return evaluation_words(event.get("round"), event.get("loss"), event.get("by"))
        case "run.finished":
            return "the run is finished; this keeper goes on serving its last state, Ctrl-C ends it"
        case "run.ended":
            return f"stays at round {event.get('round')}: {event.get('reason')}"
        case "run.led":
            return f"{event.get('reason')}, after round {event.get('round')}"
        case "succession.refused" | "succession.late" | "succession.retry" | "state.not_handed_over":
            return f"{event.get('reason')}"
        case "run.revised":
            return f"from round {event.get('round')} on, as the run's owner has revised it: {event.get('reason')}"
        case "peer.stays":
            return f"stays for round {event.get('round')}: {event.get('reason')}"
        case "peer.lost" | "peer.charged" | "member.refused":
            what = " left" if event.get("reason") == LEFT else f": {event.get('reason')}"
            return f"{str(event.get('peer'))[-SHORT_ID:]}{what}"
    return ""
