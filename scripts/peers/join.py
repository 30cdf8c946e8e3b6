"""`flockstep join`: trains with a run on this computer, and reports its progress.

All output comes from the events in the home folder's log. Ctrl-C once leaves the run in order, a second time leaves it
at once. A peer trains in shifts: outside of what its user allows (`volunteer.availability`) it has left, and waits.
"""

import contextlib
import gc
import json
import os
import shlex
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...dht.members.table import LEFT
from ...dht.run.link import JoinLink
from ...dht.run.succession import ENDED, RETRY_SECONDS, SUCCEEDED
from ...peer.base.config import PeerConfig
from ...peer.base.errors import FlockstepError, LocalError, NetworkError, UsageError
from ...peer.base.loading import uncollected
from ...peer.base.plain import SHORT_ID
from ...peer.log.metrics import EventFigures, shown_metrics
from ...peer.log.telemetry import Event, Telemetry, log_path
from ...peer.log.web import split_host_port
from ..volunteer.availability import Availability, Shift, await_shift, shift
from ..volunteer.control import training_here
from ..volunteer.gpu import gpu_of
from ..volunteer.hours import Hours
from ..volunteer.policy import Policy
from ..watch.console import PlainConsole
from ..watch.live_view import megabytes
from ..watch.story import RESTORED_START, ROOT_DIGITS, PeerStory, count_of
from ..watch.words import evaluation_words, short_number, span
from .agree import Agreement, terminal_reader
from .terminal import ending_signals

if TYPE_CHECKING:
    from ...optim.train.trainer import Summary

LOG_PERIOD = 60.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of `flockstep join` beside a peer's settings."""

    save: Path | None = None
    """Where to write the model each time that this peer leaves."""

    as_json: bool = False
    """Print events as JSON lines."""

    yes: bool = False
    """Do not ask before the first join of a run."""

    hours: Hours | None = None
    """The hours of the day in which this peer trains; None: all."""

    when_idle: bool = False
    """Train only while other programs leave most of the processors alone."""

    max_temp: float = 0.0
    """Rest while the GPU is hotter, in degrees Celsius; 0: however hot."""

    max_watts: float = 0.0
    """Rest so that the GPU draws no more on average, in watts; 0: whatever it draws."""

    metrics: str = ""
    """HOST:PORT of a page for Prometheus; empty for none."""


