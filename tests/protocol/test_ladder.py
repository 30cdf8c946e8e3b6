"""One climb of the ladder under a virtual clock: the dials' order, end, and events."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio
import trio.testing
from flockstep.peer.base.transport import Address, PeerId, Rung
from flockstep.peer.libp2p.ladder import STAGGER, Climb
from flockstep.peer.log.telemetry import Event, Telemetry

RELAY = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LAN = "/ip4/192.168.1.7/tcp/4001"
DIRECT = "/ip4/44.0.1.1/tcp/4001"
RELAYED = f"/ip4/44.0.0.10/tcp/4001/p2p/{RELAY}/p2p-circuit"
SILENT = (60.0, "timed out")


@dataclass(slots=True)
class World:
    """What becomes of each address: after so many seconds, and the cause if it fails."""

    outcomes: dict[Address, tuple[float, str]]
    started: dict[Address, float] = field(default_factory=dict)
    ended: list[Address] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    async def dial(self, peer: PeerId, address: Address, rung: Rung) -> str:
        self.started[address] = trio.current_time()
        seconds, cause = self.outcomes[address]
        await trio.sleep(seconds)
        self.ended.append(address)
        return cause

    def climb(self, *addresses: Address) -> Climb:
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        return Climb("peer", addresses, self.dial, telemetry)


def virtual(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


run_test = virtual


async def test_a_silent_address_does_not_hold_up_the_next_and_the_best_rung_comes_first() -> None:
    world = World({LAN: SILENT, DIRECT: SILENT, RELAYED: (0.1, "")})
    climb = world.climb(RELAYED, DIRECT, LAN)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(climb.run)
        await climb.settled.wait()
        waited = trio.current_time() - began
    assert list(world.started) == [LAN, DIRECT, RELAYED]
    assert round(waited, 6) == 2 * STAGGER + 0.1
    assert [(event["step"], event["peer"]) for event in world.events] == [("lan", "peer"), ("direct", "peer")]


async def test_an_address_that_fails_at_once_is_followed_at_once() -> None:
    world = World({LAN: (0.0, "refused"), DIRECT: (0.0, "")})
    climb = world.climb(LAN, DIRECT)
    await climb.run()
    assert world.started[DIRECT] == world.started[LAN]
    assert [attempt.cause for attempt in climb.attempts] == ["refused"]


async def test_a_better_rung_goes_on_behind_the_callers_back_and_a_worse_one_ends() -> None:
    other = DIRECT.replace("44.0.1.1", "44.0.1.2")
    world = World({LAN: (2.0, ""), DIRECT: (0.6, ""), other: SILENT, RELAYED: SILENT})
    climb = world.climb(LAN, DIRECT, other, RELAYED)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(climb.run)
        await climb.settled.wait()
        assert world.ended == [DIRECT]
    assert world.ended == [DIRECT, LAN]


async def test_once_a_rung_is_reached_no_worse_one_is_tried() -> None:
    world = World({DIRECT: (0.1, ""), RELAYED: (0.0, "")})
    await world.climb(DIRECT, RELAYED).run()
    assert list(world.started) == [DIRECT]


async def test_all_failures_are_named_in_the_order_that_was_asked_for() -> None:
    world = World({RELAYED: (0.0, "full"), LAN: (0.0, "refused")})
    climb = world.climb(RELAYED, "nonsense", LAN)
    await climb.run()
    assert climb.settled.is_set()
    assert [attempt.cause for attempt in climb.attempts] == ["full", "not an address that can be dialled", "refused"]
