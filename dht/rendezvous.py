"""Rendezvous: from a join link to a bootstrap, then the run's manifest, then its members.

The only file outside of `peer/` that opens the real host. The asynchronous functions run in the network process;
`publish_manifest`, `fetch_manifest` and `visit` are for commands that only read or publish, and open a
network of their own meanwhile.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import trio

from ..peer import wire
from ..peer.address import rung_of, split_p2p
from ..peer.base.background import background
from ..peer.base.config import PeerConfig
from ..peer.base.errors import (
    ConnectFailed,
    DialAttempt,
    FlockstepError,
    LocalError,
    NetworkError,
    OtherProtocol,
    ProtocolViolation,
    RemoteError,
    RequestRefused,
    sole_error,
)
from ..peer.base.transport import Address, Host, PeerId, Rung
from ..peer.base.troubles import FALSE_MANIFEST, RUN_UNKNOWN, remedy_for
from ..peer.host import NONE_EXEMPT, open_host
from ..peer.https.serve import WebPlace
from ..peer.identity import Identity
from ..peer.log.telemetry import Telemetry
from ..peer.nat.relay import relay_of
from ..peer.node.node import Node
from ..peer.node.session import SESSION_PROTOCOL
from ..peer.quota.limits import BootstrapLimits
from .directory.interface import Directory, Validate
from .directory.kademlia import KademliaDirectory, open_directory
from .directory.server import DirectoryHost
from .hivemind.directory import all_directories
from .keys import member_key, run_key
from .members.body import open_member
from .members.remembered import Remembered
from .members.table import Member, MemberTable
from .published import validate_published
from .records import Record
from .run.link import JoinLink
from .run.manifest import SignedManifest

_T = TypeVar("_T")

SEARCH_ANSWER_SECONDS = 5.0
"""The timeout of one member's answer in seconds; all are asked at once."""
ENTER_PERIOD = 30.0
"""Seconds between retries of a bootstrap that did not answer: the members of a run may be known to any of them."""
MOST_NAMED_BY_MEMBERS = 3
"""Bootstraps that a peer enters where its link names none, each of another network: one that lies is none of most."""
TWIN_SECONDS = 5.0
"""The timeout in seconds for finding another process with this peer's key: a dial over a relay takes eight round trips. A
restart waits that long if its earlier addresses drop packets."""
OTHERS_SECONDS = 2.0
"""Seconds for the other bootstraps once one is reached: each may know more than the first, but none may delay a peer long."""


@asynccontextmanager
async def open_client(
    identity: Identity, config: PeerConfig, telemetry: Telemetry, validate: Validate = validate_published
) -> AsyncIterator[tuple[Host, KademliaDirectory]]:
    """Open a host and a directory client that knows no server yet. Raises `LocalError` if no port can be had."""
    async with (
        open_host(identity, config, telemetry) as host,
        open_directory(host, server=False, telemetry=telemetry, validate=validate) as directory,
    ):
        yield host, directory


@asynccontextmanager
async def open_bootstrap_host(
    identity: Identity,
    config: PeerConfig,
    telemetry: Telemetry,
    limits: BootstrapLimits,
    validate: Validate = validate_published,
    store: Path | None = None,
    web: Sequence[WebPlace] = (),
) -> AsyncIterator[tuple[DirectoryHost, KademliaDirectory]]:
    """Open a bootstrap's host and the directory that it serves and keeps in the file `store`. Raises `LocalError`.

    `web`: where it accepts WebSockets, too.
    """
    async with (
        open_host(identity, config, telemetry, bootstrap=limits, web=web) as host,
        open_directory(host, server=True, telemetry=telemetry, validate=validate, store=store) as directory,
    ):
        yield host, directory


@asynccontextmanager
async def open_bootstraps(
    identity: Identity,
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    validate_published: Validate = validate_published,
    remembered: Remembered | None = None,
) -> AsyncIterator[tuple[Host, Directory]]:
    """Open a host and a directory client that knows at least one bootstrap of the link.

    If no bootstrap answers, a remembered member that does, or a hivemind DHT that the link names, is enough; the
    bootstraps are retried in the background. The directory takes the values that `validate_published` accepts. Raises
    `NetworkError` if none of them answers.
    """
    async with (
        open_client(identity, config, telemetry, validate_published) as (host, kademlia),
        all_directories(kademlia, link, telemetry, validate_published) as directory,
        background() as nursery,
    ):
        if link.bootstraps:
            try:
                await enter(host, kademlia, link, telemetry, nursery)
            except ConnectFailed as error:
                reached = await find_again(host, remembered) if remembered is not None else None
                if reached is None and not link.hivemind:
                    raise
                telemetry.emit("door.remembered", peer=reached or "", step="connect", reason=str(error))
        else:
            nursery.start_soon(_enter_through_members, host, directory, link.run_id, telemetry)
        yield host, directory


