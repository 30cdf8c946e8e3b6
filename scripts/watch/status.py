"""`flockstep status`: how a run stands, or how this computer's own peer stands."""

import json
from collections.abc import Callable, Sequence

from rich.console import Console

from ...collectives.picture.picture import RunState
from ...collectives.picture.snapshot import figures_of
from ...dht.run.link import JoinLink
from ...peer.config import PeerConfig
from ...peer.errors import UsageError
from ...peer.home_lock import HOME_LOCK, is_locked
from ...peer.plain import plain_text
from ...peer.telemetry import log_path, read_events
from ..live_view import peers_table
from ..story import PeerStory
from ..volunteer.control import TRAINING_LOCK
from .watching import picture_of
from .words import describe_picture, heading, member_story, progress_words, state_words

PIPED_WIDTH = 120
"""Characters of a line for a file or another program, which has no width of its own: every column has its room."""


def status(link_text: str | None, config: PeerConfig, say: Callable[[str], None], *, as_json: bool) -> None:
    """Show the run behind a link, or without one the peer whose log is in the home folder."""
    if link_text is None:
        peer = local_story(config)
        if as_json:
            say(json.dumps([status_figures(peer)]))
            return
        show([peer])
        if peer.state == "killed":
            say("It ended without leaving; the command that started it goes on from what is on the disk.")
        elif votes := votes_line(config):
            say(votes)
        return
    picture = picture_of(JoinLink.parse(link_text), config)
    if as_json:
        from ... import __version__

        say(json.dumps(figures_of(picture, __version__)))
        return
    if picture.progress.state is not RunState.EMPTY:
        say(heading(picture))
        say(f"{progress_words(picture)}. {state_words(picture)}\n")
        show([member_story(member, picture.votes) for member in picture.members])
        say("")
        is_member = (config.home / "runs" / picture.run).is_dir()
        if picture.votes is None and is_member and (line := votes_line(config, picture.run)):
            say(f"As this computer's peer sees it: {line}")  # A closed run tells nobody else.
    else:
        say(state_words(picture))
    for line in describe_picture(picture):
        say(line)


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
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(peers_table(peers, console.width))
