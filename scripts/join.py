"""`flockstep join`: lend this computer to a run, and tell calmly how it goes.

All that is shown comes from the events that also stand in the home folder's log. Ctrl-C once leaves the run in order,
a second time leaves it at once.
"""

import contextlib
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..dht.run.link import JoinLink
from ..peer.config import PeerConfig
from ..peer.errors import FlockstepError, UsageError
from ..peer.telemetry import Event
from .demo_view import megabytes
from .story import ROOT_DIGITS, PeerStory

Say = Callable[[str], None]


def join(link: str, config: PeerConfig, say: Say, *, save: Path | None, threads: int | None, as_json: bool) -> None:
    """Train with the others until the run ends or the user leaves. Raises `FlockstepError`, or `KeyboardInterrupt`."""
    if os.environ.get("RANK", "0") != "0":  # Of the processes that torchrun starts as one peer, the first one speaks.
        say = _nowhere
    JoinLink.parse(link)  # Before two seconds are spent on importing torch.
    if save is not None and not save.absolute().parent.is_dir():
        raise UsageError(f"--save {save}: there is no folder {save.absolute().parent}", remedy="make it first")
    # Imported before Ctrl-C means anything else than to end at once.
    import torch

    from ..optim.trainer import join_run

    if threads is not None:
        torch.set_num_threads(threads)
    with leaving_on_signals() as stop, shown(say, as_json=as_json) as on_event:
        try:
            summary = join_run(link, config, save=save, on_event=on_event, stop=stop)
        except FlockstepError:
            if stop.is_set():  # Whoever leaves before the run is reached need not hear that it was not reached.
                raise KeyboardInterrupt from None
            raise
        finally:
            # What torch has loaded lives until the end: the last collections of a leaving interpreter need not walk
            # over it, which took 2 to 4 s on a busy machine, and Ctrl-C is to be over in 3 (docs/log.md).
            gc.freeze()
    if not as_json:
        kept = f"; the model is in {save}" if save is not None else ""
        say(f"{summary.reason}: after round {summary.round}, state root {summary.root[:ROOT_DIGITS]}{kept}")
    if stop.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; whoever presses Ctrl-C again does not want to wait."""
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
def shown(say: Say, *, as_json: bool) -> Iterator[Callable[[Event], None]]:
    """What to call with every event: JSON lines, or a live line on a terminal, or plain lines elsewhere."""
    console = Console()
    peer = PeerStory("", "")
    if as_json:
        yield lambda event: say(json.dumps(event))
        return
    if not console.is_terminal:
        yield lambda event: _tell(event, say)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(event: Event) -> None:
            peer.apply(event)
            _tell(event, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
            live.update(Text(progress_line(peer), overflow="ellipsis", no_wrap=True))

        yield show


def _tell(event: Event, say: Say) -> None:
    if line := describe(event):
        say(line)


def progress_line(peer: PeerStory) -> str:
    """Where a peer stands, in one line; what is not known yet is left out."""
    if peer.taking is not None:
        here, total, givers = peer.taking
        from_whom = f"{givers} peers" if givers != 1 else "1 peer"
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


def describe(event: Event) -> str:
    """An event in words for the person in front of the screen; empty for those that only programs care about."""
    peer, reason = str(event.get("peer", ""))[-8:], event.get("reason", "no reason given")
    match event.get("event"):
        case "peer.start":
            return f"training on {event.get('device')}"
        case "host.port_taken":
            return f"the port is taken: {reason}"
        case "clock.off" | "relay.none" | "memory.short" | "disk.short":
            return f"{reason} — {event.get('remedy')}"
        case "device.bench":
            memory = event.get("memory_used")
            peak = f", {megabytes(memory)} MB of memory" if isinstance(memory, int) and memory else ""
            pieces = f"{event.get('micro_batch')} of {event.get('batch_size')} samples at once"
            return f"this device trains {event.get('tokens_per_s')} tokens/s, {pieces}{peak}"
        case "device.out_of_memory":
            return f"out of memory; from now on {event.get('micro_batch')} samples at once: {reason}"
        case "phase.end" if event.get("ramp", 1.0) != 1.0:
            return f"round {event.get('round')}: as a newcomer's, this work counts {event.get('ramp')}-fold"
        case "run.joined":
            return f"joined; the run has {event.get('peers')} members now"
        case "state.restored":
            return f"goes on from round {event.get('round')}, as this computer's disk has it"
        case "state.awaited":
            return f"{reason}: waiting for one (Ctrl-C to leave)"
        case "state.synced" if event.get("peer"):
            return f"took over the state of round {event.get('round')}"
        case "checkpoint.unwritten" | "checkpoint.damaged" | "outputs.unwritten":
            return f"no use of the disk: {reason}"
        case "round.done":
            roster, cut = event.get("roster"), event.get("cut")
            count = f"{len(cut)} of {len(roster)}" if isinstance(roster, list) and isinstance(cut, list) else "all"
            root = str(event.get("root"))[:ROOT_DIGITS]
            return f"round {event.get('round')}: averaged the work of {count} peers, state root {root}"
        case "round.awaited":
            return f"trains alone until round {event.get('round')} can be tried: {reason}"
        case "round.possible":
            return f"round {event.get('round')} can be tried now: {reason}"
        case "round.void":
            return f"round {event.get('round')} had no effect: {reason}; nothing is lost"
        case "round.missed" | "round.behind":
            return f"round {event.get('round')} went on without this peer: {reason}"
        case "round.abstained" | "state.rebased":
            return f"round {event.get('round')}: {reason}"
        case "peer.lost":
            return f"lost {peer}: {reason}"
        case "peer.charged":
            return f"{peer} broke a rule: {reason}"
        case "network.died":
            return f"the network process died: {reason}; training goes on while it starts anew"
        case "network.restarted":
            return "the network is back"
        case "run.finished":
            return "the run is finished"
    return ""


def _nowhere(line: str) -> None:
    """What another rank would say once more."""
