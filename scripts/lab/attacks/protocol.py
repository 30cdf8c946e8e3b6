"""Attacks on the protocol by name: production peers of which one method is replaced.

    equivocating_proposer   sends every second peer another cut (equivocation)
    censoring_owner         denies that it holds the contribution of one peer
    lying_owner             flips the sign of 2 % of its output's elements
    lying_sender            signs sketches that are not those of its contribution
    lying_sender_with_owner as it, but only for parts whose owners collude and accept the sketch
    mute                    signs no sketches
    withholding             commits, and delivers nothing
    selective               sends no round messages to every third peer
    lazy                    contributes zeros

Their messages are correctly signed and well-formed: tests send garbage (`tests/attacks`). Each deviation from the protocol
emits an `attack.made` event in the attacker's own telemetry.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from ....collectives.allreduce.words import claims_in
from ....collectives.driver.contribution import Averaged, Contribution, NextRoot
from ....collectives.driver.rounds import Averager
from ....collectives.robust.checks import seed_of
from ....collectives.vector.codec import CELL, FlatSum
from ....peer import wire
from ....peer.base.digest import digest
from ....peer.identity import Identity
from ....peer.node.bulk import Blob
from ....peer.node.file_blob import FileBlob
from ....peer.node.node import Node
from ....peer.wire.signed import sign

TAMPERED_EVERY = 50
"""Of the elements of an output, one."""


class Corruptible(Protocol):
    """The interface of a peer that an attack replaces a method of."""

    identity: Identity
    node: Node

    @property
    def averager(self) -> Averager:
        """Its rounds."""

    @property
    def peer(self) -> str:
        """Its id."""


Lie: TypeAlias = Callable[[str, wire.RoundMessage], wire.RoundMessage | None]
"""(id of the recipient, message) → the message sent instead; None sends nothing."""


def lies(liar: Corruptible, lie: Lie) -> None:
    """Replace every message that `liar` signs and sends by `lie` of it, correctly signed."""
    send_unchanged = liar.node.send

    def send(peers: str | Iterable[str], message: object) -> None:
        if not isinstance(message, wire.Signed) or message.sender != liar.peer:
            return send_unchanged(peers, message)
        for peer in (peers,) if isinstance(peers, str) else tuple(peers):
            truth = wire.opened(message)
            sent = lie(peer, truth)
            if sent is not truth:
                made(liar, type(truth).__name__)
            if sent is not None:
                send_unchanged(peer, sign(liar.identity, sent))

    liar.node.send = send  # type: ignore[method-assign]


def made(liar: Corruptible, step: str) -> None:
    """Emit the event of one deviation."""
    liar.node.telemetry.emit("attack.made", step=step)


def changes(liar: Corruptible, change: Callable[[Contribution], Contribution]) -> None:
    """Replace every contribution of `liar` by `change` of it."""
    average = liar.averager.average

    last = 0

    async def lie(contribution: Contribution, next_root: NextRoot) -> Averaged:
        nonlocal last
        if contribution.round > last:
            made(liar, "contribute")
            last = contribution.round
        return await average(change(contribution), next_root)

    liar.averager.average = lie  # type: ignore[method-assign]


def one_of(number: int) -> Callable[[str], bool]:
    """Return a predicate that is true for every `number`-th peer, in the order of first queries."""
    seen: dict[str, int] = {}
    return lambda peer: seen.setdefault(peer, len(seen)) % number == 0


def equivocating_proposer(liar: Corruptible) -> None:
    """Equivocate with two cuts: the second lacks the last word."""
    chosen = one_of(2)

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if isinstance(message, wire.Cut) and chosen(peer):
            return replace(message, words=message.words[:-1])
        return message

    lies(liar, lie)


def computes(liar: Corruptible, name: str, change: Callable[..., Any]) -> None:
    """Replace the result of the function `name`, which `liar` computes, by `change(result, *arguments)`."""
    compute = liar.node.compute

    async def changed(function: Callable[..., Any], *arguments: Any) -> Any:
        result = await compute(function, *arguments)
        if getattr(function, "__name__", "") != name:
            return result
        made(liar, name)
        return change(result, *arguments)

    liar.node.compute = changed  # type: ignore[method-assign]


def lying_owner(liar: Corruptible) -> None:
    """Serve an output that is not the sum; its hash, and the signature under it, match."""
    codec = liar.averager._spec.output

    def tamper(made: tuple[Blob, bytes]) -> tuple[Blob, bytes]:
        values = np.empty(len(made[0]) // codec.cell_bytes * CELL, np.float32)
        codec.decode(bytes(made[0]), values)
        values[::TAMPERED_EVERY] *= -1
        data = codec.encode(values)
        return data, digest(data)

    computes(liar, "reduce", tamper)


def lying_sender(liar: Corruptible) -> None:
    """Sign sketches of half the contribution, so that it seems nearer to all others."""
    computes(liar, "sketch_parts", lambda tables, *_: _scaled(tables, 0.5))


def lying_sender_with_owner(liar: Corruptible, fellows: Collection[str] = ()) -> None:
    """Shrink the sketches of parts that colluding owners accept, after the cut; those after the outputs are true."""

    def shorten(tables: bytes, codec: object, parts: Sequence[object], bounds: object, seed: bytes, _: int) -> bytes:
        attempt = liar.averager._work
        if attempt is None or seed_of(attempt.machine.exchange.collect_phase.stage.hash) != seed:
            return tables
        members = attempt.machine.exchange.table.members
        return _scaled(tables, *(0.1 if peer in fellows and peer != liar.peer else 1.0 for peer in members))

    computes(liar, "sketch_parts", shorten)
    computes(liar, "is_true", lambda *_: True)


def _scaled(tables: bytes, *factors: float) -> bytes:
    """Multiply the sketch of each part by its factor, or all by the one."""
    parts = np.frombuffer(tables, "<f4").reshape(len(factors), -1)
    return (parts * np.asarray(factors, np.float32)[:, None]).astype("<f4").tobytes()


def mute(liar: Corruptible) -> None:
    """Omit all Sketch messages."""
    lies(liar, lambda peer, message: None if isinstance(message, wire.Sketch) else message)


def censoring_owner(liar: Corruptible) -> None:
    """Omit one sender from every Have: the first in the roster that is not the liar."""

    guard = liar.averager._conduct.guard
    sign_truth = guard.sign

    def lie(message: wire.RoundMessage, lock: wire.Proof | None = None) -> wire.Signed | str:
        attempt = liar.averager._work
        if not isinstance(message, wire.Have) or attempt is None or attempt.machine._table is None:
            return sign_truth(message, lock)
        victim = 1 if attempt.machine._table.places[liar.peer] == 0 else 0
        if all(victim not in held for _, held in message.parts):
            return sign_truth(message, lock)
        made(liar, "Have")
        claims = claims_in(message)
        assert claims is not None
        names = {index: name for held in claims.values() for index, name in held.items() if index != victim}
        parts = tuple((part, tuple(index for index in held if index != victim)) for part, held in message.parts)
        # Itself, too: it goes on by the word that it has given.
        object.__setattr__(message, "names", b"".join(names[index] for index in sorted(names)))
        object.__setattr__(message, "parts", parts)
        return sign_truth(message, lock)

    guard.sign = lie  # type: ignore[method-assign]


def withholding(liar: Corruptible) -> None:
    """Serve no part of the contribution to other peers."""
    find = liar.node.blobs.find

    def hide(key: bytes, reader: str) -> Blob | FileBlob | None:
        found = find(key, reader)
        if reader == liar.peer or not _is_mine(liar, found):
            return found
        made(liar, "withhold a part")
        return None

    liar.node.blobs.find = hide  # type: ignore[method-assign]


def _is_mine(liar: Corruptible, data: Blob | FileBlob | None) -> bool:
    attempt = liar.averager._work
    return attempt is not None and any(data is part for part in attempt.mine)


def selective(liar: Corruptible) -> None:
    """Omit round messages to every third peer; heartbeats go to all."""
    shunned = one_of(3)
    lies(liar, lambda peer, message: None if shunned(peer) else message)


def lazy(liar: Corruptible) -> None:
    """Contribute zeros, for trust without work."""

    def idle(contribution: Contribution) -> Contribution:
        assert contribution.vector is not None
        zeros = np.zeros(contribution.vector.size, np.float32)
        return replace(contribution, vector=FlatSum([zeros], contribution.vector.start))

    changes(liar, idle)


LIARS: Mapping[str, Callable[..., None]] = {
    lie.__name__: lie
    for lie in (
        equivocating_proposer,
        censoring_owner,
        lying_owner,
        lying_sender,
        lying_sender_with_owner,
        mute,
        withholding,
        selective,
        lazy,
    )
}
"""By name: the function that corrupts a peer after its assembly, before its first message."""
TOGETHER = ("lying_sender_with_owner",)
"""The attacks that take the ids of their `fellows`."""
