"""A member whose process was stopped (SIGSTOP, a suspended laptop) while it waited for a round."""

from functools import partial
from pathlib import Path

import trio
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, all_at, in_memory, kept_run

STALL = 15.0
"""Seconds of a term without a quorum, after which those decide that are here."""


def stand_still(seconds: float) -> None:
    """Let the event loop do nothing for so long, like a process that is stopped."""
    trio.lowlevel.current_clock().deadline_to_sleep_time(trio.current_time() + seconds)


def test_who_was_stopped_does_not_take_that_time_for_the_others_absence(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        stays, goes = (run.train(number, seconds=2.0) for number in (0, 1))
        await run.until(lambda: all_at([stays, goes], 3))
        run.kill(goes)
        at = stays.round
        await run.until(lambda: any(it["round"] == at + 1 and it["step"] == "Ready" for it in stays.named("round.said")))
        stand_still(60 * STALL)
        awake = trio.current_time()
        await run.until(lambda: bool(stays.named("agreement.stalled")))
        assert trio.current_time() > awake + 0.5 * STALL
        assert sum(float(str(it["seconds"])) for it in stays.named("peer.overslept")) > 59 * STALL
        await run.until(lambda: all_at([stays], at + 2))

    run_virtual(partial(in_memory, kept_run(2, stall="present"), tmp_path, body))
