"""The Kademlia client: signed values and provider records, looked up at the bootstraps.

Theory of operation. The wire is libp2p's Kademlia (`/ipfs/kad/1.0.0`): servers keep values and provider records, any
peer may send requests. A *walk* (the paper's iterative lookup) asks the known servers, and those that they name,
nearest to the key first, until the 20 nearest have been asked; a value is put at the nearest known. A swarm has a
handful of servers, so a walk asks all of them at once, and one that is down costs one timeout in parallel. A server
that has answered enters the routing table (`routing`).

No server is trusted. Values are records that `validate` accepts for their key. Of all servers' values the highest
sequence wins, and servers that returned an older one, or none, are sent the newest (read repair): a server that was
down while a value was published has it after the next `get`. Providers that most servers of the user's own link name come
first. What this holds against is measured (`tests/protocol/test_eclipse.py`).

The lookups are written here, message by message. The library's own do not report whether the servers had no value or
none answered; they answer from the local store first (so that an update is never seen), and raise if a newer value is
known. With `server` and `messages` this is the only user of `kad_dht`.
"""

import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, islice, zip_longest
from pathlib import Path

import trio
from libp2p.kad_dht.common import PROTOCOL_ID

from ...peer.base.background import background
from ...peer.base.errors import LocalError, NetworkError, NoRightToVote, OtherProtocol, RemoteError, StreamClosed
from ...peer.base.transport import Address, Host, PeerId
from ...peer.identity import peer_of
from ...peer.log.telemetry import Telemetry
from .interface import Validate
from .messages import (
    MAX_NAMED_PEERS,
    Message,
    MessageReader,
    about,
    about_value,
    add_peer_to,
    binary_id,
    peers_of,
    send,
)
from .routing import BUCKET_SIZE, Candidates, Servers, position, position_of_key, shared_bits
from .server import DirectoryHost, DirectoryServer
from .store_file import StoreFile

MAX_ANSWER_BYTES = 1 << 20
"""The limit of an answer: it names some hundred peers; servers of other programs send more addresses of each than ours."""

MAX_FOUND = 128
"""The limit of providers taken from one walk: one that answers is enough."""

MAX_KNOWN = 4096
"""The limit of peers whose addresses are kept; the oldest are dropped first."""

ASK_TIMEOUT = 8.0
"""The timeout of one server in seconds, dial included; a walk's `WALK_TIMEOUT` is enough for two such delays in a row."""

WALK_TIMEOUT = 20.0

GRACE = 2.0
"""Seconds for the other servers of a walk once all pinned ones have answered: of free keys that are silent each walk would
take two timeouts. As the other bootstraps of a link have."""

REPAIR_TIMEOUT = 1.0
"""The timeout of read repair within `get`, in seconds."""

ASK_AGAIN = (0.0, 0.3, 1.0)
"""The backoff: seconds before each attempt; a busy server resets streams."""

REPUBLISH_SECONDS = 20 * 60.0
"""A third of the lifetime of provider records: two republications may fail."""

AGAIN_SECONDS = 60.0
"""Seconds until the retry of a publication that missed a server."""

REFRESH_SECONDS = 600.0
"""Seconds between refreshes of the routing table, on a server of each bucket; as in go-libp2p."""

FINEST_BUCKET = 15
"""The finest bucket that is refreshed. A key in it is found by trial: 65 000 hashes, 0.1 s; as go-libp2p's longest prefix."""


@asynccontextmanager
async def open_directory(
    host: DirectoryHost, *, server: bool, telemetry: Telemetry, validate: Validate, store: Path | None = None
) -> AsyncIterator["KademliaDirectory"]:
    """Open the directory of a host; a `server` also keeps the records of others, in the file `store` if given."""
    async with background() as nursery:
        dht = DirectoryServer(host, validate, StoreFile(store, telemetry) if store else None) if server else None
        directory = KademliaDirectory(host, telemetry, validate, dht)
        if dht is not None:
            await nursery.start(dht.serve)
            nursery.start_soon(directory.refresh)
        nursery.start_soon(directory.republish)
        yield directory


