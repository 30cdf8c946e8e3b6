"""Turns: those of one address or network wait for each other, and others do not wait for them."""

import trio
import trio.testing
from flockstep.peer.quota.origins import UNKNOWN, Origin
from flockstep.peer.quota.turns import Turns


def test_who_asks_most_waits_and_others_do_not() -> None:
    turns, inside = Turns(4, 1, 2), list[str]()

    async def work(origin: Origin, done: trio.Event) -> None:
        async with turns.turn(origin):
            inside.append(origin.address)
            await done.wait()
        inside.remove(origin.address)

    async def main() -> None:
        first, last = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            for address in ("a1", "a1", "a1", "a2", "a3", "a3"):
                nursery.start_soon(work, Origin(address, "a", exempt=False), first)
                await trio.testing.wait_all_tasks_blocked()
            assert inside == ["a1", "a2"]
            for origin in (Origin("b1", "b", exempt=False), UNKNOWN, Origin("c1", "c", exempt=False)):
                nursery.start_soon(work, origin, last)
                await trio.testing.wait_all_tasks_blocked()
            assert inside == ["a1", "a2", "b1", "unknown"]
            first.set()
            await trio.testing.wait_all_tasks_blocked()
            assert inside == ["b1", "unknown", "c1"]
            last.set()

    trio.run(main)
