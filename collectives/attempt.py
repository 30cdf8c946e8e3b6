"""One attempt of a round, driven: the machine's actions become messages, fetches and arithmetic; it holds no rules."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from ..peer import wire
from ..peer.bulk import Blob
from ..peer.digest import digest
from ..peer.errors import LocalError, NetworkError, RemoteError
from ..peer.node import Node
from ..peer.schema import encode
from . import agenda
from .agenda import Action, FetchKind, Outcome
from .codec import CELL, Codec, Floats, weighted_mean
from .round import Round

MAX_TRIES = 2
"""A fetch is tried again once: the first failure may be a connection that died unnoticed."""

NextRoot = Callable[[Sequence[int], Sequence[Blob]], bytes]
"""The state root that the encoded outputs (one a part, with the bounds) lead to."""


def sign(node: Node, message: wire.RoundMessage) -> wire.Signed:
    """My signature under a round message."""
    code, payload = wire.code_of(message), encode(message)
    return wire.Signed(node.peer_id, code, payload, node.identity.sign(wire.signed_bytes(code, payload)))


@dataclass(slots=True)
class Work:
    """The bytes of one attempt: my contribution as I sent it, what I hold of others, and all outputs."""

    contribution: Floats
    bounds: tuple[int, ...] = ()
    mine: list[Blob] = field(default_factory=list)
    parts: dict[int, Blob] = field(default_factory=dict)
    outputs: dict[int, Blob] = field(default_factory=dict)
    served: list[bytes] = field(default_factory=list)


class Attempt:
    """Runs one `Round` over a node until it has ended."""

    def __init__(
        self, node: Node, machine: Round, codecs: tuple[Codec, Codec], work: Work, next_root: NextRoot
    ) -> None:
        self.node = node
        self.machine = machine
        self.work = work
        self._contribution_codec, self._output_codec = codecs
        self._next_root = next_root
        self._actions: deque[Action] = deque()
        self._pumping = False
        self._moved = trio.Event()

    async def run(self, early: Sequence[tuple[wire.Signed, wire.RoundMessage]]) -> Outcome:
        """Drive the machine to its end; `early` are messages that came before I was ready."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.act(self.machine.start())
            for signed, message in early:
                self.hear(signed, message)
            while self.machine.outcome is None:
                self._moved = trio.Event()
                with trio.move_on_at(self.machine.deadline):
                    await self._moved.wait()
                self.act(self.machine.tick(trio.current_time()))
            nursery.cancel_scope.cancel()
        assert self.machine.outcome is not None
        return self.machine.outcome

    def hear(self, signed: wire.Signed, message: wire.RoundMessage) -> None:
        """A message from somebody else; one that breaks a rule is charged to its sender."""
        try:
            self.act(self.machine.receive(signed, message, trio.current_time()))
        except RemoteError as error:
            self.node.charge(signed.sender, type(message).__name__, error)

    def act(self, actions: Sequence[Action]) -> None:
        """Carry out actions, and what follows from them, in order."""
        self._actions.extend(actions)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._actions:
                self._do(self._actions.popleft())
        finally:
            self._pumping = False
        self._moved.set()

    def _do(self, action: Action) -> None:
        match action:
            case agenda.Send(to, message):
                signed = sign(self.node, message)
                if self.node.peer_id in to:
                    self._actions.extend(self.machine.receive(signed, message, trio.current_time()))
                self.node.tell([peer for peer in to if peer != self.node.peer_id], signed)
            case agenda.HashParts():
                self._nursery.start_soon(self._encode, action)
            case agenda.Fetch():
                self._nursery.start_soon(self._fetch, action)
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
        for owner, (data, key) in zip(action.members, encoded, strict=True):
            self._serve(key, data, readers=[owner])
        self.act(self.machine.parts_hashed(tuple(key for _, key in encoded), trio.current_time()))

    async def _fetch(self, action: agenda.Fetch) -> None:
        codec = self._contribution_codec if action.kind is FetchKind.PART else self._output_codec
        try:
            data = await self._obtain(action)
            self._check(codec, data, action)
        except (NetworkError, RemoteError) as error:
            self.act(self.machine.not_fetched(action.kind, action.index, str(error), trio.current_time()))
            return
        if action.kind is FetchKind.PART:
            self.work.parts[action.index] = data
        else:
            self.work.outputs[action.index] = data
        self.act(self.machine.fetched(action.kind, action.index, action.hash, trio.current_time()))

    def _check(self, codec: Codec, data: Blob, action: agenda.Fetch) -> None:
        """Raises `MalformedMessage`, charged to its source, for bytes that their own codec did not write."""
        try:
            codec.check(data, action.num_cells)
        except RemoteError as error:
            self.node.charge(action.source, action.kind, error)
            raise

    async def _obtain(self, action: agenda.Fetch) -> Blob:
        if action.source == self.node.peer_id:
            own = self.node.blobs.get(action.hash, action.source)
            if own is None:
                raise LocalError("a part of my own that I do not serve")
            return own
        for attempt in range(1, MAX_TRIES + 1):
            try:
                return await self.node.fetch(action.source, action.hash, action.num_bytes)
            except NetworkError as error:
                if attempt == MAX_TRIES:
                    raise
                self.node.telemetry.emit("fetch.retry", peer=action.source, step=action.kind, reason=str(error))
        raise AssertionError("unreachable: the last try returns or raises")

    async def _reduce(self, action: agenda.Reduce) -> None:
        parts = [self.work.parts[index] for index in action.contributors]

        def reduce() -> tuple[Blob, bytes]:
            mean = weighted_mean(self._contribution_codec, parts, action.weights, action.num_cells)
            data = self._output_codec.encode(mean)
            return data, digest(data)

        data, key = await self.node.compute(reduce)
        self._serve(key, data, readers=None)
        self.act(self.machine.reduced(key, trio.current_time()))

    async def _finalize(self, action: agenda.Finalize) -> None:
        outputs = [self.work.outputs.get(index, b"") for index in range(len(action.outputs))]
        root = await self.node.compute(self._next_root, action.bounds, outputs)
        self.act(self.machine.finalized(root, trio.current_time()))

    def _serve(self, key: bytes, data: Blob, *, readers: Sequence[str] | None) -> None:
        # My own part is served to me like any other, so that an owner has one way to get parts.
        self.node.blobs.put(key, data, readers=readers)
        self.work.served.append(key)
