"""The driver of one attempt of a round: executes the machine's actions, and holds no rules."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.disk import room_on_disk
from ...peer.base.errors import LocalError, NetworkError, RemoteError, sole_error
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ..accountability.conduct import Conduct
from ..agreement.actions import Note
from ..allreduce import actions
from ..allreduce.actions import Action, Outcome, OutcomeKind
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
from ..round.early import EARLY_BYTES
from ..round.machine import Round
from ..vector.codec import EMPTY, Codec, FlatSum
from ..vector.lines import CodecChoice
from ..vector.partition import memory_for_parts
from .contribution import NextRoot
from .incoming import Incoming

TRANSFER_SHARE = 0.25
"""Of the time to the next round: for each of the two transfers of one that nobody waits for. A result that comes after half
of it is worth as much as one at once; after all of it 1 % less (docs/log.md), and the votes take their time, too."""
LINE_SHARE = 0.5
"""Of a peer's line, for such transfers where that is enough: the rest is for the other programs of its home."""
PHASE_SHARE = 0.05
"""Of an inner phase, for the bytes of a contribution in blocking mode, where a peer may choose its codec."""


@dataclass(slots=True)
class AttemptBytes:
    """The bytes of one attempt: my contribution as sent, the parts that I hold of others, and all outputs."""

    contribution: FlatSum | None
    """None for a keeper, which contributes nothing."""
    choice: CodecChoice
    """Of the codec of my contribution, among those of all."""
    output_codec: Codec
    patience: float = 0.0
    mine: list[Blob] = field(default_factory=list)
    keys: tuple[bytes, ...] = ()
    """Their hashes."""
    parts: dict[tuple[int, int], Blob] = field(default_factory=dict)
    """By part and contributor."""
    parts_bytes: int = 0
    """The bytes of all parts that I have begun to fetch."""
    outputs: dict[bytes, Blob] = field(default_factory=lambda: {EMPTY: b""})
    """By hash."""
    served: list[bytes] = field(default_factory=list)

    @property
    def codec(self) -> Codec:
        """What decodes the contributions of all."""
        return self.choice.codec


