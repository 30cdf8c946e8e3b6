"""What the demo shows while it runs: a live table of the peers and a progress bar, or plain lines without a terminal."""

import contextlib
from collections.abc import Sequence
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .console import PlainConsole
from .story import ROOT_DIGITS, PeerStory, RoundFacts, rounds_of

STATE_STYLES = {
    "training": "green",
    "keeping": "green",
    "finished": "bold green",
    "killed": "bold red",
    "missing": "bold red",
    "left": "yellow",
}
VIEW_COLUMNS = ("peer", "", "device", "step", "tokens/s", "round", "loss", "rung", "up MB", "down MB", "root")
LEFT_ALIGNED = ("peer", "", "device", "rung", "root")
NAMELESS = ("step", "rung")
"""Columns that give way to the names in a narrow terminal."""
NAMED_WIDTH = 100
"""Characters of a line from which on all columns have room beside the names."""


class DemoView:
    """A context: `update` with the peers as they are now, `say` for a line that stays."""

    def __init__(self, rounds: int, console: PlainConsole) -> None:
        self._console = console
        self._told = 0
        self._progress = Progress(
            TextColumn("[bold]rounds"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("rounds", total=rounds)
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else contextlib.nullcontext()

    def __enter__(self) -> "DemoView":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self._console.say(line)

    def update(self, peers: Sequence[PeerStory]) -> None:
        """Show the peers as they are now."""
        rounds = rounds_of(peers)
        self._progress.update(self._task, completed=sum(facts.outcome == "done" for facts in rounds))
        if isinstance(self._live, Live):
            self._live.update(Group(peers_table(peers), self._progress))
        else:
            # The newest round is told once the next has begun, when everybody's word about it is in.
            for facts in rounds[self._told : -1]:
                self.say(round_line(facts))
            self._told = max(self._told, len(rounds) - 1)

    def finish(self, peers: Sequence[PeerStory]) -> None:
        """Show the end."""
        self.update(peers)
        if not isinstance(self._live, Live):
            for facts in rounds_of(peers)[self._told :]:
                self.say(round_line(facts))


def peers_table(peers: Sequence[PeerStory], width: int = NAMED_WIDTH) -> Table:
    """One row a peer, for lines of a `width`; a dash where nothing was measured yet.

    Texts are shown as texts: others wrote some of them.
    """
    view = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")  # Four peers fit into 80 columns.
    named = any(peer.called for peer in peers)
    hidden = NAMELESS if named and width < NAMED_WIDTH else ()
    columns = [name for name in VIEW_COLUMNS if name not in hidden]
    for name in columns:
        view.add_column(name, justify="left" if name in LEFT_ALIGNED else "right", no_wrap=True)
    if named:  # Last: anybody may call itself anything.
        view.add_column("name", no_wrap=True)
    for peer in peers:
        cells: tuple[Text | str, ...] = (
            Text(peer.name),
            Text(peer.state, style=STATE_STYLES.get(peer.state, "dim")),
            Text(peer.device or "-"),
            f"{peer.step:,}",
            "-" if peer.tokens_per_s is None else f"{peer.tokens_per_s:,.0f}",
            "-" if peer.round is None else str(peer.round),
            "-" if peer.loss is None else f"{peer.loss:.3f}",
            str(peer.rung or "-"),
            megabytes(peer.sent) if peer.sent else "-",
            megabytes(peer.received) if peer.received else "-",
            Text(peer.root[:ROOT_DIGITS] or "-"),
        )
        shown = [cell for name, cell in zip(VIEW_COLUMNS, cells, strict=True) if name not in hidden]
        style = "dim" if peer.gone and peer.state != "finished" else ""
        view.add_row(*shown, *([Text(peer.called)] if named else []), style=style)
    return view


def round_line(facts: RoundFacts) -> str:
    """One round in one line."""
    loss = "-" if facts.loss is None else f"{facts.loss:.3f}"
    roots = " != ".join(sorted({root[:ROOT_DIGITS] for root in facts.state_roots.values()})) or "-"
    voids = f"  void before: {'; '.join(facts.voids)}" if facts.voids else ""
    return (
        f"round {facts.round:>3}  {facts.outcome}  cut {len(facts.cut)} of {len(facts.roster)}  loss {loss}  "
        f"{facts.seconds:.1f} s  root {roots} on {len(facts.state_roots)} peers{voids}"
    )


def megabytes(count: int) -> str:
    """Bytes as megabytes, for people."""
    return f"{count / 1e6:.2f}"
