"""Data from members: files go by hash from whoever has them, whatever the others say and serve."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.optim.data.tokenizer import files_folder
from flockstep.optim.shards.index import ShardIndex
from flockstep.optim.shards.packed import seed_file
from flockstep.optim.shards.seeding import HELD_SECONDS, STALL_SECONDS, Seeds, shards_folder
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.disk import write_whole
from flockstep.peer.base.errors import LocalError, NetworkError
from flockstep.peer.base.transport import Stream
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node import bulk
from flockstep.peer.node.node import Node
from flockstep.peer.wire.framing import frame
from support.packed import packed, train_tokenizer

run_test = run_virtual

OWNER, ANNA, BEN, EVE = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3, 4))


@dataclass
class Peer:
    """A node with its files and its events."""

    node: Node
    seeds: Seeds
    home: Path
    events: list[Event] = field(default_factory=list)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


@dataclass
class World:
    """A run whose data its members provide."""

    folder: Path
    signed: SignedManifest
    index: ShardIndex
    peers: dict[str, Peer] = field(default_factory=dict)

    def __getitem__(self, identity: Identity) -> Peer:
        return self.peers[identity.peer_id]

    async def take_index(self, identity: Identity) -> None:
        """Let a peer fetch the index from the owner, as whoever trains has done."""
        key, home = self.index.hash, self[identity].home
        size = (self.folder / "p" / "index.json").stat().st_size
        await self[identity].seeds.fetch(key, size, files_folder(home) / key.hex(), [OWNER.peer_id])
        await self[identity].seeds.look()

    async def take(self, identity: Identity, number: int, *others: Identity) -> bytes:
        """Let a peer fetch a shard from these, or from whom the directory names; it then provides it, too."""
        peer, shard = self[identity], self.index.shards[number]
        path = shards_folder(peer.home) / f"{shard.hash.hex()}.shard"
        await peer.seeds.fetch(shard.hash, shard.num_bytes, path, [other.peer_id for other in others])
        await peer.seeds.look()
        return path.read_bytes()


def run(folder: Path, body: Callable[[World], Awaitable[None]]) -> None:
    content = train_tokenizer(folder / "tokenizer.json")
    index = packed(folder / "p", tokenizer=content)
    size = (folder / "p" / "index.json").stat().st_size
    data = Data(source=f"tokens:swarm:{size}@{index.hash.hex()}")
    signed = SignedManifest.sign(Manifest(owner=OWNER.peer_id, name="x", data=data), OWNER)
    write_whole(seed_file(folder / OWNER.peer_id, index.hash), str(folder / "p").encode())

    async def main() -> None:
        async with world_of(World(folder, signed, index)) as world:
            await body(world)

    run_virtual(main)


@asynccontextmanager
async def world_of(world: World) -> AsyncIterator[World]:
    network, board = MemoryNetwork(latency=0.01), MemoryBoard()
    async with network.open(), trio.open_nursery() as nursery:

        async def live(identity: Identity, task_status: Any) -> None:
            telemetry = Telemetry(clock=trio.current_time)
            home, events = world.folder / identity.peer_id, list[Event]()
            telemetry.subscribe(events.append)
            transport = network.transport(identity.peer_id, telemetry=telemetry)
            async with Node(transport, identity, PeerConfig(home=home), telemetry, inline=True) as node:
                directory = MemoryDirectory(board, identity.peer_id, (f"/memory/{identity.peer_id}",), lambda *_: 0)
                await directory.provide(world.signed.run_id)
                seeds = Seeds(node, directory, world.signed, home)
                world.peers[identity.peer_id] = Peer(node, seeds, home, events)
                await seeds.look()
                task_status.started()
                await trio.sleep_forever()

        for identity in (OWNER, ANNA, BEN, EVE):
            await nursery.start(live, identity)
        for peer in world.peers.values():
            for other in world.peers:
                peer.node.learn(other, (f"/memory/{other}",))
        yield world
        nursery.cancel_scope.cancel()


def test_the_owner_provides_and_who_has_fetched_passes_it_on(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        original = (tmp_path / "p" / "00002.u16").read_bytes()
        await world.take_index(ANNA)
        assert await world.take(ANNA, 2, OWNER, BEN) == original
        world[OWNER].node.blobs.drop([world.index.shards[2].hash])
        assert await world.take(BEN, 2) == original  # By the directory, and from Anna.
        with pytest.raises(NetworkError, match="no member that has it is here"):
            await world.take(EVE, 3, ANNA, BEN)
        for key, size, name in (
            (world.index.hash, (tmp_path / "p" / "index.json").stat().st_size, "index.json"),
            (bytes.fromhex(world.index.tokenizer[7:]), world.index.tokenizer_bytes, "tokenizer.json"),
        ):
            await world[EVE].seeds.fetch(key, size, files_folder(world[EVE].home) / key.hex(), [OWNER.peer_id])
            assert (files_folder(world[EVE].home) / key.hex()).read_bytes() == (tmp_path / "p" / name).read_bytes()
        await world[EVE].seeds.look()
        world[OWNER].node.blobs.drop([world.index.hash])
        await trio.sleep(HELD_SECONDS + 1)  # What it has said before is believed no longer.
        await world[BEN].seeds.fetch(world.index.hash, size_of(tmp_path), tmp_path / "again", [EVE.peer_id])
        assert (tmp_path / "again").read_bytes() == (tmp_path / "p" / "index.json").read_bytes()

    run(tmp_path, body)


def size_of(folder: Path) -> int:
    return (folder / "p" / "index.json").stat().st_size


def test_a_member_without_the_index_provides_nothing_and_names_nothing(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.take(ANNA, 1, OWNER)
        other = shards_folder(world[ANNA].home) / f"{'ab' * 32}.shard"
        other.write_bytes(b"of another run")
        answer = await world[BEN].node.ask(ANNA.peer_id, wire.FilesAsk(world.signed.run_id, b""))
        assert answer == wire.FilesHeld(b"")
        await world.take_index(ANNA)
        answer = await world[BEN].node.ask(ANNA.peer_id, wire.FilesAsk(world.signed.run_id, b""))
        assert answer.tags == b"".join(sorted(one[:4] for one in (world.index.hash, world.index.shards[1].hash)))
        with pytest.raises(NetworkError, match="not here"):
            await world[BEN].node.fetch(ANNA.peer_id, bytes.fromhex("ab" * 32), 14)
        with pytest.raises(NetworkError, match="another run"):
            await world[BEN].node.ask(ANNA.peer_id, wire.FilesAsk("x" * 52, b""))

    run(tmp_path, body)


def test_a_liar_is_charged_and_the_file_comes_from_another(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        shard = world.index.shards[0]
        world[EVE].node.blobs.put(shard.hash, bytes(shard.num_bytes))

        async def all_of_it(peer: str, question: wire.FilesAsk) -> wire.FilesHeld:
            return wire.FilesHeld(b"".join(sorted(one.hash[:4] for one in world.index.shards)))

        for liar in (EVE, BEN):  # One serves other bytes, one nothing.
            world[liar].node.on_ask(wire.FilesAsk, all_of_it)
        assert await world.take(ANNA, 0, EVE, BEN, OWNER) == (tmp_path / "p" / "00000.u16").read_bytes()
        assert [event["peer"] for event in world[ANNA].named("peer.charged")] == [EVE.peer_id]
        assert [event["peer"] for event in world[ANNA].named("data.missed")] == [BEN.peer_id]

    run(tmp_path, body)


def test_members_that_send_a_byte_now_and_then_hold_a_file_up_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of 16 MiB came for an hour from each of them, at just more than the least rate."""
    monkeypatch.setattr(bulk, "LEAST_STATE_RATE", 1e-9)  # As if it were so long.

    async def body(world: World) -> None:
        shard = world.index.shards[0]

        async def all_of_it(peer: str, question: wire.FilesAsk) -> wire.FilesHeld:
            return wire.FilesHeld(shard.hash[:4])

        async def drip(stream: Stream, request: wire.Fetch) -> None:
            await stream.send_all(frame(wire.pack(wire.Serve(shard.num_bytes, "", True))))
            for _ in range(shard.num_bytes):
                await stream.send_all(b"x")
                await trio.sleep(STALL_SECONDS / 2)

        for liar in (EVE, BEN):
            world[liar].node.on_ask(wire.FilesAsk, all_of_it)
            monkeypatch.setattr(world[liar].node._bulk, "_send", drip)
        began = trio.current_time()
        assert await world.take(ANNA, 0, EVE, BEN, OWNER) == (tmp_path / "p" / "00000.u16").read_bytes()
        assert trio.current_time() - began < 3 * STALL_SECONDS
        assert len(world[ANNA].named("data.missed")) == 1

    run(tmp_path, body)


