"""The frames of a stranger, read by the task that reads real ones, under virtual time; and what windows may grow by."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.peer.identity import Identity
from flockstep.peer.quota.origins import Origin, Rates
from flockstep.peer.strangers.frames import (
    FIRST_WINDOW,
    FRAMES_BURST_SECONDS,
    FRAMES_PER_SECOND,
    MAX_WINDOW,
    TURN,
    WINDOWS_IN_ALL,
    WINDOWS_OF_ONE,
    WindowBudget,
    own_budget,
)
from flockstep.peer.yamux import muxer
from flockstep.peer.yamux.machine import DATA, HEADER, SYN, UPDATE, Stream
from flockstep.peer.yamux.muxer import Yamux
from libp2p.peer.id import ID
from support.secured import Secured

FOR_NO_STREAM = HEADER.pack(0, UPDATE, 0, 999, 1)
HERE, THERE = Origin("192.0.2.1", "192.0.2.0/24", exempt=False), Origin("192.0.2.2", "192.0.2.0/24", exempt=False)
PEER = ID.from_base58(Identity.from_seed(bytes(32)).peer_id)


def yamux(secured: Secured) -> Yamux:
    return Yamux(secured, PEER)


async def seconds_for(packets: list[bytes], spend: Any = None) -> float:
    """Let packets arrive, and return how long it takes to handle them."""
    secured = Secured(below=SimpleNamespace(spend_frames=spend))
    for packet in packets:
        secured.arriving.send_nowait(packet)
    secured.arriving.close()
    began = trio.current_time()
    await yamux(secured).start()
    return trio.current_time() - began


async def test_others_have_a_turn_between_frames_of_one_packet() -> None:
    turns = 0
    async with trio.open_nursery() as nursery:

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(count)
        await seconds_for([100 * TURN * FOR_NO_STREAM], lambda peer, frames: 0.0)
        nursery.cancel_scope.cancel()
    assert turns >= 99


def test_frames_that_no_bytes_pay_for_come_at_a_rate() -> None:
    async def main() -> None:
        burst = int(FRAMES_PER_SECOND * FRAMES_BURST_SECONDS)
        assert await seconds_for([burst * FOR_NO_STREAM]) < 0.1
        assert await seconds_for([2 * burst * FOR_NO_STREAM]) == pytest.approx(FRAMES_BURST_SECONDS, rel=0.02)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_bytes_pay_for_their_frames() -> None:
    async def main() -> None:
        number = int(2 * FRAMES_PER_SECOND * FRAMES_BURST_SECONDS)
        bulk = HEADER.pack(0, DATA, 0, 999, 1024) + bytes(1024)
        assert await seconds_for((number // 64) * [64 * bulk]) == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_connections_of_one_address_share_a_budget() -> None:
    rates = Rates(10.0, 2.0)
    assert rates.spend(HERE, 0.0, 15) == 0
    assert rates.spend(HERE, 0.0, 15) == 1
    assert rates.spend(THERE, 0.0, 15) == 0
    assert rates.spend(HERE, 100.0, 20) == 0


async def test_a_connection_inside_of_a_circuit_has_the_budgets_of_the_circuit() -> None:
    spend, another = own_budget(trio.current_time), own_budget(trio.current_time)
    outer = yamux(Secured(below=SimpleNamespace(spend_frames=another)))
    inner = yamux(Secured(below=SimpleNamespace(muxed_conn=outer, spend_frames=spend)))
    innermost = yamux(Secured(below=SimpleNamespace(muxed_conn=inner, spend_frames=another)))
    assert (outer.spend_frames, inner.spend_frames, innermost.spend_frames) == (another, spend, spend)
    assert innermost.inner_windows is inner.inner_windows is outer.inner_windows


def grown(budget: WindowBudget, stream: Stream) -> int:
    """Let a window grow as far as it may; returns by how much."""
    return sum(budget.grow(stream) for _ in range(20))


def opened(end: Yamux, number: int) -> Stream:
    end.machine.receive(HEADER.pack(0, UPDATE, SYN, number, 0))
    return end.machine.streams[number]


def grow(end: Yamux, number: int) -> int:
    """Let the remote fill a stream's window, and read it, until it does not grow any more; returns the window."""
    stream, before = opened(end, number), 0
    while stream.window > before:
        before, data = stream.window, bytes(stream.receive_window)
        end.machine.receive(HEADER.pack(0, DATA, 0, number, len(data)) + data)
        while end.machine.read(stream, 1 << 30):
            pass
        end.machine.meter.bill()
    return before


async def test_circuits_in_one_connection_have_together_the_windows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muxer, "ALL_WINDOWS", WindowBudget(WINDOWS_IN_ALL))

    outer = yamux(Secured())
    inside = [yamux(Secured(below=SimpleNamespace(muxed_conn=outer))) for _ in range(9)]
    assert sum(grow(end, 1) - FIRST_WINDOW for end in inside) == WINDOWS_OF_ONE
    elsewhere = yamux(Secured(below=SimpleNamespace(muxed_conn=yamux(Secured()))))
    assert grow(elsewhere, 1) == grow(outer, 1) == MAX_WINDOW


def test_windows_grow_within_the_limits_of_one_connection_and_of_all() -> None:
    in_all = WindowBudget(WINDOWS_OF_ONE + (4 << 20))
    one, other = WindowBudget(WINDOWS_OF_ONE, in_all), WindowBudget(WINDOWS_OF_ONE, in_all)
    first = Stream(1)
    assert grown(one, first) == MAX_WINDOW - FIRST_WINDOW
    others = [Stream(number) for number in range(9)]
    assert sum(grown(one, stream) for stream in others) == WINDOWS_OF_ONE - (MAX_WINDOW - FIRST_WINDOW)
    more = Stream(1)
    assert grown(other, more) == 4 << 20
    first.is_reset = True
    assert grown(other, more) == MAX_WINDOW - FIRST_WINDOW - (4 << 20)


def test_a_stream_that_is_over_takes_what_is_unread_of_it_until_nobody_holds_it() -> None:
    budget = WindowBudget(FIRST_WINDOW)
    stream, other = Stream(1), Stream(3)
    assert grown(budget, stream) == FIRST_WINDOW
    stream.is_reset = True
    stream.unread.extend(bytes(FIRST_WINDOW + 1000))
    assert grown(budget, other) == FIRST_WINDOW - 1000
    del stream
    gc.collect()
    assert grown(budget, other) == 1000
