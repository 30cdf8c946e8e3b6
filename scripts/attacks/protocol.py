"""Peers that break the protocol, by name: each is a production peer of which one method is replaced.

    equivocating_convener   tells every second peer another cut than the rest
    censoring_owner         denies to hold the contribution of one peer, though it does
    lying_owner             turns the sign of a share of its output's elements: of 2 %, or as its scale says
    lying_sender            signs sketches that are not those of its contribution
    lying_sender_with_owner as it, but only about parts that others of the same attack own, who find it true
    mute                    signs no sketches
    withholding             commits, and delivers nothing
    late                    delivers as many seconds late as its scale says: 1.9, a moment before the shortest deadline
    selective               says nothing in rounds to every third peer
    greedy                  says that it has trained on 10¹² tokens
    lazy                    brings zeros
    flood                   says three times as many words at once as are taken from anybody, in its first round
    replay                  says again what it has heard in the rounds before

    usurper                 makes rounds alone, of 10¹² tokens each, and shows the others its longer chain

What they say is rightly signed, what they send well-formed: garbage is the tests' part (`tests/attacks`). Each time that
one does what it should not, its own telemetry has an `attack.made` event.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import trio

from ...collectives.attempt import NextRoot
from ...collectives.averager import Averaged, Averager, Contribution
from ...collectives.chain.certificate import sign
from ...collectives.codec import CELL
from ...collectives.state.archive import Archive
from ...dht.run.admission import OPEN
from ...peer import wire
from ...peer.digest import digest
from ...peer.identity import Identity
from ...peer.node.bulk import Blob
from ...peer.node.file_blob import FileBlob
from ...peer.node.guard import BURST
from ...peer.node.node import Node
from ...peer.transport import Stream

LATE = 1.9
"""Seconds: the floor of a round's deadlines is 2 by default."""
GREED = 10**12
TAMPERED = 0.02
FLOOD = 3 * BURST
POURED, POUR_SECONDS = 1024, 0.25
"""At a time: half of what a session keeps for a peer that does not read."""
REPLAYED = 512
"""Words that are kept to be said again: below what is taken for a flood."""


class Corruptible(Protocol):
    """A peer, as far as a lie must reach into it."""

    identity: Identity
    node: Node

    @property
    def averager(self) -> Averager:
        """Its rounds."""

    @property
    def archive(self) -> Archive | None:
        """What it keeps, where it keeps anything."""

    @property
    def peer(self) -> str:
        """Its id."""


Lie: TypeAlias = Callable[[str, wire.RoundMessage], wire.RoundMessage | None]
"""What a peer of this id is told in the place of a message; None: nothing."""


def lies(liar: Corruptible, lie: Lie) -> None:
    """From now on `liar` tells each peer what `lie` makes of its messages, rightly signed."""
    told = liar.node.tell

    def tell(peers: str | Iterable[str], message: object) -> None:
        if not isinstance(message, wire.Signed) or message.sender != liar.peer:
            return told(peers, message)
        for peer in (peers,) if isinstance(peers, str) else tuple(peers):
            truth = wire.opened(message)
            words = lie(peer, truth)
            if words is not truth:
                made(liar, type(truth).__name__)
            if words is not None:
                told(peer, sign(liar.identity, words))

    liar.node.tell = tell  # type: ignore[method-assign]


def made(liar: Corruptible, step: str) -> None:
    """It has done it."""
    liar.node.telemetry.emit("attack.made", step=step)


def changes(liar: Corruptible, change: Callable[[Contribution], Contribution]) -> None:
    """From now on `liar` contributes what `change` makes of what it would."""
    average = liar.averager.average

    last = 0

    async def lie(contribution: Contribution, next_root: NextRoot) -> Averaged:
        nonlocal last
        if contribution.round > last:
            made(liar, "contribute")
            last = contribution.round
        return await average(change(contribution), next_root)

    liar.averager.average = lie  # type: ignore[method-assign]


def to_some(some: Collection[str], kind: type, **changes: Any) -> Lie:
    """`some` hear another content of every message of one kind than the others."""

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return replace(message, **changes) if isinstance(message, kind) and peer in some else message

    return lie