async def _enter_through_members(host: Host, directory: Directory, run_id: str, telemetry: Telemetry) -> None:
    """Use some of the members' relays as my bootstraps if the link names none."""
    tried: set[PeerId] = set()
    networks: set[str] = set()
    while True:
        try:
            for peer in await directory.find(run_id):
                for address in directory.addresses(peer):
                    base, relay = relay_of(address) if rung_of(address) is Rung.RELAYED else ("", "")
                    network = NONE_EXEMPT.of(base.split("/")[2]).network if base else ""
                    if relay not in tried and network not in {"", *networks} and len(networks) < MOST_NAMED_BY_MEMBERS:
                        tried.add(relay)
                        await host.bootstraps.enter(relay, base, stated=True)
                        networks.add(network)
        except NetworkError as error:
            telemetry.emit("bootstrap.unreachable", step="through members", reason=str(error))
        await trio.sleep(ENTER_PERIOD)


async def check_alone(
    identity: Identity, link: JoinLink, config: PeerConfig, mine: Host | None = None, stated: Sequence[Address] = ()
) -> Sequence[Address]:
    """Raise `LocalError` if another process that runs has this identity, as with a copied home folder.

    A visitor with a new key dials the `stated` addresses, or else those of the peer's newest record in the directory; returns
    them. The handshake proves the key of the process that answers, so neither an old record, which any server may return, nor
    a stranger at an old address proves anything. `mine` is the host of this process if it is open already: the visitor may
    reach that, through a relay above all.
    """
    me, visitor, found = identity.peer_id, replace(config, port=0, upnp=False, announce=()), ""
    with trio.move_on_after(TWIN_SECONDS):
        try:
            bootstraps = replace(link, via=link.bootstraps)  # A node of hivemind takes longer to start.
            async with open_bootstraps(Identity.generate(), bootstraps, visitor, Telemetry()) as (host, directory):
                if not stated and (value := await directory.get(member_key(link.run_id, me))) is not None:
                    stated = open_member(Record.decode(value)).addresses
                await host.connect(me, stated)
                await (await host.open_stream(me, SESSION_PROTOCOL)).aclose()  # Now its side has the connection, too.
                if mine is None or host.peer_id not in mine.connected():
                    found = ", ".join(host.dialled(me))
        except* (NetworkError, RemoteError):  # Without an answer nothing shows another process.
            pass
    if found:
        raise LocalError(
            f"another process has the key of {config.home} and answers at {found}",
            remedy="end it first, or move identity.key out of this folder, which makes this a peer of its own",
        )
    return stated


async def find_again(host: Host, remembered: Remembered) -> PeerId | None:
    """Dial all remembered members at once; returns the first that answers, None if none does."""
    reached: list[PeerId] = []
    async with trio.open_nursery() as nursery:

        async def reach(peer: PeerId, addresses: tuple[Address, ...]) -> None:
            with suppress(ConnectFailed):  # An old address: that most members have moved is no event.
                await host.connect(peer, addresses)
                reached.append(peer)
                nursery.cancel_scope.cancel()

        for peer, addresses in remembered.addresses().items():
            if peer != host.peer_id:
                nursery.start_soon(reach, peer, addresses)
    return reached[0] if reached else None


async def enter(
    host: Host, directory: KademliaDirectory, link: JoinLink, telemetry: Telemetry, nursery: trio.Nursery
) -> None:
    """Connect to all bootstraps of a link at once; one is enough. Raises `ConnectFailed`, which names each failure.

    Those that do not answer are retried in `nursery`, in both cases.
    """
    failures: list[DialAttempt] = []
    reached: list[PeerId] = []
    untried: dict[PeerId, list[Address]] = {}
    for address, peer in map(split_p2p, link.bootstraps):
        untried.setdefault(peer, []).append(address)
    one_is_reached, all_are_tried = trio.Event(), trio.Event()

    async def hold(peer: PeerId, addresses: list[Address]) -> None:
        while True:
            try:
                await host.bootstraps.enter(peer, *addresses)
                await directory.add_server(peer)
                reached.append(peer)
            except NetworkError as error:
                failures.extend(error.attempts if isinstance(error, ConnectFailed) and peer in untried else ())
                telemetry.emit("bootstrap.unreachable", peer=peer, step="connect", reason=str(error))
            untried.pop(peer, None)
            if reached or not untried:
                one_is_reached.set()
            if not untried:
                all_are_tried.set()
            if peer in reached:
                return
            await trio.sleep(ENTER_PERIOD)

    for peer, addresses in list(untried.items()):
        nursery.start_soon(hold, peer, addresses)
    await one_is_reached.wait()
    if not reached:
        remedy = remedy_for(attempt.cause for attempt in failures)
        raise ConnectFailed("any bootstrap of the link", failures, remedy=remedy)
    with trio.move_on_after(OTHERS_SECONDS):
        await all_are_tried.wait()