def join(link: str, config: PeerConfig, say: Callable[[str], None], options: TrainingOptions) -> None:
    """Train with the others until the run ends or the user leaves. Raises `FlockstepError`, or `KeyboardInterrupt`.

    Before the first join of a run its user is asked, if there is a terminal and `yes` is not the answer already.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    if not speaks:  # Of the processes of one peer (torchrun) only the first reports.
        say = _nowhere
    JoinLink.parse(link)  # Before the import of torch takes two seconds.
    save, as_json = options.save, options.as_json
    if save is not None and not save.absolute().parent.is_dir():
        raise UsageError(f"--save {save}: there is no folder {save.absolute().parent}", remedy="make it first")
    if save is not None and config.load_in_4bit:
        what = "--save writes the whole model, of which --load-in-4bit has no base"
        raise UsageError(what, remedy="leave it out: `flockstep export` writes the adapter")
    if options.metrics:
        split_host_port(options.metrics)
    limited = options.hours is not None or options.when_idle or options.max_temp or options.max_watts
    if "RANK" in os.environ and limited:
        what = "--hours, --when-idle, --max-temp and --max-watts are not for torchrun"
        raise UsageError(what, remedy="start and end it with cron, or as a service; nvidia-smi -pl limits the power")
    # Imported while Ctrl-C still ends the process at once.
    with uncollected():
        import torch

    if config.threads:
        torch.set_num_threads(config.threads)
    agreement = Agreement(config, _nowhere if as_json else say, None if as_json else terminal_reader(), options.yes)
    with (
        training_here(config.home) if speaks else contextlib.nullcontext(),
        leaving_on_signals() as stop,
        shown(say, as_json=as_json) as show_event,
        recorded(options.metrics if speaks else "", config, show_event) as on_event,
    ):
        try:
            summary = _train_in_shifts(link, config, options, agreement, stop, on_event)
        finally:
            # The objects of torch live until the end: the interpreter's last garbage collections need not walk over
            # them, which took 2 to 4 s on a busy machine, and Ctrl-C must take less than 3 (docs/log.md).
            gc.freeze()
    if not as_json:
        kept = f"; the model is in {summary.saved}" if summary.saved is not None else ""
        say(f"{summary.reason}: after round {summary.round}, state root {summary.root[:ROOT_DIGITS]}{kept}")
        if summary.reason == "finished":
            home = shlex.quote(str(config.home))
            say(f"Thank you for training. To use the model in other programs: flockstep export {home} my-model")
    if stop.is_set():
        raise KeyboardInterrupt


def _train_in_shifts(
    link: str,
    config: PeerConfig,
    options: TrainingOptions,
    agreement: Agreement,
    stop: threading.Event,
    on_event: Callable[[Event], None],
) -> "Summary":
    """Train whenever this peer may; returns how the last membership ended. Raises as `join` does."""
    with uncollected():
        from ...optim.train.trainer import Summary, free_device, join_run

    def note(event: str, reason: str) -> None:
        with _event_log(config, on_event) as telemetry:
            telemetry.emit(event, step="availability", reason=reason)

    availability, goes_on = _availability(config, options, note), False
    while True:
        if "RANK" not in os.environ:  # The processes of one peer can only leave together.
            await_shift(availability, stop)
        if stop.is_set():
            raise KeyboardInterrupt
        with shift(availability, stop) if "RANK" not in os.environ else contextlib.nullcontext(Shift(stop)) as now:

            def farewell(now: Shift = now) -> str:
                return "paused" if now.reason else "left"  # Why is nobody else's business.

            summary: Summary | None = None
            try:
                summary = join_run(
                    link,
                    config,
                    save=options.save,
                    on_event=on_event,
                    stop=now.over,
                    agree=agreement.agree,
                    farewell=farewell,
                    rest=now.rest,
                )
            except FlockstepError as error:
                if stop.is_set():  # A user who leaves before the run is reached gets no error that it was not reached.
                    raise KeyboardInterrupt from None
                if goes_on and isinstance(error, NetworkError):
                    note("succession.retry", str(error))
                    stop.wait(RETRY_SECONDS)
                elif not now.over.is_set():
                    raise
        goes_on = goes_on if summary is None else summary.reason == SUCCEEDED and "RANK" not in os.environ
        if summary is not None and (stop.is_set() or not (goes_on or summary.reason == "paused")):
            return summary
        free_device()
        config = replace(config, resume=True)  # Whoever begins anew does so once, not after each pause.


def _availability(config: PeerConfig, options: TrainingOptions, note: Callable[[str, str], None]) -> Availability:
    """Return what looks at this computer for what its user allows. Raises `UsageError` for a limit of an unseen GPU."""
    import torch

    from ...optim.train.device import choose_device

    policy = Policy(when_idle=options.when_idle, max_temp=options.max_temp, max_watts=options.max_watts)
    found = Availability(config.home, options.hours, policy, note=note)
    if not (options.when_idle or options.max_temp or options.max_watts):
        return found
    device = choose_device(config.device)
    try:
        gpu = gpu_of(device)
    except LocalError as error:
        if options.max_temp or options.max_watts:
            raise UsageError(f"--max-temp and --max-watts: {error}", remedy=error.remedy) from error
        if device.type == "cuda":
            note("device.unseen", f"{error} — {error.remedy}")
        return found
    found.gpu = lambda: gpu.read(holds_memory=torch.cuda.memory_reserved(device) > 0)
    return found


@contextlib.contextmanager
def _event_log(config: PeerConfig, on_event: Callable[[Event], None]) -> Iterator[Telemetry]:
    """Yield the home folder's event log, for events from before, between and after memberships."""
    with contextlib.closing(Telemetry(log_path(config.home))) as telemetry:
        telemetry.subscribe(on_event)
        yield telemetry


