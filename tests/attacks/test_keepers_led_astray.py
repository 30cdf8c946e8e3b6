"""One member without a vote makes keepers look for another chain, again and again: rounds go on."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.dht.members.body import MemberBody
from flockstep.dht.members.gossip import Gossip
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from support.certificates import certify
from support.keepers import KeptRun, Peer, all_at, in_memory, kept_run, key

KEEPERS, LIAR = range(10, 14), 5


def silent_about_its_chain(node: Node, codec: object) -> None:
    """Answer no question about certificates, until it times out."""
    real = node.on_ask

    async def never(peer: str, question: object) -> object:
        return await trio.sleep_forever()

    def on_ask(kind: Any, answer: Any) -> None:
        real(kind, never if kind is wire.LedgerAsk else answer)

    node.on_ask = on_ask  # type: ignore[method-assign, assignment]


def test_a_hint_and_a_head_that_is_never_proven_take_no_keeper_out_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce, liar, lies = Gossip.announce, key(LIAR).peer_id, False
    marks = iter(range(1 << 20))

    def lying(gossip: Gossip, body: MemberBody) -> None:
        if lies and gossip._node.peer_id == liar:
            mark = next(marks).to_bytes(32)
            body = replace(body, state="training", round=body.round + 5, head=mark, root=mark, chain_tokens=10**9)
        announce(gossip, body)

    monkeypatch.setattr(Gossip, "announce", lying)

    async def mislead(keepers: list[Peer], node: Node) -> None:
        while True:
            for keeper in keepers:
                assert keeper.keeper is not None
                assert keeper.keeper.kept is not None
                before = keeper.keeper.kept.place.certificate
                node.send(keeper.peer, certify(before, 100, roster=[key(LIAR)], run=kept_run(4, first=10).run_id))
            await trio.sleep(1.0)

    async def body(run: KeptRun) -> None:
        nonlocal lies
        run.corrupt[liar] = silent_about_its_chain
        keepers = [run.keep(number) for number in KEEPERS]
        trainers = [run.train(number) for number in range(3)]
        member = run.train(LIAR)
        await run.until(lambda: all_at([*keepers, *trainers], 3))
        lies, began, reached = True, trio.current_time(), keepers[0].at[0]
        assert member.node is None
        async with run.visit() as visitor, trio.open_nursery() as nursery:
            assert visitor.members
            nursery.start_soon(mislead, keepers, nodes[liar])
            await run.until(lambda: all_at([*keepers, *trainers], reached + 4))
            nursery.cancel_scope.cancel()
        assert all(keeper.named("certificate.hint") for keeper in keepers)
        times = [float(event["time"]) for event in keepers[0].named("round.done")]  # type: ignore[arg-type]  # numbers
        waits = [after - before for before, after in pairwise(times) if before > began]
        assert max(waits) < 15.0, waits

    nodes: dict[str, Node] = {}
    enter = Node.__aenter__

    async def entered(node: Node) -> Node:
        nodes[node.peer_id] = node
        return await enter(node)

    monkeypatch.setattr(Node, "__aenter__", entered)
    run_virtual(partial(in_memory, kept_run(4, first=10), tmp_path, body), seed=0)