async def find_manifest(directory: Directory, run_id: str) -> SignedManifest:
    """Find the manifest of a run.

    Raises `NetworkError` if no server has it, `RemoteError` if it is false or of another protocol.
    """
    value = await directory.get(run_key(run_id))
    if value is None:
        if isinstance(directory, KademliaDirectory):
            for server in directory.servers.nearest(run_key(run_id).encode()):
                with suppress(NetworkError):  # `get` has emitted an event for each that does not answer.
                    await held_manifest(directory, server, run_id)
        raise NetworkError(f"{RUN_UNKNOWN.cause} {run_id}", remedy=RUN_UNKNOWN.remedy)
    return SignedManifest.decode(value, run_id)


async def held_manifest(directory: KademliaDirectory, server: PeerId, run_id: str) -> SignedManifest | None:
    """Ask one server for the manifest of a run. Raises `NetworkError`, or `RemoteError` if its manifest is a false one."""
    value = await directory.held(server, run_key(run_id))
    try:
        return SignedManifest.decode(value, run_id) if value is not None else None
    except OtherProtocol:
        raise
    except RemoteError as error:
        false = FALSE_MANIFEST.with_details(str(error))
        raise ProtocolViolation(false.cause, remedy=false.remedy) from error


async def take_manifest(directory: Directory, remembered: Remembered, run_id: str) -> SignedManifest:
    """Take the manifest of my run from my disk or the directory, and keep it in both from now on.

    So a run is found as long as it has a member, even if its publisher is gone. Raises `NetworkError`, and
    `RemoteError` as `find_manifest` does.
    """
    signed = remembered.manifest() or await find_manifest(directory, run_id)
    remembered.keep_manifest(signed)
    if isinstance(directory, KademliaDirectory):
        directory.keep(run_key(run_id), signed.publishable)
    return signed


async def find_members(node: Node, directory: Directory, run_id: str) -> tuple[Member, ...]:
    """Find the active members of a run: all providers of its key are asked at once, and the first answer is taken."""
    table = MemberTable(run_id, node.peer_id)
    found = await directory.find(run_id)
    async with trio.open_nursery() as nursery:

        async def ask(peer: PeerId) -> None:
            try:
                value = await directory.get(member_key(run_id, peer))
                if value is not None:
                    table.merge(Record.decode(value), trio.current_time())
                member = table.get(peer)
                node.learn(peer, member.body.addresses if member is not None else ())
                answer = await node.ask(peer, wire.MembersAsk(run_id, b""), timeout=SEARCH_ANSWER_SECONDS)
                for data in answer.records if isinstance(answer, wire.Members) else ():
                    table.merge(Record.decode(data), trio.current_time())
                nursery.cancel_scope.cancel()
            except RequestRefused as error:  # It is there, and its record says so; a closed run tells visitors no more.
                node.telemetry.emit("gossip.failed", peer=peer, step="ask for members", reason=str(error))
            except NetworkError as error:
                table.lose(peer, trio.current_time(), str(error))
                node.telemetry.emit("member.unreachable", peer=peer, step="ask for members", reason=str(error))
            except RemoteError as error:
                node.charge(peer, "ask for members", error)

        for peer in found:
            nursery.start_soon(ask, peer)
    return table.claimed(trio.current_time())  # What its members say: a visitor meets one or two of them.


def publish_manifest(signed: SignedManifest, link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> None:
    """Publish a manifest through the link's bootstraps. Raises `FlockstepError`."""

    async def publish(node: Node, directory: Directory) -> None:
        await directory.put(run_key(signed.run_id), signed.publishable)

    visit(link, config, telemetry, publish)


def fetch_manifest(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> SignedManifest:
    """Find the manifest of a link's run. Raises `FlockstepError`."""

    async def fetch(node: Node, directory: Directory) -> SignedManifest:
        return await find_manifest(directory, link.run_id)

    return visit(link, config, telemetry, fetch)




def visit(
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    errand: Callable[[Node, Directory], Awaitable[_T]],
    identity: Identity | None = None,
) -> _T:
    """Run an errand on a node that is closed after it, under this identity or a new one. Raises `FlockstepError`."""

    async def main() -> _T:
        me, visitor = identity or Identity.generate(), replace(config, upnp=False)
        async with (
            open_bootstraps(me, link, visitor, telemetry) as (host, directory),
            Node(host, me, visitor, telemetry) as node,
        ):
            return await errand(node, directory)

    try:
        return trio.run(main)
    except (FlockstepError, BaseExceptionGroup) as error:
        raise sole_error(error) from None
