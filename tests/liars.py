"""Peers that break the rules: production peers whose words are changed on their way out, and who is left of a flock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flock import Bird, Flock
from flockstep.collectives.quorum import sign
from flockstep.peer import wire
from flockstep.peer.telemetry import Event

Lie = Callable[[str, wire.RoundMessage], wire.RoundMessage | None]
"""What a peer of this id is told in the place of a message; None: nothing."""


def lies(bird: Bird, lie: Lie) -> None:
    """From now on `bird` tells each peer what `lie` makes of its messages, rightly signed."""
    told = bird.node.tell

    def tell(peers: str | Iterable[str], message: object) -> None:
        if not isinstance(message, wire.Signed) or message.sender != bird.peer:
            return told(peers, message)
        for peer in (peers,) if isinstance(peers, str) else tuple(peers):
            words = lie(peer, wire.opened(message))
            if words is not None:
                told(peer, sign(bird.identity, words))

    bird.node.tell = tell  # type: ignore[method-assign]


def to_some(some: Sequence[Bird], kind: type, **changes: Any) -> Lie:
    """`some` hear another content of every message of one kind than the others."""
    chosen = {bird.peer for bird in some}

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return replace(message, **changes) if isinstance(message, kind) and peer in chosen else message

    return lie


def honest(flock: Flock, *liars: Bird) -> list[Bird]:
    return [bird for bird in flock.birds if bird not in liars]


def events_of(birds: Iterable[Bird], name: str) -> list[Event]:
    return [event for bird in birds for event in bird.events if event["event"] == name]


def banned(birds: Iterable[Bird]) -> list[set[str]]:
    """Whom each of them has banned."""
    return [{str(event["peer"]) for event in bird.events if event["event"] == "peer.banned"} for bird in birds]
