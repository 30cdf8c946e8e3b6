"""Attackers in a `SimSwarm`, and queries about its honest peers."""

from collections.abc import Iterable, Sequence
from typing import Any

from flockstep.peer.log.telemetry import Event
from flockstep.scripts.lab.attacks import protocol
from flockstep.scripts.lab.attacks.protocol import Lie, lies
from support.swarm import SimPeer, SimSwarm

__all__ = ["Lie", "banned", "events_of", "honest", "lies", "to_some"]


def to_some(some: Sequence[SimPeer], kind: type, **changes: Any) -> Lie:
    """Return a lie: `some` receive every message of class `kind` with these fields changed."""
    return protocol.to_some({sim.peer for sim in some}, kind, **changes)


def honest(swarm: SimSwarm, *liars: SimPeer) -> list[SimPeer]:
    return [sim for sim in swarm.sims if sim not in liars]


def events_of(sims: Iterable[SimPeer], name: str) -> list[Event]:
    return [event for sim in sims for event in sim.events if event["event"] == name]


def banned(sims: Iterable[SimPeer]) -> list[set[str]]:
    """Return the peers that each of them has banned."""
    return [{str(event["peer"]) for event in sim.events if event["event"] == "peer.banned"} for sim in sims]
