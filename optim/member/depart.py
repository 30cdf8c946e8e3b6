"""Leaving in order: who leaves ends the round that it is bound to, and votes once more where the others need it.

The round of that last vote gives it no vote in the next one.
"""

from collections.abc import Callable

import trio

from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.averager import Averager
from ...collectives.chain.chain import ChainPosition
from ...collectives.contribution import Contribution, NextRoot
from ...peer.telemetry import Telemetry

FINISH_SECONDS = 1.5
"""A leaving peer's time to end a round whose cut it has acknowledged, before its deputies must do its work again.

Of the three seconds that leaving may take: half a second remains for the goodbye, one for the end of the process.
"""
DEPART_PERIOD = 0.25
"""Seconds between two looks at who is ready, and after an attempt without effect."""


async def finish_round(is_over: trio.Event, round_: int, telemetry: Telemetry) -> None:
    """Wait for the end of a round whose cut I have acknowledged, for `FINISH_SECONDS` at most."""
    with trio.move_on_after(FINISH_SECONDS):
        await is_over.wait()
        return
    reason = f"it has not ended within {FINISH_SECONDS:g} s, so that deputies may have to do my work again"
    telemetry.emit("peer.left_round", reason=reason, round=round_)


async def stay_for_round(
    averager: Averager, place: Callable[[], ChainPosition], next_root: NextRoot, patience: float
) -> None:
    """Take part in the next round without a contribution if my vote may be needed for it, for `patience` seconds at most.

    `place` is where my state stands. I am ready once another member is: a term that begins with me alone would stall, and
    where several leave there may be few others. The state stays what it is, since I leave.
    """
    with trio.move_on_after(patience):
        while averager.is_needed and not averager.behind:
            position = place()
            if averager.round != position.round + 1:
                return
            if averager.is_called or averager.waiting():
                leaving = Contribution(
                    vector=None,
                    round=position.round + 1,
                    base_root=position.root,
                    tokens=0,
                    steps=0,
                    loss=0.0,
                    grace=0.0,
                    is_leaving=True,
                )
                averaged = await averager.average(leaving, next_root)
                if averaged.outcome.kind is OutcomeKind.DONE:
                    return
            await trio.sleep(DEPART_PERIOD)
