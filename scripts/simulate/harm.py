"""What attacks do to a simulation: how far they push the outputs, what is noticed of them, and by what.

The measure of a round is the token-weighted mean of the honest contributions in its cut: `applied` is how far the
outputs are from it, relative to its norm, `mean` how far the weighted mean of the whole cut would have been, rounded
by the same codec. Rounding alone leaves 0.12 with int4, and what the rule takes for itself where nobody lies comes to that.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from ...collectives.averager import Averaged
from ...collectives.chain.certificate import result_of, token_weights
from ...collectives.codec import CELL, Codec, Encoded, Floats, weighted_mean
from ...optim.member.apply import decode_outputs
from ...peer.errors import LocalError
from ...peer.telemetry import Event
from ..attacks.gradients import Attackers

NOTICES = (
    "round.left_out",
    "round.disowned",
    "round.output_missing",
    "round.output_false",
    "round.sketches_differ",
    "round.roster_refused",
    "round.equivocation",
    "round.result_differs",
    "peer.charged",
    "peer.banned",
)
"""Events by which an honest peer says that another one does not do as it should."""

HONEST = "honest"


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the outputs of a round are from the mean of the honest, and those of `mean` would have been."""

    round: int
    applied: float
    mean: float


class Harm:
    """Told of what the honest peers say and end, it knows in the end what the attacks came to."""

    def __init__(self, roles: Mapping[str, Attackers], names: Mapping[str, str]) -> None:
        self.distances: list[Distance] = []
        self.flagged: Counter[str] = Counter()
        """Rounds in which the run's rule has flagged a peer, by its id."""
        self.banned: dict[str, dict[str, str]] = {}
        """By the id of a peer: which honest peers have banned it, and why."""
        self.made: Counter[str] = Counter()
        """How often a peer has done what it should not, by its id."""
        self.noticed: dict[str, Counter[str]] = defaultdict(Counter)
        """By the id of a peer: what honest peers said of it."""
        self._roles = roles
        self._names = names
        self._round = 0

    def event(self, name: str, event: Event) -> None:
        """An honest peer has emitted an event."""
        kind, peer = str(event["event"]), str(event.get("peer", ""))
        if kind in NOTICES:
            self.noticed[peer][kind] += 1
        if kind == "peer.banned":
            self.banned.setdefault(peer, {})[name] = str(event["reason"])

    def ended(self, averaged: Averaged, codec: Codec, cut: Sequence[tuple[Floats, int]]) -> None:
        """A round was certified for an honest peer; `cut` is what its contributors have brought, and their tokens."""
        outcome = averaged.outcome
        if outcome.slot.round <= self._round or outcome.certificate is None:
            return  # It is known from who ended it first.
        self._round = outcome.slot.round
        self.flagged.update(outcome.members[index] for index in result_of(outcome.certificate).flagged)
        honest = [brought for peer, brought in zip(outcome.cut, cut, strict=True) if peer not in self._roles]
        if not self._roles or not honest:
            return
        right = _mean(honest)
        g = np.empty_like(right)
        decode_outputs(codec, outcome.bounds, averaged.outputs, slice(0, g.size), g)
        by_mean = np.empty_like(g)
        try:
            decode_outputs(codec, outcome.bounds, encoded_mean(codec, outcome.bounds, cut), slice(0, g.size), by_mean)
        except LocalError:  # Not finite, or beyond what it can write.
            by_mean.fill(math.inf)
        self.distances.append(Distance(self._round, _apart(g, right), _apart(by_mean, right)))

    def lines(self) -> Iterator[str]:
        """All of it, for a person."""
        yield f"{'attack':<26} {'peers':<14} {'made':<11} {'flagged':<11} {'banned':<8} noticed"
        for attack, peers in self._by_attack():
            names = " ".join(self._names[peer] for peer in peers) if attack != HONEST else f"{len(peers)} peers"
            made, flagged = (f"{sum(times[peer] for peer in peers)} times" for times in (self.made, self.flagged))
            banned = f"{sum(peer in self.banned for peer in peers)} of {len(peers)}"
            noticed = ", ".join(f"{event} {count}" for event, count in self._noticed(peers).items())
            yield f"{attack:<26} {names:<14} {made:<11} {flagged:<11} {banned:<8} {noticed or '-'}"
        for peer, reasons in self.banned.items():
            name = f"{self._names[peer]}, who is {self._roles.get(peer, HONEST)},"
            yield f"{name} was banned by {len(reasons)} honest peers: {next(iter(reasons.values()))}"
        if self.distances:
            yield "the outputs were so far from the mean of the honest contributions, relative to its norm:"
            for who, values in (
                ("applied", [d.applied for d in self.distances]),
                ("mean", [d.mean for d in self.distances]),
            ):
                worst = max(self.distances, key=lambda distance: getattr(distance, who))
                yield f"  {who:<10} median {median(values):.3f}, worst {max(values):.3f} in round {worst.round}"

    def figures(self) -> dict[str, object]:
        """The same, for `--json`; a distance that is not finite is null."""
        return {
            "distances": [
                {"round": distance.round, "applied": _number(distance.applied), "mean": _number(distance.mean)}
                for distance in self.distances
            ],
            "attacks": [
                {
                    "attack": attack,
                    "peers": [self._names[peer] for peer in peers],
                    "made": sum(self.made[peer] for peer in peers),
                    "flagged": {self._names[peer]: self.flagged[peer] for peer in peers if self.flagged[peer]},
                    "banned": {
                        self._names[peer]: {
                            "by": len(self.banned[peer]),
                            "reason": next(iter(self.banned[peer].values())),
                        }
                        for peer in peers
                        if peer in self.banned
                    },
                    "noticed": dict(self._noticed(peers)),
                }
                for attack, peers in self._by_attack()
            ],
        }

    def _by_attack(self) -> Iterator[tuple[str, list[str]]]:
        """The peers of each attack, and at last the honest ones, by id."""
        for attackers in dict.fromkeys(self._roles.values()):
            yield str(attackers), [peer for peer, role in self._roles.items() if role == attackers]
        yield HONEST, [peer for peer in self._names if peer not in self._roles]

    def _noticed(self, peers: Sequence[str]) -> Counter[str]:
        return sum((self.noticed[peer] for peer in peers), Counter[str]())


def encoded_mean(codec: Codec, bounds: Sequence[int], cut: Sequence[tuple[Floats, int]]) -> list[Encoded]:
    """What the rule `mean` makes of contributions (x, tokens), part by part."""
    weights = token_weights([tokens for _, tokens in cut])
    outputs: list[Encoded] = []
    for low, high in pairwise(bounds):
        parts = [codec.encode(x[low * CELL : high * CELL]) for x, _ in cut]
        outputs.append(codec.encode(weighted_mean(codec, parts, weights, high - low)))
    return outputs


def _mean(contributions: Sequence[tuple[Floats, int]]) -> Floats:
    weights = token_weights([tokens for _, tokens in contributions])
    mean: Floats = np.zeros_like(contributions[0][0])
    for weight, (x, _) in zip(weights, contributions, strict=True):
        mean += np.float32(weight) * x
    return mean


def _apart(output: Floats, right: Floats) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(output.astype(np.float64) - right) / np.linalg.norm(right))


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
