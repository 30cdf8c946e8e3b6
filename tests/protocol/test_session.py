"""Messages between two nodes in memory: in order, batched, and counted as heartbeats."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import MalformedMessage, NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.memory.stream import SEGMENT, MemoryStream
from flockstep.peer.node import session
from flockstep.peer.node.node import Node
from flockstep.peer.node.session import message_packet, unpack_message

ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def virtually(network: MemoryNetwork, body: Callable[[Node, Node], Awaitable[None]]) -> None:
    async def main() -> None:
        async with network.open():
            log = Telemetry(clock=trio.current_time)
            ends = [network.transport(identity.peer_id, telemetry=log) for identity in (ANNA, BERT)]
            async with (
                Node(ends[0], ANNA, PeerConfig(), log, inline=True) as anna,
                Node(ends[1], BERT, PeerConfig(), log, inline=True) as bert,
            ):
                anna.learn(BERT.peer_id, ends[1].addresses())
                bert.learn(ANNA.peer_id, ends[0].addresses())
                await body(anna, bert)

    run_virtual(main)


@pytest.mark.parametrize("rate", [None, 1e5])
def test_words_arrive_in_the_order_in_which_they_were_said(rate: float | None) -> None:
    heard: list[str] = []
    long = "x" * 1000

    async def body(anna: Node, bert: Node) -> None:
        bert.on_message(wire.Goodbye, lambda peer, message: heard.append(message.reason))
        for number in range(300):  # The first ones wait for the stream, which then takes the others at once.
            anna.send(BERT.peer_id, wire.Goodbye(f"{number} {long if number % 7 == 0 else ''}".strip()))
            if number % 50 == 49:
                await trio.sleep(0.3)
        await trio.sleep(10)

    virtually(MemoryNetwork(latency=0.05, bandwidth=rate, jitter=0.02), body)
    assert [int(reason.split()[0]) for reason in heard] == list(range(300))


def test_what_has_gathered_goes_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    send_all = MemoryStream.send_all

    async def count(stream: MemoryStream, data: bytes) -> None:
        writes.append(len(data))
        await send_all(stream, data)

    monkeypatch.setattr(MemoryStream, "send_all", count)

    async def body(anna: Node, bert: Node) -> None:
        bert.on_message(wire.Goodbye, lambda peer, message: None)
        for _ in range(200):
            anna.send(BERT.peer_id, wire.Goodbye("y" * 1000))
        await trio.sleep(5)

    virtually(MemoryNetwork(latency=0.05), body)
    assert len(writes) == 4
    assert max(writes) <= session.SESSION_WRITE_BYTES


def test_a_word_to_many_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[object] = []
    pack = wire.pack
    monkeypatch.setattr(wire, "pack", lambda message: packed.append(message) or pack(message))  # type: ignore[func-returns-value]

    async def body(anna: Node, bert: Node) -> None:
        anna.send([BERT.peer_id, ANNA.peer_id, BERT.peer_id], wire.Goodbye("z"))

    virtually(MemoryNetwork(), body)
    assert len([message for message in packed if isinstance(message, wire.Goodbye)]) == 1


def test_words_that_go_both_ways_are_as_good_as_beats() -> None:
    beats: list[float] = []

    async def body(anna: Node, bert: Node) -> None:
        lost: list[str] = []
        for node, other in ((anna, BERT), (bert, ANNA)):
            node.on_message(wire.Goodbye, lambda peer, message: None)
            node.on_lost(lambda peer, reason: lost.append(reason))
            node.set_beat(1.0)
            node.watch([other.peer_id])
        bert.on_message(wire.Beat, lambda peer, beat: beats.append(trio.current_time()))
        for _ in range(40):
            anna.send(BERT.peer_id, wire.Goodbye(""))
            bert.send(ANNA.peer_id, wire.Goodbye(""))
            await trio.sleep(0.3)
        while_talking = len(beats)
        await trio.sleep(10)
        assert while_talking <= 1
        assert len(beats) >= while_talking + 9
        assert not lost

    virtually(MemoryNetwork(latency=0.05), body)


def test_who_only_listens_still_gets_beats() -> None:
    """Words that nobody answers must not keep the beat away that asks for one."""
    beats: list[float] = []

    async def body(anna: Node, bert: Node) -> None:
        bert.on_message(wire.Goodbye, lambda peer, message: None)
        bert.on_message(wire.Beat, lambda peer, beat: beats.append(trio.current_time()))
        anna.set_beat(1.0)
        anna.watch([BERT.peer_id])
        for _ in range(20):
            anna.send(BERT.peer_id, wire.Goodbye(""))
            await trio.sleep(0.3)

    virtually(MemoryNetwork(latency=0.05), body)
    assert len(beats) >= 2


def test_only_one_whole_word_is_unpacked() -> None:
    packet = message_packet(wire.Goodbye("home"))
    assert unpack_message(packet) == wire.Goodbye("home")
    for other in (packet[:-1], packet + packet, b"", packet[:3], packet[:4] + b"\x01" + packet[5:]):
        assert unpack_message(other) is None
    with pytest.raises(MalformedMessage):
        unpack_message(packet[:-1] + b"\xff")


def test_a_blob_that_is_withdrawn_while_it_is_served_is_nobodys_fault() -> None:
    data = bytearray(range(256)) * (40 * SEGMENT // 256)
    key = digest(data)

    async def change(anna: Node) -> None:
        await trio.sleep(1.5)
        anna.blobs.drop([key])
        data[:] = bytes(len(data))

    async def body(anna: Node, bert: Node) -> None:
        anna.blobs.put(key, memoryview(data))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, anna)
            with pytest.raises(NetworkError):
                await bert.fetch(ANNA.peer_id, key, len(data))

    virtually(MemoryNetwork(latency=0.01, bandwidth=1e6), body)


def test_a_piece_that_is_being_sent_stays_what_it_was() -> None:
    data = bytearray(range(256)) * (8 * SEGMENT // 256)
    whole = bytes(data)
    key = digest(data)

    async def change(anna: Node) -> None:
        await trio.sleep(0.2)
        anna.blobs.drop([key])
        data[:] = bytes(len(data))

    async def body(anna: Node, bert: Node) -> None:
        anna.blobs.put(key, memoryview(data))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, anna)
            assert await bert.fetch(ANNA.peer_id, key, len(data)) == whole

    virtually(MemoryNetwork(latency=0.01, bandwidth=1e6), body)


def test_a_small_word_does_not_overtake_a_long_one() -> None:
    heard: list[int] = []

    async def body(anna: Node, bert: Node) -> None:
        bert.on_message(wire.Members, lambda peer, message: heard.append(len(message.records)))
        anna.send(BERT.peer_id, wire.Members(()))
        await trio.sleep(1)
        for number in range(1, 7):
            size = 40_000 if number % 2 else 1
            anna.send(BERT.peer_id, wire.Members((bytes(size),) * number))
        await trio.sleep(10)

    virtually(MemoryNetwork(latency=0.05, bandwidth=1e6), body)
    assert heard == list(range(7))


def test_the_middle_of_a_long_word_is_not_taken_for_a_small_one() -> None:
    heard: list[str] = []

    async def body(anna: Node, bert: Node) -> None:
        bert.on_message(wire.Goodbye, lambda peer, message: heard.append(message.reason))
        bert.on_message(wire.Members, lambda peer, message: None)
        await anna.transport.connect(BERT.peer_id, bert.transport.addresses())
        stream = await anna.transport.open_stream(BERT.peer_id, session.SESSION_PROTOCOL)
        inner = message_packet(wire.Goodbye("x"))
        outer = message_packet(wire.Members((bytes(20) + inner,)))
        await stream.send_all(outer[: -len(inner)])
        await trio.sleep(1)
        await stream.send_all(inner)
        await trio.sleep(1)
        assert heard == []
        await stream.send_all(inner)
        await trio.sleep(1)
        assert heard == ["x"]

    virtually(MemoryNetwork(latency=0.05), body)


def test_one_hash_for_two_readers_is_served_to_both() -> None:
    async def body(anna: Node, bert: Node) -> None:
        anna.blobs.put(b"k" * 32, b"zeros", readers=["one"])
        anna.blobs.put(b"k" * 32, b"zeros", readers=["two"])
        assert [anna.blobs.get(b"k" * 32, reader) for reader in ("one", "two", "three")] == [b"zeros", b"zeros", None]
        anna.blobs.put(b"k" * 32, b"zeros")
        anna.blobs.put(b"k" * 32, b"zeros", readers=["two"])
        assert anna.blobs.get(b"k" * 32, "three") == b"zeros"

    virtually(MemoryNetwork(), body)
