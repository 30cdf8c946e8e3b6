"""`flockstep status`: how the peers of a run stand, asked from its members, or how this computer's own peer stands."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing

from rich.console import Console

from ..collectives.chain.fork_choice import is_keeper
from ..collectives.picture.votes import VotesHere
from ..collectives.spec import charter_of
from ..collectives.watcher import ask_votes
from ..dht.directory.interface import Directory
from ..dht.members.body import MemberState
from ..dht.members.table import Member
from ..dht.run.link import JoinLink
from ..peer.config import PeerConfig
from ..peer.errors import UsageError
from ..peer.node.node import Node
from ..peer.plain import SHORT_ID, plain_text
from ..peer.telemetry import Telemetry, log_path, read_events
from ..peer.transport import Rung
from .live_view import peers_table
from .story import PeerStory


def status(link_text: str | None, config: PeerConfig, say: Callable[[str], None], *, as_json: bool) -> None:
    """Show the members of the run behind a link, or without one the peer whose log is in the home folder."""
    votes = ""
    if link_text is None:
        peers = [local_story(config)]
        votes = votes_line(config)
    else:
        with closing(Telemetry(log_path(config.home))) as telemetry:
            members, found = fetch_votes(JoinLink.parse(link_text), config, telemetry)
        peers, votes = [story_of(member) for member in members], "" if found is None else str(found)
    if as_json:
        say(json.dumps([status_figures(peer) for peer in peers]))
    elif peers:
        show(peers)
    else:
        say("Nobody is in this run at the moment.")
    if votes and not as_json:
        say(votes)


def fetch_votes(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> tuple[list[Member], VotesHere | None]:
    """Fetch the members of a run and its voters, as far as it shows them to visitors. Raises `FlockstepError`."""
    from ..dht.rendezvous import find_manifest, find_members, visit

    async def ask(node: Node, directory: Directory) -> tuple[list[Member], VotesHere | None]:
        members = list(await find_members(node, directory, link.run_id))
        for member in members:
            node.learn(member.peer, member.body.addresses)
        signed = await find_manifest(directory, link.run_id)
        # A closed run gives its certificates to no visitor.
        return members, await ask_votes(node, members, signed) if charter_of(signed).earned else None

    return visit(link, config, telemetry, ask)


def votes_line(config: PeerConfig) -> str:
    """Return who is here to vote, as this computer's keeper has reported last; empty if it has not."""
    line = ""
    for _, event in read_events(log_path(config.home)):
        match event.get("event"):
            case "peer.start":
                line = ""
            case "run.votes":
                counts = f"{event.get('votes')} of {event.get('total')} are here, {event.get('quorum')} decide"
                line = plain_text(f"votes: {counts}; {event.get('reason')}")
            case "round.awaited":
                line = plain_text(f"no round: {event.get('reason')}")
            case "round.possible":
                line = ""
    return line


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
        state="keeping" if is_keeper(member) and body.state == MemberState.TRAINING else body.state,
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
