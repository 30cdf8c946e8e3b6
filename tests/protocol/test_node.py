"""A node on the network in memory: messages, deadlines, heartbeats, bulk bytes, violations."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import DeadlineExceeded, NetworkError, ProtocolViolation, StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.memory.peer import MemoryTransport
from flockstep.peer.node import bulk, session
from flockstep.peer.node.file_blob import FileBlob
from flockstep.peer.node.guard import BURST
from flockstep.peer.node.node import Node
from flockstep.peer.node.session import message_packet
from flockstep.peer.wire.framing import frame
from support.recorded import recorded

A, B, C = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))


@dataclass
class Party:
    """Two nodes that know each other, and what they have told."""

    network: MemoryNetwork
    nodes: dict[str, Node] = field(default_factory=dict)
    events: list[tuple[str, Event]] = field(default_factory=list)

    def named(self, event: str) -> list[Event]:
        return [record for _, record in self.events if record["event"] == event]


@asynccontextmanager
async def party(*identities: Identity, latency: float = 0.01) -> AsyncIterator[Party]:
    network = MemoryNetwork(latency=latency)
    async with network.open(), trio.open_nursery() as nursery:
        guests = Party(network)

        async def live(identity: Identity, task_status: Any) -> None:
            telemetry = Telemetry(clock=trio.current_time)
            telemetry.subscribe(lambda event: guests.events.append((identity.peer_id, event)))
            transport = network.transport(identity.peer_id, telemetry=telemetry)
            async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:
                guests.nodes[identity.peer_id] = node
                task_status.started()
                await trio.sleep_forever()

        for identity in identities:
            await nursery.start(live, identity)
        for node in guests.nodes.values():
            for other in identities:
                node.learn(other.peer_id, (f"/memory/{other.peer_id}",))
        yield guests
        nursery.cancel_scope.cancel()

run_test = run_virtual


async def test_an_answer_that_does_not_come_is_a_deadline_and_a_refusal_says_why() -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]

        async def sleep(peer: str, question: wire.StateAsk) -> wire.Beat:
            await trio.sleep(100)
            return wire.Beat(False)

        b.on_ask(wire.StateAsk, sleep)
        with pytest.raises(DeadlineExceeded, match="StateAsk within 3 s"):
            await a.ask(B.peer_id, wire.StateAsk("run"), timeout=3)
        assert trio.current_time() == pytest.approx(3)
        with pytest.raises(NetworkError, match="does not answer MembersAsk"):
            await a.ask(B.peer_id, wire.MembersAsk("run", b""))


async def test_who_dies_while_asked_ends_the_question_at_once() -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]

        async def die(peer: str, question: wire.StateAsk) -> wire.Beat:
            guests.network.kill(B.peer_id)
            await trio.sleep_forever()

        b.on_ask(wire.StateAsk, die)
        with pytest.raises(StreamClosed):
            await a.ask(B.peer_id, wire.StateAsk("run"), timeout=50)
        assert trio.current_time() < 1


async def test_whoever_has_left_hears_nothing_any_more() -> None:
    """The transport goes on for a moment, and brings words to handlers whose tasks have ended."""

    async with party(A) as guests:
        a = guests.nodes[A.peer_id]
        heard: list[str] = []
        telemetry, events = recorded(clock=trio.current_time)
        async with Node(guests.network.transport(B.peer_id, telemetry=telemetry), B, PeerConfig(), telemetry) as b:
            a.learn(B.peer_id, (f"/memory/{B.peer_id}",))
            b.on_message(wire.Goodbye, lambda peer, message: heard.append(message.reason))
            a.send(B.peer_id, wire.Goodbye("one"))
            await trio.sleep(1)
        a.send(B.peer_id, wire.Goodbye("two"))
        await trio.sleep(1)
        assert heard == ["one"]
        assert [(event["event"], event["reason"]) for event in events] == [("stream.lost", "this peer is leaving")]


@pytest.mark.parametrize("how", ["stall", "cut"])
async def test_a_silent_peer_is_lost_after_three_beats_and_only_once(how: str) -> None:
    async with party(A, B, C) as guests:
        a = guests.nodes[A.peer_id]
        lost: list[tuple[str, float]] = []
        a.on_lost(lambda peer, reason: lost.append((peer, trio.current_time())))
        for node in guests.nodes.values():
            node.watch([A.peer_id, B.peer_id, C.peer_id])
            node.set_beat(1.0)
        await trio.sleep(10)
        assert not lost
        getattr(guests.network, how)(B.peer_id)
        await trio.sleep(20)
        ((peer, when),) = lost
        assert peer == B.peer_id
        assert 12 <= when <= 14
        assert any("silent for" in str(event["reason"]) for event in guests.named("peer.lost"))


async def test_who_is_watched_was_not_heard_before_it_has_sent_anything() -> None:
    async with party(A, B) as guests:
        a = guests.nodes[A.peer_id]
        heard: list[str] = []
        a.on_heard(heard.append)
        guests.network.stall(B.peer_id)
        a.watch([B.peer_id])
        await trio.sleep(1)
        assert (heard, a.heard(B.peer_id)) == ([], -math.inf)
        guests.network.resume(B.peer_id)
        guests.nodes[B.peer_id].send(A.peer_id, wire.Beat())
        await trio.sleep(1)
        assert heard == [B.peer_id]


async def test_who_beats_fast_does_not_lose_who_beats_slowly() -> None:
    """A peer in a round expects a word each second; one that still trains says one of its own every five."""

    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        a.watch([B.peer_id])
        b.watch([A.peer_id])
        a.set_beat(1.0)
        await trio.sleep(60)
        assert not guests.named("peer.lost")


async def test_beats_that_cross_are_not_answered_beside() -> None:
    """Two that beat at the same moments have heard each other: one word each way is enough."""

    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        a.watch([B.peer_id])
        b.watch([A.peer_id])
        await trio.sleep(10 * a.beat_interval + 1)
        beat = len(message_packet(wire.Beat(echo=True)))
        assert a.transport.traffic().sent == b.transport.traffic().sent == 10 * beat
        assert not guests.named("peer.lost")


async def test_one_stopped_peer_does_not_hold_up_what_is_said_to_all() -> None:
    async with party(A, B, C) as guests:
        a, c = guests.nodes[A.peer_id], guests.nodes[C.peer_id]
        heard: list[str] = []
        c.on_message(wire.Goodbye, lambda peer, message: heard.append(message.reason))
        guests.network.stall(B.peer_id)
        lost: list[str] = []
        a.on_lost(lambda peer, reason: lost.append(reason))
        a.watch([B.peer_id])
        for number in range(session.QUEUE_MESSAGES + 1):
            a.send([B.peer_id, C.peer_id], wire.Goodbye(str(number)))
            if number % 100 == 0:
                await trio.sleep(0.1)
        await trio.sleep(1)
        assert heard == [str(number) for number in range(session.QUEUE_MESSAGES + 1)]
        assert any("does not read" in reason for reason in lost)


async def test_a_peer_that_does_not_read_is_kept_few_bytes_for() -> None:
    async with party(A, B, C) as guests:
        a, c = guests.nodes[A.peer_id], guests.nodes[C.peer_id]
        heard: list[wire.Signed] = []
        c.on_message(wire.Signed, lambda peer, message: heard.append(message))
        guests.network.stall(B.peer_id)
        lost: list[str] = []
        a.on_lost(lambda peer, reason: lost.append(reason))
        a.watch([B.peer_id, C.peer_id])
        long = wire.Signed(A.peer_id, 1, bytes(100_000), bytes(64))
        for _ in range(2):  # Twice what is kept at a time goes to who reads.
            for _ in range(session.QUEUE_BYTES // 100_000 - 1):
                a.send([B.peer_id, C.peer_id], long)
            await trio.sleep(1)
        (reason,) = lost
        assert "bytes wait for" in reason
        assert B.peer_id in reason
        assert len(heard) == 2 * (session.QUEUE_BYTES // 100_000 - 1)


GARBAGE = {
    "a frame without end": (1 << 30).to_bytes(4, "big"),
    "an unknown kind": frame(bytes([9, 0, 0, 0, 0])),
    "a message without a number": frame(bytes([0, 0, 0, 0, 0])),
    "a message that is none": frame(bytes([0, 0, 0, 0, 0, 4]) + b"\xc1\xc1"),
    "an answer that nobody asked for": frame(bytes([2, 0, 0, 0, 0]) + wire.pack(wire.Beat(False))),
    "a signed word with a wrong length": frame(bytes([0, 0, 0, 0, 0, 9]) + b"\x94\xa1x\x14\xc4\x00\xc4\x00"),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_malformed_bytes_end_their_stream_charge_their_sender_and_do_nothing_else(what: str) -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]

        async def answer(peer: str, question: wire.StateAsk) -> wire.Beat:
            return wire.Beat(False)

        b.on_ask(wire.StateAsk, answer)
        await a.ask(B.peer_id, wire.StateAsk("run"))
        stream = await a.transport.open_stream(B.peer_id, session.SESSION_PROTOCOL)
        await stream.send_all(GARBAGE[what])
        with pytest.raises(StreamClosed):
            await stream.receive_some(1)
        (charge,) = guests.named("peer.charged")
        assert charge["peer"] == A.peer_id
        assert isinstance(await a.ask(B.peer_id, wire.StateAsk("run")), wire.Beat)


async def test_a_member_that_has_not_started_all_of_itself_blames_nobody_for_what_arrives() -> None:
    """A restarted peer serves first and takes messages later: what the others sent meanwhile was a broken rule."""

    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        heard: list[wire.Met] = []
        a.send(B.peer_id, wire.Met(b""))
        await trio.sleep(1)
        b.on_message(wire.Met, lambda peer, met: heard.append(met))
        a.send(B.peer_id, wire.Met(b""))
        await trio.sleep(120)
        assert heard == [wire.Met(b"")]
        assert not guests.named("peer.charged")
        (ended,) = guests.named("stream.lost")
        assert (ended["peer"], ended["reason"]) == (A.peer_id, "this peer does not take Met now")


@pytest.mark.parametrize(
    "data", [frame(b"x" * 300)[:304], frame(wire.pack(wire.Beat(False))), (1 << 31).to_bytes(4, "big")]
)
async def test_malformed_bytes_on_a_bulk_stream_do_no_more(data: bytes) -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        b.blobs.put(digest(b"blob"), b"blob")
        assert await a.fetch(B.peer_id, digest(b"blob"), 4) == b"blob"
        stream = await a.transport.open_stream(B.peer_id, bulk.BULK_PROTOCOL)
        await stream.send_all(data)
        with pytest.raises(StreamClosed):
            await stream.receive_some(1)
        (charge,) = guests.named("peer.charged")
        assert charge["peer"] == A.peer_id
        assert await a.fetch(B.peer_id, digest(b"blob"), 4) == b"blob"


async def test_requests_for_bytes_have_a_budget_and_a_file_is_not_hashed_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 50 bytes for the end of a file made its owner read and hash the whole file."""
    read: list[bytes] = []
    is_sound = FileBlob.is_sound

    def counted(blob: FileBlob, key: bytes) -> bool:
        read.append(key)
        return is_sound(blob, key)

    monkeypatch.setattr(FileBlob, "is_sound", counted)

    async with party(A, B) as guests:
        data = bytes(range(256)) * 100
        (tmp_path / "leaf").write_bytes(data)
        key = digest(data)
        guests.nodes[B.peer_id].blobs.put(key, FileBlob(tmp_path / "leaf", 0, len(data)))
        a = guests.nodes[A.peer_id]
        await a.transport.connect(B.peer_id, (f"/memory/{B.peer_id}",))
        stream = await a.transport.open_stream(B.peer_id, bulk.BULK_PROTOCOL)
        for _ in range(100):
            await stream.send_all(frame(wire.pack(wire.Fetch(key, len(data)))))
            assert await stream.receive_some(100)
        assert read == [key]
        with suppress(StreamClosed):
            await stream.send_all(2 * BURST * frame(wire.pack(wire.Fetch(bytes(32), 0))))
            while await stream.receive_some(1 << 16):
                pass
        (charged,) = guests.named("peer.charged")
        assert (charged["peer"], charged["step"]) == (A.peer_id, bulk.BULK_PROTOCOL)