@contextlib.contextmanager
def recorded(metrics: str, config: PeerConfig, show: Callable[[Event], None]) -> Iterator[Callable[[Event], None]]:
    """Yield the handler of events that also counts them for Prometheus."""
    figures = EventFigures()

    def take(event: Event) -> None:
        show(event)
        figures.take(event)

    def notice(reason: str) -> None:
        with _event_log(config, take) as telemetry:
            telemetry.emit("metrics.refused", step="metrics", reason=reason)

    with contextlib.ExitStack() as stack:
        if metrics:
            port = stack.enter_context(shown_metrics(metrics, figures.figures, notice))
            with _event_log(config, take) as telemetry:
                telemetry.emit("metrics.ready", port=port)
        yield take


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C, SIGTERM or SIGHUP sets; a second Ctrl-C ends the process at once."""
    stop = threading.Event()

    def leave(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, leave) for number in ending_signals()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def shown(say: Callable[[str], None], *, as_json: bool) -> Iterator[Callable[[Event], None]]:
    """Yield the handler of events: JSON lines, or a live panel on a terminal, or plain lines elsewhere."""
    console = PlainConsole()
    peer = PeerStory("", "")
    if as_json:
        yield lambda event: say(json.dumps(event))
        return
    if not console.is_terminal:
        yield _Log(say)
        return
    live = Live(console=console, refresh_per_second=4, transient=True)

    def show(event: Event) -> None:
        peer.apply(event)
        if event.get("event") == "peer.start":  # Not before: a live panel would hide the question whether to join.
            live.start()
        _report(event, peer, console.say)
        live.update(progress_panel(peer))

    try:
        yield show
    finally:
        live.stop()


class _Log:
    """Writes events as lines, and the progress once a minute, for a log that somebody reads later."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._peer = PeerStory("", "")
        self._last: float | None = None

    def __call__(self, event: Event) -> None:
        self._peer.apply(event)
        _report(event, self._peer, self._say)
        time = event.get("time")
        if event.get("event") != "step" or not isinstance(time, (int, float)):
            return
        if self._last is None or time >= self._last + LOG_PERIOD:
            if self._last is not None:  # The first step says little yet.
                self._say(progress_line(self._peer))
            self._last = time


def _report(event: Event, peer: PeerStory, say: Callable[[str], None]) -> None:
    """Say an event in words, and of a round what became of this peer's work in it; `peer` knows the event already."""
    if line := describe_event(event):
        work = f"; {peer.work}" if event.get("event") == "round.done" and peer.work else ""
        say(line + work)


def progress_panel(peer: PeerStory) -> Panel:
    """Return a peer's progress as a small panel, without what is not known yet."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    facts = list(progress_rows(peer)) or [("", "looking for the run and its state")]
    rows.add_column(no_wrap=True, min_width=max(len(label) for label, _ in facts))
    rows.add_column(overflow="ellipsis", no_wrap=True)
    for label, text in facts:
        rows.add_row(Text(label, style="dim"), Text(text))
    return Panel(rows, title=f"flockstep: {peer.state}", title_align="left", expand=False)


def progress_rows(peer: PeerStory) -> Iterator[tuple[str, str]]:
    """Yield what is known of a peer's progress: labels and texts."""
    if peer.taking is not None:
        yield "state", progress_line(peer)
    if peer.round is not None:
        left = f", about {span(peer.seconds_left)} left" if peer.seconds_left else ""
        yield "round", round_of(peer) + left + (f", state root {peer.root[:ROOT_DIGITS]}" if peer.root else "")
    if peer.work:
        yield "last work", peer.work
        counted = "1 round" if peer.counted == 1 else f"{peer.counted:,} rounds"
        yield "counted", f"{counted}, {short_number(peer.credit)} tokens since the start"
    if peer.peers_here:
        yield "peers", "1 trains now, this one" if peer.peers_here == 1 else f"{peer.peers_here:,} train now"
    if peer.step:
        rate = f" at {peer.tokens_per_s:,.0f} tokens/s" if peer.tokens_per_s is not None else ""
        yield "step", f"{peer.step:,}{rate}"
    if peer.waits_for:
        yield ("waits" if peer.state == "paused" else "has rested"), peer.waits_for
    if peer.awaits:
        yield "no round", waiting_words(peer)
    if peer.loss is not None:
        yield "loss", f"{peer.loss:.3f}"
    if peer.sent:
        by = f", {peer.rung}" if peer.rung else ""
        yield "network", f"up {megabytes(peer.sent)} MB, down {megabytes(peer.received)} MB{by}"


