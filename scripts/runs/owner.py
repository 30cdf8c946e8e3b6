"""`flockstep run vouch | revoke | ban | pardon | revise`: what a run's owner states after the run was published.

A statement is signed with the key of the home folder, kept in `<home>/runs/<run id>/statements`, and published through the
run's bootstraps, where the members find it. It is kept before it is published: its number is never given to another one.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from ...collectives.picture.picture import RunProgress, RunState
from ...dht.directory.interface import Directory
from ...dht.directory.kademlia import KademliaDirectory
from ...dht.keys import statements_key
from ...dht.members.owner_log import publish_pages, read_pages
from ...dht.members.remembered import Remembered
from ...dht.members.table import Member
from ...dht.rendezvous import find_manifest, find_members, visit
from ...dht.run.admission import Ticket
from ...dht.run.link import JoinLink
from ...dht.run.manifest import Manifest
from ...dht.run.revision import REVISABLE, Revision, open_revision, revised, settings_of
from ...dht.run.settings import parse_toml, read_toml
from ...dht.run.statements import (
    MAX_STATED_REASON,
    OwnerStatement,
    OwnerStatements,
    OwnerVerb,
    pages_of,
    unpack_statements,
)
from ...peer.base.config import PeerConfig
from ...peer.base.errors import NetworkError, RemoteError, UsageError
from ...peer.base.plain import plain_text
from ...peer.base.transport import PeerId
from ...peer.identity import Identity, identity_path, is_peer_id
from ...peer.log.telemetry import Telemetry, log_path
from ...peer.node.node import Node
from ..watch.watching import watched

if TYPE_CHECKING:
    from ...collectives.visit.watcher import RunWatcher

DONE = {
    OwnerVerb.VOUCH: "You vouch for {peer}",
    OwnerVerb.REVOKE: "The admission of {peer} is withdrawn",
    OwnerVerb.BAN: "{peer} is banned",
    OwnerVerb.PARDON: "{peer} is pardoned",
    OwnerVerb.REVISE: "The run is revised to {settings}",
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
        done = DONE[OwnerVerb(self.statement.verb)].format(peer=self.statement.peer, settings=self.statement.settings)
        held = f"{self.num_holders} of {self.num_bootstraps} bootstraps hold it"
        stated = f"{done}: statement {self.number} of this run; {held}, and members find it there within a minute."
        if self.statement.verb != OwnerVerb.REVISE:
            return stated
        return f"{stated} It holds for all from the round after the one whose certificate names it."


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

    is_now = verb == OwnerVerb.PARDON and until_round is None
    certified = _progress(link, config).round if is_now else 0

    async def choose(log: OwnerStatements, manifest: Manifest, members: FindMembers) -> OwnerStatement:
        if peer == log.owner:
            raise UsageError("that is you: the owner of a run states nothing about itself", remedy="name another peer")
        # Records of members may be some rounds old, above all on a busy machine; the chain is not.
        rounds = max(certified + 1, _round_of_run(await members())) if is_now else until_round
        return OwnerStatement(verb, peer, reason, rounds or 0)

    return _state(link, config, choose)


def revise_run(
    text: str,
    given: Sequence[str],
    file: Path | None,
    config: PeerConfig,
) -> Stated:
    """Sign a revision of the settings of the run of a link, and publish it. Raises `FlockstepError`.

    `given` are `NAME=VALUE`, which come before those of the TOML `file`; what neither names stays as it is.
    """
    link = JoinLink.parse(text)
    changes = {**_read_changes(file), **dict(map(parse_change, given))}
    if not changes:
        raise UsageError("nothing to revise is given", remedy="for example --set outer.rounds=60")
    certified = _check_not_over(link, config)

    async def choose(log: OwnerStatements, manifest: Manifest, members: FindMembers) -> OwnerStatement:
        before = open_revision(log.revision, log.run, log.owner)
        settings = settings_of(manifest, before, changes)
        after = revised(manifest, Revision(before.number + 1, settings))
        here = await members()
        # What members state shows more than the chain where the run's bootstraps are behind it.
        check_rounds(max(certified + 1, _round_of_run(here) if here else 1), after)
        return OwnerStatement(OwnerVerb.REVISE, log.owner, settings=settings)

    return _state(link, config, choose)


def check_rounds(now: int, after: Manifest) -> None:
    """Raise `UsageError` if a run that is in round `now` would be over under the settings `after` it."""
    if now > after.num_rounds:
        present = -(-now // after.outer.fragments)
        raise UsageError(
            f"outer.rounds = {after.outer.rounds} is below the present round, {present}",
            remedy=f"name {present} or more: the run then ends there",
        )


def _check_not_over(link: JoinLink, config: PeerConfig) -> int:
    """Return a run's last certified round. Raises `UsageError` where it is over: no round is left to name a revision."""
    progress = _progress(link, config)
    if progress.state is RunState.OVER:
        remedy = "`flockstep run succeed LINK --set rounds=60` has it go on, for so many more"
        raise UsageError("the run is over: its last round is certified, and no round is left to revise", remedy=remedy)
    return progress.round


