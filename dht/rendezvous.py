"""From a join link to its run: reach a bootstrap, then the manifest, then the members.

Asynchronous inside the network process; `publish_manifest`, `fetch_manifest` and `fetch_members` are for commands that
only look or publish, and run a network of their own for that moment.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import trio

from ..peer import wire
from ..peer.address import rung_of
from ..peer.background import background
from ..peer.config import PeerConfig
from ..peer.errors import (
    ConnectFailed,
    DialAttempt,
    FlockstepError,
    NetworkError,
    ProtocolViolation,
    RemoteError,
    sole_error,
)
from ..peer.host import Libp2pHost, open_host, split_p2p
from ..peer.identity import Identity
from ..peer.nat.relay import relay_of
from ..peer.node.node import Node
from ..peer.telemetry import Telemetry
from ..peer.transport import Address, PeerId, Rung
from ..peer.troubles import FALSE_MANIFEST, RUN_UNKNOWN, remedy_for
from .directory.kademlia import Directory, KademliaDirectory, Validate, open_directory
from .hivemind.directory import all_doors
from .members.remembered import Remembered
from .members.table import Member, MemberTable
from .records import Record
from .run.link import JoinLink
from .run.manifest import SignedManifest, member_key, run_key, validate

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""For one member to say who is there; all are asked at once."""
ENTER_PERIOD = 30.0
"""Seconds between attempts to reach a bootstrap that did not answer: who is in a run is to be found through all of them."""
OTHERS_SECONDS = 2.0
"""For the other bootstraps once one is reached: each may know what the first does not, and none is to keep a peer out."""


@asynccontextmanager
async def door(
    identity: Identity,
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    validate: Validate = validate,
    remembered: Remembered | None = None,
) -> AsyncIterator[tuple[Libp2pHost, Directory]]:
    """A host and a directory that knows at least one bootstrap of the link, and takes what `validate` accepts.

    Where no bootstrap answers but a remembered member does, that will do, as does a hivemind DHT that the link names, and
    the bootstraps are tried again now and then. Raises `NetworkError` if nobody answers.
    """
    async with (
        open_host(identity, config, telemetry) as host,
        open_directory(host, server=False, telemetry=telemetry, validate=validate) as kademlia,
        all_doors(kademlia, link, telemetry, validate) as directory,
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


async def _enter_through_members(host: Libp2pHost, directory: Directory, run_id: str, telemetry: Telemetry) -> None:
    """A link without bootstraps: those through which its members are reached serve me as well."""
    tried: set[PeerId] = set()
    while True:
        try:
            for peer in await directory.find(run_id):
                for address in directory.addresses(peer):
                    base, relay = relay_of(address) if rung_of(address) is Rung.RELAYED else ("", "")
                    if base and relay not in tried:
                        tried.add(relay)
                        await host.bootstraps.enter(relay, base)
        except NetworkError as error:
            telemetry.emit("bootstrap.unreachable", step="through members", reason=str(error))
        await trio.sleep(ENTER_PERIOD)


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


async def enter(
    host: Libp2pHost, directory: KademliaDirectory, link: JoinLink, telemetry: Telemetry, nursery: trio.Nursery
) -> None:
    """Connect to the bootstraps of a link, all at once; one is enough. Raises `ConnectFailed` naming each failure.

    Those that do not answer are tried again now and then in `nursery`, in both cases.
    """
    failures: list[DialAttempt] = []
    reached: list[PeerId] = []
    untried = {via: split_p2p(via) for via in link.bootstraps}
    one_is_reached, all_are_tried = trio.Event(), trio.Event()

    async def hold(via: str, address: Address, peer: PeerId) -> None:
        while True:
            try:
                await host.bootstraps.enter(peer, address)
                await directory.add_server(peer)
                reached.append(peer)
            except NetworkError as error:
                failures.extend(error.attempts if isinstance(error, ConnectFailed) and via in untried else ())
                telemetry.emit("bootstrap.unreachable", peer=peer, step="connect", reason=str(error))
            untried.pop(via, None)
            if reached or not untried:
                one_is_reached.set()
            if not untried:
                all_are_tried.set()
            if peer in reached:
                return
            await trio.sleep(ENTER_PERIOD)

    for via, place in list(untried.items()):
        nursery.start_soon(hold, via, *place)
    await one_is_reached.wait()
    if not reached:
        remedy = remedy_for(attempt.cause for attempt in failures)
        raise ConnectFailed("any bootstrap of the link", failures, remedy=remedy)
    with trio.move_on_after(OTHERS_SECONDS):
        await all_are_tried.wait()


async def find_manifest(directory: Directory, run_id: str) -> SignedManifest:
    """The manifest of a run. Raises `NetworkError` where nobody knows it, `RemoteError` where only false ones are known."""
    value = await directory.get(run_key(run_id))
    if value is None:
        if isinstance(directory, KademliaDirectory):
            for server in directory.servers.nearest(run_key(run_id).encode()):
                with suppress(NetworkError):  # `get` has told which of them do not answer.
                    await held_manifest(directory, server, run_id)
        raise NetworkError(f"{RUN_UNKNOWN.cause} {run_id}", remedy=RUN_UNKNOWN.remedy)
    return SignedManifest.decode(value, run_id)


async def held_manifest(directory: KademliaDirectory, server: PeerId, run_id: str) -> SignedManifest | None:
    """The manifest that one server has of a run. Raises `NetworkError`, or `RemoteError` where it is a false one."""
    value = await directory.held(server, run_key(run_id))
    try:
        return SignedManifest.decode(value, run_id) if value is not None else None
    except RemoteError as error:
        false = FALSE_MANIFEST.with_details(str(error))
        raise ProtocolViolation(false.cause, remedy=false.remedy) from error


async def take_manifest(directory: Directory, remembered: Remembered, run_id: str) -> SignedManifest:
    """The manifest of a run that I take part in, from my disk or the directory; from now on I keep it in both.

    So a run stays findable as long as somebody is in it, whoever published it. Raises `NetworkError`.
    """
    signed = remembered.manifest() or await find_manifest(directory, run_id)
    remembered.keep_manifest(signed)
    if isinstance(directory, KademliaDirectory):
        directory.keep(run_key(run_id), signed.publishable)
    return signed


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

    async def publish(host: Libp2pHost, directory: Directory) -> None:
        await directory.put(run_key(signed.run_id), signed.publishable)

    visit(link, config, telemetry, publish)


def fetch_manifest(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> SignedManifest:
    """The manifest that a link leads to. Raises `FlockstepError`."""

    async def fetch(host: Libp2pHost, directory: Directory) -> SignedManifest:
        return await find_manifest(directory, link.run_id)

    return visit(link, config, telemetry, fetch)


def fetch_members(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> list[Member]:
    """Who is in a run now. Raises `FlockstepError`."""

    async def fetch(host: Libp2pHost, directory: Directory) -> list[Member]:
        return list(await find_members(host, directory, link.run_id, telemetry))

    return visit(link, config, telemetry, fetch)


def visit(
    link: JoinLink,
    config: PeerConfig,
    telemetry: Telemetry,
    errand: Callable[[Libp2pHost, Directory], Awaitable[T]],
) -> T:
    """Run one errand in a network that lasts as long as it, under an identity that nobody has seen before."""

    async def main() -> T:
        async with door(Identity.generate(), link, replace(config, upnp=False), telemetry) as (host, directory):
            return await errand(host, directory)

    try:
        return trio.run(main)
    except (FlockstepError, BaseExceptionGroup) as error:
        raise sole_error(error) from None
