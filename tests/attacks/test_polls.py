"""Polls by the owner or a steward among members that lie about the round, or answer some questions only."""

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
from flockstep.collectives.spec import charter_of
from flockstep.collectives.visit.polls import ask_poll
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, all_at, in_memory, kept_run

KEEPER, NUM_LIARS = 10, 40


@pytest.mark.parametrize("in_one_round", [True, False])
def test_members_that_never_show_a_certificate_do_not_hold_up_a_poll(tmp_path: Path, in_one_round: bool) -> None:
    async def body(run: KeptRun) -> None:
        honest = [*(run.keep(KEEPER + number) for number in range(4)), run.train(0)]
        await run.until(lambda: all_at(honest, 2))
        run.kill(honest.pop(3))
        run.kill(honest.pop(2))
        await trio.sleep(60)

        async with AsyncExitStack() as stack:
            visitor = await stack.enter_async_context(run.visit())
            true: wire.VoteShown = await visitor.node.ask(honest[0].peer, wire.VoteAsk(run.signed.run_id))
            liars: list[str] = []
            for number in range(NUM_LIARS):
                liar = (await stack.enter_async_context(run.visit())).node
                lie = true.round if in_one_round else 2 + number

                async def show(peer: str, question: wire.VoteAsk, round_: int = lie) -> wire.VoteShown:
                    return wire.VoteShown(round_, true.previous, 0, b"", ())

                async def hang(peer: str, question: wire.LedgerAsk) -> None:
                    await trio.sleep_forever()

                liar.on_ask(wire.VoteAsk, show)
                liar.on_ask(wire.LedgerAsk, hang)
                visitor.node.learn(liar.peer_id, liar.transport.addresses())
                liars.append(liar.peer_id)
            began = trio.current_time()
            poll = await ask_poll(visitor.node, [*liars, *run.peers], charter_of(run.signed))
            assert trio.current_time() < began + 10
            assert poll is not None
            assert (poll.slot.round, poll.slot.previous) == (true.round, true.previous)
            assert set(poll.ready) == {peer.peer for peer in honest[:2]}
            # Of liars alone nothing follows, and it ends.
            assert await ask_poll(visitor.node, liars, charter_of(run.signed)) is None
            assert trio.current_time() < began + 95

    run_virtual(partial(in_memory, kept_run(4, first=KEEPER), tmp_path, body))