def one_of(number: int) -> Callable[[str], bool]:
    """Whether a peer is the first, or `number` after it, of those that are asked about."""
    seen: dict[str, int] = {}
    return lambda peer: seen.setdefault(peer, len(seen)) % number == 0


def equivocating_convener(liar: Corruptible) -> None:
    """Two cuts of one version: the second without the last contribution."""
    chosen = one_of(2)

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if isinstance(message, wire.Cut) and chosen(peer):
            return replace(message, contributors=message.contributors[:-1])
        return message

    lies(liar, lie)


def computes(liar: Corruptible, name: str, change: Callable[..., Any]) -> None:
    """What `liar` computes with the function of that name is from now on what `change` makes of result and arguments."""
    compute = liar.node.compute

    async def changed(function: Callable[..., Any], *arguments: Any) -> Any:
        result = await compute(function, *arguments)
        if getattr(function, "__name__", "") != name:
            return result
        made(liar, name)
        return change(result, *arguments)

    liar.node.compute = changed  # type: ignore[method-assign]


def lying_owner(liar: Corruptible, scale: float = TAMPERED) -> None:
    """An output that is no sum; its hash, and the signature under that, are right."""
    codec = liar.averager._spec.output

    def tamper(made: tuple[Blob, bytes]) -> tuple[Blob, bytes]:
        values = np.empty(len(made[0]) // codec.cell_bytes * CELL, np.float32)
        codec.decode(bytes(made[0]), values)
        values[:: max(1, round(1 / scale))] *= -1
        data = codec.encode(values)
        return data, digest(data)

    computes(liar, "reduce", tamper)


def lying_sender(liar: Corruptible) -> None:
    """Sketches of half of what it has sent, so that it seems to be nearer to all others."""
    computes(liar, "sketch_parts", lambda tables, *_: _scaled(tables, 0.5))


def lying_sender_with_owner(liar: Corruptible, fellows: Collection[str] = ()) -> None:
    """After the cut says less of its parts that its fellows own, who find it true; after the outputs it says the truth."""

    def shorten(tables: bytes, codec: object, parts: Sequence[object], bounds: object, after: bytes, _: int) -> bytes:
        attempt = liar.averager._attempt
        if attempt is None or attempt.machine.exchange._cut_hash != after:
            return tables
        members = attempt.machine.exchange._table.members
        return _scaled(tables, *(0.1 if peer in fellows and peer != liar.peer else 1.0 for peer in members))

    computes(liar, "sketch_parts", shorten)
    computes(liar, "is_true", lambda *_: True)


def _scaled(tables: bytes, *factors: float) -> bytes:
    """Sketches of parts, each times a factor, or all times the one."""
    parts = np.frombuffer(tables, "<f4").reshape(len(factors), -1)
    return (parts * np.asarray(factors, np.float32)[:, None]).astype("<f4").tobytes()


def mute(liar: Corruptible) -> None:
    """Lets everybody wait for its sketches."""
    lies(liar, lambda peer, message: None if isinstance(message, wire.Sketch) else message)


def censoring_owner(liar: Corruptible) -> None:
    """Holds everything of everybody but of one: the first in the roster who is not itself."""

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        attempt = liar.averager._attempt
        if not isinstance(message, wire.Have) or attempt is None or attempt.machine._table is None:
            return message
        victim = 1 if attempt.machine._table.places[liar.peer] == 0 else 0
        if all(victim not in held for _, held in message.parts):
            return message
        parts = tuple((part, tuple(index for index in held if index != victim)) for part, held in message.parts)
        return replace(message, parts=parts)

    lies(liar, lie)


def withholding(liar: Corruptible) -> None:
    """Has no part of its contribution for anybody else."""
    find = liar.node.blobs.find

    def hide(key: bytes, reader: str) -> Blob | FileBlob | None:
        found = find(key, reader)
        if reader == liar.peer or not _is_mine(liar, found):
            return found
        made(liar, "withhold a part")
        return None

    liar.node.blobs.find = hide  # type: ignore[method-assign]


def late(liar: Corruptible, scale: float = LATE) -> None:
    """Lets everybody wait for its contribution."""
    send = liar.node._bulk._send

    async def linger(stream: Stream, request: wire.Fetch) -> None:
        if _is_mine(liar, liar.node.blobs.find(request.hash, stream.remote)):
            made(liar, "delay a part")
            await trio.sleep(scale)
        await send(stream, request)

    liar.node._bulk._send = linger  # type: ignore[method-assign]


def _is_mine(liar: Corruptible, data: Blob | FileBlob | None) -> bool:
    attempt = liar.averager._attempt
    return attempt is not None and any(data is part for part in attempt.work.mine)


def selective(liar: Corruptible) -> None:
    """Silent in rounds toward some; its heart beats for all."""
    shunned = one_of(3)
    lies(liar, lambda peer, message: None if shunned(peer) else message)


def greedy(liar: Corruptible) -> None:
    """Wants more weight."""
    changes(liar, lambda contribution: replace(contribution, tokens=GREED))


def lazy(liar: Corruptible) -> None:
    """Wants trust without work."""
    changes(liar, lambda contribution: replace(contribution, vector=np.zeros_like(contribution.vector)))


def flood(liar: Corruptible) -> None:
    """Says what is not worth hearing, as fast as its streams take it. Once it is cut off it founds no chain of its own."""
    told = liar.node.tell
    liar.averager._spec = replace(liar.averager._spec, min_peers=2)

    async def pour(peers: tuple[str, ...], slot: wire.Slot) -> None:
        junk = sign(liar.identity, wire.Void(replace(slot, attempt=slot.attempt + 1), "flood", ()))
        for _ in range(FLOOD // POURED):
            made(liar, "flood")
            for _ in range(POURED):
                told(peers, junk)
            await trio.sleep(POUR_SECONDS)

    def tell(peers: str | Iterable[str], message: object) -> None:
        told(peers, message)
        if isinstance(message, wire.Signed) and isinstance(ready := wire.opened(message), wire.Ready):
            liar.node.tell = told  # type: ignore[method-assign]
            liar.node.nursery.start_soon(pour, (peers,) if isinstance(peers, str) else tuple(peers), ready.slot)

    liar.node.tell = tell  # type: ignore[method-assign]


def usurper(liar: Corruptible) -> None:
    """Knows no other members, and so needs nobody's signature."""
    liar.averager._active = frozenset
    liar.averager._spec = replace(liar.averager._spec, min_peers=1, charter=OPEN)
    if liar.archive is not None:
        liar.archive.ledger._charter = OPEN
    greedy(liar)


def replay(liar: Corruptible) -> None:
    """Says old words of others, and its own, whenever a round begins."""
    heard: deque[wire.Signed] = deque(maxlen=REPLAYED)
    receive, told = liar.averager._receive, liar.node.tell

    def keep(carrier: str, signed: wire.Signed) -> None:
        heard.append(signed)
        receive(carrier, signed)

    def tell(peers: str | Iterable[str], message: object) -> None:
        told(peers, message)
        if isinstance(message, wire.Signed) and isinstance(ready := wire.opened(message), wire.Ready):
            old = [signed for signed in heard if wire.opened(signed).slot.round < ready.slot.round]
            if old:
                made(liar, "replay")
            for signed in old:
                told(peers, signed)

    liar.node.on_tell(wire.Signed, keep)
    liar.node.tell = tell  # type: ignore[method-assign]


LIARS: Mapping[str, Callable[..., None]] = {
    lie.__name__: lie
    for lie in (
        equivocating_convener,
        censoring_owner,
        lying_owner,
        lying_sender,
        lying_sender_with_owner,
        mute,
        withholding,
        late,
        selective,
        greedy,
        lazy,
        flood,
        replay,
        usurper,
    )
}
"""How to corrupt a peer that stands and has said nothing yet."""
SCALED = {"late": (0.0, 3600.0), "lying_owner": (1e-3, 1.0)}
"""Those that take a scale, and from what to what."""
TOGETHER = ("lying_sender_with_owner",)
"""Those that must know their `fellows`, by id."""
