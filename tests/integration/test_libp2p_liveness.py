"""Connections in doubt, on real hosts and sockets: who shows life keeps them, who does not loses them soon."""

import ctypes
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.peer.base.errors import StreamClosed
from flockstep.peer.base.transport import Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import tcp
from flockstep.peer.libp2p.dial import tcp_stream
from flockstep.peer.libp2p.liveness import LOOK_INTERVAL, SILENT_LOOKS, shows_life
from flockstep.peer.log.telemetry import Event, Telemetry
from support.loopback import ECHO, LOOPBACK

SO_ATTACH_FILTER = 26

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what was acknowledged")


@dataclass
class Pair:
    """Two hosts under a clock that can be put forward, and the events of the first."""

    here: Libp2pHost
    there: Libp2pHost
    clock: trio.testing.MockClock
    events: list[Event] = field(default_factory=list)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    def connections(self, host: Libp2pHost) -> list[Any]:
        hidden: Any = host
        other = self.there if host is self.here else self.here
        found: list[Any] = hidden._connections(other.peer_id)
        return found

    async def dial_again(self, host: Libp2pHost) -> None:
        """One more connection, as when two dial each other at the same moment, or one comes back."""
        hidden: Any = host
        other, number = (self.there if host is self.here else self.here), len(self.connections(host))
        assert await hidden._dialler.plainly(other.peer_id, other.addresses()[0]) == ""
        while min(len(self.connections(self.here)), len(self.connections(self.there))) <= number:
            await trio.lowlevel.checkpoint()

    async def conclude(self, event: str) -> None:
        """Look after look until there is such an event, or more looks than any check takes have passed."""
        for _ in range(3 * SILENT_LOOKS):
            await trio.testing.wait_all_tasks_blocked(0.01)
            if self.named(event):
                return
            self.clock.jump(LOOK_INTERVAL)
        raise AssertionError(self.events)


def run_test(body: Callable[[Pair], Any]) -> None:
    clock = trio.testing.MockClock(rate=1.0)

    async def main() -> None:
        async with pair(clock) as both:
            await body(both)

    trio.run(main, clock=clock)


@asynccontextmanager
async def pair(clock: trio.testing.MockClock) -> AsyncIterator[Pair]:
    telemetry = Telemetry()
    async with (
        open_host(Identity.generate(), LOOPBACK, telemetry) as here,
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as there,
    ):
        both = Pair(here, there, clock)
        telemetry.subscribe(both.events.append)

        async def echo(stream: Stream) -> None:
            while data := await stream.receive_some(1 << 16):
                await stream.send_all(data)

        there.handle(ECHO, echo)
        await here.connect(there.peer_id, there.addresses())
        while not both.connections(there):
            await trio.lowlevel.checkpoint()
        yield both


def keep_busy(connection: Any) -> trio.Event:
    """Let this end neither read nor write, like a process that computes, until the event is set."""
    stream: Any = tcp_stream(connection)
    read, write, free = stream.read, stream.write, trio.Event()

    async def read_later(n: int | None = None) -> bytes:
        data: bytes = await read(n)
        await free.wait()
        return data

    async def write_later(data: bytes) -> None:
        await free.wait()
        await write(data)

    stream.read, stream.write = read_later, write_later
    return free


