"""Peers of a flock that break the rules, and who is left of it."""

from collections.abc import Iterable, Sequence
from typing import Any

from flockstep.peer.telemetry import Event
from flockstep.scripts.attacks import protocol as liars
from flockstep.scripts.attacks.protocol import Lie, lies
from support.swarm import Bird, Flock

__all__ = ["Lie", "banned", "events_of", "honest", "lies", "to_some"]


def to_some(some: Sequence[Bird], kind: type, **changes: Any) -> Lie:
    """`some` hear another content of every message of one kind than the others."""
    return liars.to_some({bird.peer for bird in some}, kind, **changes)


def honest(flock: Flock, *liars: Bird) -> list[Bird]:
    return [bird for bird in flock.birds if bird not in liars]


def events_of(birds: Iterable[Bird], name: str) -> list[Event]:
    return [event for bird in birds for event in bird.events if event["event"] == name]


def banned(birds: Iterable[Bird]) -> list[set[str]]:
    """Whom each of them has banned."""
    return [{str(event["peer"]) for event in bird.events if event["event"] == "peer.banned"} for bird in birds]
