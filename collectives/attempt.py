"""One attempt of a round, driven: the machine's actions become messages, fetches and arithmetic; it holds no rules."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from ..peer import wire
from ..peer.digest import digest
from ..peer.errors import LocalError, NetworkError, RemoteError
from ..peer.node.bulk import Blob
from ..peer.node.node import Node
from .accountability.conduct import Conduct
from .accountability.evidence import SUBJECTS
from .chain.certificate import sign
from .codec import CELL, Codec, Floats, mean_chunks
from .robust.checks import doubtful, false_outputs, is_true, judge, sketch_parts
from .robust.rule import Verdict
from .round import actions as agenda
from .round.actions import Action, Outcome, Phase
from .round.machine import Round

MAX_TRIES = 2
"""A fetch is tried again once: the first failure may be a connection that died unnoticed."""

NextRoot = Callable[[Sequence[int], Sequence[Blob]], bytes]
"""The state root that the encoded outputs (one a part, with the bounds) lead to."""


@dataclass(slots=True)
class Work:
    """The bytes of one attempt: my contribution as I sent it, what I hold of others, and all outputs."""

    contribution: Floats
    bounds: tuple[int, ...] = ()
    mine: list[Blob] = field(default_factory=list)
    parts: dict[tuple[int, int], Blob] = field(default_factory=dict)
    """By part and contributor."""
    outputs: dict[bytes, Blob] = field(default_factory=lambda: {agenda.EMPTY: b""})
    """By hash."""
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)
    """By cut."""
    served: list[bytes] = field(default_factory=list)


class Attempt:
    """Runs one `Round` over a node until it has ended."""

    def __init__(
        self,
        node: Node,
        machine: Round,
        codecs: tuple[Codec, Codec],
        work: Work,
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
        """Seconds that each phase took, as far as it has ended."""

    async def run(self, early: Sequence[tuple[wire.Signed, wire.RoundMessage]]) -> Outcome:
        """Drive the machine to its end; `early` are messages that came before I was ready."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                self.act(self.machine.start())
                for signed, message in early:
                    self.hear(signed, message)
                while self.machine.outcome is None:
                    with trio.CancelScope(deadline=self.machine.deadline) as self._alarm:
                        await self._ended.wait()
                    self.act(self.machine.tick(trio.current_time()))
            finally:
                self._left = True
            nursery.cancel_scope.cancel()
        assert self.machine.outcome is not None
        return self.machine.outcome

    def hear(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """A message from somebody else; one that breaks a rule is charged to its sender."""
        try:
            self.act(self.machine.receive(signed, message, self.node.now()))
        except RemoteError as error:
            self.node.charge(signed.sender, type(message).__name__, error)

    def act(self, actions: Sequence[Action]) -> None:
        """Carry out actions, and what follows from them, in order; nothing any more once the attempt was left."""
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
            case agenda.Send(to, message):
                if type(message) in SUBJECTS:
                    self._conduct.promises.speak(message.slot)
                signed = sign(self.node.identity, message)
                slot = message.slot
                self.node.telemetry.emit(
                    "round.said", step=type(message).__name__, round=slot.round, attempt=slot.attempt
                )
                if self.node.peer_id in to:
                    self._actions.extend(self.machine.receive(signed, message, trio.current_time()))
                self.node.tell([peer for peer in to if peer != self.node.peer_id], signed)
            case agenda.Forward(to, signed):
                self.node.tell([peer for peer in to if peer != self.node.peer_id], signed)
            case agenda.HashParts():
                self._nursery.start_soon(self._encode, action)
            case agenda.FetchPart(num_bytes=0):
                self._take_part(action, b"")  # Nothing is here already.
            case agenda.FetchOutput(num_bytes=0):
                self._take_output(action, b"")
            case agenda.FetchPart():
                self._nursery.start_soon(self._fetch_part, action)
            case agenda.FetchOutput():
                self._nursery.start_soon(self._fetch_output, action)
            case agenda.SketchParts():
                self._nursery.start_soon(self._sketch, action)
            case agenda.CompareSketch():
                self._nursery.start_soon(self._compare, action)
            case agenda.Judge():
                self._nursery.start_soon(self._judge, action)
            case agenda.CheckOutputs():
                self._nursery.start_soon(self._check, action)
            case agenda.Reduce():
                self._nursery.start_soon(self._reduce, action)
            case agenda.Finalize():
                self._nursery.start_soon(self._finalize, action)
            case agenda.Note(event, peer, step, reason):
                slot = self.machine.slot
                self.node.telemetry.emit(
                    event, peer=peer, step=step, reason=reason, round=slot.round, attempt=slot.attempt
                )
            case agenda.Ended():
                pass

    async def _encode(self, action: agenda.HashParts) -> None:
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
        self.machine.exchange.collecting.parts_hashed(tuple(key for _, key in encoded))
        self._tell([])

    async def _fetch_part(self, action: agenda.FetchPart) -> None:
        self._take_part(action, await self._obtain(action, self._contribution_codec))

    def _take_part(self, action: agenda.FetchPart, data: Blob | str) -> None:
        if isinstance(data, str):
            notes = self.machine.exchange.collecting.not_fetched(action.part, action.contributor, data)
            self._tell(notes)
        else:
            self.work.parts[action.part, action.contributor] = data
            if self.machine.exchange.collecting.fetched(action.part, action.contributor):
                self._tell([])

    async def _fetch_output(self, action: agenda.FetchOutput) -> None:
        self._take_output(action, await self._obtain(action, self._output_codec))

    def _take_output(self, action: agenda.FetchOutput, data: Blob | str) -> None:
        if isinstance(data, str):
            self._tell(self.machine.exchange.harvest.not_fetched(action.part, action.hash, data))
        else:
            self.work.outputs[action.hash] = data
            self._serve(action.hash, data, readers=None)  # For whom its owner does not give it to.
            if self.machine.exchange.harvest.fetched(action.part, action.hash):
                self._tell([])

    async def _obtain(self, action: agenda.FetchPart | agenda.FetchOutput, codec: Codec) -> Blob | str:
        """Well-formed bytes, or why they cannot be had."""
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

    def _well_formed(self, action: agenda.FetchPart | agenda.FetchOutput, data: Blob, codec: Codec) -> Blob:
        """The bytes, if they are an encoding. Whoever bound itself to any others by their hash is convicted by them."""
        try:
            codec.check(data, action.num_cells)
        except RemoteError:
            if statements := self.machine.exchange.bound_to(action):
                self._conduct.bans.accuse(statements, action.part, data)
            raise
        return data

    async def _get(self, action: agenda.FetchPart | agenda.FetchOutput) -> Blob:
        if action.source != self.node.peer_id:
            return await self.node.fetch(action.source, action.hash, action.num_bytes)
        own = self.node.blobs.get(action.hash, action.source)
        if own is None:
            raise LocalError("bytes of my own that I do not serve")
        return own

    async def _sketch(self, action: agenda.SketchParts) -> None:
        work, codec = self.work, self._contribution_codec
        tables = await self.node.compute(
            sketch_parts, codec, work.mine, work.bounds, action.after, action.columns
        )
        self._tell(self.machine.exchange.sketched(action.after, tables))

    async def _compare(self, action: agenda.CompareSketch) -> None:
        exchange, codec = self.machine.exchange, self._contribution_codec
        words, data = exchange.bound_to(action), self.work.parts[action.part, action.contributor]
        if not words:
            return  # Meanwhile the cut was made again.
        sketch = wire.opened(words[0])
        assert isinstance(sketch, wire.Sketch)
        if await self.node.compute(is_true, sketch, self.work.bounds, action.part, codec, data):
            exchange.compared(action)
            self._tell([])
        else:  # Everybody will see that; without its author, the convener cuts again.
            self._conduct.bans.accuse(words, action.part, data)

    async def _judge(self, action: agenda.Judge) -> None:
        rule, members = self.machine.setup.rule, len(self.work.bounds) - 1
        verdict = await self.node.compute(judge, rule, action.sketches, action.masses, members)
        self.work.verdicts[action.cut] = verdict
        weights = tuple(tuple(row) for row in verdict.weights.tolist())
        self._tell(self.machine.exchange.judged(action.cut, weights, verdict.flagged))

    async def _check(self, action: agenda.CheckOutputs) -> None:
        codec, bounds = self._output_codec, self.work.bounds
        outputs = {part: self.work.outputs[key] for part, key in action.outputs.items()}

        def check() -> tuple[tuple[int, ...], tuple[int, ...]]:
            weights = np.array(action.weights)
            false = false_outputs(codec, outputs, bounds, weights, action.second, action.after)
            return false, doubtful(action.first, action.second, len(bounds) - 1)

        self._tell(self.machine.exchange.checked(action, *await self.node.compute(check)))

    async def _reduce(self, action: agenda.Reduce) -> None:
        parts = [self.work.parts[action.part, index] for index in action.contributors]

        codec, verdict, rule = self._contribution_codec, self.work.verdicts.get(action.cut), self.machine.setup.rule

        def reduce() -> tuple[Blob, bytes]:
            if verdict is None:
                chunks = mean_chunks(codec, parts, action.weights, action.num_cells)
            else:
                chunks = rule.chunks(codec, parts, verdict, action.part, action.num_cells)
            data = self._output_codec.encode_chunks(chunks, action.num_cells)
            return data, digest(data)

        data, key = await self.node.compute(reduce)
        self._serve(key, data, readers=None)
        self.machine.exchange.reduced(action.cut, action.part, key)
        self._tell([])

    async def _finalize(self, action: agenda.Finalize) -> None:
        outputs = [self.work.outputs[key] for key in action.outputs]
        root = await self.node.compute(self._next_root, action.bounds, outputs)
        self.machine.exchange.finalized(action.outputs, root)
        self._tell([])

    def _tell(self, actions: Sequence[Action]) -> None:
        """A piece of work is done: carry out what follows."""
        self.act(self.machine.told(trio.current_time(), actions))

    def _serve(self, key: bytes, data: Blob, *, readers: Sequence[str] | None) -> None:
        # My own part is served to me like any other, so that an owner has one way to get parts.
        self.node.blobs.put(key, data, readers=readers)
        self.work.served.append(key)
