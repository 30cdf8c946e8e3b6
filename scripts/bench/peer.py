"""The bench's own system: one flockstep peer with a real libp2p host, averaging a seeded vector in place.

Theory of operation. The same node, averager and codecs as in `flockstep join`, without a trainer: no torch, no outer
step. Timed is everything from the first Ready to the decoded average in the vector; connections are there before. A
void attempt is followed by the next one, with those who are still there, as a trainer would.
"""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import trio

from ...collectives.averager import Averaged, Averager, Contribution, Spec
from ...collectives.chain.certificate import token_weights
from ...collectives.codec import CELL, codec_named, weighted_mean
from ...collectives.robust.rules import rule_named
from ...collectives.round.actions import OutcomeKind
from ...optim.member.apply import decode_outputs, spans
from ...peer import wire
from ...peer.config import PeerConfig
from ...peer.host import open_host
from ...peer.identity import Identity
from ...peer.node.node import Node
from ...peer.telemetry import Telemetry
from . import worker as bench_worker
from .worker import Answer, Line

MAX_ATTEMPTS = 5
"""Of one round: each lost peer costs at most one, and the bench loses one."""
FLOOR, CEILING = 2.0, 120.0
"""The deadlines that a manifest has by default."""
ROOT = bytes(32)
"""The state root of everybody: there is no state here."""


class Peer:
    """One peer and its vector."""

    def __init__(self, node: Node, host: Any, command: Answer) -> None:
        contribution, _, output = command["codec"].partition("/")
        self._index, self._peers = command["index"], command["peers"]
        self._rule = rule_named(command["rule"])
        self._codecs = codec_named(contribution), codec_named(output or contribution)
        self._host, self._node = host, node
        num_cells = -(-command["params"] // CELL)
        self._vector = np.empty(num_cells * CELL, np.float32)
        self._lost: set[str] = set()
        self._members = [_identity(index).peer_id for index in range(self._peers)]
        node.on_lost(lambda peer, reason: self._lost.add(peer))
        spec = Spec(
            run="bench",
            num_cells=num_cells,
            contribution=self._codecs[0],
            output=self._codecs[1],
            min_peers=1,
            floor=FLOOR,
            ceiling=CEILING,
            rule=self._rule,
        )
        self._averager = Averager(node, spec, lambda: frozenset(self._members) - self._lost)
        self.commands: dict[str, Callable[[Answer], Awaitable[Answer]]] = {
            "meet": self._meet,
            "fill": self._fill,
            "gather": self._gather,
            "go": self._go,
            "check": self._check,
        }

    async def _meet(self, command: Answer) -> Answer:
        node = self._node
        for peer, greeting in zip(self._members, command["greetings"], strict=True):
            if peer != node.peer_id:
                node.learn(peer, greeting["addresses"])
                await self._host.connect(peer, greeting["addresses"])
        node.watch(self._members)
        node.tell([peer for peer in self._members if peer != node.peer_id], wire.Beat())
        return {}

    async def _fill(self, command: Answer) -> Answer:
        bench_worker.fill(self._vector, self._index)
        return {}

    async def _gather(self, command: Answer) -> Answer:
        return {}

    async def _go(self, command: Answer) -> Answer:
        before = self._host.traffic().sent
        contribution = Contribution(
            vector=self._vector,
            round=self._averager.round,
            base_root=ROOT,
            tokens=bench_worker.weight(self._index),
            steps=1,
            loss=0.0,
            grace=FLOOR,
        )
        attempts, over = 0, False
        while not over:
            averaged = await self._averager.average(contribution, lambda bounds, outputs: ROOT)
            attempts += 1
            over = averaged.outcome.kind in (OutcomeKind.DONE, OutcomeKind.BEHIND) or attempts == MAX_ATTEMPTS
        outcome = averaged.outcome
        answer: Answer = {"outcome": outcome.kind.value, "reason": outcome.reason, "attempts": attempts}
        if outcome.kind is OutcomeKind.DONE:
            await self._node.compute(self._decode, averaged)
            answer["contributors"] = [self._members.index(peer) for peer in outcome.cut]
        return {**answer, "sent": self._host.traffic().sent - before}

    def _decode(self, averaged: Averaged) -> None:
        for span in spans(averaged.outcome.bounds):
            decode_outputs(self._codecs[1], averaged.outcome.bounds, averaged.outputs, span, self._vector[span])

    async def _check(self, command: Answer) -> Answer:
        return {
            **bench_worker.compare(self._vector, command["groups"]),
            "exact": any(map(self._is_exact, command["groups"])) if self._rule.blind else None,
        }

    def _is_exact(self, members: Sequence[int]) -> bool:
        """Whether each bit is what the codecs make of the weighted mean of these contributions, in this order."""
        contribution, output = self._codecs
        num_cells = bench_worker.BLOCK // CELL
        parts = [contribution.encode(bench_worker.block(index)) for index in members]
        weights = token_weights([bench_worker.weight(index) for index in members])
        encoded = output.encode(weighted_mean(contribution, parts, weights, num_cells))
        due = np.empty(bench_worker.BLOCK, np.float32)
        output.decode(encoded, due)
        pieces = (self._vector[start : start + due.size] for start in range(0, self._vector.size, due.size))
        return all(np.array_equal(piece, due[: piece.size]) for piece in pieces)


def _identity(index: int) -> Identity:
    return Identity.from_seed(index.to_bytes(32, "big"))


async def _serve() -> None:
    line = Line()
    opening = await trio.to_thread.run_sync(line.read)
    if opening is None:
        return
    identity, config, telemetry = _identity(opening["index"]), PeerConfig(host="127.0.0.1", port=0), Telemetry()
    async with open_host(identity, config, telemetry) as host, Node(host, identity, config, telemetry) as node:
        peer = Peer(node, host, opening)
        line.write({"addresses": list(host.addresses())})
        while (command := await trio.to_thread.run_sync(line.read)) is not None:
            try:
                answer = await peer.commands[command["op"]](command)
            except Exception as error:  # noqa: BLE001  The boundary of one measured system.
                answer = bench_worker.failed(error)
            line.write(answer)


def main() -> None:
    """Serve the bench."""
    trio.run(_serve)
    sys.exit()
