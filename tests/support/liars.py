"""Attackers in a `SimSwarm`, and queries about its honest peers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flockstep.peer import wire
from flockstep.peer.log.telemetry import Event
from flockstep.scripts.lab.attacks.protocol import Lie, lies
from support.swarm import SimPeer, SimSwarm

__all__ = ["Lie", "banned", "events_of", "honest", "lies", "to_some"]


def to_some(some: Sequence[SimPeer], kind: type, **changes: Any) -> Lie:
    """Return a lie: `some` receive every message of class `kind` with these fields changed."""
    peers = {sim.peer for sim in some}

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        return replace(message, **changes) if isinstance(message, kind) and peer in peers else message

    return lie


def honest(swarm: SimSwarm, *liars: SimPeer) -> list[SimPeer]:
    return [sim for sim in swarm.sims if sim not in liars]


def events_of(sims: Iterable[SimPeer], name: str) -> list[Event]:
    return [event for sim in sims for event in sim.events if event["event"] == name]


def banned(sims: Iterable[SimPeer]) -> list[set[str]]:
    """Return the peers that each of them has banned."""
    return [{str(event["peer"]) for event in sim.events if event["event"] == "peer.banned"} for sim in sims]
