"""A run of few that its manifest lists, where those decide that are present: who votes when all voters are killed."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from flockstep.dht.run.manifest import Admission, SignedManifest
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, all_at, in_memory, kept_run, key

FRIENDS = [key(number).peer_id for number in range(4)]


def friends() -> SignedManifest:
    admission = Admission("allow", allow=" ".join(FRIENDS), voters="members", stall="present", vouch_after=0)
    return SignedManifest.sign(replace(kept_run(1).manifest, admission=admission), key(0))


@pytest.mark.parametrize("num_late", [1, 2])
def test_who_came_after_the_last_round_goes_on_when_all_voters_are_killed_and_they_follow_when_they_return(
    tmp_path: Path, num_late: int
) -> None:
    async def body(run: KeptRun) -> None:
        first = [run.train(number, seconds=20.0) for number in (0, 1)]
        await run.until(lambda: all_at(first, 2))
        late = [run.train(number, seconds=5.0) for number in (2, 3)[:num_late]]
        await run.until(lambda: all_at(late, 2), seconds=15.0)  # Before the next round, whose roster gives them votes.
        for peer in first:
            run.kill(peer)
        assert not all_at(late[:1], 3)
        await run.until(lambda: all_at(late, 5), seconds=90.0)
        (appointed,) = {str(it["reason"]) for it in late[0].named("agreement.appointed")}
        assert appointed == f"voters: {', '.join(sorted(peer.peer for peer in late))}"

        back = [run.train(number, seconds=5.0) for number in (0, 1)]
        everybody = [*back, *late]
        await run.until(lambda: all_at(back, late[0].round) and back[0].round > 5, seconds=120.0)
        goal = max(peer.round for peer in everybody) + 3
        await run.until(lambda: all_at(everybody, goal), seconds=120.0)
        done = [{it["round"]: it["root"] for it in peer.named("round.done")} for peer in everybody]
        assert len({roots[goal] for roots in done}) == 1
        assert not any(peer.named("chain.parted") for peer in late)

    run_virtual(partial(in_memory, friends(), tmp_path, body))
