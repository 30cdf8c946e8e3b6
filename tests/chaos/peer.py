"""One peer of a chaos run as a program: production code; commands and events as JSON lines.

A strike is armed before its round and happens in the peer itself, right after the named message was handed to the network.
So it happens at the same point in every run, unlike a signal from outside, which is a few milliseconds late.
`Serve` names the moment when another peer requests the output of this peer, which has just sent its Result.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import trio
from chaos.seeded import RUN, codecs_named, hash_of, tokens_of, vector_of
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.driver.averager import Averager
from flockstep.collectives.driver.contribution import Averaged, Contribution
from flockstep.collectives.spec import Spec
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, FlatSum
from flockstep.dht.run.admission import Charter
from flockstep.optim.member.apply import decode_outputs, spans
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.host import open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.node.bulk import Blob
from flockstep.peer.node.file_blob import FileBlob
from flockstep.peer.node.node import Node
from flockstep.peer.wire import Certificate, Members, MembersAsk
from flockstep.peer.wire.framing import MAX_FRAME_BYTES
from flockstep.peer.wire.schema import decode, encode

ROOT = bytes(32)
"""The state root of everybody: there is no state here."""
MAX_ATTEMPTS = 5
"""Of one round: two are void for a fault that the round's rules cannot heal, the rest is for a busy machine."""
CEILING = 60.0
REDIAL = 0.1
"""Seconds: a connection that the other side is just closing refuses what is new for about that long."""

Command = dict[str, Any]


def identity_of(index: int) -> Identity:
    return Identity.from_seed(bytes([index + 1]) * 32)


def peer_of(index: int) -> str:
    return identity_of(index).peer_id


def say(event: str, **figures: Any) -> None:
    send({"event": event, **figures})


