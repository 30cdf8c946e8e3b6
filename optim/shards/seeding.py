"""The network process's side of data from members: serves the files of a run's data by hash, and fetches them.

Theory of operation. A run may have its data from no server, but from its members: its owner's peer provides the pack that
`run create` was given, and whoever has fetched a file of it provides that, too. All files are addressed by their hash; the
run pins that of the index, and the index the others. Whoever needs a file asks some members which ones they hold, and then
those that hold it, in an order of its own, the owner last. The bytes go at the rate of states for newcomers: half of the
upload, and behind those of rounds. Of other data on this computer nothing is served or named.

Imports no torch, like everything that the network process imports.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import trio

from ...dht.directory.interface import Directory
from ...dht.run.manifest import SignedManifest
from ...peer import wire
from ...peer.base.digest import digest, keyed
from ...peer.base.disk import write_whole
from ...peer.base.errors import FlockstepError, LocalError, NetworkError, ProtocolViolation, RemoteError, UsageError
from ...peer.base.transport import PeerId
from ...peer.node.file_blob import FileBlob
from ...peer.node.node import Node
from ..data.tokenizer import files_folder
from .index import INDEX, MAX_INDEX_BYTES, MAX_SHARD_BYTES, read_index
from .packed import Pin, seed_folder

SHARD = ".shard"
MOST_ASKED = 8
"""Members that are asked for a file at once; as for a state."""
TAG_BYTES = 4
HELD_SECONDS = 20.0
"""How long an answer about what a member holds is believed."""
ANSWER_SECONDS = 10.0
STALL_SECONDS = 20.0
"""As for a leaf of a state: a provider serves its own rounds first."""
LATE_RATE = 125e3
"""Bytes/s: a provider with less than 1 Mbit/s is late. Each liar would else hold up a shard of 16 MiB for an hour."""
SCAN_SECONDS = 5.0
SCAN_SHARE = 50
"""Times as long as a look takes, at least, until the next one: 65,536 shards take a good part of a second."""

Peers = Callable[[], Sequence[PeerId]]


def shards_folder(home: Path) -> Path:
    """Return the folder of shards from elsewhere, each named by its hash."""
    return home / "cache" / "shards"


class Seeds:
    """The files of one run's data on this computer, over a node. Nothing that others send raises here."""

    def __init__(
        self, node: Node, directory: Directory, signed: SignedManifest, home: Path, invite: bytes = b""
    ) -> None:
        """`invite` is this peer's invitation, if the run demands one."""
        pin = Pin.of(signed.manifest.data.source)
        self._node, self._directory = node, directory
        self._run, self._owner = signed.run_id, signed.manifest.owner
        self._index = pin.index if pin is not None and pin.size else None
        self._home, self._invite = home, invite
        self._served: dict[bytes, FileBlob] = {}
        self._tags = b""
        self._held: dict[PeerId, tuple[float, frozenset[bytes]]] = {}
        """What each member has said that it holds, and when."""
        self._missed: set[bytes] = set()
        node.on_ask(wire.FilesAsk, self._tell)

    async def run(self) -> None:
        """Serve what lies on the disk, as it comes and goes, until cancelled."""
        while self._index is not None:
            began = trio.current_time()
            await self.look()
            await trio.sleep(max(SCAN_SECONDS, SCAN_SHARE * (trio.current_time() - began)))

    async def look(self) -> None:
        """Serve what lies on the disk now."""
        try:
            found = await self._node.compute(lambda: dict(self._scan()))
        except (OSError, FlockstepError) as error:
            self._node.telemetry.emit("data.not_provided", step="read the run's data", reason=str(error))
            return
        for key, blob in found.items():
            if self._served.get(key) != blob:
                self._node.blobs.put(key, blob)
        self._node.blobs.drop(self._served.keys() - found.keys())
        self._served = found
        self._tags = b"".join(sorted({key[:TAG_BYTES] for key in found}))

    async def fetch(self, key: bytes, size: int, path: Path, members: Iterable[PeerId]) -> None:
        """Write the file with this hash to `path`. Raises `NetworkError` if no member that is here provides it."""
        if size > MAX_SHARD_BYTES:
            raise LocalError(f"a file of the run's data has {size:,} bytes")
        peers = await self._providers(key, members)
        if (data := await self._first_of(peers, key, size)) is not None:
            await self._node.compute(write_whole, path, data)
            self._missed.discard(key)
            return
        reason = f"none of {len(peers)} members that were asked has it" if peers else "no member that has it is here"
        if key not in self._missed:
            self._missed.add(key)
            self._node.telemetry.emit("file.awaited", step="fetch a file of the run's data", reason=reason)
        raise NetworkError(reason)

    async def _first_of(self, peers: Sequence[PeerId], key: bytes, size: int) -> bytearray | None:
        """Return a file from the first that provides it, two at a time: the next is asked once one fails or is late."""
        found: bytearray | None = None
        asked: list[trio.CancelScope] = []
        async with trio.open_nursery() as nursery:

            async def fetch(peer: PeerId, scope: trio.CancelScope, ended: trio.Event) -> None:
                nonlocal found
                with scope:
                    try:
                        found = await self._node.fetch(peer, key, size, patience=STALL_SECONDS)
                        nursery.cancel_scope.cancel()
                    except NetworkError as error:
                        self._miss(peer, str(error))
                    except RemoteError as error:
                        self._node.charge(peer, "provide a file", error)
                if scope.cancelled_caught:
                    self._miss(peer, "it is late, and so is the one that was asked after it")
                ended.set()

            for peer in peers:
                for scope in asked[:-1]:
                    scope.cancel()
                asked.append(trio.CancelScope())
                nursery.start_soon(fetch, peer, asked[-1], ended := trio.Event())
                with trio.move_on_after(STALL_SECONDS + size / LATE_RATE):
                    await ended.wait()
        return found

    def _miss(self, peer: PeerId, reason: str) -> None:
        self._node.telemetry.emit("data.missed", peer=peer, step="fetch a file", reason=reason)
        self._held.pop(peer, None)

    async def _providers(self, key: bytes, members: Iterable[PeerId]) -> list[PeerId]:
        """Return the peers that say that they hold a file, in an order of mine, the owner last."""
        me = self._node.peer_id
        found = {peer for peer in members if peer != me}
        if not found:  # I am no member yet, and know none.
            found = {peer for peer in await self._directory.find(self._run) if peer != me}
            for peer in found:
                self._node.learn(peer, self._directory.addresses(peer))

        def order(peer: PeerId) -> tuple[bool, bytes]:
            return peer == self._owner, keyed("provider", key, me.encode(), peer.encode())

        others = sorted(found - {self._owner}, key=order)[:MOST_ASKED]
        asked = [*others, *({self._owner} & found)]
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(self._ask, peer)
        return [peer for peer in asked if key[:TAG_BYTES] in self._held.get(peer, (0.0, frozenset()))[1]]

    async def _ask(self, peer: PeerId) -> None:
        """Learn what a member holds, unless that is known."""
        now = trio.current_time()
        if peer in self._held and self._held[peer][0] + HELD_SECONDS > now:
            return
        self._held.pop(peer, None)
        try:
            answer = await self._node.ask(peer, wire.FilesAsk(self._run, self._invite), timeout=ANSWER_SECONDS)
            if not isinstance(answer, wire.FilesHeld):
                raise ProtocolViolation(f"{type(answer).__name__} in answer to FilesAsk")
        except NetworkError as error:
            self._node.telemetry.emit("data.missed", peer=peer, step="ask for files", reason=str(error))
        except RemoteError as error:
            self._node.charge(peer, "ask for files", error)
        else:
            tags = answer.tags
            held = frozenset(tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES))
            self._held = {one: what for one, what in self._held.items() if what[0] + HELD_SECONDS > now} | {peer: (now, held)}

    async def _tell(self, peer: PeerId, question: wire.FilesAsk) -> wire.FilesHeld:
        if question.run != self._run:
            raise NetworkError("this peer takes part in another run")
        return wire.FilesHeld(self._tags)

    def _scan(self) -> Iterator[tuple[bytes, FileBlob]]:
        """Yield the files of the run's data on this computer. Raises `OSError` and `UsageError`."""
        if (key := self._index) is None:
            return
        index = files_folder(self._home) / key.hex()
        if (folder := seed_folder(self._home, key)) is not None:
            index = folder / INDEX
        if not index.is_file():
            return
        with index.open("rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
        if digest(data) != key:
            raise UsageError(f"{index} is not the index that the run pins", remedy="pack the data anew as they were")
        yield key, FileBlob(index, 0, len(data))
        shards, files = shards_folder(self._home), files_folder(self._home)
        for name, hash_, size in read_index(data, str(index)).files:
            places = [shards / f"{hash_.hex()}{SHARD}", files / hash_.hex()]
            for path in [*([] if folder is None else [folder / name]), *places]:
                if path.is_file() and path.stat().st_size == size:
                    yield hash_, FileBlob(path, 0, size)
                    break
