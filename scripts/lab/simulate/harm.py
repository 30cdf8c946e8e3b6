"""Attackers of a simulation and their effect: protocol violations, and who notices them.

An attacker is corrupted after its assembly, before its first message. From then on it breaks the protocol in one way
(`attacks.protocol`). Everything else is the production code.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ....collectives.allreduce.actions import Outcome
from ....collectives.chain.certificate import value_of
from ....peer.log.events import Fault, faults_of
from ....peer.log.telemetry import Event
from ..attacks.gradients import Attackers
from ..attacks.protocol import LIARS, TOGETHER
from ..table import table_lines
from .peer import SimulatedPeer

NOTICES = faults_of(Fault.OMISSION, Fault.COMMISSION)
"""Events by which an honest peer reports another one."""
HONEST = "honest"


def corrupt(peer: SimulatedPeer, roles: Mapping[str, Attackers]) -> None:
    """Install the attack of a peer, by its role, after its assembly."""
    attackers = roles.get(peer.peer)
    if attackers is not None:
        fellows = [fellow for fellow, role in roles.items() if role == attackers]
        LIARS[attackers.name](peer, **({"fellows": fellows} if attackers.name in TOGETHER else {}))


class Harm:
    """Collects the effect of the attacks from the events and results of honest peers."""

    def __init__(self, roles: Mapping[str, Attackers], names: Mapping[str, str]) -> None:
        self.flagged: Counter[str] = Counter()
        """By peer id: rounds in which the run's rule has flagged it."""
        self.banned: dict[str, dict[str, str]] = {}
        """By peer id: the honest peers that have banned it, and the reasons."""
        self.made: Counter[str] = Counter()
        """By peer id: its deviations from the protocol."""
        self.noticed: dict[str, Counter[str]] = defaultdict(Counter)
        """By peer id: the events of honest peers about it."""
        self._roles = roles
        self._names = names
        self._round = 0

    def event(self, name: str, event: Event) -> None:
        """Count an event that an honest peer has emitted."""
        kind, peer = str(event["event"]), str(event.get("peer", ""))
        if kind in NOTICES:
            self.noticed[peer][kind] += 1
        if kind == "peer.banned":
            self.banned.setdefault(peer, {})[name] = str(event["reason"])

    def ended(self, outcome: Outcome) -> None:
        """Count whom the rule has flagged in a round that an honest peer ended certified."""
        if outcome.slot.round > self._round and outcome.certificate is not None:  # Another peer may have ended it first.
            self._round = outcome.slot.round
            self.flagged.update(outcome.members[index] for index in value_of(outcome.certificate).flagged)

    def figures(self) -> list[dict[str, Any]]:
        """Return the effect of each attack, then what became of the honest peers."""
        roles = {**dict.fromkeys(self._names, HONEST), **{peer: str(role) for peer, role in self._roles.items()}}
        found = []
        for attack in (*dict.fromkeys(map(str, self._roles.values())), HONEST):
            peers = {peer: self._names[peer] for peer, role in roles.items() if role == attack}
            found.append(
                {
                    "attack": attack,
                    "peers": list(peers.values()),
                    "made": sum(self.made[peer] for peer in peers),
                    "flagged": {name: self.flagged[peer] for peer, name in peers.items() if self.flagged[peer]},
                    "banned": {
                        name: {"by": len(reasons), "reason": next(iter(reasons.values()))}
                        for peer, name in peers.items()
                        if (reasons := self.banned.get(peer))
                    },
                    "noticed": dict(sum((self.noticed[peer] for peer in peers), Counter[str]())),
                }
            )
        return found

    def lines(self) -> Iterator[str]:
        """Yield the effect as lines of text."""
        figures, rows = self.figures(), []
        for one in figures:
            noticed = ", ".join(f"{event} {count}" for event, count in one["noticed"].items())
            banned = f"{len(one['banned'])} of {len(one['peers'])}"
            rows.append((one["attack"], len(one["peers"]), one["made"], sum(one["flagged"].values()), banned, noticed or "-"))
        yield from table_lines("", ("attack", "peers", "made", "flagged", "banned", "noticed"), rows)
        for one in figures:
            for name, ban in one["banned"].items():
                yield f"{name} ({one['attack']}) was banned by {ban['by']} honest peers: {ban['reason']}"
