"""The work of one attempt of a round: encodes, fetches, sketches, reduces. Holds no rules."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import trio

from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.disk import room_on_disk
from ...peer.base.errors import LocalError, NetworkError, RemoteError, sole_error
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ..allreduce import actions
from ..allreduce.actions import Action
from ..allreduce.exchange import RosterRound
from ..chain.certificate import open_value
from ..chain.kept_outputs import Outputs
from ..chain.replay import fetch_outputs
from ..robust.checks import (
    is_true,
    judge_sketches,
    sketch_parts,
)
from ..robust.residual import judge_outputs
from ..robust.rule import Weighting
from ..round.machine import Round
from ..vector.codec import EMPTY, Codec
from ..vector.lines import CodecChoice
from ..vector.partition import memory_for_parts
from .contribution import Contribution, NextRoot
from .incoming import Incoming

TRANSFER_SHARE = 0.25
"""Of the time to the next round: for each of the two transfers of one that nobody waits for. A result that comes after half
of it is worth as much as one at once; after all of it 1 % less (docs/log.md), and the votes take their time, too."""
LINE_SHARE = 0.5
"""Of a peer's line, for such transfers where that is enough: the rest is for the other programs of its home."""
PHASE_SHARE = 0.05
"""Of an inner phase, for the bytes of a contribution in blocking mode, where a peer may choose its codec."""


