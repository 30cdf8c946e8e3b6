"""The bench's own peers, three of them in one process: they compute beside their loops, and come back once lost."""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.host import open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.node import Node
from flockstep.scripts.lab.bench import worker
from flockstep.scripts.lab.bench.peer import BenchPeer, identity_of
from flockstep.scripts.lab.bench.worker import WorkerAnswer

NUM_PEERS = 3


class Bench:
    """Gives commands to all peers, or some, at once."""

    def __init__(self, nodes: list[Node], peers: list[BenchPeer]) -> None:
        self.nodes = nodes
        self._peers = peers

    async def call(self, operation: str, *indices: int, **arguments: object) -> list[WorkerAnswer]:
        answers: dict[int, WorkerAnswer] = {}

        async def command(index: int) -> None:
            answers[index] = await self._peers[index].commands[operation]({"op": operation, **arguments})

        async with trio.open_nursery() as nursery:
            for index in indices or range(NUM_PEERS):
                nursery.start_soon(command, index)
        return [answers[index] for index in sorted(answers)]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    opening = {"codec": "int8", "peers": NUM_PEERS, "rule": "mean", "params": 4096}
    with trio.fail_after(120):  # A safety net against a hang.
        async with AsyncExitStack() as stack:
            nodes, peers, greetings = [], [], []
            for index in range(NUM_PEERS):
                identity: Identity = identity_of(index)
                config, telemetry = PeerConfig(host="127.0.0.1", port=0), Telemetry()
                host = await stack.enter_async_context(open_host(identity, config, telemetry))
                node = await stack.enter_async_context(Node(host, identity, config, telemetry))
                nodes.append(node)
                peers.append(BenchPeer(node, host, {**opening, "index": index}))
                greetings.append({"addresses": list(host.addresses())})
            opened = Bench(nodes, peers)
            await opened.call("meet", greetings=greetings)
            yield opened


async def test_a_peer_that_was_lost_and_missed_a_round_is_in_the_next_one() -> None:
    async with bench() as opened:
        *others, last = opened.nodes
        for node in others:
            node.lose(last.peer_id, "the test")
        await opened.call("fill")
        without = await opened.call("go", 0, 1)
        assert [sorted(answer["contributors"]) for answer in without] == [[0, 1]] * 2
        (late,) = await opened.call("go", 2)
        assert (late["outcome"], sorted(late["contributors"])) == ("done", [0, 1])  # With the outputs of the others.
        for step in ("fill", "gather"):
            await opened.call(step)
        again = await opened.call("go")
        assert [(sorted(answer["contributors"]), answer["attempts"]) for answer in again] == [([0, 1, 2], 1)] * 3
        checks = await opened.call("check", groups=[again[0]["contributors"]])
        assert all(check["exact"] for check in checks)


def test_vectors_are_written_and_checked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    for name in ("fill", "compare"):
        function = getattr(worker, name)

        def recorded(*arguments: object, function: object = function) -> object:
            threads.append(threading.current_thread())
            return function(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(worker, name, recorded)

    async def main() -> None:
        async with bench() as opened:
            await opened.call("fill", 0)
            await opened.call("check", 0, groups=[[0]])

    trio.run(main)
    assert len(threads) == 2
    assert threading.main_thread() not in threads