def _progress(link: JoinLink, config: PeerConfig) -> RunProgress:
    async def look(watcher: "RunWatcher") -> RunProgress:
        with suppress(UsageError):  # Its bootstraps disagree on its chain: nothing is known of its end.
            await watcher.look(1)
        return watcher.picture().progress

    return watched(link, config, look)


def _read_changes(file: Path | None) -> dict[str, Any]:
    """Read a TOML file of settings by section, like a `run.toml`. Raises `UsageError`."""
    if file is None:
        return {}
    text = read_toml(file)
    try:
        tables = parse_toml(text)
    except UsageError as error:
        raise UsageError(f"cannot read {file}: {error}", remedy="it has the form of a run.toml: docs/steering.md") from error
    changes: dict[str, Any] = {}
    for section, table in tables.items():
        named = table.items() if isinstance(table, dict) else ()
        changes |= {f"{section}.{key}": value for key, value in named} or {section: table}
    return changes


def parse_change(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`: the section may be left out where only one has the setting. Raises `UsageError`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} sets nothing", remedy="write NAME=VALUE, for example outer.rounds=60")
    found = [f"{section}.{key}" for section, keys in REVISABLE.items() for key in keys if key == name.strip()]
    if len(found) > 1:
        raise UsageError(f"several sections have {name.strip()!r}", remedy=f"write {' or '.join(found)}")
    try:
        parsed = parse_toml(f"value = {value}")["value"]
    except UsageError:
        parsed = value.strip()  # A text without its quotes, which a shell takes away.
    return found[0] if len(found) == 1 else name.strip(), parsed


FindMembers = Callable[[], Awaitable[Sequence[Member]]]
Choose = Callable[[OwnerStatements, Manifest, FindMembers], Awaitable[OwnerStatement]]
"""Returns the statement to make, for a run with these statements, manifest and members."""


def _state(link: JoinLink, config: PeerConfig, choose: Choose) -> Stated:
    """Sign the statement that `choose` returns, and publish it; one that holds already is only published again."""
    identity = Identity.load_or_create(identity_path(config.home))

    async def publish(node: Node, directory: Directory) -> Stated:
        manifest = (await find_manifest(directory, link.run_id)).manifest
        check_owner(manifest, identity)
        owner = manifest.owner
        folder = config.home / "runs" / link.run_id
        none = OwnerStatements(link.run_id, owner)
        remembered = Remembered(folder, link.run_id, node.telemetry)
        known = await read_pages(directory, remembered.statements(none))
        wanted = await choose(known, manifest, lambda: find_members(node, directory, link.run_id))
        number = next((number for number, held in known.in_force.items() if held == wanted), 0)
        signed = remembered.append(known, identity, () if number else (wanted,))
        number = number or len(signed)
        await publish_pages(directory, signed, none)
        return await _count(directory, signed, number)

    with closing(Telemetry(log_path(config.home))) as telemetry:
        return visit(link, config, telemetry, publish)


def check_owner(manifest: Manifest, identity: Identity) -> None:
    """Raise `UsageError` for a key that is not the owner's."""
    if manifest.owner != identity.peer_id:
        raise UsageError(
            f"only its owner {manifest.owner} states anything about this run, not {identity.peer_id}",
            remedy="name the home folder with the owner's key by --home",
        )


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
    page = next(page for page, value in pages_of(statements) if record in unpack_statements(value))
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
        settings = f" {plain_text(stated.settings)}" if stated.settings else ""
        lines.append(f"{number:4} {stated.verb:7} {stated.peer}{settings}{until}{reason}")
    return lines