async def test_bulk_bytes_come_whole_to_readers_only() -> None:
    async with party(A, B, C) as guests:
        a, b, c = (guests.nodes[identity.peer_id] for identity in (A, B, C))
        data = bytes(range(256)) * 20_000
        b.blobs.put(digest(data), data, readers=[A.peer_id])
        assert await a.fetch(B.peer_id, digest(data), len(data)) == data
        with pytest.raises(NetworkError, match="not for you"):
            await c.fetch(B.peer_id, digest(data), len(data))
        b.blobs.drop([digest(data)])
        with pytest.raises(NetworkError, match="not here"):
            await a.fetch(B.peer_id, digest(data), len(data))
        assert len(guests.named("fetch.refused")) == 2


async def test_other_bytes_than_announced_are_a_violation() -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        b.blobs.put(digest(b"right"), b"wrong")
        with pytest.raises(ProtocolViolation, match="hash"):
            await a.fetch(B.peer_id, digest(b"right"), 5)
        b.blobs.put(digest(b"long"), b"a longer one")
        with pytest.raises(ProtocolViolation, match="offers 12 bytes where 4"):
            await a.fetch(B.peer_id, digest(b"long"), 4)


async def test_a_fetch_goes_on_where_its_stream_broke() -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        data = bytes(3 << 20)
        asked: list[int] = []

        async def break_once(stream: Stream) -> None:
            request = wire.unpack((await stream.receive_some(1000))[4:])
            assert isinstance(request, wire.Fetch)
            asked.append(request.offset)
            rest = data[request.offset :]
            await stream.send_all(frame(wire.pack(wire.Serve(len(rest), ""))))
            if len(asked) == 1:
                await stream.send_all(rest[: 1 << 20])
                await trio.sleep(1)
                await stream.reset()
            else:
                await stream.send_all(rest)
                await trio.sleep(10)

        b.transport.handle(bulk.BULK_PROTOCOL, break_once)
        assert await a.fetch(B.peer_id, digest(data), len(data)) == data
        assert asked == [0, 1 << 20]
        assert len(guests.named("fetch.resumed")) == 1