def cut(connection: Any) -> None:
    """Let the system drop every packet that comes to this end, as a road does that has died without a word."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K: keep 0 bytes.
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    tcp_stream(connection).stream.socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@linux_only
async def test_crossing_dials_cost_no_connection_however_late_the_answers_come(both: Pair, /) -> None:
    (first,) = both.connections(both.there)
    free = keep_busy(first)
    await both.dial_again(both.there)
    await trio.testing.wait_all_tasks_blocked(0.01)
    await both.dial_again(both.here)
    await trio.testing.wait_all_tasks_blocked(0.01)
    free.set()
    await trio.testing.wait_all_tasks_blocked(0.01)
    both.clock.jump(60)
    await both.conclude("connection.alive")
    assert not both.named("connection.dead")
    assert len(both.connections(both.here)) == len(both.connections(both.there)) == 3


async def test_a_second_doubt_joins_the_check_that_is_under_way(both: Pair, /) -> None:
    moves: Any = both.here._moves
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(moves._doubt, both.there.peer_id)
    assert [event["peer"] for event in both.named("connection.alive")] == [both.there.peer_id]
    await moves._doubt(both.there.peer_id)
    assert len(both.named("connection.alive")) == 2


@linux_only
async def test_bytes_that_are_acknowledged_show_life_while_the_peer_is_too_busy_to_answer(both: Pair, /) -> None:
    keep_busy(*both.connections(both.there))
    hidden: Any = both.here
    hidden._spawn(hidden._moves._doubt, both.there.peer_id)
    await both.conclude("connection.alive")
    assert not both.named("connection.dead")


def test_any_byte_that_comes_shows_life_where_the_system_tells_of_no_acknowledgements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "ACKNOWLEDGED", slice(0, 0))

    async def body(both: Pair) -> None:
        hidden: Any = both.here
        hidden._spawn(hidden._moves._doubt, both.there.peer_id)
        await both.conclude("connection.alive")
        assert not both.named("connection.dead")

    run_test(body)


@linux_only
async def test_a_connection_that_died_without_a_word_is_given_up_and_the_new_one_used(both: Pair, /) -> None:
    (old,) = both.connections(both.here)
    filler = await both.here.open_stream(both.there.peer_id, ECHO)
    cut(old)
    cut(*both.connections(both.there))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill, filler)
        await both.dial_again(both.there)
        await both.conclude("connection.dead")
        (dead,) = both.named("connection.dead")
        assert (dead["peer"], dead["step"]) == (both.there.peer_id, "ping")
        assert "none was acknowledged" in str(dead["reason"])
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert tcp_stream(old).stream.socket.fileno() == -1
        stream = await both.here.open_stream(both.there.peer_id, ECHO)
        await stream.send_all(b"alive")
        assert await stream.receive_some(100) == b"alive"


async def test_a_goodbye_does_not_wait_for_a_peer_that_reads_nothing(both: Pair, /) -> None:
    """A close that is cancelled in the middle leaves the socket open, and one place less for this peer for ever."""

    (connection,) = both.connections(both.here)
    stream = await both.here.open_stream(both.there.peer_id, ECHO)
    keep_busy(*both.connections(both.there))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill, stream)
        await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.move_on_after(1.0):  # As a node does with a peer that has missed its beats.
            await both.here.disconnect(both.there.peer_id)
    assert tcp_stream(connection).stream.socket.fileno() == -1
    assert connection not in both.here.host.get_network().get_connections()


async def fill(stream: Stream) -> None:
    with suppress(StreamClosed):
        while True:
            await stream.send_all(bytes(1 << 20))


def test_silence_ends_after_so_many_looks_in_time() -> None:
    async def main() -> None:
        assert not await shows_life(lambda: 0)
        assert trio.current_time() == pytest.approx(SILENT_LOOKS * LOOK_INTERVAL)
        signs = iter([0, 0, 0, 1])
        assert await shows_life(lambda: next(signs))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_pause_of_ones_own_is_not_the_silence_of_another() -> None:
    """What came while the loop stood still is read only after the late look."""
    clock = trio.testing.MockClock()
    signs: list[int] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def check() -> None:
                assert await shows_life(lambda: len(signs))

            nursery.start_soon(check)
            for _ in range(SILENT_LOOKS - 1):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(LOOK_INTERVAL)
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(60)
            await trio.testing.wait_all_tasks_blocked()
            signs.append(1)
            clock.jump(LOOK_INTERVAL)

    trio.run(main, clock=clock)
