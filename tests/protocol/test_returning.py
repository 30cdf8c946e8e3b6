"""A member that was killed and comes back with its home, while others are away."""

from functools import partial
from pathlib import Path

from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, all_at, in_memory, kept_run

FIRST = 10
"""The number of the first keeper's key."""
KEEPERS = 5


def test_who_comes_back_waits_for_no_member_that_does_not_answer_where_enough_others_do(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(FIRST + number) for number in range(KEEPERS)]
        trainers = [run.train(number, seconds=2.0) for number in range(2)]
        await run.until(lambda: all_at([*keepers, *trainers], 3))
        run.kill(trainers[0])
        run.network.cut(keepers[-1].peer)  # Its record says that it is here, and a dial to it ends in a timeout.
        at = trainers[1].round
        await run.until(lambda: trainers[1].round >= at + 2)
        back = run.train(0, seconds=2.0)
        await run.until(lambda: any(it["peer"] == keepers[-1].peer for it in back.named("gossip.failed")))
        events = [event["event"] for event in back.events]
        assert events.index("state.synced") < events.index("gossip.failed")
        assert int(str(back.named("state.synced")[0]["round"])) >= at + 2

    run_virtual(partial(in_memory, kept_run(KEEPERS, first=FIRST), tmp_path, body))
