"""Attackers in a `SimSwarm`, and queries about its honest peers."""

from collections.abc import Callable, Iterable, Sequence

from flockstep.peer.log.telemetry import Event
from flockstep.scripts.lab.attacks.protocol import Lie, lies
from support.deeds import ABOUT, Change, Step, false, step_of
from support.swarm import SimPeer, SimSwarm

__all__ = ["Lie", "banned", "events_of", "honest", "lies", "lies_about", "only", "silent", "tells"]


def silent(*steps: Step, to: Callable[[str], bool] = lambda peer: True) -> Lie:
    """Return a lie: no messages of these steps, to these peers."""
    return lambda peer, message: None if step_of(message) in steps and to(peer) else message


def only(*steps: Step) -> Lie:
    """Return a lie: nothing but the messages of these steps."""
    return lambda peer, message: message if step_of(message) in steps else None


def tells(some: Sequence[SimPeer], step: Step, change: Change = false) -> Lie:
    """Return a lie: another message of a step to `some`."""
    peers = {sim.peer for sim in some}
    return lambda peer, message: change(message) if step_of(message) == step and peer in peers else message


def lies_about(what: str, *steps: Step) -> Lie:
    """Return a lie: all messages of these steps are false about one thing (`deeds.ABOUT`)."""
    return lambda peer, message: ABOUT[what](message) if step_of(message) in steps else message


def honest(swarm: SimSwarm, *liars: SimPeer) -> list[SimPeer]:
    return [sim for sim in swarm.sims if sim not in liars]


def events_of(sims: Iterable[SimPeer], name: str) -> list[Event]:
    return [event for sim in sims for event in sim.events if event["event"] == name]


def banned(sims: Iterable[SimPeer]) -> list[set[str]]:
    """Return the peers that each of them has banned."""
    return [{str(event["peer"]) for event in sim.events if event["event"] == "peer.banned"} for sim in sims]