class KademliaDirectory:
    """A `Directory` over libp2p's Kademlia."""

    def __init__(
        self, host: Host, telemetry: Telemetry, validate: Validate, server: DirectoryServer | None = None
    ) -> None:
        self._host = host
        self._telemetry = telemetry
        self._validate = validate
        self.server = server
        """The server side, if this host has one."""
        self.servers = server.servers if server is not None else Servers(host.peer_id)
        self._addresses: dict[PeerId, tuple[Address, ...]] = {}
        self._vouched: dict[PeerId, dict[PeerId, tuple[Address, ...]]] = {}
        """By pinned server: the first servers that it has named last."""
        self._published: dict[str, bytes] = {}
        self._provided: dict[str, None] = {}
        self._look_again_at: dict[str, float] = {}
        """When to check again if a newer value than mine is published; servers refuse an older one in any case."""
        self._look_around_at = -math.inf
        """When to search for further servers near a run again, before I provide it."""
        self._missed = False
        """True if a server missed my last publication."""
        self._forgotten = trio.Event()
        """Set when a bootstrap is back: it may have lost my publications."""
        host.bootstraps.on_return(lambda: self._forgotten.set())

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value, and keep it published. Raises `LocalError` if it is not valid under its key."""
        try:
            sequence = self._validate(key, value)
        except RemoteError as error:
            raise LocalError(f"refusing to publish an invalid value under {key}: {error}") from error
        self._published[key] = value
        message = about_value(key, value)
        if trio.current_time() < self._look_again_at.get(key, -math.inf):
            with suppress(NetworkError):  # Refused, it may be outdated; unanswered, the walk raises.
                await self._publish(message)
                return
        held = self._best(key, await self._walk(about(Message.GET_VALUE, key)))
        if held is not None and self._validate(key, held) > sequence:
            self._telemetry.emit("directory.outdated", step="put", reason=f"a newer value of {key} is published")
            del self._published[key]
            self._look_again_at.pop(key, None)
            return
        await self._publish(message)
        self._look_again_at[key] = trio.current_time() + REFRESH_SECONDS

    async def get(self, key: str) -> bytes | None:
        """Return the valid value of the highest sequence; None if the servers have none."""
        answers = await self._walk(about(Message.GET_VALUE, key))
        best = self._best(key, answers)
        if best is not None:
            lacking = [server for server, answer in answers.items() if bytes(answer.record.value) != best]
            with trio.move_on_after(REPAIR_TIMEOUT):
                await self._send_to_all(about_value(key, best), lacking)
        return best

    def keep(self, key: str, value: bytes) -> None:
        """Republish a valid value from now on, without looking for a newer one first."""
        self._published[key] = value

    async def held(self, server: PeerId, key: str) -> bytes | None:
        """Return the value that one server has under a key, valid or not. Raises `NetworkError` or `RemoteError`."""
        with trio.move_on_after(ASK_TIMEOUT):
            answer = await self._ask(server, (), about(Message.GET_VALUE, key))
            return bytes(answer.record.value) if answer.HasField("record") else None
        raise NetworkError(f"the directory server {server} did not answer within {ASK_TIMEOUT:g} s")

    async def provide(self, run_id: str) -> None:
        """Publish that I provide a run, and keep it published."""
        self._provided[run_id] = None
        now = trio.current_time()
        if now >= self._look_around_at:
            await self._walk(about(Message.FIND_NODE, _run_key(run_id)))
            self._look_around_at = now + REFRESH_SECONDS
        message = about(Message.ADD_PROVIDER, _run_key(run_id))
        add_peer_to(message.providerPeers, self._host.peer_id, self._host.addresses())
        await self._publish(message)

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Find the providers of a run except me; `addresses` then returns theirs.

        Those come first that most pinned servers name, then those that most servers name: free keys are servers, too, and
        many of them may invent the same. Those that equally many name are taken from each server in turns, so that a
        server that invents some hides none.
        """
        answers = await self._walk(about(Message.GET_PROVIDERS, _run_key(run_id)))
        by_server = {server: peers_of(answer.providerPeers) for server, answer in answers.items()}
        named = list(by_server.values())
        pinned = [peers for server, peers in by_server.items() if self.servers.is_pinned(server)]
        found: dict[PeerId, tuple[Address, ...]] = {}
        for peer in filter(None, chain.from_iterable(zip_longest(*named))):
            found[peer] = tuple(dict.fromkeys(chain.from_iterable(peers.get(peer, ()) for peers in named)))
        found.pop(self._host.peer_id, None)

        def support(peer: PeerId) -> tuple[int, int]:
            return sum(peer in peers for peers in pinned), sum(peer in peers for peers in named)

        chosen = sorted(found, key=support, reverse=True)[:MAX_FOUND]
        for peer in chosen:
            self._addresses.pop(peer, None)  # Moves it behind those that were found earlier.
            self._addresses[peer] = found[peer]
        for peer in list(self._addresses)[:-MAX_KNOWN]:
            del self._addresses[peer]
        return tuple(chosen)

    async def connected(self, run_id: str) -> set[PeerId]:
        """Return the providers of a run to which a server is connected, by its own word. Raises `NetworkError`."""
        answers = await self._walk(about(Message.GET_PROVIDERS, _run_key(run_id)))
        named = chain.from_iterable(answer.providerPeers[:MAX_NAMED_PEERS] for answer in answers.values())
        return {peer_of(entry.id) for entry in named if entry.connection == Message.CONNECTED}

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses that a found peer has published."""
        return self._addresses.get(peer, ())

    async def add_server(self, peer: PeerId) -> None:
        """Use this connected peer as a server, too; it is sent my publications within a minute."""
        self._missed = self._missed or bool(self._provided or self._published)
        self.servers.pin(peer, self._host.dialled(peer))  # To dial it again when the connection has broken.

    async def republish(self) -> None:
        """Republish everything before it expires on the servers, until cancelled."""
        due = trio.current_time() + REPUBLISH_SECONDS
        while True:
            with trio.move_on_after(AGAIN_SECONDS * random.uniform(0.8, 1.0)):  # Jitter: not all members of a run at once.
                await self._forgotten.wait()
            if not self._missed and not self._forgotten.is_set() and trio.current_time() < due:
                continue
            self._missed, self._forgotten = False, trio.Event()
            due = trio.current_time() + REPUBLISH_SECONDS * random.uniform(0.8, 1.0)
            try:
                for run_id in tuple(self._provided):
                    await self.provide(run_id)
                for key, value in tuple(self._published.items()):
                    await self.put(key, value)
            except NetworkError as error:
                self._missed = True
                self._telemetry.emit("directory.republish_failed", step="republish", reason=str(error))

    async def refresh(self) -> None:
        """Refresh the routing table every `REFRESH_SECONDS`, until cancelled."""
        while True:
            await trio.sleep(REFRESH_SECONDS * random.uniform(0.8, 1.0))
            await self.look_around()

    async def look_around(self) -> None:
        """Refresh the routing table: look up my own position and a random one in each bucket."""
        own = position(self._host.peer_id)
        keys = [_random_key(own, bucket) for bucket in sorted(self.servers.buckets()) if bucket <= FINEST_BUCKET]
        for key in (binary_id(self._host.peer_id), *keys):
            with suppress(NetworkError):  # Each timeout has emitted an event.
                await self._walk(Message(type=Message.FIND_NODE, key=key))

    def _best(self, key: str, answers: dict[PeerId, Message]) -> bytes | None:
        best: tuple[int, bytes] | None = None
        for server, answer in answers.items():
            if answer.HasField("record"):
                try:
                    found = self._validate(key, answer.record.value), answer.record.value
                except (OtherProtocol, NoRightToVote) as error:  # Servers need not know the run.
                    self._telemetry.emit("directory.ignored", peer=server, step=f"get {key}", reason=str(error))
                except RemoteError as error:
                    self._telemetry.emit("peer.charged", peer=server, step=f"get {key}", reason=str(error))
                else:
                    best = max(best, found) if best else found
        return best[1] if best else None

    async def _walk(self, message: Message) -> dict[PeerId, Message]:
        """Ask the servers nearest to the message's key, and those that they name. Raises `NetworkError` if none answers."""
        answers = self._ask_myself(message)
        failures: dict[PeerId, str] = {}
        known = self._near(message.key)
        candidates = Candidates((*known, self._host.peer_id))
        asked: set[PeerId] = set()
        pinned = {server for server in known if self.servers.is_pinned(server)}
        with trio.move_on_after(WALK_TIMEOUT) as scope:

            async def ask(server: PeerId) -> None:
                await self._try_to_ask(server, known[server], message, answers, failures)
                if server in pinned and pinned <= answers.keys():
                    scope.deadline = min(scope.deadline, trio.current_time() + GRACE)

            while batch := self.servers.unasked(message.key, known, self._all_vouched(), asked):
                asked.update(batch)
                async with trio.open_nursery() as nursery:
                    for server in batch:
                        nursery.start_soon(ask, server)
                for server in batch:
                    if server in answers:
                        named = peers_of(answers[server].closerPeers)
                        if self.servers.is_pinned(server):
                            self._vouched[server] = dict(islice(named.items(), BUCKET_SIZE))
                        known |= {peer: where for peer, where in named.items() if candidates.take(peer, where)}
        if not answers:
            raise self._nobody(failures)
        return answers

    async def _publish(self, message: Message) -> None:
        """Send to the servers nearest to the key; one must accept. Raises `NetworkError`."""
        answers = self._ask_myself(message)
        near = self._near(message.key)
        failures = await self._send_to_all(message, [server for server in near if server != self._host.peer_id])
        self._missed = self._missed or bool(failures)
        if not answers and len(failures) == len(near):
            raise self._nobody(failures)

    async def _send_to_all(self, message: Message, servers: Sequence[PeerId]) -> dict[PeerId, str]:
        """Send to these servers at once; returns the reason of each failure."""
        answers: dict[PeerId, Message] = {}
        failures: dict[PeerId, str] = {}
        known = self._near(message.key)
        with trio.move_on_after(WALK_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for server in servers:
                    if server in known:
                        nursery.start_soon(self._try_to_ask, server, known[server], message, answers, failures)
        return failures

    def _near(self, key: bytes) -> dict[PeerId, tuple[Address, ...]]:
        """Return the servers with which a lookup begins, and that keep a record."""
        return self._all_vouched() | self.servers.nearest(key)

    def _all_vouched(self) -> dict[PeerId, tuple[Address, ...]]:
        found = {peer: where for named in self._vouched.values() for peer, where in named.items() if where}
        found.pop(self._host.peer_id, None)
        return found

    def _ask_myself(self, message: Message) -> dict[PeerId, Message]:
        answer = self.server.answer_myself(message) if self.server is not None else None
        return {self._host.peer_id: answer} if answer is not None else {}

    async def _try_to_ask(
        self,
        server: PeerId,
        addresses: tuple[Address, ...],
        message: Message,
        answers: dict[PeerId, Message],
        failures: dict[PeerId, str],
    ) -> None:
        failures[server] = f"no answer within {ASK_TIMEOUT:g} s"
        with trio.move_on_after(ASK_TIMEOUT):
            for pause in ASK_AGAIN:
                await trio.sleep(pause * random.uniform(0.5, 1.5))
                try:
                    answers[server] = await self._ask(server, addresses, message)
                except (NetworkError, RemoteError) as error:
                    failures[server] = str(error)
                else:
                    del failures[server]
                    self.servers.answered(server, addresses)
                    return
        self.servers.failed(server)
        step = Message.MessageType.Name(message.type).lower()
        self._telemetry.emit("directory.unanswered", peer=server, step=step, reason=failures[server])

    async def _ask(self, server: PeerId, addresses: tuple[Address, ...], message: Message) -> Message:
        """Send one message and receive its answer. Raises `NetworkError`, or `RemoteError` for a wrong answer."""
        if server not in self._host.connected():
            await self._host.connect(server, addresses)
        try:
            stream = await self._host.open_stream(server, PROTOCOL_ID)
            try:
                await send(stream, message)
                answer = await MessageReader(stream, MAX_ANSWER_BYTES).next()
            finally:
                with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                    await stream.aclose()
        except StreamClosed as error:
            raise NetworkError(f"the directory server {server} gave no answer: {error}") from error
        if answer is None:
            raise NetworkError(f"the directory server {server} gave no answer")
        if answer.type != message.type:
            raise RemoteError(f"the directory server {server} answered another question")
        return answer

    def _nobody(self, failures: dict[PeerId, str]) -> NetworkError:
        asked = "; ".join(f"{server}: {reason}" for server, reason in failures.items()) or "no server is known"
        return NetworkError(
            f"no directory server answered ({asked})", remedy="check that a bootstrap of the run is up and reachable"
        )


def _random_key(own: int, bucket: int) -> bytes:
    """Return a random key that shares exactly `bucket` leading bits with my position."""
    while True:
        key = random.randbytes(16)
        if shared_bits(own, position_of_key(key)) == bucket:
            return key


def _run_key(run_id: str) -> str:
    return f"/flockstep/{run_id}"
