"""`flockstep run vouch | revoke | ban | pardon`: what a run's owner states about a peer after the run was published.

A statement is signed with the key of the home folder, kept in `<home>/runs/<run id>/statements`, and published through the
run's bootstraps, where the members find it. It is kept before it is published: its number is never given to another one.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from statistics import median_high

from ..dht.directory.interface import Directory
from ..dht.directory.kademlia import KademliaDirectory
from ..dht.keys import statements_key
from ..dht.members.owner_log import publish_pages, read_pages
from ..dht.members.remembered import Remembered
from ..dht.members.table import Member
from ..dht.rendezvous import find_manifest, find_members, visit
from ..dht.run.admission import Ticket
from ..dht.run.link import JoinLink
from ..dht.run.statements import (
    MAX_STATED_REASON,
    OwnerStatement,
    OwnerStatements,
    OwnerVerb,
    unpack_statements,
)
from ..peer.config import PeerConfig
from ..peer.errors import NetworkError, RemoteError, UsageError
from ..peer.identity import Identity, is_peer_id
from ..peer.node.node import Node
from ..peer.plain import plain_text
from ..peer.telemetry import Telemetry, log_path
from ..peer.transport import PeerId

DONE = {
    OwnerVerb.VOUCH: "You vouch for {peer}",
    OwnerVerb.REVOKE: "The admission of {peer} is withdrawn",
    OwnerVerb.BAN: "{peer} is banned",
    OwnerVerb.PARDON: "{peer} is pardoned",
}
"""What each statement does, in a line for its owner."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A statement that is published: its number, and how many of the bootstraps hold it."""

    statement: OwnerStatement
    number: int
    num_holders: int
    num_bootstraps: int

    def describe(self) -> str:
        """Return it in one line."""
        done = DONE[OwnerVerb(self.statement.verb)].format(peer=self.statement.peer)
        held = f"{self.num_holders} of {self.num_bootstraps} bootstraps hold it"
        return f"{done}: statement {self.number} of this run; {held}, and members find it there within a minute."


def state_as_owner(
    verb: str, text: str, peer: PeerId, reason: str, until_round: int | None, config: PeerConfig
) -> Stated:
    """Sign a statement about `peer` in the run of a link, and publish it. Raises `FlockstepError`.

    Whoever revokes may name an invitation by the text that `flockstep run invite` has printed.

    `until_round`: the last round whose evidence a pardon covers; None: the round that the members are in. A statement that
    holds already is only published again.
    """
    link = JoinLink.parse(text)
    if verb == OwnerVerb.REVOKE and not is_peer_id(peer):
        with suppress(UsageError):  # Then it is no invitation either.
            peer = Ticket.parse(peer).invitation.key
    if not is_peer_id(peer):
        raise UsageError(
            f"{peer!r} is not a peer id", remedy="`flockstep run info LINK --json` shows those of the members"
        )
    if len(reason.encode()) > MAX_STATED_REASON:
        raise UsageError(f"the reason has {len(reason.encode())} bytes, at most {MAX_STATED_REASON} are allowed")
    identity = Identity.load_or_create(config.home / "identity.key")

    async def publish(node: Node, directory: Directory) -> Stated:
        owner = (await find_manifest(directory, link.run_id)).manifest.owner
        if owner != identity.peer_id:
            remedy = "name the home folder with the owner's key by --home"
            raise UsageError(
                f"only its owner {owner} states anything about this run, not {identity.peer_id}", remedy=remedy
            )
        if peer == owner:
            raise UsageError("that is you: the owner of a run states nothing about itself", remedy="name another peer")
        folder = config.home / "runs" / link.run_id
        none = OwnerStatements(link.run_id, owner)
        remembered = Remembered(folder, link.run_id, node.telemetry)
        known = await read_pages(directory, remembered.statements(none))
        rounds = until_round
        if verb == OwnerVerb.PARDON and rounds is None:
            rounds = _round_of_run(await find_members(node, directory, link.run_id))
        wanted = OwnerStatement(verb, peer, reason, rounds or 0)
        number = next((number for number, held in known.in_force.items() if held == wanted), 0)
        signed = remembered.append(known, identity, () if number else (wanted,))
        number = number or len(signed)
        await publish_pages(directory, signed, none)
        return await _count(directory, signed, number)

    with closing(Telemetry(log_path(config.home))) as telemetry:
        return visit(link, config, telemetry, publish)


def _round_of_run(members: Sequence[Member]) -> int:
    """Return the round that most members are in. Raises `UsageError` if none is found."""
    if not members:
        raise UsageError(
            "no member is found that could tell the round of the run",
            remedy="name the last round whose evidence the pardon voids by --round",
        )
    return median_high(member.body.round for member in members) + 1


async def _count(directory: Directory, statements: OwnerStatements, number: int) -> Stated:
    """Ask every bootstrap whether it holds a statement. Raises `NetworkError` if none does."""
    record = statements.records[number - 1]
    page = next(page for page, value in statements.pages() if record in unpack_statements(value))
    key = statements_key(statements.run, statements.owner, page)
    holders = servers = 0
    if isinstance(directory, KademliaDirectory):
        for server in directory.servers.nearest(key.encode()):
            servers += 1
            with suppress(NetworkError, RemoteError):  # It counts as one that does not hold it.
                value = await directory.held(server, key)
                holders += value is not None and record in unpack_statements(value)
        if not holders:
            remedy = "it is kept on this computer: run the command again when a bootstrap is reachable"
            raise NetworkError("no bootstrap holds the statement", remedy=remedy)
    return Stated(statements.statements[number - 1], number, holders, servers)


def describe_statements(statements: OwnerStatements) -> list[str]:
    """Return a line for each statement that no later one has replaced."""
    lines: list[str] = []
    for number, stated in statements.in_force.items():
        until = f" (evidence up to round {stated.until_round} is void)" if stated.until_round else ""
        reason = f": {plain_text(stated.reason)}" if stated.reason else ""
        lines.append(f"{number:4} {stated.verb:7} {stated.peer}{until}{reason}")
    return lines
