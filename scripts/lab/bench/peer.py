"""The bench's own system: a flockstep peer with a libp2p host, averaging a seeded vector in place.

Theory of operation. The same node, averager and codecs as in `flockstep join`, without a trainer: no torch, no outer
step. The time runs from the first Ready to the decoded average in the vector; connections are open before.
"""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio

from ....collectives.accountability.trust import token_weights
from ....collectives.allreduce.actions import OutcomeKind
from ....collectives.chain.kept_outputs import Outputs
from ....collectives.driver.contribution import Averaged, Contribution
from ....collectives.driver.rounds import Averager
from ....collectives.robust.rules import rule_named
from ....collectives.spec import Spec
from ....collectives.vector.codec import CELL, FlatSum, codec_named, weighted_mean
from ....dht.rendezvous import open_client
from ....dht.run.admission import Charter
from ....optim.member.apply import decode_outputs, spans
from ....peer import wire
from ....peer.base.config import PeerConfig
from ....peer.base.errors import LocalError
from ....peer.identity import Identity
from ....peer.log.telemetry import Telemetry
from ....peer.node.node import Node
from . import worker
from .worker import WorkerAnswer, WorkerLine

_FLOOR, _CEILING = 2.0, 120.0
"""A manifest's default deadlines."""
BENCH_RUN = "bench"
ROOT = bytes(32)
"""The state root of all peers: there is no state here."""


class BenchPeer:
    """One peer and its vector."""

    def __init__(self, node: Node, host: Any, command: WorkerAnswer) -> None:
        contribution, _, output = command["codec"].partition("/")
        self._index, self._peers = command["index"], command["peers"]
        self._rule = rule_named(command["rule"])
        self._codecs = codec_named(contribution), codec_named(output or contribution)
        self._host, self._node = host, node
        num_cells = -(-command["params"] // CELL)
        self._vector = np.empty(num_cells * CELL, np.float32)
        self._members = [identity_of(index).peer_id for index in range(self._peers)]
        self._others = [*self._members[self._index + 1 :], *self._members[: self._index]]  # All dial another one first.
        node.prefer(frozenset(self._members).__contains__)
        spec = Spec(
            run=BENCH_RUN,
            num_cells=num_cells,
            contribution=self._codecs[0],
            output=self._codecs[1],
            min_peers=1,
            floor=_FLOOR,
            ceiling=_CEILING,
            rule=self._rule,
            charter=Charter(founders=frozenset(self._members)),
        )
        # A run's peer has those of earlier rounds on its disk.
        outputs = Outputs(node, rounds=1)
        self._averager = Averager(node, spec, lambda: frozenset(self._members), outputs)
        self.commands: dict[str, Callable[[WorkerAnswer], Awaitable[WorkerAnswer]]] = {
            "meet": self._meet,
            "fill": self._fill,
            "go": self._go,
            "check": self._check,
        }

    async def _meet(self, command: WorkerAnswer) -> WorkerAnswer:
        addresses = dict(zip(self._members, (greeting["addresses"] for greeting in command["greetings"]), strict=True))
        for peer in self._others:
            self._node.learn(peer, addresses[peer])
        for peer in self._others:
            await self._host.connect(peer, addresses[peer])
        self._node.watch(set(self._members))
        self._node.send(self._others, wire.Beat())
        return {}

    async def _fill(self, command: WorkerAnswer) -> WorkerAnswer:
        await self._node.compute(worker.fill, self._vector, self._index)
        return {}

    async def _go(self, command: WorkerAnswer) -> WorkerAnswer:
        contribution = Contribution(
            vector=FlatSum([self._vector]),
            round=self._averager.round,
            base_root=ROOT,
            tokens=worker.weight(self._index),
            steps=1,
            loss=0.0,
            grace=_FLOOR,
        )
        averaged = await self._averager.average(contribution, lambda bounds, outputs: ROOT)
        if averaged.outcome.kind is not OutcomeKind.DONE:
            raise LocalError(averaged.outcome.reason)
        self._cut = [self._members.index(peer) for peer in averaged.outcome.cut]
        await self._node.compute(self._decode, averaged)
        return {}

    def _decode(self, averaged: Averaged) -> None:
        for span in spans(averaged.outcome.value.bounds):
            decode_outputs(self._codecs[1], averaged.outcome.value.bounds, averaged.outputs, span, self._vector[span])

    async def _check(self, command: WorkerAnswer) -> WorkerAnswer:
        return await self._node.compute(self._compare)

    def _compare(self) -> WorkerAnswer:
        return {**worker.compare(self._vector, self._peers), "exact": self._is_exact() if self._rule.blind else None}

    def _is_exact(self) -> bool:
        """Return True if each bit is that of the codecs' weighted mean of the cut, in its order."""
        contribution, output = self._codecs
        num_cells = worker.FILL_BLOCK // CELL
        parts = [contribution.encode(worker.block(index)) for index in self._cut]
        weights = token_weights([worker.weight(index) for index in self._cut])
        encoded = output.encode(weighted_mean(contribution, parts, weights, num_cells))
        due = np.empty(worker.FILL_BLOCK, np.float32)
        output.decode(encoded, due)
        pieces = (self._vector[start : start + due.size] for start in range(0, self._vector.size, due.size))
        return all(np.array_equal(piece, due[: piece.size]) for piece in pieces)


def identity_of(index: int) -> Identity:
    """Return an identity that is the same in every run: the bench needs no keys of its own."""
    return Identity.from_seed(index.to_bytes(32, "big"))


async def _serve() -> None:
    line = WorkerLine()
    opening = await trio.to_thread.run_sync(line.read)
    if opening is None:
        return
    identity, config, telemetry = identity_of(opening["index"]), PeerConfig(host="127.0.0.1", port=0), Telemetry()
    async with open_client(identity, config, telemetry) as (host, _), Node(host, identity, config, telemetry) as node:
        peer = BenchPeer(node, host, opening)
        line.write({"addresses": list(host.addresses())})
        while (command := await trio.to_thread.run_sync(line.read)) is not None:
            try:
                answer = await peer.commands[command["op"]](command)
            except Exception as error:  # noqa: BLE001  The boundary of one measured system.
                answer = worker.failed(error)
            line.write(answer)


def main() -> None:
    """Serve the bench."""
    trio.run(_serve)
    sys.exit()
