"""Leaving in order: the end of the round that a peer is bound to."""

import pytest
import trio
import trio.testing
from flockstep.optim.member.member import FINISH_SECONDS, finish_round
from support.recorded import recorded


@pytest.mark.parametrize("lasts", [FINISH_SECONDS / 2, 2 * FINISH_SECONDS])
def test_who_leaves_waits_for_the_round_for_a_while_and_says_so_where_it_does_not_end_it(lasts: float) -> None:
    telemetry, events = recorded()

    async def leave() -> float:
        is_over = trio.Event()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def end() -> None:
                await trio.sleep(lasts)
                is_over.set()

            await finish_round(is_over, 7, telemetry)
            left = trio.current_time()
        return left

    async def timed() -> float:
        began = trio.current_time()
        return await leave() - began

    waited = trio.run(timed, clock=trio.testing.MockClock(autojump_threshold=0))
    assert waited == pytest.approx(min(lasts, FINISH_SECONDS))
    said = [(event["event"], event["round"]) for event in events]
    assert said == ([("peer.left_round", 7)] if lasts > FINISH_SECONDS else [])
