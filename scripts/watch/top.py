"""`flockstep top`: a run in the terminal while it goes on: its peers, its last rounds, its troubles.

It takes part in nothing. All texts are shown as texts, since others wrote some of them, and nothing depends on colour.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from ...collectives.picture.fold import KEEPS
from ...collectives.picture.picture import MemberShown, Picture
from ...dht.run.link import JoinLink
from ...peer.config import PeerConfig
from ...peer.errors import FlockstepError, UsageError
from ...peer.plain import SHORT_ID, shortened
from ..story import ROOT_DIGITS
from .watching import PictureFeed
from .words import heading, progress_words, short_number, state_words, trouble_words

LOOK_AGAIN_SECONDS = 1.0
PEER_COLUMNS = ("peer", "state", "here", "device", "round", "tok/s", "loss", "rung", "vote", "trust", "name")
"""Together 80 characters with their usual contents. The name is last: anybody may call itself anything."""
ROUND_COLUMNS = ("round", "cut", "signed", "of", "term", "root", "without")
DEVICE_WIDTH, CALLED_WIDTH = 10, 8
NAMED_AWAY = 3

Source = Callable[[], Picture | None]


class TopApp(App[None]):
    """The views of one run; `source` returns the newest picture, and raises `FlockstepError` where there are no more."""

    CSS = """
    #heading { height: auto; padding: 0 1; text-style: bold; }
    #state { height: auto; padding: 0 1; }
    ContentSwitcher { height: 1fr; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "show('peers')", "Peers"),
        Binding("r", "show('rounds')", "Rounds"),
        Binding("e", "show('events')", "Events"),
        Binding("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._picture: Picture | None = None
        self.failure: FlockstepError | None = None
        """What has ended the views; None if the user did."""

    def compose(self) -> ComposeResult:
        """Lay the views out, one above the other."""
        yield Static("Looking for the run …", id="heading", markup=False)
        yield Static("", id="state", markup=False)
        with ContentSwitcher(initial="peers"):
            yield _table("peers", PEER_COLUMNS)
            yield _table("rounds", ROUND_COLUMNS)
            with VerticalScroll(id="events"):
                yield Static("", id="troubles", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look for pictures."""
        self.query_one("#peers").focus()
        self.show_newest()
        self.set_interval(LOOK_AGAIN_SECONDS, self.show_newest)

    def action_show(self, view: str) -> None:
        """Switch to another view."""
        self.query_one(ContentSwitcher).current = view
        self.query_one(f"#{view}").focus()

    def show_newest(self) -> None:
        """Show the newest picture, if it is another one."""
        try:
            picture = self._source()
        except FlockstepError as error:
            self.failure = error
            self.exit()
            return
        if picture is None or picture is self._picture:
            return
        self._picture = picture
        self.query_one("#heading", Static).update(heading(picture))
        votes = f"\n{picture.votes}" if picture.votes is not None else ""
        joining = f"\n{picture.joining}" if picture.joining else ""
        state = f"{progress_words(picture)}\n{state_words(picture)}{votes}\nverified: {picture.verified}{joining}"
        self.query_one("#state", Static).update(state)
        _fill(self.query_one("#peers", DataTable), map(_peer_cells, picture.members))
        _fill(self.query_one("#rounds", DataTable), _round_rows(picture))
        troubles = "\n".join(map(trouble_words, picture.troubles)) or "No troubles in the rounds that are shown."
        self.query_one("#troubles", Static).update(troubles)


def top(link_text: str, config: PeerConfig) -> None:
    """Show a link's run until the user ends it. Raises `FlockstepError`."""
    link = JoinLink.parse(link_text)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal", remedy="`flockstep status` with the same link prints once")
    with PictureFeed(link, config) as feed:
        app = TopApp(feed.newest)
        app.run()
    if app.failure is not None:
        raise app.failure


def _table(name: str, columns: Sequence[str]) -> DataTable[Text]:
    table: DataTable[Text] = DataTable(id=name, cursor_type="row", cell_padding=0)
    for column in columns:
        table.add_column(f"{column} ")
    return table


def _fill(table: DataTable[Text], rows: Iterable[Sequence[str]]) -> None:
    """Replace the rows of a table, and leave the cursor where it is."""
    row = table.cursor_row
    table.clear()
    for cells in rows:
        table.add_row(*(Text(f"{cell} ", no_wrap=True) for cell in cells))
    if table.row_count:
        table.move_cursor(row=min(row, table.row_count - 1))


def _peer_cells(member: MemberShown) -> tuple[str, ...]:
    return (
        member.peer[-SHORT_ID:],
        member.state,
        {True: "yes", False: "no", None: "?"}[member.here],
        shortened(member.device, DEVICE_WIDTH) or "-",
        str(member.round),
        short_number(member.tokens_per_s) if member.tokens_per_s else "-",
        "-" if member.loss is None else f"{member.loss:.3f}",
        member.rung or "-",
        str(member.votes) if member.votes else "-",
        "-" if member.trust is None else f"{member.trust:.2f}",
        shortened(member.name, CALLED_WIDTH),
    )


def _round_rows(picture: Picture) -> Iterable[tuple[str, ...]]:
    for row in picture.recent:
        away = [f"{peer[-SHORT_ID:]} ({reason})" for peer, reason in row.away if reason != KEEPS]
        more = f" and {len(away) - NAMED_AWAY} more" if len(away) > NAMED_AWAY else ""
        yield (
            str(row.round),
            f"{len(row.cut)}/{len(row.roster)}",
            str(len(row.voters)),
            "?" if row.total is None else str(row.total),
            str(row.term),
            row.root[:ROOT_DIGITS],
            ", ".join(away[:NAMED_AWAY]) + more,
        )