@dataclass(eq=False)
class Work:
    """Executes the work that one attempt's machine requests, and reports each result to it."""

    node: Node
    machine: Round
    contribution: Contribution
    choice: CodecChoice
    """The codec of this peer's contribution, and the one that decodes those of all."""
    next_root: NextRoot
    kept: Outputs
    act: Callable[[Sequence[Action]], None]
    """Executes the actions that follow from a result."""
    nursery: trio.Nursery
    mine: list[Blob] = field(default_factory=list)
    """This peer's contribution as sent, by part."""
    keys: tuple[bytes, ...] = ()
    """Its hashes, by part."""
    parts: dict[tuple[int, int], Blob] = field(default_factory=dict)
    """The parts of other contributions that this peer holds, by part and contributor."""
    parts_bytes: int = 0
    """Bytes of all parts whose fetch has begun."""
    outputs: dict[bytes, Blob] = field(default_factory=lambda: {EMPTY: b""})
    """Encoded outputs, by hash."""
    served: list[bytes] = field(default_factory=list)
    is_over: bool = False
    """True once the attempt has ended: results of its last tasks are dropped."""
    _incoming: Incoming = field(default_factory=Incoming)
    _coming: dict[tuple[int, int], trio.CancelScope] = field(default_factory=dict)
    """The fetches of parts under way, by part and contributor."""

    def __post_init__(self) -> None:
        """Map each kind of work to the task that does it."""
        setup = self.machine.setup
        self._output_codec, self._bans = setup.spec.output, setup.conduct.bans
        self._tasks: Mapping[type[Action], Callable[..., Awaitable[None]]] = {
            actions.FetchValue: self._fetch_value,
            actions.HashParts: self._encode,
            actions.FetchPart: self._fetch_part,
            actions.FetchOutput: self._fetch_output,
            actions.SketchParts: self._sketch,
            actions.CompareSketch: self._compare,
            actions.Judge: self._judge,
            actions.CheckOutputs: self._check,
            actions.Reduce: self._reduce,
            actions.Finalize: self._finalize,
        }

    def start(self, action: actions.Work | actions.ShowParts) -> None:
        """Start the work of an action."""
        if isinstance(action, actions.ShowParts):
            for key, data in zip(self.keys, self.mine, strict=True):
                self._serve(key, data, readers=action.readers)
        else:
            self.nursery.start_soon(self._tasks[type(action)], action)

    async def _fetch_value(self, action: actions.FetchValue) -> None:
        """Fetch the outputs of a value that others hold; a failure is an event."""
        value, setup, holders = open_value(action.value), self.machine.setup, action.holders or action.voters
        # Others first in each attempt: one that serves false bytes, or none, must not delay all of them.
        turn = self.machine.slot.attempt % max(1, len(holders))
        holders, patience = (*holders[turn:], *holders[:turn]), setup.timing.control
        failed, reason = "check", "the outputs of a proposed value do not lead to the state that it names"
        try:
            self.outputs |= await fetch_outputs(
                self.node, self._output_codec, setup.cells, value, action.voters, holders, set(), patience=patience
            )
            outputs = [self.outputs[key] for key in value.outputs]
            root = await self.node.compute(self.next_root, value.bounds, outputs)
            failed = "" if root == value.next_root else failed
        except* (NetworkError, RemoteError) as raised:
            failed, reason = "fetch", str(sole_error(raised))
        if failed:
            self.node.telemetry.emit("value.not_fetched", step=failed, reason=reason, round=value.round)
            return
        await self._keep(value.outputs)
        if not self.is_over:
            self.act(self.machine.value_held(action.value, self.node.running.now()))

    async def _keep(self, outputs: Sequence[bytes]) -> None:
        """Write outputs to disk before I accept a value of them: else a power cut may leave its proof and no copy of it."""
        await self.kept.keep(self.machine.slot.round, {key: self.outputs[key] for key in outputs})

    async def _encode(self, action: actions.HashParts) -> None:
        vector = self.contribution.vector
        assert vector is not None, "a member that does not train has nothing to encode"
        self._choose(action.bounds)

        def encode_parts() -> list[tuple[Blob, bytes]]:
            codec, spans = self.choice.mine, pairwise(action.bounds)
            parts = [codec.encode_chunks(vector.chunks(low, high), high - low) for low, high in spans]
            return [(data, digest(data)) for data in parts]

        encoded = await self.node.compute(encode_parts)
        self.mine, self.keys = [data for data, _ in encoded], tuple(key for _, key in encoded)
        if self.contribution.patience:
            self._share_line(action.bounds)
        for readers, (data, key) in zip(action.readers, encoded, strict=True):
            self._serve(key, data, readers=[*readers, self.node.peer_id])
        self._done(lambda exchange: exchange.collect_phase.parts_hashed(self.keys, self.choice.stated))

    def _choose(self, bounds: Sequence[int]) -> None:
        """Choose the codec of my contribution by my line as its receivers measured it; a change is an event.

        What I measure myself counts bytes that still wait in the buffers of this computer.
        """
        exchange = self.machine.exchange
        rate = exchange.my_rate * (len(bounds) - 2)  # All connections at a time share the line.
        seconds = self.contribution.patience * TRANSFER_SHARE or self.machine.setup.phase_seconds * PHASE_SHARE
        if reason := self.choice.choose(bounds[-1] - bounds[0] - self._own_cells(bounds), rate, seconds):
            slot = self.machine.slot
            self.node.telemetry.emit(
                "codec.changed", step="encode", reason=reason, round=slot.round, attempt=slot.attempt
            )

    def _own_cells(self, bounds: Sequence[int]) -> int:
        mine = self.machine.exchange.table.me
        return bounds[mine + 1] - bounds[mine] if mine + 1 < len(bounds) else 0

    def _share_line(self, bounds: Sequence[int]) -> None:
        """Send the bytes of a round at `LINE_SHARE` of my line, or as much as they need of it; none was measured at first."""
        others, total, own = len(self.machine.exchange.members) - 1, bounds[-1] - bounds[0], self._own_cells(bounds)
        most = max(self.choice.mine.num_bytes(total - own), self._output_codec.num_bytes(own) * others)
        line = self.machine.exchange.my_rate * (len(bounds) - 2)
        rate = max(line * LINE_SHARE, most / (self.contribution.patience * TRANSFER_SHARE))
        self.node.pace_round(rate if rate < line else 0.0)

    async def _fetch_part(self, action: actions.FetchPart) -> None:
        data: Blob | str = "it came too late"
        with trio.CancelScope() as scope:  # Who sends a part a byte at a time is not to hold up what else it sends.
            self._coming[action.part, action.contributor] = scope
            data = await self._obtain(action, self.choice.codec)
        del self._coming[action.part, action.contributor]
        if isinstance(data, str):
            self._done(lambda exchange: exchange.collect_phase.not_fetched(action.part, action.contributor, data))
        else:
            self.parts[action.part, action.contributor] = data
            self._done(lambda exchange: exchange.collect_phase.fetched(action.part, action.contributor))

    def give_up_late(self) -> None:
        """Give up the parts that are on their way and cannot count any more; once, with the first cut."""
        if self._coming and self.machine.has_roster and self.machine.exchange.is_cut:
            collect = self.machine.exchange.collect_phase
            for pair, scope in self._coming.items():
                if collect.is_too_late(*pair):
                    scope.cancel()

    async def _room(self, size: int) -> bytearray | memoryview:
        """Make room for a contribution to a part that I reduce or pass on: beyond `memory_for_parts` in a file.

        Raises `NetworkError` where the disk has none: without that contribution the round goes on.
        """
        folder = self.kept.folder
        self.parts_bytes += size
        own = self.choice.codec.num_bytes(len(self.machine.setup.cells))
        if folder is not None and self.parts_bytes > memory_for_parts(own):
            try:
                return await self.node.compute(room_on_disk, folder, size)
            except LocalError as error:
                raise NetworkError(f"no room for its part: {error}") from error
        return bytearray(size)

    async def _fetch_output(self, action: actions.FetchOutput) -> None:
        data = await self._obtain(action, self._output_codec)
        if isinstance(data, str):
            self._done(lambda exchange: exchange.output_not_fetched(action.part, action.source, action.hash, data))
        else:
            self.outputs[action.hash] = data
            self._serve(action.hash, data, readers=None)  # For members that its owner withholds it from.
            self._done(lambda exchange: exchange.output_fetched(action.part, action.hash))

    async def _obtain(self, action: actions.FetchBytes, codec: Codec) -> Blob | str:
        """Fetch bytes and check their encoding; returns the bytes, or the reason why they are not available.

        From the source, or, if I have lost it or it refuses, from others that fetch them from it.
        """
        if not action.num_bytes:
            return b""
        reason, sources, limit = "", action.sources, math.inf
        if isinstance(action, actions.FetchPart) and self.machine.exchange.is_weighed:
            # To make a part again: others hold it, and its source may let it hang.
            sources, limit = tuple(dict.fromkeys(sources)), self.machine.setup.timing.transfer / 2
        if action.is_from_maker:
            self._incoming.begin(action.name)
        try:
            for source in sources:
                if source != action.source:
                    self._incoming.end(action.name)  # Whom I ask may ask me: neither is to wait for the other.
                if reason:
                    self.node.telemetry.emit("fetch.retry", peer=source, step="fetch", reason=reason)
                try:
                    with trio.fail_after(limit):
                        data = await self._get(action, source)
                except trio.TooSlowError:
                    reason = reason or "its bytes hang"
                except NetworkError as error:
                    reason = reason or str(error)
                except RemoteError as error:
                    self.node.charge(source, "fetch", error)
                    reason = reason or str(error)
                else:
                    return self._checked(action, data, codec)
            return reason
        finally:
            self._incoming.end(action.name)

    async def pass_on(self, name: bytes, reader: str) -> None:
        """Bring bytes here for another member that cannot get them from their source: its part, or an output.

        Waits only while I fetch them from their source. Raises `ProtocolViolation` for a member that waits for too much.
        """
        if not self.machine.has_roster or reader not in self.machine.exchange.members:
            return
        with self._incoming.waiting(reader), trio.move_on_after(self.machine.setup.timing.transfer):
            await self._incoming.ended(name)
            wanted = self.machine.exchange.part_for(name, reader)
            if wanted is None or self.is_over or self.node.blobs.find(name, reader) is not None:
                return
            data = self.parts.get((wanted.part, wanted.contributor))
            if data is None:
                self._incoming.begin(name)
                try:
                    data = await self._room(wanted.num_bytes)
                    await self.node.fetch_into(wanted.source, wanted.hash, data)
                except (NetworkError, RemoteError):
                    return  # The reader asks others, and says what is missing.
                finally:
                    self._incoming.end(name)
            if not self.is_over:
                self._serve(name, data, readers=wanted.others)

    def _checked(self, action: actions.FetchBytes, data: Blob, codec: Codec) -> Blob | str:
        """Return a well-formed encoding; of a malformed one why it is, and accuse the peer that signed its hash."""
        try:
            codec.check(data, action.num_cells)
        except RemoteError as error:
            if statements := self.machine.exchange.bound_to(action):
                self._bans.accuse(statements, action.part, data)
            self.node.charge(action.source, "fetch", error)
            return str(error)
        return data

    async def _get(self, action: actions.FetchBytes, source: str) -> Blob:
        if source != self.node.peer_id:
            name, size = b"" if source == action.source else action.name, action.num_bytes
            into = await self._room(size) if isinstance(action, actions.FetchPart) else bytearray(size)
            await self.node.fetch_into(source, action.hash, into, name=name)
            return into
        own = self.node.blobs.get(action.hash, source)
        if own is None:
            raise LocalError("my own part is no longer served here")
        return own

    async def _sketch(self, action: actions.SketchParts) -> None:
        codec, parts, bounds = self.choice.codec, self.mine, self.machine.exchange.bounds
        tables = await self.node.compute(sketch_parts, codec, parts, bounds, action.seed, action.columns)
        self._done(lambda exchange: exchange.sketched(action.seed, tables))

    async def _compare(self, action: actions.CompareSketch) -> None:
        exchange, codec = self.machine.exchange, self.choice.codec
        statements, data = exchange.bound_to(action), self.parts[action.part, action.contributor]
        if not statements:
            return
        sketch = wire.opened(statements[0])
        assert isinstance(sketch, wire.Sketch)
        if await self.node.compute(is_true, sketch, exchange.bounds, action.part, codec, data):
            self._done(lambda exchange: exchange.compared(action))
        else:  # All members will verify that.
            self._bans.accuse(statements, action.part, data)

    async def _judge(self, action: actions.Judge) -> None:
        rule, members = self.machine.setup.spec.rule, len(self.machine.exchange.bounds) - 1
        weighting = await self.node.compute(judge_sketches, rule, action.sketches, action.voices, action.masses, members)
        weights = tuple(tuple(row) for row in weighting.weights.tolist())
        self._done(lambda exchange: exchange.judged(weights, weighting.flagged, weighting.short))

    async def _check(self, action: actions.CheckOutputs) -> None:
        codec, bounds = self._output_codec, self.machine.exchange.bounds
        outputs = {part: self.outputs[key] for part, key in action.outputs.items()}

        weights, tables = np.array(action.weights), (action.first, action.second)
        found = await self.node.compute(judge_outputs, codec, outputs, bounds, weights, *tables, action.silent, action.seed)
        self._done(lambda exchange: exchange.checked(action, found.false, found.unheard))

    async def _reduce(self, action: actions.Reduce) -> None:
        weighted = [it for it in zip(action.contributors, action.weights, strict=True) if it[1]]
        parts, weights = [self.parts[action.part, index] for index, _ in weighted], [weight for _, weight in weighted]
        codec, rule = self.choice.codec, self.machine.setup.spec.rule

        def reduce() -> tuple[Blob, bytes]:
            weighting = Weighting(weights=np.array([weights]), flagged={})
            chunks = rule.chunks(codec, parts, weighting, 0, action.num_cells)
            data = self._output_codec.encode_chunks(chunks, action.num_cells)
            return data, digest(data)

        data, key = await self.node.compute(reduce)
        self._serve(key, data, readers=None)
        self._done(lambda exchange: exchange.reduced(action.cut, action.part, key))

    async def _finalize(self, action: actions.Finalize) -> None:
        outputs = [self.outputs[key] for key in action.outputs]
        root = await self.node.compute(self.next_root, action.bounds, outputs)
        await self._keep(action.outputs)
        self._done(lambda exchange: exchange.finalized(action.outputs, root))

    def _done(self, report: Callable[[RosterRound], Sequence[Action] | None]) -> None:
        """Report finished work to the machine, and execute what follows."""
        if not self.is_over:
            self.act(self.machine.done(report))

    def _serve(self, key: bytes, data: Blob, *, readers: Sequence[str] | None) -> None:
        # I fetch my own part like any other, so that an owner has one way to get parts.
        self.node.blobs.put(key, data, readers=readers)
        self.served.append(key)
