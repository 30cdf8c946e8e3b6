"""Finding a run before anyone in it is known: small signed values and lists of providers, kept by the bootstraps.

Theory of operation. The wire is libp2p's Kademlia (`/ipfs/kad/1.0.0`): servers keep values and provider records,
anyone asks. A *walk* asks the known servers, and those whom they name, nearest to the key first, until 20 have been
asked or nobody new is named; a value is put at everyone who answered. A swarm has a handful of servers, so a walk asks
all of them, and one that is down costs one timeout beside the others, not behind them.

Serving is py-libp2p's `KadDHT` (see `directory_server`). Asking is done here, message by message: the library's own
calls do not say whether the servers had no value or none of them answered, they answer from the local store first (so
that an update is never seen), and raise where a newer value is known. With `directory_server` the one user of `kad_dht`.

Values are records that `validate` accepts for their key; of several the highest sequence wins, at the servers, too.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.common import MAX_DHT_MESSAGE_SIZE, PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.utils import sort_peer_ids_by_distance
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited

from ..peer.background import background
from ..peer.errors import LocalError, NetworkError, RemoteError
from ..peer.libp2p_host import Libp2pHost
from ..peer.libp2p_stream import ROAD_ERRORS
from ..peer.telemetry import Telemetry
from ..peer.transport import Address, PeerId
from .directory_server import DirectoryServer, add_peer_to, peers_of
from .memory_directory import Directory, MemoryBoard, MemoryDirectory, Validate

__all__ = ["Directory", "KademliaDirectory", "MemoryBoard", "MemoryDirectory", "Validate", "open_directory"]

MAX_SERVERS = 20
"""k of Kademlia, in the paper and in every libp2p: so many servers nearest to a key keep its value."""

ASK_TIMEOUT = 8.0
"""Seconds for one server, dial included; a walk has `WALK_TIMEOUT`, enough for two such delays behind each other."""

WALK_TIMEOUT = 20.0

ASK_AGAIN = (0.0, 0.3, 1.0)
"""Seconds before each attempt: a server resets streams when it is busy."""

REPUBLISH_SECONDS = 20 * 60.0
"""A third of the expiry of provider records: two republications may fail."""


@asynccontextmanager
async def open_directory(
    host: Libp2pHost, *, server: bool, telemetry: Telemetry, validate: Validate
) -> AsyncIterator["KademliaDirectory"]:
    """The directory of a host; as a `server` it also keeps what others publish."""
    async with background() as nursery:
        dht = DirectoryServer(host, validate) if server else None
        directory = KademliaDirectory(host, telemetry, validate, dht)
        if dht is not None:
            nursery.start_soon(dht.serve, telemetry)
        nursery.start_soon(directory.republish)
        try:
            yield directory
        finally:
            if dht is not None:
                host.host.remove_stream_handler(PROTOCOL_ID)


class KademliaDirectory:
    """Implements `Directory` over libp2p's Kademlia."""

    def __init__(
        self, host: Libp2pHost, telemetry: Telemetry, validate: Validate, server: DirectoryServer | None = None
    ) -> None:
        self._host = host
        self._telemetry = telemetry
        self._validate = validate
        self._server = server
        self._servers: dict[PeerId, tuple[Address, ...]] = {}
        self._addresses: dict[PeerId, tuple[Address, ...]] = {}
        self._published: dict[str, bytes] = {}
        self._provided: dict[str, None] = {}

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value, and keep it published; `LocalError` if it may not stand under its key."""
        try:
            sequence = self._validate(key, value)
        except RemoteError as error:
            raise LocalError(f"refusing to publish what nobody would accept under {key}: {error}") from error
        self._published[key] = value
        held = self._best(key, await self._walk(_message(Message.GET_VALUE, key)))
        if held is not None and self._validate(key, held) > sequence:
            self._telemetry.emit("directory.outdated", step="put", reason=f"a newer value of {key} is published")
            del self._published[key]
            return
        message = _message(Message.PUT_VALUE, key)
        message.record.key, message.record.value = message.key, value
        await self._tell(message)

    async def get(self, key: str) -> bytes | None:
        """The valid value of the highest sequence, None if the servers have none."""
        return self._best(key, await self._walk(_message(Message.GET_VALUE, key)))

    async def held(self, server: PeerId, key: str) -> bytes | None:
        """What this server has under a key, whether that is valid or not. Raises `NetworkError` or `RemoteError`."""
        with trio.move_on_after(ASK_TIMEOUT):
            answer = await self._ask(server, _message(Message.GET_VALUE, key))
            return bytes(answer.record.value) if answer.HasField("record") else None
        raise NetworkError(f"the directory server {server} did not answer within {ASK_TIMEOUT:g} s")

    @property
    def servers(self) -> tuple[PeerId, ...]:
        """Those among whom I ask that I am connected to."""
        return tuple(server for server in self._servers if server in self._host.connected())

    async def provide(self, run_id: str) -> None:
        """Publish that I am in a run, and keep it published."""
        self._provided[run_id] = None
        await self._walk(_message(Message.GET_PROVIDERS, _run_key(run_id)))
        message = _message(Message.ADD_PROVIDER, _run_key(run_id))
        add_peer_to(message.providerPeers, ID.from_base58(self._host.peer_id), self._host.addresses())
        await self._tell(message)

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Who said so, without me; their addresses are then known to `addresses`."""
        answers = await self._walk(_message(Message.GET_PROVIDERS, _run_key(run_id)))
        found: dict[PeerId, tuple[Address, ...]] = {}
        for answer in answers.values():
            for peer, addresses in peers_of(answer.providerPeers).items():
                found[peer] = tuple(dict.fromkeys((*found.get(peer, ()), *addresses)))
        found.pop(self._host.peer_id, None)
        self._addresses.update(found)
        return tuple(found)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Where a peer that was found said to be."""
        return self._addresses.get(peer, ())

    async def add_server(self, peer: PeerId) -> None:
        """Ask this connected peer, too."""
        self._servers[peer] = self._host.dialled(peer)  # To dial it again when the connection has broken.
        if self._server is not None:
            await self._server.meet(peer)

    async def republish(self) -> None:
        """Publish everything anew before the servers forget it, until cancelled."""
        while True:
            await trio.sleep(REPUBLISH_SECONDS * random.uniform(0.8, 1.0))  # Not all members of a run at once.
            try:
                for run_id in tuple(self._provided):
                    await self.provide(run_id)
                for key, value in tuple(self._published.items()):
                    await self.put(key, value)
            except NetworkError as error:
                self._telemetry.emit("directory.republish_failed", step="republish", reason=str(error))

    def _best(self, key: str, answers: dict[PeerId, Message]) -> bytes | None:
        best: tuple[int, bytes] | None = None
        for server, answer in answers.items():
            if answer.HasField("record"):
                try:
                    found = self._validate(key, answer.record.value), answer.record.value
                except RemoteError as error:
                    self._telemetry.emit("peer.charged", peer=server, step=f"get {key}", reason=str(error))
                else:
                    best = max(best, found) if best else found
        return best[1] if best else None

    async def _walk(self, message: Message) -> dict[PeerId, Message]:
        """Ask the servers nearest to the message's key, and those whom they name. Raises `NetworkError` if none answers."""
        answers: dict[PeerId, Message] = {}
        failures: dict[PeerId, str] = {}
        if self._server is not None:
            answers[self._host.peer_id] = self._server.answer(message)
        with trio.move_on_after(WALK_TIMEOUT):
            while batch := self._nearest(message.key, {*answers, *failures}):
                async with trio.open_nursery() as nursery:
                    for server in batch:
                        nursery.start_soon(self._try_to_ask, server, message, answers, failures)
                for server in batch:
                    if server in answers:
                        for peer, addresses in peers_of(answers[server].closerPeers).items():
                            self._servers.setdefault(peer, addresses)
        if not answers:
            raise self._nobody(failures)
        return answers

    async def _tell(self, message: Message) -> None:
        """Send to every server nearest to the key; one must take it. Raises `NetworkError`."""
        answers: dict[PeerId, Message] = {}
        failures: dict[PeerId, str] = {}
        if self._server is not None:
            answers[self._host.peer_id] = self._server.answer(message)
        with trio.move_on_after(WALK_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for server in self._nearest(message.key, set()):
                    nursery.start_soon(self._try_to_ask, server, message, answers, failures)
        if not answers:
            raise self._nobody(failures)

    def _nearest(self, key: bytes, done: set[PeerId]) -> list[PeerId]:
        peers = sort_peer_ids_by_distance(key, [ID.from_base58(peer) for peer in self._servers])
        return [str(peer) for peer in peers[:MAX_SERVERS] if str(peer) not in done and str(peer) != self._host.peer_id]

    async def _try_to_ask(
        self, server: PeerId, message: Message, answers: dict[PeerId, Message], failures: dict[PeerId, str]
    ) -> None:
        failures[server] = f"no answer within {ASK_TIMEOUT:g} s"
        with trio.move_on_after(ASK_TIMEOUT):
            for pause in ASK_AGAIN:
                await trio.sleep(pause * random.uniform(0.5, 1.5))
                try:
                    answers[server] = await self._ask(server, message)
                except (NetworkError, RemoteError) as error:
                    failures[server] = str(error)
                else:
                    del failures[server]
                    return
        step = Message.MessageType.Name(message.type).lower()
        self._telemetry.emit("directory.unanswered", peer=server, step=step, reason=failures[server])

    async def _ask(self, server: PeerId, message: Message) -> Message:
        """One message and its answer. Raises `NetworkError`, or `RemoteError` where the answer is none."""
        if server not in self._host.connected():
            await self._host.connect(server, self._servers[server])
        try:
            stream = await self._host.host.new_stream(ID.from_base58(server), [PROTOCOL_ID])
            try:
                await stream.write(encode_varint_prefixed(message.SerializeToString()))
                data = await read_varint_prefixed_bytes_limited(stream, MAX_DHT_MESSAGE_SIZE)
            finally:
                with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                    await stream.close()
        except ROAD_ERRORS as error:
            raise NetworkError(f"the directory server {server} gave no answer: {error!r}") from error
        answer = Message()
        try:
            answer.ParseFromString(data)
        except DecodeError as error:
            raise RemoteError(f"the directory server {server} answered no Kademlia message") from error
        if answer.type != message.type:
            raise RemoteError(f"the directory server {server} answered another question")
        return answer

    def _nobody(self, failures: dict[PeerId, str]) -> NetworkError:
        asked = "; ".join(f"{server}: {reason}" for server, reason in failures.items()) or "no server is known"
        return NetworkError(
            f"no directory server answered ({asked})", remedy="check that a bootstrap of the run is up and reachable"
        )


def _message(kind: Any, key: str) -> Message:
    return Message(type=kind, key=key.encode())


def _run_key(run_id: str) -> str:
    return f"/flockstep/{run_id}"
