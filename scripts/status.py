"""`flockstep status`: how the peers of a run stand, asked from its members, or how this computer's own peer stands."""

import json
from collections.abc import Callable, Sequence

from rich.console import Console

from ..dht.members.table import Member
from ..dht.run.link import JoinLink
from ..peer.config import PeerConfig
from ..peer.errors import UsageError
from ..peer.plain import plain_text
from ..peer.telemetry import Telemetry, log_path, read_events
from ..peer.transport import Rung
from .live_view import peers_table
from .story import SHORT_ID, PeerStory


def status(link_text: str | None, config: PeerConfig, say: Callable[[str], None], *, as_json: bool) -> None:
    """Show the members of the run behind a link, or without one the peer whose log is in the home folder."""
    if link_text is None:
        peers = [local_story(config)]
    else:
        from ..dht.rendezvous import fetch_members

        telemetry = Telemetry(log_path(config.home))
        peers = [story_of(member) for member in fetch_members(JoinLink.parse(link_text), config, telemetry)]
    if as_json:
        say(json.dumps([status_figures(peer) for peer in peers]))
    elif peers:
        show(peers)
    else:
        say("Nobody is in this run at the moment.")


def local_story(config: PeerConfig) -> PeerStory:
    """What the last peer with this home folder did. Raises `UsageError` if there was none."""
    peer = PeerStory("this peer", "")
    for _, event in read_events(log_path(config.home)):
        if event.get("event") == "peer.start":
            peer = PeerStory("this peer", "")  # The log holds every start; the last one counts.
        peer.apply(event)
    if peer.state == "starting":
        raise UsageError(f"no peer has run with the home folder {config.home}", remedy="give a join link, or --home")
    return peer


def story_of(member: Member) -> PeerStory:
    """A member's record as the facts that the tables show."""
    body = member.body
    return PeerStory(
        member.peer[-SHORT_ID:],
        member.peer,
        state=body.state,
        device=plain_text(body.device),
        step=body.step,
        round=body.round,
        tokens=body.tokens,
        tokens_per_s=body.tokens_per_s,
        loss=body.loss,
        sent=body.sent,
        received=body.received,
        root=body.root.hex(),
        rung=Rung(body.rung) if body.rung else None,
    )


def status_figures(peer: PeerStory) -> dict[str, object]:
    """One peer for programs."""
    names = ("state", "device", "step", "round", "tokens", "tokens_per_s", "loss", "rung", "sent", "received", "root")
    return {"peer": peer.peer_id} | {name: getattr(peer, name) for name in names}


def show(peers: Sequence[PeerStory]) -> None:
    """Print the table of peers."""
    Console().print(peers_table(peers))
