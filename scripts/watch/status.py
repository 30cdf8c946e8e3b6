"""`flockstep status`: how a run stands, once or while it goes on, or how this computer's own peer stands."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...collectives.picture.figures import figures_of
from ...collectives.picture.picture import Picture, RunState
from ...dht.run.link import JoinLink
from ...peer.base.config import PeerConfig
from ...peer.base.errors import UsageError
from ...peer.base.home_lock import HOME_LOCK, is_locked
from ...peer.base.plain import plain_text
from ...peer.log.telemetry import log_path, read_events
from ..volunteer.control import TRAINING_LOCK
from .console import PlainConsole
from .live_view import peers_table
from .story import PeerStory
from .watching import picture_of, show_pictures, watched
from .words import describe_picture, heading, member_story, progress_words, state_words

PIPED_WIDTH = 120
"""Characters of a line for a file or another program, which has no width of its own: every column has its room."""


def status(
    link_text: str | None, config: PeerConfig, say: Callable[[str], None], *, as_json: bool, follow: bool = False
) -> None:
    """Show the run behind a link, with `follow` until Ctrl-C; without a link the peer whose log is in the home folder.

    Raises `FlockstepError`.
    """
    if link_text is None:
        if follow:
            raise UsageError("--follow shows a run, and not this computer's peer", remedy="give the run's join link")
        show_peer(config, say, as_json=as_json)
        return
    link, console = JoinLink.parse(link_text), wide_console()
    if as_json:

        def show(picture: Picture) -> None:
            from ... import __version__

            say(json.dumps(figures_of(picture, __version__)))

        if follow:
            watched(link, config, partial(show_pictures, show))
        else:
            show(picture_of(link, config))
        return
    if not follow:
        for part in picture_parts(picture_of(link, config), config, console.width):
            if isinstance(part, str):
                say(part)
            else:
                console.print(part)
        return
    if not console.is_terminal:
        raise UsageError("--follow needs a terminal", remedy="add --json: it writes a line for each picture")
    with Live(Text("Looking for the run …"), console=console, auto_refresh=False) as live:

        def refresh(picture: Picture) -> None:
            live.update(live_view(picture, config, console.width), refresh=True)

        watched(link, config, partial(show_pictures, refresh))


def live_view(picture: Picture, config: PeerConfig, width: int) -> Group:
    """Return what is shown of a picture at once. Others wrote some of the texts: they are no markup."""
    parts = picture_parts(picture, config, width)
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))


def picture_parts(picture: Picture, config: PeerConfig, width: int) -> Iterator[str | Table]:
    """Yield what is shown of a picture, for lines of a `width`."""
    if picture.progress.state is RunState.EMPTY:
        yield state_words(picture)
    else:
        yield heading(picture)
        yield f"{progress_words(picture)}. {state_words(picture)}"
        yield ""
        yield peers_table([member_story(member, picture.votes) for member in picture.members], width)
        yield ""
        is_member = (config.home / "runs" / picture.run).is_dir()
        if picture.votes is None and is_member and (line := votes_line(config, picture.run)):
            yield f"As this computer's peer sees it: {line}"  # A closed run tells nobody else.
    yield from describe_picture(picture)


def show_peer(config: PeerConfig, say: Callable[[str], None], *, as_json: bool) -> None:
    """Show the peer whose log is in the home folder. Raises `UsageError`."""
    peer = local_story(config)
    if as_json:
        say(json.dumps([status_figures(peer)]))
        return
    show([peer])
    if peer.state == "killed":
        say("It ended without leaving; the command that started it goes on from what is on the disk.")
    elif votes := votes_line(config):
        say(votes)


def votes_line(config: PeerConfig, run: str = "") -> str:
    """Return who is here to vote, as this computer's peer has reported last; empty if it has not, or not of that `run`."""
    line, is_other = "", False
    for _, event in read_events(log_path(config.home)):
        match event.get("event"):
            case "peer.start" | "peer.leave":
                line, is_other = "", False
            case "run.joined":
                is_other = bool(run) and event.get("run") != run
            case "run.votes":
                counts = f"{event.get('votes')} of {event.get('total')} are here, {event.get('quorum')} needed"
                line = plain_text(f"votes: {counts}; {event.get('reason')}")
            case "round.awaited":
                line = plain_text(f"no round: {event.get('reason')}")
            case "round.possible":
                line = ""
    return "" if is_other else line


def local_story(config: PeerConfig) -> PeerStory:
    """What the last peer with this home folder did. Raises `UsageError` if there was none."""
    peer = PeerStory("this peer", "")
    for _, event in read_events(log_path(config.home)):
        if event.get("event") == "peer.start":
            peer = PeerStory("this peer", "")  # The log holds every start; the last one counts.
        peer.apply(event)
    if peer.state == "starting":
        raise UsageError(f"no peer has run with the home folder {config.home}", remedy="give a join link, or --home")
    if not peer.gone and not any(is_locked(config.home / name) for name in (HOME_LOCK, TRAINING_LOCK)):
        peer.kill()  # Its log cannot say so.
    return peer


def status_figures(peer: PeerStory) -> dict[str, object]:
    """One peer for programs."""
    names = ("state", "device", "step", "round", "tokens", "tokens_per_s", "loss", "rung", "sent", "received", "root")
    return {"peer": peer.peer_id} | {name: getattr(peer, name) for name in names}


def show(peers: Sequence[PeerStory]) -> None:
    """Print the table of peers."""
    console = wide_console()
    console.print(peers_table(peers, console.width))


def wide_console() -> PlainConsole:
    """Return the console of stdout, with room for every column where that has no width of its own."""
    console = PlainConsole()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console