def send(event: Event) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Peer:
    """A peer that averages what its seed says, when it is told to."""

    def __init__(self, node: Node, nursery: trio.Nursery, setting: Command) -> None:
        self.node = node
        self.nursery = nursery
        self.setting = setting
        self.members: dict[str, int] = {}
        self.lost: set[str] = set()
        self.strike: Command | None = None
        self.outputs: set[bytes] = set()
        self.num_cells = -(-setting["params"] // CELL)
        self.codecs = codecs_named(setting["codec"])
        self.cancel = trio.CancelScope()
        self.silence = ExitStack()
        spec = Spec(
            run=RUN,
            num_cells=self.num_cells,
            contribution=self.codecs[0],
            output=self.codecs[1],
            min_peers=2,
            floor=setting["floor"],
            ceiling=CEILING,
            charter=Charter(founders=frozenset(map(peer_of, range(setting["count"])))),
        )
        self.averager = Averager(node, spec, lambda: frozenset(self.members) - self.lost)
        node.on_ask(MembersAsk, self.answer)
        node.on_lost(lambda peer, reason: self.lost.add(peer))
        node.telemetry.subscribe(send)
        node.telemetry.subscribe(self.hear)

    async def meet(self, command: Command) -> None:
        """Know these members, and watch them; whoever was lost is back. Answers `met` when all are connected."""
        self.members = {peer: index for index, peer, _ in command["members"]}
        others = {peer: addresses for _, peer, addresses in command["members"] if peer != self.node.peer_id}
        self.node.watch(others)
        async with trio.open_nursery() as nursery:
            for peer, addresses in others.items():
                self.node.learn(peer, addresses)
                nursery.start_soon(self.reach, peer)
        self.node.watch(others)
        self.lost.clear()
        say("met")

    async def reach(self, peer: str) -> None:
        """Talk with a peer: a session that broke while I was stopped shows it now, and is replaced by the next word."""
        while True:
            try:
                await self.node.ask(peer, MembersAsk(RUN, b""), timeout=CEILING)
                return
            except NetworkError as error:
                say("dial.retry", peer=peer, reason=str(error))
                await trio.sleep(REDIAL)

    async def answer(self, peer: str, question: MembersAsk) -> Members:
        return Members(())

    async def expect(self, command: Command) -> None:
        """Give up what is going on, and hold the state that a certificate proves."""
        self.cancel.cancel()
        written = bytes.fromhex(command["certificate"])
        certificate = decode(Certificate, written, max_bytes=MAX_FRAME_BYTES) if written else None
        self.averager.expect(command["round"], certificate)
        say("expecting")

    async def prepare(self, command: Command) -> None:
        """Make the contribution to a round, and arm the strike that is to fall in it, if there is one."""
        number, index = command["round"], self.setting["index"]
        self.strike = command if command["at"] else None
        self.outputs.clear()
        self.vector = vector_of(self.setting["seed"], index, number, self.num_cells)
        self.contribution = Contribution(
            vector=FlatSum([self.vector]),
            round=number,
            base_root=ROOT,
            tokens=tokens_of(index),
            steps=1,
            loss=0.0,
            grace=self.setting["floor"],
        )
        say("prepared")

    async def round(self, command: Command) -> None:
        """Take part in the round until it is certified, with as many attempts as a trainer would make."""
        began, attempts = trio.current_time(), 0
        with trio.CancelScope() as self.cancel:
            while attempts < MAX_ATTEMPTS:
                averaged = await self.averager.average(self.contribution, lambda bounds, outputs: ROOT)
                attempts += 1
                if averaged.outcome.kind in (OutcomeKind.DONE, OutcomeKind.BEHIND):
                    break
                self.node.telemetry.emit("attempt.over", step=averaged.outcome.kind.value, reason=averaged.outcome.reason)
        if not self.cancel.cancelled_caught:
            await self.report(averaged, trio.current_time() - began, attempts)

    async def report(self, averaged: Averaged, seconds: float, attempts: int) -> None:
        outcome, out = averaged.outcome, self.vector
        figures: dict[str, Any] = {}
        if outcome.kind is OutcomeKind.DONE:
            await self.node.compute(self.decode, averaged, out)
            assert outcome.certificate is not None
            figures["hash"] = await self.node.compute(hash_of, out)
            figures["cut"] = [self.members[peer] for peer in outcome.cut]
            bounds, members = outcome.value.bounds, outcome.value.members
            figures["parts"] = [
                (bounds[part], bounds[part + 1], [self.members[members[index]] for index in sorted(counted)])
                for part, counted in sorted(outcome.counted.items())
            ]
            figures["certificate"] = encode(outcome.certificate).hex()
        kind, reason = outcome.kind.value, outcome.reason
        say(
            "round.over",
            round=outcome.slot.round,
            kind=kind,
            reason=reason,
            seconds=seconds,
            attempts=attempts,
            **figures,
        )

    def decode(self, averaged: Averaged, out: Floats) -> None:
        out.fill(np.nan)  # What is not written by the round must not look like a result.
        for span in spans(averaged.outcome.value.bounds):
            decode_outputs(self.codecs[1], averaged.outcome.value.bounds, averaged.outputs, span, out[span])

    def hear(self, event: Event) -> None:
        strike = self.strike
        if strike and event["event"] == "round.said" and (event["step"], event["round"]) == (
            strike["at"],
            strike["round"],
        ):
            self.silence.enter_context(patch.object(self.node, "send", self.last_send(self.node.send)))
            self.nursery.start_soon(self.strike_when_heard)

    def last_send(self, send: Callable[..., None]) -> Callable[..., None]:
        """The node's `send`, which sends only once more: the round would go on until the message is written."""
        left = [send]
        return lambda peers, message: left.pop()(peers, message) if left else None

    async def strike_when_heard(self) -> None:
        for session in list(self.node._sessions.values()):
            await session.drain(1.0)
        self.fall()

    def fall(self) -> None:
        """The strike itself: nothing of this peer runs behind this line until it is resumed."""
        strike, self.strike = self.strike, None
        if strike is not None:
            say("struck", at=strike["at"], round=strike["round"], time=self.node.telemetry._clock())
            os.kill(os.getpid(), strike["signal"])
        self.silence.close()

    def watch_blobs(self) -> None:
        """Notice when somebody asks for an output: those are the blobs that everybody may read."""
        store = self.node.blobs
        put, find = store.put, store.find

        def noted(key: bytes, data: Blob | FileBlob, *, readers: Iterable[str] | None = None) -> None:
            if readers is None:
                self.outputs.add(key)
            put(key, data, readers=readers)

        def asked(key: bytes, reader: str) -> Blob | FileBlob | None:
            if key in self.outputs and reader != self.node.peer_id and self.strike and self.strike["at"] == "Serve":
                self.fall()
            return find(key, reader)

        patch.object(store, "put", noted).start()
        patch.object(store, "find", asked).start()


async def main() -> None:
    setting = json.loads(sys.stdin.readline())
    identity, config = identity_of(setting["index"]), PeerConfig(host=setting["host"], port=0)
    telemetry = Telemetry()
    async with (
        open_host(identity, config, telemetry) as host,
        Node(host, identity, config, telemetry) as node,
        trio.open_nursery() as nursery,
    ):
        peer = Peer(node, nursery, setting)
        peer.watch_blobs()
        say("opened", peer=identity.peer_id, addresses=list(host.addresses()))
        commands = {"meet": peer.meet, "expect": peer.expect, "prepare": peer.prepare, "round": peer.round}
        # Abandoned, so that a peer that breaks shows its traceback and does not wait for another command.
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):  # type: ignore[call-arg]
            command = json.loads(line)
            nursery.start_soon(commands[command["op"]], command)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
