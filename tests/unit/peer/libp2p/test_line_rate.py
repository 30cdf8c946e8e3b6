"""The rate limits of a line, under virtual time, over real sockets."""

import socket

import pytest
import trio
import trio.testing
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.libp2p.line_rate import AHEAD_SECONDS, LEAST_SLICE_BYTES, MESSAGE_BYTES, LineRate
from flockstep.peer.libp2p.tcp import TrafficMeter, TunedStream

RATE = 250_000.0
"""Bytes/s: 2 Mbit/s."""
PIECE, NUM_PIECES, NUM_CONNECTIONS = 100_000, 5, 4


def most(seconds: float, line: LineRate) -> float:
    """The bytes that may go within so many seconds."""
    return line.rate * (seconds + AHEAD_SECONDS) + NUM_CONNECTIONS * line.slice_bytes


async def pairs(meter: TrafficMeter) -> list[tuple[TunedStream, TunedStream]]:
    """Connections whose first ends count into the meter."""
    made = []
    for _ in range(NUM_CONNECTIONS):
        ends = [TunedStream(trio.SocketStream(trio.socket.from_stdlib_socket(end))) for end in socket.socketpair()]
        ends[0].count_into(meter)
        made.append((ends[0], ends[1]))
    return made


@pytest.mark.parametrize("direction", ["up", "read", "receive_into"])
def test_all_connections_together_keep_to_the_rate(direction: str) -> None:
    async def main() -> None:
        line = LineRate(RATE)
        meter = TrafficMeter(up=line) if direction == "up" else TrafficMeter(down=line)
        seen: list[tuple[float, int]] = []

        async def write(stream: TunedStream) -> None:
            for _ in range(NUM_PIECES):
                await stream.write(bytes(PIECE))

        async def drain(stream: TunedStream) -> None:
            left, room = NUM_PIECES * PIECE, memoryview(bytearray(PIECE))
            while left:
                got = await stream.receive_into(room) if direction == "receive_into" else len(await stream.read(PIECE))
                seen.append((trio.current_time(), got))
                left -= got

        connections = await pairs(meter)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for mine, other in connections:
                nursery.start_soon(write, mine if direction == "up" else other)
                nursery.start_soon(drain, other if direction == "up" else mine)
        total = NUM_CONNECTIONS * NUM_PIECES * PIECE
        assert total <= most(trio.current_time() - began, line)
        for start, _ in seen[::50]:
            window = sum(num for at, num in seen if start <= at <= start + 1.0)
            assert window <= most(1.0, line)
        for mine, other in connections:
            await mine.close()
            await other.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_message_goes_before_bytes_that_are_not_paid_for_and_not_without_end() -> None:
    async def main() -> None:
        line = LineRate(RATE)
        line.spend(int(RATE * AHEAD_SECONDS / 2))
        await line.ready(MESSAGE_BYTES)
        assert trio.current_time() == began
        line.spend(int(RATE))  # 1.5 s are unpaid now.
        await line.ready(MESSAGE_BYTES)
        assert trio.current_time() == pytest.approx(began + 0.5)
        await line.ready(MESSAGE_BYTES + 1)
        assert trio.current_time() == pytest.approx(began + 1.5)

    began = 0.0
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def run() -> None:
        nonlocal began
        began = trio.current_time()
        await main()

    trio.run(run, clock=clock)


def test_without_a_limit_nothing_waits() -> None:
    async def main() -> None:
        line, began = LineRate(), trio.current_time()
        line.spend(1 << 40)
        await line.ready()
        assert trio.current_time() == began
        assert line.queue_bytes == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_slow_line_has_small_slices() -> None:
    assert LineRate(1.0).slice_bytes == LEAST_SLICE_BYTES
    assert LineRate(RATE).slice_bytes == 5000


@pytest.mark.parametrize("bad", [-1.0, 0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["max_up", "max_down"])
def test_a_limit_that_nobody_can_take_part_with_is_refused(name: str, bad: float) -> None:
    with pytest.raises(UsageError, match="--max-"):
        PeerConfig(**{name: bad})  # type: ignore[arg-type]
