"""The middle of a round, from a certified roster to a quorum of signed results: COLLECT, REDUCE, CONFIRM.

Pure, like `round`, which owns it: facts come in from there, conclusions are drawn by `advance`, and whatever stands in
the way is left in `failure`, for `round` to give up with.
"""

import math
from collections.abc import Callable, Collection

from ..peer import wire
from ..peer.transport import PeerId
from .agenda import EMPTY, Action, Fetch, FetchKind, Finalize, HashParts, Note, Phase, Reduce, Send, Setup
from .facts import Facts, Table
from .quorum import commits_hash, quorum, token_weights


class Exchange:
    """What one member of a roster sends, holds and concludes."""

    def __init__(self, setup: Setup, facts: Facts, table: Table) -> None:
        self.phase = Phase.COLLECT
        self.failure = ""
        self.certificate: wire.Certificate | None = None
        self.cut: wire.Cut | None = None
        self.outputs: dict[int, bytes] = {}
        self.next_root: bytes | None = None
        self._setup = setup
        self._facts = facts
        self._table = table
        self._quorum = quorum(len(table.members))
        self._cut_hash = b""
        self._held: set[int] = set()
        self._failed: dict[int, str] = {}
        self._parts: tuple[bytes, ...] | None = None
        self._output: bytes | None = None
        self._done: set[object] = set()

    def begin(self) -> list[Action]:
        """The roster is certified: encode my contribution."""
        return [HashParts(self._table.members, self._table.bounds)]

    def parts_hashed(self, parts: tuple[bytes, ...]) -> None:
        """My contribution is encoded and served."""
        self._parts = parts

    def fetched(self, kind: FetchKind, index: int, hash_: bytes) -> None:
        """A contribution's part, or an output, is here and well-formed."""
        if kind is FetchKind.PART:
            self._held.add(index)
        else:
            self.outputs[index] = hash_

    def not_fetched(self, kind: FetchKind, index: int, reason: str) -> list[Action]:
        """Something cannot be had: a contribution is then left out, while a missing output ends the round."""
        if kind is FetchKind.OUTPUT:
            self.failure = f"the output of part {index} cannot be had: {reason}"
            return []
        self._failed[index] = reason
        return [Note("round.part_missing", self._table.members[index], "collect", reason)]

    def reduced(self, output: bytes) -> None:
        """My part's output is encoded and served under this hash."""
        self._output = output

    def finalized(self, next_root: bytes) -> None:
        """The state root that all outputs lead to."""
        self.next_root = next_root

    def holds(self, result: wire.ResultAck) -> bool:
        """Whether everything that a result acknowledges is here."""
        return self.next_root == result.next_root and self.output_hashes() == result.outputs

    def output_hashes(self) -> tuple[bytes, ...]:
        """One hash a member; an empty part's is that of nothing."""
        return tuple(self.outputs.get(index, EMPTY) for index in range(len(self._table.members)))

    def close_collection(self) -> list[Action]:
        """Time is up: I have what I have. Nothing where I own no part or have said so before."""
        return [self._have()] if self._table.owning and self._once("have") else []

    def missing(self, living: Collection[PeerId]) -> str:
        """Whose word the current phase waits for."""
        kind: type[wire.RoundMessage] = wire.Have if self._table.me == 0 else wire.Cut
        if self.phase is not Phase.COLLECT:
            kind = wire.Result if self.phase is Phase.REDUCE else wire.ResultAck
        silent = set(living) - self._facts.of(kind, self._table.slot).keys()
        return f"{kind.__name__} from {', '.join(sorted(silent)) or 'nobody, but bulk bytes'}"

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Everything that the facts allow now. Each step is taken once."""
        steps: dict[Phase, Callable[[Collection[PeerId]], list[Action]]] = {
            Phase.COLLECT: self._collect,
            Phase.REDUCE: self._reduce,
            Phase.CONFIRM: self._confirm,
        }
        actions: list[Action] = []
        while not self.failure:
            phase = self.phase
            actions += steps[phase](active)
            if self.phase is phase:
                break
        return actions

    def _collect(self, active: Collection[PeerId]) -> list[Action]:
        table, setup = self._table, self._setup
        actions: list[Action] = []
        if self._parts is not None and self._once("commit"):
            loss = setup.loss if math.isfinite(setup.loss) else 0.0
            commit = wire.Commit(table.slot, table.hash, setup.tokens, setup.steps, loss, self._parts)
            actions.append(Send(table.members, commit))
        if table.owning:
            for index, commit in table.commits().items():
                actions += self._fetch(FetchKind.PART, index, commit.parts[table.me], table.me)
            awaited = {index for index, peer in enumerate(table.members) if peer in active}
            if awaited <= self._held | self._failed.keys() and self._once("have"):
                actions.append(self._have())
        if table.me == 0 and table.haves().keys() >= table.owners and self._once("cut"):
            actions += self._propose_cut()
        if table.convener in self._facts.of(wire.Cut, table.slot):
            actions += self._accept_cut()
        return actions

    def _have(self) -> Send:
        return Send(self._table.members, wire.Have(self._table.slot, self._table.hash, tuple(sorted(self._held))))

    def _propose_cut(self) -> list[Action]:
        """The contributions that every owner holds: all or nothing of each."""
        table = self._table
        commits, haves = table.commits(), table.haves()
        order = tuple(index for index in commits if all(index in haves[owner] for owner in table.owners))
        if len(order) < self._quorum:
            self.failure = f"only {len(order)} of {len(table.members)} contributions are held by every owner"
        elif not any(commits[index].tokens for index in order):
            self.failure = "no contribution has any tokens"
        else:
            bound = commits_hash(table.commits_signed(order))
            return [Send(table.members, wire.Cut(table.slot, table.hash, order, bound))]
        return []

    def _accept_cut(self) -> list[Action]:
        table = self._table
        cut = self._facts.of(wire.Cut, table.slot)[table.convener]
        order = cut.contributors
        if (flaw := table.flaw_of(cut, self._quorum)) is not None:
            self.failure = flaw
            return [Note("peer.charged", table.convener, "cut", flaw)]
        if not set(order) <= table.commits().keys() or (table.owning and not set(order) <= self._held):
            return []  # What is on its way may still come; if not, the deadline ends the wait.
        if cut.commits != commits_hash(table.commits_signed(order)):
            self.failure = "the convener cut other commits than those that were sent to me"
            return []
        cut_hash = self._facts.signed(wire.Cut, table.convener).hash
        if self._once("cut_ack"):
            return [Send(table.members, wire.CutAck(table.slot, cut_hash))]
        if self._facts.count(wire.CutAck, table.slot, lambda ack: ack.cut == cut_hash) < self._quorum:
            return []
        self.cut, self._cut_hash, self.phase = cut, cut_hash, Phase.REDUCE
        return [
            Note("round.left_out", peer, "cut", self._failed.get(index, "not every owner holds its contribution"))
            for index, peer in enumerate(table.members)
            if index not in order
        ]

    def _reduce(self, active: Collection[PeerId]) -> list[Action]:
        assert self.cut is not None
        table, commits = self._table, self._table.commits()
        weights = token_weights([commits[index].tokens for index in self.cut.contributors])
        actions: list[Action] = []
        if table.owning and self._once("reduce"):
            actions.append(Reduce(self.cut.contributors, weights, table.cells(table.me)))
        if self._output is not None and self._once("result"):
            actions.append(Send(table.members, wire.Result(table.slot, self._cut_hash, weights, self._output)))
        for peer, result in self._facts.of(wire.Result, table.slot).items():
            index = table.members.index(peer)
            if result.cut != self._cut_hash or index not in table.owners:
                continue
            if result.weights != weights:
                self.failure = f"{peer} weighs the contributions otherwise than by their tokens"
                return actions
            actions += self._fetch(FetchKind.OUTPUT, index, result.output, index)
        if self.outputs.keys() == table.owners and self._once("finalize"):
            actions.append(Finalize(table.bounds, self.output_hashes()))
        if self.next_root is not None:
            self.phase = Phase.CONFIRM
            ack = wire.ResultAck(
                table.slot,
                self._cut_hash,
                self.output_hashes(),
                self.next_root,
                self._setup.previous,
                self._setup.tokens_before + sum(commits[index].tokens for index in self.cut.contributors),
            )
            actions.append(Send(table.members, ack))
        return actions

    def _confirm(self, active: Collection[PeerId]) -> list[Action]:
        acks = self._facts.of(wire.ResultAck, self._table.slot)
        mine = acks.get(self._setup.me)
        if mine is None:
            return []  # My own word comes back to me first.
        actions: list[Action] = []
        for peer, ack in acks.items():
            if ack != mine and self._once(("differs", peer)):
                actions.append(Note("round.result_differs", peer, "confirm", "it signed another result than I"))
        agreed = [self._facts.signed(wire.ResultAck, peer) for peer, ack in acks.items() if ack == mine]
        if len(agreed) >= self._quorum:
            self.certificate = self._table.certificate(agreed)
        return actions

    def _fetch(self, kind: FetchKind, index: int, hash_: bytes, part: int) -> list[Action]:
        if not self._once((kind, index)):
            return []
        cells = self._table.cells(part)
        size = (self._setup.part_bytes if kind is FetchKind.PART else self._setup.output_bytes)(cells)
        return [Fetch(kind, index, self._table.members[index], hash_, cells, size)]

    def _once(self, step: object) -> bool:
        """Whether `step` is taken for the first time."""
        if step in self._done:
            return False
        self._done.add(step)
        return True
