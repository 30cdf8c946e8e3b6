"""`flockstep run appoint`: the run's owner names the voters of a round that waits, since too few of its voters are here.

The command visits the run under a key of its own, so that the owner's keeper may run meanwhile. A closed run answers no
visitor: there it acts under the owner's key, whose home folder nobody else may use at that time.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from ...collectives.accountability.appointing import AppointmentRecord
from ...collectives.spec import charter_of
from ...collectives.visit.polls import Poll, appoint, ask_poll
from ...dht.directory.interface import Directory
from ...dht.members.owner_log import read_pages
from ...dht.members.remembered import Remembered
from ...dht.rendezvous import fetch_manifest, find_members, visit
from ...dht.run.link import JoinLink
from ...dht.run.statements import OwnerStatements
from ...peer.base.config import PeerConfig
from ...peer.base.errors import LocalError, NetworkError, UsageError
from ...peer.base.home_lock import home_lock
from ...peer.base.transport import PeerId
from ...peer.identity import Identity, identity_path, is_peer_id
from ...peer.log.telemetry import Telemetry, log_path
from ...peer.node.node import Node


def appoint_voters(text: str, voters: Sequence[PeerId], config: PeerConfig, say: Callable[[str], object]) -> None:
    """Appoint voters in the run of a link, those that are ready or the named ones among them. Raises `FlockstepError`."""
    link = JoinLink.parse(text)
    if wrong := next((voter for voter in voters if not is_peer_id(voter)), None):
        raise UsageError(
            f"{wrong!r} is not a peer id", remedy="this command without --voters shows those that are ready"
        )
    identity = Identity.load_or_create(identity_path(config.home))
    folder = config.home / "runs" / link.run_id
    with closing(Telemetry(log_path(config.home))) as telemetry:
        signed = Remembered(folder, link.run_id, telemetry).manifest() or fetch_manifest(link, config, telemetry)
        charter = charter_of(signed)
        if why_not := charter.why_not_appoint(identity.peer_id, charter.founders):
            remedy = "name the home folder with the owner's key by --home"
            raise UsageError(f"{identity.peer_id} appoints nobody in this run: {why_not}", remedy=remedy)

        async def errand(node: Node, directory: Directory) -> None:
            members = await find_members(node, directory, link.run_id)
            for member in members:
                node.learn(member.peer, member.body.addresses)
            poll = await ask_poll(node, [member.peer for member in members], charter)
            if poll is None:
                remedy = "start a keeper of the run; `flockstep status` with the same link shows who is here"
                raise NetworkError("no member shows how the decision of its round stands", remedy=remedy)
            for line in describe_poll(poll):
                say(line)
            statements = await read_pages(directory, OwnerStatements(signed.run_id, signed.manifest.owner))
            made = await appoint(node, poll, charter.amended(statements), AppointmentRecord(identity, folder), voters)
            slot, names = made.appointment.slot, ", ".join(made.appointment.voters)
            telemetry.emit(
                "owner.appointed", peer=identity.peer_id, step=f"term {slot.term}", reason=names, round=slot.round
            )
            again = "was appointed before and is shown again" if made.is_again else "is appointed"
            holders = f"{len(made.holders)} of {len(poll.here)} members hold it"
            say(
                f"Term {slot.term} of round {slot.round} {again}: {names}; {holders}, and enter it once theirs has stalled."
            )

        is_open = charter.kind == "open"
        with ExitStack() as held:
            if not is_open:
                try:
                    held.enter_context(home_lock(config.home, pid=os.getpid()))
                except LocalError as error:
                    remedy = "a closed run answers its members only: end that one, appoint, and start it again"
                    raise LocalError(str(error), remedy=remedy) from error
            visit(link, config, telemetry, errand, None if is_open else identity)


def describe_poll(poll: Poll) -> list[str]:
    """Return how a round stands in lines: its term, who is ready and who is missing."""
    slot, electorate = poll.slot, poll.electorate
    by = f", appointed by {poll.appointed_by}" if poll.appointed_by else ""
    votes = f"{electorate.votes_of(poll.answered)} of {electorate.total} votes are here, {electorate.quorum} needed"
    lines = [f"Round {slot.round}, term {slot.term}{by}: {votes}."]
    lines += [f"  ready    {peer}" for peer in sorted(poll.ready)]
    lines += [f"  busy     {peer}" for peer in sorted(poll.here & electorate.votes.keys() - poll.ready.keys())]
    lines += [f"  missing  {peer}" for peer in electorate.voters if peer and peer not in poll.here]
    return lines