def waiting_words(peer: PeerStory) -> str:
    """Return why no round can be tried, and for how long that has been so."""
    return f"{peer.awaits}, for {span(peer.seen_at - peer.awaits_since)} now"


def round_of(peer: PeerStory) -> str:
    """Return the last round whose result a peer holds, and of how many."""
    return f"{peer.round or 0:,}" + (f" of {peer.num_rounds:,}" if peer.num_rounds else "")


def progress_line(peer: PeerStory) -> str:
    """Return a peer's progress in one line, without what is not known yet."""
    if peer.taking is not None:
        here, total, providers = peer.taking
        from_whom = f"{providers} peers" if providers != 1 else "1 peer"
        return f"taking the state: {here / 1e6:,.0f} of {total / 1e6:,.0f} MB from {from_whom}"
    parts = [
        peer.state,
        f"step {peer.step:,}" if peer.step else "",
        f"round {round_of(peer)}" if peer.round is not None else "",
        f"loss {peer.loss:.3f}" if peer.loss is not None else "",
        f"{peer.tokens_per_s:,.0f} tokens/s" if peer.tokens_per_s is not None else "",
        f"up {megabytes(peer.sent)} MB, down {megabytes(peer.received)} MB" if peer.sent else "",
        str(peer.rung or ""),
        f"no round: {waiting_words(peer)}" if peer.awaits else "",
    ]
    return " | ".join(part for part in parts if part)


