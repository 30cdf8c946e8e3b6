"""`flockstep join`: trains with a run on this computer, and reports its progress.

All output comes from the events in the home folder's log. Ctrl-C once leaves the run in order, a second time leaves it
at once.
"""

import contextlib
import gc
import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..dht.run.link import JoinLink
from ..peer.config import PeerConfig
from ..peer.errors import FlockstepError, UsageError
from ..peer.plain import plain_text
from ..peer.telemetry import Event
from .agree import Agreement, terminal_reader
from .live_view import megabytes
from .story import ROOT_DIGITS, SHORT_ID, PeerStory


def join(
    link: str,
    config: PeerConfig,
    say: Callable[[str], None],
    *,
    save: Path | None,
    threads: int | None,
    as_json: bool,
    yes: bool = False,
) -> None:
    """Train with the others until the run ends or the user leaves. Raises `FlockstepError`, or `KeyboardInterrupt`.

    Before the first join of a run its user is asked, if there is a terminal and `yes` is not the answer already.
    """
    if os.environ.get("RANK", "0") != "0":  # Of the processes of one peer (torchrun) only the first reports.
        say = _nowhere
    JoinLink.parse(link)  # Before the import of torch takes two seconds.
    if save is not None and not save.absolute().parent.is_dir():
        raise UsageError(f"--save {save}: there is no folder {save.absolute().parent}", remedy="make it first")
    # Imported while Ctrl-C still ends the process at once.
    import torch

    from ..optim.trainer import join_run

    if threads is not None:
        torch.set_num_threads(threads)
    agreement = Agreement(config, _nowhere if as_json else say, None if as_json else terminal_reader(), yes)
    with leaving_on_signals() as stop, shown(say, as_json=as_json) as on_event:
        try:
            summary = join_run(link, config, save=save, on_event=on_event, stop=stop, agree=agreement.agree)
        except FlockstepError:
            if stop.is_set():  # A user who leaves before the run is reached gets no error that it was not reached.
                raise KeyboardInterrupt from None
            raise
        finally:
            # The objects of torch live until the end: the interpreter's last garbage collections need not walk over
            # them, which took 2 to 4 s on a busy machine, and Ctrl-C must take less than 3 (docs/log.md).
            gc.freeze()
    if not as_json:
        kept = f"; the model is in {save}" if save is not None else ""
        say(f"{summary.reason}: after round {summary.round}, state root {summary.root[:ROOT_DIGITS]}{kept}")
    if stop.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets; a second Ctrl-C ends the process at once."""
    stop = threading.Event()

    def leave(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def shown(say: Callable[[str], None], *, as_json: bool) -> Iterator[Callable[[Event], None]]:
    """Yield the handler of events: JSON lines, or a live line on a terminal, or plain lines elsewhere."""
    console = Console()
    peer = PeerStory("", "")
    if as_json:
        yield lambda event: say(json.dumps(event))
        return
    if not console.is_terminal:
        yield lambda event: _report(event, say)
        return
    live = Live(console=console, refresh_per_second=4, transient=True)

    def show(event: Event) -> None:
        peer.apply(event)
        if event.get("event") == "peer.start":  # Not before: a live line would hide the question whether to join.
            live.start()
        _report(event, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
        live.update(Text(progress_line(peer), overflow="ellipsis", no_wrap=True))

    try:
        yield show
    finally:
        live.stop()


def _report(event: Event, say: Callable[[str], None]) -> None:
    if line := describe_event(event):
        say(plain_text(line))


def progress_line(peer: PeerStory) -> str:
    """Return a peer's progress in one line, without what is not known yet."""
    if peer.taking is not None:
        here, total, providers = peer.taking
        from_whom = f"{providers} peers" if providers != 1 else "1 peer"
        return f"taking the state: {here / 1e6:,.0f} of {total / 1e6:,.0f} MB from {from_whom}"
    parts = [
        peer.state,
        f"step {peer.step:,}" if peer.step else "",
        f"round {peer.round}" if peer.round is not None else "",
        f"loss {peer.loss:.3f}" if peer.loss is not None else "",
        f"{peer.tokens_per_s:,.0f} tokens/s" if peer.tokens_per_s is not None else "",
        f"up {megabytes(peer.sent)} MB, down {megabytes(peer.received)} MB" if peer.sent else "",
        str(peer.rung or ""),
    ]
    return " | ".join(part for part in parts if part)


LINES = {
    "peer.start": "training on {device}",
    "host.port_taken": "port {port} is taken; this peer listens on port {chosen}",
    "clock.off": "{reason} — {remedy}",
    "relay.none": "{reason} — {remedy}",
    "memory.short": "{reason} — {remedy}",
    "disk.short": "{reason} — {remedy}",
    "device.out_of_memory": "out of memory; from now on {micro_batch} samples at once: {reason}",
    "device.uncompiled": "the model trains without torch.compile, which failed: {reason}",
    "run.joined": "joined; the run has {peers} members now",
    "state.restored": "continues from round {round}, restored from this computer's disk",
    "state.awaited": "{reason}: waiting for one (Ctrl-C to leave)",
    "checkpoint.unwritten": "no use of the disk: {reason}",
    "checkpoint.damaged": "no use of the disk: {reason}",
    "outputs.unwritten": "no use of the disk: {reason}",
    "promise.unwritten": "no use of the disk, and no part in rounds without it: {reason}",
    "promise.forgotten": "takes part again after a few rounds, since it may have signed in them before: {reason}",
    "round.awaited": "trains alone until round {round} can be tried: {reason}",
    "round.possible": "round {round} can be tried now: {reason}",
    "round.void": "round {round} had no effect: {reason}; nothing is lost",
    "round.missed": "round {round} went on without this peer: {reason}",
    "round.behind": "round {round} went on without this peer: {reason}",
    "round.abstained": "round {round}: {reason}",
    "state.rebased": "round {round}: {reason}",
    "peer.lost": "lost {peer}: {reason}",
    "peer.charged": "{peer} broke a rule: {reason}",
    "network.died": "the network process died: {reason}; training goes on while it restarts",
    "network.failed": "the network process did not {step}: {reason}; training goes on",
    "network.restarted": "the network is back",
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
            return f"this device trains {event.get('tokens_per_s')} tokens/s, {pieces}{peak}"
        case "phase.end" if event.get("ramp", 1.0) != 1.0:
            return f"round {event.get('round')}: as a newcomer's, this work counts {event.get('ramp')}-fold"
        case "state.synced" if event.get("peer"):
            return f"took over the state of round {event.get('round')}"
        case "round.done":
            roster, cut = event.get("roster"), event.get("cut")
            count = f"{len(cut)} of {len(roster)}" if isinstance(roster, list) and isinstance(cut, list) else "all"
            root = str(event.get("root"))[:ROOT_DIGITS]
            return f"round {event.get('round')}: averaged the work of {count} peers, state root {root}"
    fields: dict[str, object] = {"reason": "no reason given", **event, "peer": str(event.get("peer", "?"))[-SHORT_ID:]}
    return LINES.get(str(event.get("event")), "").format_map(defaultdict(lambda: "?", fields))


def _nowhere(line: str) -> None:
    """Print nothing: the first rank prints the same lines, or the output is JSON."""
