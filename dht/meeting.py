"""From a join link to its run: reach a bootstrap, then the manifest, then the members.

Asynchronous inside the network process; `publish_manifest`, `fetch_manifest` and `fetch_members` are for commands that
only look or publish, and run a network of their own for that moment.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import trio

from ..peer import wire
from ..peer.background import background
from ..peer.config import PeerConfig
from ..peer.errors import ConnectFailed, DialAttempt, FlockstepError, NetworkError, RemoteError, sole_error
from ..peer.identity import Identity
from ..peer.libp2p_host import Libp2pHost, open_host, split_p2p
from ..peer.node import Node
from ..peer.telemetry import Telemetry
from ..peer.transport import Address, PeerId
from .directory import Directory, KademliaDirectory, Validate, open_directory
from .members import Member, MemberTable
from .records import Record
from .remembered import Remembered
from .runs import JoinLink, SignedManifest, member_key, run_key, validate

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""For one member to say who is there; all are asked at once."""
ENTER_PERIOD = 30.0
"""Seconds between looks for the bootstraps of a peer that found the others without them; it needs them for newcomers."""

REMEDY_UNREACHABLE = "check that you are online and the link is current; any other bootstrap of the run serves as well"
REMEDY_UNKNOWN = "check the run id, or ask the run's owner to publish it with `flockstep run create`"


@asynccontextmanager
async def door(
    identity: Identity,
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    validate: Validate = validate,
    remembered: Remembered | None = None,
) -> AsyncIterator[tuple[Libp2pHost, KademliaDirectory]]:
    """A host and a directory that knows at least one bootstrap of the link, and takes what `validate` accepts.

    Where no bootstrap answers but a remembered member does, that will do, and the bootstraps are tried again now and
    then. Raises `NetworkError` if nobody answers.
    """
    async with (
        open_host(identity, config, telemetry) as host,
        open_directory(host, server=False, telemetry=telemetry, validate=validate) as directory,
        background() as nursery,
    ):
        try:
            await enter(host, directory, link, telemetry)
        except ConnectFailed as error:
            reached = await find_again(host, remembered) if remembered is not None else None
            if reached is None:
                raise
            telemetry.emit("door.remembered", peer=reached, step="connect", reason=str(error))
            nursery.start_soon(_enter_later, host, directory, link, telemetry)
        yield host, directory


async def find_again(host: Libp2pHost, remembered: Remembered) -> PeerId | None:
    """The first remembered member that answers, of all at once; None where none does."""
    reached: list[PeerId] = []
    async with trio.open_nursery() as nursery:

        async def reach(peer: PeerId, addresses: tuple[Address, ...]) -> None:
            with suppress(ConnectFailed):  # Its address of then: that most have moved is nothing to tell.
                await host.connect(peer, addresses)
                reached.append(peer)
                nursery.cancel_scope.cancel()

        for peer, addresses in remembered.addresses().items():
            if peer != host.peer_id:
                nursery.start_soon(reach, peer, addresses)
    return reached[0] if reached else None


async def _enter_later(host: Libp2pHost, directory: KademliaDirectory, link: JoinLink, telemetry: Telemetry) -> None:
    while True:
        await trio.sleep(ENTER_PERIOD)
        with suppress(ConnectFailed):  # `enter` has told why.
            await enter(host, directory, link, telemetry)
            return


async def enter(host: Libp2pHost, directory: KademliaDirectory, link: JoinLink, telemetry: Telemetry) -> None:
    """Connect to the bootstraps of a link, all at once; one is enough. Raises `ConnectFailed` naming each failure."""
    failures: list[DialAttempt] = []
    reached: list[str] = []

    async def reach(via: str) -> None:
        address, peer = split_p2p(via)
        try:
            await host.bootstraps.enter(peer, address)
            await directory.add_server(peer)
            reached.append(peer)
        except ConnectFailed as error:
            failures.extend(error.attempts)
            telemetry.emit("bootstrap.unreachable", peer=peer, step="connect", reason=str(error))

    async with trio.open_nursery() as nursery:
        for via in link.via:
            nursery.start_soon(reach, via)
    if not reached:
        raise ConnectFailed("any bootstrap of the link", failures, remedy=REMEDY_UNREACHABLE)


async def find_manifest(directory: Directory, run_id: str) -> SignedManifest:
    """The manifest of a run. Raises `NetworkError` where nobody knows it."""
    value = await directory.get(run_key(run_id))
    if value is None:
        raise NetworkError(f"the bootstraps know no run {run_id}", remedy=REMEDY_UNKNOWN)
    return SignedManifest.decode(value, run_id)


async def find_members(host: Libp2pHost, directory: Directory, run_id: str, telemetry: Telemetry) -> tuple[Member, ...]:
    """The active members, asked of all who say that they are there; whoever answers first knows the others."""
    table = MemberTable(run_id, host.peer_id)
    found = await directory.find(run_id)
    async with Node(host, host.identity, host.config, telemetry) as node, trio.open_nursery() as nursery:

        async def ask(peer: PeerId) -> None:
            try:
                value = await directory.get(member_key(run_id, peer))
                if value is not None:
                    table.merge(Record.decode(value), trio.current_time())
                member = table.get(peer)
                node.learn(peer, member.body.addresses if member is not None else ())
                answer = await node.ask(peer, wire.MembersAsk(run_id, ()), timeout=ANSWER_SECONDS)
                for data in answer.records if isinstance(answer, wire.Members) else ():
                    table.merge(Record.decode(data), trio.current_time())
                nursery.cancel_scope.cancel()
            except NetworkError as error:
                table.lose(peer, trio.current_time(), str(error))
                telemetry.emit("member.unreachable", peer=peer, step="ask for members", reason=str(error))
            except RemoteError as error:
                node.charge(peer, "ask for members", error)

        for peer in found:
            nursery.start_soon(ask, peer)
    return table.active(trio.current_time())


def publish_manifest(signed: SignedManifest, link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> None:
    """Put a manifest where the link's bootstraps find it. Raises `FlockstepError`."""

    async def publish(host: Libp2pHost, directory: KademliaDirectory) -> None:
        await directory.put(run_key(signed.run_id), signed.publishable)

    visit(link, config, telemetry, publish)


def fetch_manifest(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> SignedManifest:
    """The manifest that a link leads to. Raises `FlockstepError`."""

    async def fetch(host: Libp2pHost, directory: KademliaDirectory) -> SignedManifest:
        return await find_manifest(directory, link.run_id)

    return visit(link, config, telemetry, fetch)


def fetch_members(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> list[Member]:
    """Who is in a run now. Raises `FlockstepError`."""

    async def fetch(host: Libp2pHost, directory: KademliaDirectory) -> list[Member]:
        return list(await find_members(host, directory, link.run_id, telemetry))

    return visit(link, config, telemetry, fetch)


def visit(
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    errand: Callable[[Libp2pHost, KademliaDirectory], Awaitable[T]],
) -> T:
    """Run one errand in a network that lasts as long as it, under an identity that nobody has seen before."""

    async def main() -> T:
        async with door(Identity.generate(), link, config, telemetry) as (host, directory):
            return await errand(host, directory)

    try:
        return trio.run(main)
    except (FlockstepError, BaseExceptionGroup) as error:
        raise sole_error(error) from None
