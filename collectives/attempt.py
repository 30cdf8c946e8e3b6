"""The driver of one attempt of a round: executes the machine's actions, and holds no rules."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from ..peer import wire
from ..peer.arrays import Floats
from ..peer.digest import digest
from ..peer.errors import LocalError, NetworkError, RemoteError
from ..peer.node.bulk import Blob
from ..peer.node.node import Node
from .accountability.conduct import Conduct
from .codec import CELL, EMPTY, Codec, mean_chunks
from .robust.checks import doubtful, false_outputs, is_true, judge_sketches, sketch_parts
from .robust.rule import Weighting
from .round import actions
from .round.actions import Action, Outcome, Phase
from .round.machine import Round

MAX_TRIES = 2
"""One retry of a fetch: the first failure may be a connection that died unnoticed."""

NextRoot = Callable[[Sequence[int], Sequence[Blob]], bytes]
"""Computes the state root that the encoded outputs (one per part, with the bounds) lead to."""


@dataclass(slots=True)
class AttemptBytes:
    """The bytes of one attempt: my contribution as sent, the parts that I hold of others, and all outputs."""

    contribution: Floats
    bounds: tuple[int, ...] = ()
    mine: list[Blob] = field(default_factory=list)
    parts: dict[tuple[int, int], Blob] = field(default_factory=dict)
    """By part and contributor."""
    outputs: dict[bytes, Blob] = field(default_factory=lambda: {EMPTY: b""})
    """By hash."""
    weightings: dict[bytes, Weighting] = field(default_factory=dict)
    """By cut."""
    served: list[bytes] = field(default_factory=list)


class Attempt:
    """Drives one `Round` over a node until it ends."""

    def __init__(
        self,
        node: Node,
        machine: Round,
        codecs: tuple[Codec, Codec],
        work: AttemptBytes,
        next_root: NextRoot,
        conduct: Conduct,
    ) -> None:
        self.node = node
        self.machine = machine
        self.work = work
        self._contribution_codec, self._output_codec = codecs
        self._next_root = next_root
        self._conduct = conduct
        self._actions: deque[Action] = deque()
        self._pumping = False
        self._left = False
        self._ended = trio.Event()
        self._alarm = trio.CancelScope()
        self._phase = (machine.phase, trio.current_time())
        self.durations: dict[Phase, float] = {}
        """The seconds that each finished phase took."""

    async def run(self, early: Sequence[tuple[wire.Signed, wire.RoundMessage]]) -> Outcome:
        """Drive the machine to its end; `early` are messages that arrived before I was ready."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                self.act(self.machine.start())
                for signed, message in early:
                    self.receive(signed, message)
                while self.machine.outcome is None:
                    with trio.CancelScope(deadline=self.machine.deadline) as self._alarm:
                        await self._ended.wait()
                    self.act(self.machine.tick(trio.current_time()))
            finally:
                self._left = True
            nursery.cancel_scope.cancel()
        assert self.machine.outcome is not None
        return self.machine.outcome

    def receive(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Receive another peer's message; one that breaks a rule is charged to its sender."""
        try:
            self.act(self.machine.receive(signed, message, self.node.now()))
        except RemoteError as error:
            self.node.charge(signed.sender, type(message).__name__, error)

    def act(self, actions: Sequence[Action]) -> None:
        """Execute actions, and those that follow from them, in order; nothing once the attempt has ended."""
        self._actions.extend(actions)
        if self._pumping or self._left:
            return
        self._pumping = True
        try:
            while self._actions:
                self._do(self._actions.popleft())
        finally:
            self._pumping = False
        phase, began = self._phase
        if self.machine.phase is not phase:
            now = trio.current_time()
            self.durations[phase] = now - began
            self._phase = (self.machine.phase, now)
        if self.machine.outcome is not None:
            self._ended.set()
        elif self.machine.deadline != self._alarm.deadline:
            self._alarm.deadline = self.machine.deadline

    def _do(self, action: Action) -> None:
        match action:
            case actions.Send(to, message):
                signed = self._conduct.guard.sign(message)
                if isinstance(signed, str):  # What else was to be done followed from a statement that I cannot make.
                    self._actions.clear()
                    self._actions.extend(self.machine.give_up(f"{type(message).__name__}: {signed}", trio.current_time()))
                    return
                slot = message.slot
                self.node.telemetry.emit(
                    "round.said", step=type(message).__name__, round=slot.round, attempt=slot.attempt
                )
                if self.node.peer_id in to:
                    self._actions.extend(self.machine.receive(signed, message, trio.current_time()))
                self.node.send([peer for peer in to if peer != self.node.peer_id], signed)
            case actions.Forward(to, signed):
                self.node.send([peer for peer in to if peer != self.node.peer_id], signed)
            case actions.HashParts():
                self._nursery.start_soon(self._encode, action)
            case actions.FetchPart(num_bytes=0):
                self._take_part(action, b"")  # Nothing is here already.
            case actions.FetchOutput(num_bytes=0):
                self._take_output(action, b"")
            case actions.FetchPart():
                self._nursery.start_soon(self._fetch_part, action)
            case actions.FetchOutput():
                self._nursery.start_soon(self._fetch_output, action)
            case actions.SketchParts():
                self._nursery.start_soon(self._sketch, action)
            case actions.CompareSketch():
                self._nursery.start_soon(self._compare, action)
            case actions.Judge():
                self._nursery.start_soon(self._judge, action)
            case actions.CheckOutputs():
                self._nursery.start_soon(self._check, action)
            case actions.Reduce():
                self._nursery.start_soon(self._reduce, action)
            case actions.Finalize():
                self._nursery.start_soon(self._finalize, action)
            case actions.Note(event, peer, step, reason):
                slot = self.machine.slot
                self.node.telemetry.emit(
                    event, peer=peer, step=step, reason=reason, round=slot.round, attempt=slot.attempt
                )
            case actions.Ended():
                pass

    async def _encode(self, action: actions.HashParts) -> None:
        work = self.work
        work.bounds = action.bounds

        def encode_parts() -> list[tuple[Blob, bytes]]:
            parts: list[tuple[Blob, bytes]] = []
            for low, high in zip(action.bounds, action.bounds[1:], strict=False):
                data = self._contribution_codec.encode(work.contribution[low * CELL : high * CELL])
                parts.append((data, digest(data)))
            return parts

        encoded = await self.node.compute(encode_parts)
        work.mine = [data for data, _ in encoded]
        for readers, (data, key) in zip(action.readers, encoded, strict=True):
            self._serve(key, data, readers=[*readers, self.node.peer_id])
        self.machine.exchange.collect_phase.parts_hashed(tuple(key for _, key in encoded))
        self._advance([])

    async def _fetch_part(self, action: actions.FetchPart) -> None:
        self._take_part(action, await self._obtain(action, self._contribution_codec))

    def _take_part(self, action: actions.FetchPart, data: Blob | str) -> None:
        if isinstance(data, str):
            notes = self.machine.exchange.collect_phase.not_fetched(action.part, action.contributor, data)
            self._advance(notes)
        else:
            self.work.parts[action.part, action.contributor] = data
            if self.machine.exchange.collect_phase.fetched(action.part, action.contributor):
                self._advance([])

    async def _fetch_output(self, action: actions.FetchOutput) -> None:
        self._take_output(action, await self._obtain(action, self._output_codec))

    def _take_output(self, action: actions.FetchOutput, data: Blob | str) -> None:
        if isinstance(data, str):
            self._advance(self.machine.exchange.reduce_phase.not_fetched(action.part, action.hash, data))
        else:
            self.work.outputs[action.hash] = data
            self._serve(action.hash, data, readers=None)  # For members that its owner withholds it from.
            if self.machine.exchange.reduce_phase.fetched(action.part, action.hash):
                self._advance([])

    async def _obtain(self, action: actions.FetchPart | actions.FetchOutput, codec: Codec) -> Blob | str:
        """Fetch bytes and check their encoding; returns the bytes, or the reason why they are not available."""
        for attempt in range(1, MAX_TRIES + 1):
            try:
                data = await self._get(action)
                return self._well_formed(action, data, codec)
            except NetworkError as error:
                if attempt == MAX_TRIES:
                    return str(error)
                self.node.telemetry.emit("fetch.retry", peer=action.source, step="fetch", reason=str(error))
            except RemoteError as error:
                self.node.charge(action.source, "fetch", error)
                return str(error)
        raise AssertionError("unreachable: the last try returns")

    def _well_formed(self, action: actions.FetchPart | actions.FetchOutput, data: Blob, codec: Codec) -> Blob:
        """Check an encoding; if it is malformed, accuse the peer that signed its hash. Raises `RemoteError`."""
        try:
            codec.check(data, action.num_cells)
        except RemoteError:
            if statements := self.machine.exchange.bound_to(action):
                self._conduct.bans.accuse(statements, action.part, data)
            raise
        return data

    async def _get(self, action: actions.FetchPart | actions.FetchOutput) -> Blob:
        if action.source != self.node.peer_id:
            return await self.node.fetch(action.source, action.hash, action.num_bytes)
        own = self.node.blobs.get(action.hash, action.source)
        if own is None:
            raise LocalError("my own part is no longer served here")
        return own

    async def _sketch(self, action: actions.SketchParts) -> None:
        work, codec = self.work, self._contribution_codec
        tables = await self.node.compute(
            sketch_parts, codec, work.mine, work.bounds, action.seed, action.columns
        )
        self._advance(self.machine.exchange.sketched(action.seed, tables))

    async def _compare(self, action: actions.CompareSketch) -> None:
        exchange, codec = self.machine.exchange, self._contribution_codec
        statements, data = exchange.bound_to(action), self.work.parts[action.part, action.contributor]
        if not statements:
            return  # A re-cut has replaced this cut.
        sketch = wire.opened(statements[0])
        assert isinstance(sketch, wire.Sketch)
        if await self.node.compute(is_true, sketch, self.work.bounds, action.part, codec, data):
            exchange.compared(action)
            self._advance([])
        else:  # All members will verify that; without the author, the convener cuts again.
            self._conduct.bans.accuse(statements, action.part, data)

    async def _judge(self, action: actions.Judge) -> None:
        rule, members = self.machine.setup.rule, len(self.work.bounds) - 1
        weighting = await self.node.compute(judge_sketches, rule, action.sketches, action.masses, members)
        self.work.weightings[action.cut] = weighting
        weights = tuple(tuple(row) for row in weighting.weights.tolist())
        self._advance(self.machine.exchange.judged(action.cut, weights, weighting.flagged))

    async def _check(self, action: actions.CheckOutputs) -> None:
        codec, bounds = self._output_codec, self.work.bounds
        outputs = {part: self.work.outputs[key] for part, key in action.outputs.items()}

        def check() -> tuple[tuple[int, ...], tuple[int, ...]]:
            weights = np.array(action.weights)
            false = false_outputs(codec, outputs, bounds, weights, action.second, action.seed)
            return false, doubtful(action.first, action.second, len(bounds) - 1)

        self._advance(self.machine.exchange.checked(action, *await self.node.compute(check)))

    async def _reduce(self, action: actions.Reduce) -> None:
        parts = [self.work.parts[action.part, index] for index in action.contributors]

        codec, weighting, rule = self._contribution_codec, self.work.weightings.get(action.cut), self.machine.setup.rule

        def reduce() -> tuple[Blob, bytes]:
            if weighting is None:
                chunks = mean_chunks(codec, parts, action.weights, action.num_cells)
            else:
                chunks = rule.chunks(codec, parts, weighting, action.part, action.num_cells)
            data = self._output_codec.encode_chunks(chunks, action.num_cells)
            return data, digest(data)

        data, key = await self.node.compute(reduce)
        self._serve(key, data, readers=None)
        self.machine.exchange.reduced(action.cut, action.part, key)
        self._advance([])

    async def _finalize(self, action: actions.Finalize) -> None:
        outputs = [self.work.outputs[key] for key in action.outputs]
        root = await self.node.compute(self._next_root, action.bounds, outputs)
        self.machine.exchange.finalized(action.outputs, root)
        self._advance([])

    def _advance(self, actions: Sequence[Action]) -> None:
        """Execute the actions that follow from finished work."""
        self.act(self.machine.after_work(trio.current_time(), actions))

    def _serve(self, key: bytes, data: Blob, *, readers: Sequence[str] | None) -> None:
        # I fetch my own part like any other, so that an owner has one way to get parts.
        self.node.blobs.put(key, data, readers=readers)
        self.work.served.append(key)