def test_an_answer_of_another_kind_is_charged_and_silence_costs_a_deadline(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        async def other(peer: str, question: wire.FilesAsk) -> wire.Leaves:
            return wire.Leaves(())

        async def silent(peer: str, question: wire.FilesAsk) -> wire.FilesHeld:
            await trio.sleep_forever()
            raise AssertionError

        world[EVE].node.on_ask(wire.FilesAsk, other)
        world[BEN].node.on_ask(wire.FilesAsk, silent)
        began = trio.current_time()
        assert await world.take(ANNA, 0, EVE, BEN, OWNER)
        assert trio.current_time() - began < 15
        assert [event["peer"] for event in world[ANNA].named("peer.charged")] == [EVE.peer_id]
        with pytest.raises(LocalError, match="67,108,865"):
            await world[ANNA].seeds.fetch(bytes(32), (64 << 20) + 1, tmp_path / "x", [])

    run(tmp_path, body)


def test_what_nobody_has_is_said_once_and_found_once_somebody_has_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        for _ in range(3):
            with pytest.raises(NetworkError):
                await world.take(BEN, 4, ANNA, EVE)
        assert len(world[BEN].named("file.awaited")) == 1
        await world.take_index(ANNA)
        await world.take(ANNA, 4, OWNER)
        await trio.sleep(HELD_SECONDS + 1)
        assert await world.take(BEN, 4, ANNA, EVE)

    run(tmp_path, body)


def test_a_pack_that_has_changed_is_not_provided_and_said(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        (tmp_path / "p" / "00001.u16").write_bytes(b"shorter")
        await world[OWNER].seeds.look()
        with pytest.raises(NetworkError, match="no member that has it is here"):
            await world.take(ANNA, 1, OWNER)
        index = tmp_path / "p" / "index.json"
        index.write_bytes(index.read_bytes() + b"\n")
        await world[OWNER].seeds.look()
        (told,) = world[OWNER].named("data.not_provided")
        assert "is not the index that the run pins" in str(told["reason"])

    run(tmp_path, body)