class Upgraded:
    """A transport whose connections move to a better one on demand; its streams are those of the network in memory."""

    is_relayed = False

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self.opened: list[Stream] = []
        self.climb: Callable[[str], None]

    def on_climb(self, handler: Callable[[str], None]) -> None:
        self.climb = handler

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        stream = await self._transport.open_stream(peer, protocol)
        if protocol == bulk.BULK_PROTOCOL:
            self.opened.append(stream)
        return stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_a_fetch_under_way_leaves_no_stream_on_a_connection_that_a_better_one_replaces() -> None:
    async with party(B) as guests:
        telemetry = Telemetry(clock=trio.current_time)
        transport: Any = Upgraded(guests.network.transport(A.peer_id, telemetry=telemetry))
        blob = bytes(4 << 20)
        async with Node(transport, A, PeerConfig(), telemetry, inline=True) as a, trio.open_nursery() as nursery:
            a.learn(B.peer_id, (f"/memory/{B.peer_id}",))
            guests.nodes[B.peer_id].blobs.put(digest(blob), blob)
            for _ in range(3):  # The third one waits for a stream of the first two.
                nursery.start_soon(a.fetch, B.peer_id, digest(blob), len(blob))
            await trio.sleep(0.1)
            assert len(transport.opened) == 2
            transport.climb(B.peer_id)
        assert len(transport.opened) == 3
        for stream in transport.opened:
            with pytest.raises(StreamClosed):
                await stream.send_all(b"more")


async def test_leaving_says_goodbye_to_those_who_are_watched() -> None:
    async with party(A, B) as guests:
        a, b = guests.nodes[A.peer_id], guests.nodes[B.peer_id]
        heard: list[str] = []
        b.on_message(wire.Goodbye, lambda peer, message: heard.append(message.reason))
        a.watch([B.peer_id])
        await a.leave("finished")
        await trio.sleep(0.1)
        assert heard == ["finished"]