LINES = {
    "peer.start": "training on {device}",
    "host.port_taken": "port {port} is taken; this peer listens on port {chosen}",
    "clock.off": "{reason} — {remedy}",
    "bootstrap.over_https": "no connection but HTTPS leads to a bootstrap, {reason}",
    "layout.unpinned": "{reason}",
    "model.not_kept": "{reason}",
    "relay.none": "{reason} — {remedy}",
    "memory.short": "{reason} — {remedy}",
    "disk.short": "{reason} — {remedy}",
    "data.joined": "the examples of a sequence are trained as one: {reason}",
    "data.awaited": "waits for data: {reason}",
    "device.out_of_memory": "out of memory; from now on {micro_batch} samples at once: {reason}",
    "device.threads": "trains with {threads} of {most} processor threads: {reason}",
    "device.rests": "rests between steps: {reason}",
    "device.unseen": "--when-idle does not see the GPU: {reason}",
    "step.skipped": "a step is skipped: {reason}",
    "device.uncompiled": "the model trains without torch.compile, which failed: {reason}",
    "voters.absent": "at the moment this run {reason}; what that means: docs/stopped.md",
    "run.joined": "joined; peers that train in it now: {peers}",
    "state.restored": "continues from round {round}, restored from this computer's disk",
    "file.awaited": "{reason}: waiting for the run's data (Ctrl-C to leave)",
    "state.awaited": "{reason}: waiting for one (Ctrl-C to leave)",
    "checkpoint.unwritten": "no use of the disk: {reason}",
    "checkpoint.damaged": "no use of the disk: {reason}",
    "outputs.unwritten": "no use of the disk: {reason}",
    "promise.unwritten": "no use of the disk, and no part in rounds without it: {reason}",
    "promise.forgotten": "takes part again after a few rounds, since it may have signed in them before: {reason}",
    "round.awaited": "no round {round} yet: {reason}; this computer trains on, and its work counts once that round ends",
    "line.thin": "{reason} — {remedy}",
    "line.enough": "{reason}",
    "round.possible": "round {round} can be tried now: {reason}",
    "round.void": "round {round} had no effect: {reason}; nothing is lost",
    "round.missed": "round {round} went on without this peer: {reason}",
    "round.behind": "round {round} went on without this peer: {reason}",
    "round.abstained": "round {round}: {reason}",
    "state.rebased": "round {round}: {reason}",
    "metrics.ready": "shows its metrics on port {port}",
    "peer.paused": "paused: {reason}",
    "peer.resumed": "goes on: {reason}",
    "peer.lost": "lost {peer}: {reason}",
    "peer.charged": "{peer} broke a rule: {reason}",
    "network.failed": "the network process did not {step}: {reason}; training goes on",
    "run.revised": "from round {round} on, as the run's owner has revised it: {reason}",
    "run.ended": "stays at round {round}: {reason}",
    "run.led": "{reason}, after round {round}",
    "succession.refused": "does not follow run {run}: {reason}",
    "succession.late": "{reason}",
    "succession.retry": "the run that goes on cannot be reached yet: {reason}",
    "state.not_handed_over": "{reason}",
    "run.finished": "the run is finished",
}
"""The text of an event for a person, by its name; the names in braces are fields of it."""


def describe_event(event: Event) -> str:
    """Return the text of an event for a person; empty for events that only programs read."""
    match event.get("event"):
        case "device.bench":
            memory = event.get("memory_used")
            peak = f", {megabytes(memory)} MB of memory" if isinstance(memory, int) and memory else ""
            pieces = f"{event.get('micro_batch')} of {event.get('batch_size')} samples at once"
            hours, rate = event.get("hours"), event.get("tokens_per_s")
            left = f": {span(3600 * hours)} for the rest of the run" if isinstance(hours, float) else ""
            speed = f"{rate:,.0f}" if isinstance(rate, float) else "?"
            what = f"{event.get('model', 'the model')} in {event.get('precision', 'fp32')}"
            return f"this device trains {what} at {speed} tokens/s, {pieces}{peak}{left}"
        case "phase.end" if isinstance(ramp := event.get("ramp"), float) and ramp != 1.0:
            return f"round {event.get('round')}: your work counts {ramp:.0%}, because you have just joined"
        case "eval.result":
            return evaluation_words(event.get("round"), event.get("loss"), event.get("by"))
        case "peer.lost" if event.get("reason") == LEFT:
            return f"{str(event.get('peer', '?'))[-SHORT_ID:]} left"
        case "round.awaited" if event.get("reason") == ENDED:
            return ""  # `run.ended` says so.
        case "state.restored" if event.get("round") == 0:
            return RESTORED_START
        case "state.synced" if event.get("peer"):
            return f"took over the state of round {event.get('round')}"
        case "round.done":
            roster, cut = event.get("roster"), event.get("cut")
            work = f"the work of {count_of(cut, 'peer')}; {count_of(roster, 'member')} took part"  # Keepers, too.
            return f"round {event.get('round')}: averaged {work}, state root {str(event.get('root'))[:ROOT_DIGITS]}"
    fields: dict[str, object] = {"reason": "no reason given", **event, "peer": str(event.get("peer", "?"))[-SHORT_ID:]}
    return LINES.get(str(event.get("event")), "").format_map(defaultdict(lambda: "?", fields))


def _nowhere(line: str) -> None:
    """Print nothing: the first rank prints the same lines, or the output is JSON."""