class Attempt:
    """Drives one `Round` over a node until it ends."""

    def __init__(
        self,
        node: Node,
        machine: Round,
        work: AttemptBytes,
        next_root: NextRoot,
        conduct: Conduct,
        kept: Outputs,
    ) -> None:
        self.node = node
        self.machine = machine
        self.work = work
        self._next_root = next_root
        self._conduct = conduct
        self._kept = kept
        self._actions: deque[Action] = deque()
        self._pumping = False
        self._left = False
        self._ended = trio.Event()
        self._alarm = trio.CancelScope()
        self._incoming = Incoming()
        self._coming: dict[tuple[int, int], trio.CancelScope] = {}
        """The parts that I fetch, by part and contributor."""
        self._foreign_bytes = 0
        """Bytes kept of members that the machine does not know as its own."""

    async def run(
        self, early: Sequence[tuple[wire.Signed, wire.RoundMessage]], unfetched: Sequence[Action] = ()
    ) -> Outcome:
        """Drive the machine to its end; `early` are messages that arrived before I was ready, `unfetched` is work to do."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.node.blobs.obtain = self._pass_on
            try:
                self.act(self.machine.start(self.node.running.now()))
                self.act(unfetched)
                for signed, message in early:
                    self.receive(signed, message)
                while self.machine.outcome is None:
                    with trio.CancelScope(deadline=self.node.running.at(self.machine.deadline)) as self._alarm:
                        await self._ended.wait()
                    self.act(self.machine.tick(self.node.running.now()))
            finally:
                self._left = True
                self.node.blobs.obtain = None
                self.node.pace_round(0.0)
            nursery.cancel_scope.cancel()
        assert self.machine.outcome is not None
        return self.machine.outcome

    @property
    def is_void(self) -> bool:
        """True once it has ended without a decision that I hold."""
        outcome = self.machine.outcome
        return outcome is not None and outcome.kind is not OutcomeKind.DONE

    def receive(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """Receive another peer's message; one that breaks a rule is charged to its sender.

        Of members without a seat here, such as ones that are not drawn, the attempt keeps a limited number of bytes.
        """
        if not self.machine.has_seat(signed.sender):
            if self._foreign_bytes + len(signed.payload) > EARLY_BYTES:
                self.node.refuse(signed.sender, "round", "more than an attempt keeps of peers outside of it")
                return
            self._foreign_bytes += len(signed.payload)
        try:
            self.act(self.machine.receive(signed, message, self.node.running.now()))
        except RemoteError as error:
            self.node.charge(signed.sender, type(message).__name__, error)

    def learn(self, proof: wire.Proof) -> None:
        """Receive a proof whose signatures are checked."""
        self.act(self.machine.learn(proof, self.node.running.now()))

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
        self._give_up_late()
        machine = self.machine
        self._conduct.enter(machine.slot)
        if machine.outcome is not None:
            self._ended.set()
        elif (alarm_at := self.node.running.at(machine.deadline)) != self._alarm.deadline:
            self._alarm.deadline = alarm_at

    def _do(self, action: Action) -> None:
        match action:
            case actions.Send(to, message):
                signed = self._conduct.guard.sign(message)
                if isinstance(signed, str):  # What else was to be done followed from a statement that I cannot make.
                    self._actions.clear()
                    self._actions.extend(self.machine.give_up(f"{type(message).__name__}: {signed}", self.node.running.now()))
                    return
                self._report(message)
                if self.node.peer_id in to:
                    self._actions.extend(self.machine.receive(signed, message, self.node.running.now()))
                self.node.send([peer for peer in to if peer != self.node.peer_id], signed)
            case actions.Forward(to, mail):
                if isinstance(mail, wire.Signed) and mail.sender == self.node.peer_id:
                    self._report(wire.opened(mail))
                self.node.send([peer for peer in to if peer != self.node.peer_id], mail)
            case actions.AskFor(to, peer):
                slot = self.machine.slot
                self.node.send(to, wire.Unheard(slot.run, slot.round, peer, asks=True))
            case actions.ShowParts(readers):
                for key, data in zip(self.work.keys, self.work.mine, strict=True):
                    self._serve(key, data, readers=readers)
            case actions.FetchValue():
                self._nursery.start_soon(self._fetch_value, action)
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
            case Note(event, peer, step, reason):
                slot = self.machine.slot
                self.node.telemetry.emit(
                    event, peer=peer, step=step, reason=reason, round=slot.round, attempt=slot.attempt
                )

    def _report(self, message: wire.RoundMessage) -> None:
        slot = message.slot
        self.node.telemetry.emit("round.said", step=type(message).__name__, round=slot.round, attempt=slot.attempt)

    async def _fetch_value(self, action: actions.FetchValue) -> None:
        """Fetch the outputs of a value that others hold; a failure is an event."""
        value, slot, setup = open_value(action.value), self.machine.slot, self.machine.setup
        # Others first in each attempt: one that serves false bytes, or none, must not delay all of them.
        holders = action.holders or action.voters
        turn, cells = slot.attempt % max(1, len(holders)), setup.cells
        root, patience = b"", setup.timing.control
        try:
            self.work.outputs |= await fetch_outputs(
                self.node,
                self.work.output_codec,
                cells,
                value,
                action.voters,
                [*holders[turn:], *holders[:turn]],
                set(),
                patience=patience,
            )
            outputs = [self.work.outputs[key] for key in value.outputs]
            root = await self.node.compute(self._next_root, value.bounds, outputs)
        except* (NetworkError, RemoteError) as raised:
            reason = str(sole_error(raised))
            self.node.telemetry.emit("value.not_fetched", step="fetch", reason=reason, round=value.round)
        if not root:
            return
        if root != value.next_root:
            reason = "the outputs of a proposed value do not lead to the state that it names"
            self.node.telemetry.emit("value.not_fetched", step="check", reason=reason, round=value.round)
            return
        await self._keep(value.outputs)
        self.act(self.machine.value_held(action.value, self.node.running.now()))

    async def _keep(self, outputs: Sequence[bytes]) -> None:
        """Write outputs to disk before I accept a value of them: else a power cut may leave its proof and no copy of it."""
        await self._kept.keep(self.machine.slot.round, {key: self.work.outputs[key] for key in outputs})

    async def _encode(self, action: actions.HashParts) -> None:
        work, vector = self.work, self.work.contribution
        assert vector is not None, "a member that does not train has nothing to encode"
        self._choose(action.bounds)

        def encode_parts() -> list[tuple[Blob, bytes]]:
            parts: list[tuple[Blob, bytes]] = []
            for low, high in zip(action.bounds, action.bounds[1:], strict=False):
                data = self.work.choice.mine.encode_chunks(vector.chunks(low, high), high - low)
                parts.append((data, digest(data)))
            return parts

        encoded = await self.node.compute(encode_parts)
        work.mine, work.keys = [data for data, _ in encoded], tuple(key for _, key in encoded)
        if work.patience:
            self._share_line(action.bounds)
        for readers, (data, key) in zip(action.readers, encoded, strict=True):
            self._serve(key, data, readers=[*readers, self.node.peer_id])
        self._done(lambda exchange: exchange.collect_phase.parts_hashed(work.keys, work.choice.stated))

    def _choose(self, bounds: Sequence[int]) -> None:
        """Choose the codec of my contribution by my line as its receivers measured it; a change is an event.

        What I measure myself counts bytes that still wait in the buffers of this computer.
        """
        exchange = self.machine.exchange
        rate = exchange.my_rate * (len(bounds) - 2)  # All connections at a time share the line.
        seconds = self.work.patience * TRANSFER_SHARE or self.machine.setup.phase_seconds * PHASE_SHARE
        if reason := self.work.choice.choose(bounds[-1] - bounds[0] - self._own_cells(bounds), rate, seconds):
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
        most = max(self.work.choice.mine.num_bytes(total - own), self.work.output_codec.num_bytes(own) * others)
        line = self.machine.exchange.my_rate * (len(bounds) - 2)
        rate = max(line * LINE_SHARE, most / (self.work.patience * TRANSFER_SHARE))
        self.node.pace_round(rate if rate < line else 0.0)

    async def _fetch_part(self, action: actions.FetchPart) -> None:
        data: Blob | str = "it came too late"
        with trio.CancelScope() as scope:  # Who sends a part a byte at a time is not to hold up what else it sends.
            self._coming[action.part, action.contributor] = scope
            data = await self._obtain(action, self.work.codec)
        del self._coming[action.part, action.contributor]
        self._take_part(action, data)

    def _give_up_late(self) -> None:
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
        work, folder = self.work, self._kept.folder
        work.parts_bytes += size
        own = self.work.codec.num_bytes(len(self.machine.setup.cells))
        if folder is not None and work.parts_bytes > memory_for_parts(own):
            try:
                return await self.node.compute(room_on_disk, folder, size)
            except LocalError as error:
                raise NetworkError(f"no room for its part: {error}") from error
        return bytearray(size)

    def _take_part(self, action: actions.FetchPart, data: Blob | str) -> None:
        if isinstance(data, str):
            self._done(lambda exchange: exchange.collect_phase.not_fetched(action.part, action.contributor, data))
        else:
            self.work.parts[action.part, action.contributor] = data
            self._done(lambda exchange: exchange.collect_phase.fetched(action.part, action.contributor))

    async def _fetch_output(self, action: actions.FetchOutput) -> None:
        self._take_output(action, await self._obtain(action, self.work.output_codec))

    def _take_output(self, action: actions.FetchOutput, data: Blob | str) -> None:
        if isinstance(data, str):
            self._done(lambda exchange: exchange.output_not_fetched(action.part, action.source, action.hash, data))
        else:
            self.work.outputs[action.hash] = data
            self._serve(action.hash, data, readers=None)  # For members that its owner withholds it from.
            self._done(lambda exchange: exchange.output_fetched(action.part, action.hash))

    async def _obtain(self, action: actions.FetchBytes, codec: Codec) -> Blob | str:
        """Fetch bytes and check their encoding; returns the bytes, or the reason why they are not available.

        From the source, or, if I have lost it or it refuses, from others that fetch them from it.
        """
        reason = ""
        if action.is_from_maker:
            self._incoming.begin(action.name)
        try:
            for source in action.sources:
                if source != action.source:
                    self._incoming.end(action.name)  # Whom I ask may ask me: neither is to wait for the other.
                if reason:
                    self.node.telemetry.emit("fetch.retry", peer=source, step="fetch", reason=reason)
                try:
                    data = await self._get(action, source)
                except NetworkError as error:
                    reason = reason or str(error)
                except RemoteError as error:
                    self.node.charge(source, "fetch", error)
                    reason = reason or str(error)
                else:
                    try:
                        return self._well_formed(action, data, codec)
                    except RemoteError as error:
                        self.node.charge(action.source, "fetch", error)
                        return str(error)
            return reason
        finally:
            self._incoming.end(action.name)

    async def _pass_on(self, name: bytes, reader: str) -> None:
        """Bring bytes here for another member that cannot get them from their source: its part, or an output.

        Waits only while I fetch them from their source. Raises `ProtocolViolation` for a member that waits for too much.
        """
        if not self.machine.has_roster or reader not in self.machine.exchange.members:
            return
        with self._incoming.waiting(reader), trio.move_on_after(self.machine.setup.timing.transfer):
            await self._incoming.ended(name)
            wanted = self.machine.exchange.part_for(name, reader)
            if wanted is None or self._left or self.node.blobs.find(name, reader) is not None:
                return
            data = self.work.parts.get((wanted.part, wanted.contributor))
            if data is None:
                self._incoming.begin(name)
                try:
                    data = await self._room(wanted.num_bytes)
                    await self.node.fetch_into(wanted.source, wanted.hash, data)
                except (NetworkError, RemoteError):
                    return  # The reader asks others, and says what is missing.
                finally:
                    self._incoming.end(name)
            if not self._left:
                self._serve(name, data, readers=wanted.others)

    def _well_formed(self, action: actions.FetchBytes, data: Blob, codec: Codec) -> Blob:
        """Check an encoding; if it is malformed, accuse the peer that signed its hash. Raises `RemoteError`."""
        try:
            codec.check(data, action.num_cells)
        except RemoteError:
            if statements := self.machine.exchange.bound_to(action):
                self._conduct.bans.accuse(statements, action.part, data)
            raise
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
        codec, parts, bounds = self.work.codec, self.work.mine, self.machine.exchange.bounds
        tables = await self.node.compute(sketch_parts, codec, parts, bounds, action.seed, action.columns)
        self._done(lambda exchange: exchange.sketched(action.seed, tables))

    async def _compare(self, action: actions.CompareSketch) -> None:
        exchange, codec = self.machine.exchange, self.work.codec
        statements, data = exchange.bound_to(action), self.work.parts[action.part, action.contributor]
        if not statements:
            return
        sketch = wire.opened(statements[0])
        assert isinstance(sketch, wire.Sketch)
        if await self.node.compute(is_true, sketch, exchange.bounds, action.part, codec, data):
            self._done(lambda exchange: exchange.compared(action))
        else:  # All members will verify that.
            self._conduct.bans.accuse(statements, action.part, data)

    async def _judge(self, action: actions.Judge) -> None:
        rule, members = self.machine.setup.rule, len(self.machine.exchange.bounds) - 1
        weighting = await self.node.compute(judge_sketches, rule, action.sketches, action.voices, action.masses, members)
        weights = tuple(tuple(row) for row in weighting.weights.tolist())
        self._done(lambda exchange: exchange.judged(weights, weighting.flagged, weighting.short))

    async def _check(self, action: actions.CheckOutputs) -> None:
        codec, bounds = self.work.output_codec, self.machine.exchange.bounds
        outputs = {part: self.work.outputs[key] for part, key in action.outputs.items()}

        weights, tables = np.array(action.weights), (action.first, action.second)
        found = await self.node.compute(judge_outputs, codec, outputs, bounds, weights, *tables, action.silent, action.seed)
        self._done(lambda exchange: exchange.checked(action, found.false, found.unheard))

    async def _reduce(self, action: actions.Reduce) -> None:
        weighted = [it for it in zip(action.contributors, action.weights, strict=True) if it[1]]
        parts, weights = (
            [self.work.parts[action.part, index] for index, _ in weighted],
            [weight for _, weight in weighted],
        )

        codec, rule = self.work.codec, self.machine.setup.rule

        def reduce() -> tuple[Blob, bytes]:
            weighting = Weighting(weights=np.array([weights]), flagged={})
            chunks = rule.chunks(codec, parts, weighting, 0, action.num_cells)
            data = self.work.output_codec.encode_chunks(chunks, action.num_cells)
            return data, digest(data)

        data, key = await self.node.compute(reduce)
        self._serve(key, data, readers=None)
        self._done(lambda exchange: exchange.reduced(action.cut, action.part, key))

    async def _finalize(self, action: actions.Finalize) -> None:
        outputs = [self.work.outputs[key] for key in action.outputs]
        root = await self.node.compute(self._next_root, action.bounds, outputs)
        await self._keep(action.outputs)
        self._done(lambda exchange: exchange.finalized(action.outputs, root))

    def _done(self, report: Callable[[RosterRound], Sequence[Action] | None]) -> None:
        """Report finished work to the machine, and execute what follows."""
        self.act(self.machine.done(report))

    def _serve(self, key: bytes, data: Blob, *, readers: Sequence[str] | None) -> None:
        # I fetch my own part like any other, so that an owner has one way to get parts.
        self.node.blobs.put(key, data, readers=readers)
        self.work.served.append(key)
