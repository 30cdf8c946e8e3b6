"""Attackers of a simulation and their effect: false contributions, protocol violations.

Theory of operation. An attacker is corrupted after its assembly, before its first message. From then on it breaks the
protocol in one way (`attacks.protocol`), or it contributes what an attack (`attacks.gradients`) makes of the
contributions of all honest peers, and of those that the attackers would send if they were honest. They know all of
these before any peer has committed to one, which real attackers cannot. Everything else is the production code.

The reference of a round is the token-weighted mean of the honest contributions in its cut. `applied` is the distance of
the outputs from it, relative to its norm. `mean` is the distance of the weighted mean of the whole cut, rounded by the
same codec. With int4 rounding alone leaves 0.12, and the rule adds to that even without attackers.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from ....collectives.accountability.trust import token_weights
from ....collectives.chain.certificate import value_of
from ....collectives.driver.contribution import Averaged
from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import CELL, Codec, Encoded, FlatSum, weighted_mean
from ....optim.member.apply import decode_outputs, elements_of
from ....peer.base.digest import keyed
from ....peer.base.errors import LocalError, UsageError
from ....peer.log.events import Fault, faults_of
from ....peer.log.telemetry import Event
from ..attacks.gradients import Attackers
from ..attacks.protocol import LIARS, TOGETHER, changes
from .options import SimulateOptions
from .peer import SimulatedPeer
from .state import State

KEPT_ROUNDS = 3
"""Rounds for which sent vectors are kept: all attempts of a round send the same."""


class Puppet(State):
    """The state of an attacker that sends vectors of a `Plot`; its codec encodes even what is not finite."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, tensors=True)
        self.codec = careless(self.codec)

    def keep_rest(self, averaged: Averaged, x: Floats) -> None:
        """No error feedback, since x is not the vector that was sent."""


class Plot:
    """The colluding attackers of one attack."""

    def __init__(self, attackers: Attackers, seed: int, honest: Callable[[], Iterable[SimulatedPeer]]) -> None:
        self.members: dict[str, Puppet] = {}
        """By id, in the order of the founders."""
        self._attackers = attackers
        self._attack = attackers.fresh()
        self._honest = honest
        self._generator = np.random.default_rng(int.from_bytes(keyed("attack", str(attackers).encode(), b"%d" % seed)))
        self._sent: dict[int, Floats] = {}

    def sent(self, member: str, round_: int) -> Floats:
        """Return the vector that a member sends in a round; the first call computes those of all members."""
        if round_ not in self._sent:
            self._sent[round_] = self._made(round_)
            self._sent.pop(round_ - KEPT_ROUNDS, None)
        x: Floats = self._sent[round_][list(self.members).index(member)].copy()
        return x

    def _made(self, round_: int) -> Floats:
        honest = [rounded(peer.state.codec, peer.state.contribution(peer.peer, round_)) for peer in self._honest()]
        own = np.stack([rounded(state.codec, state.contribution(peer, round_)) for peer, state in self.members.items()])
        with np.errstate(all="ignore"):
            made = self._attack(np.stack(honest), own.copy(), round_ - 1, self._generator)
        try:
            return np.broadcast_to(np.asarray(made, np.float32), own.shape)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the attack {self._attackers.name} returned no float32 vectors of shape {own.shape}: {error}",
                remedy="see the docstring of scripts/lab/attacks/gradients.py",
            ) from error


class Cast:
    """Assigns attacks to founders."""

    def __init__(self, options: SimulateOptions, honest: Callable[[], Iterable[SimulatedPeer]]) -> None:
        self.roles: dict[str, Attackers] = {}
        """By peer id."""
        self._seed = options.seed
        self._tensors = options.tensors
        parts = [attackers for attackers in options.attacks for _ in range(attackers.count)]
        self._parts = dict(enumerate(parts, options.peers - len(parts)))
        self._plots = {a: Plot(a, options.seed, honest) for a in {*parts} if a.name not in LIARS}

    def state(self, number: int, peer: str) -> State:
        """Return the initial state of the founder of this number."""
        attackers = self._parts.get(number)
        if attackers is not None:
            self.roles[peer] = attackers
        plot = self._plots.get(attackers) if attackers is not None else None
        if plot is None:
            return State(self._seed, tensors=self._tensors)
        plot.members[peer] = puppet = Puppet(self._seed)
        return puppet

    def corrupt(self, peer: SimulatedPeer) -> None:
        """Install the attack of a peer after its assembly."""
        attackers = self.roles.get(peer.peer)
        if attackers is None:
            return
        plot = self._plots.get(attackers)
        if plot is not None:
            changes(peer, lambda honest: replace(honest, vector=FlatSum([plot.sent(peer.peer, honest.round)])))
        else:
            options: dict[str, Any] = {} if attackers.scale is None else {"scale": attackers.scale}
            if attackers.name in TOGETHER:
                options["fellows"] = [fellow for fellow, role in self.roles.items() if role == attackers]
            LIARS[attackers.name](peer, **options)


def rounded(codec: Codec, x: Floats) -> Floats:
    """Dec(Enc(x))."""
    out = np.empty_like(x)
    codec.decode(codec.encode(x), out)
    return out


def careless(codec: Codec) -> Codec:
    """Return a codec that encodes even what is not finite, as bytes that no honest codec writes."""
    encode, careless = codec.encode_chunks, copy(codec)

    def write(chunks: Iterable[Floats], num_cells: int) -> memoryview:
        try:
            return encode(chunks, num_cells)
        except LocalError:
            return memoryview(b"\xff" * codec.num_bytes(num_cells))

    careless.encode_chunks = write  # type: ignore[method-assign]
    return careless


NOTICES = faults_of(Fault.OMISSION, Fault.COMMISSION)
"""Events by which an honest peer reports another one."""

HONEST = "honest"


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a round's outputs from the honest mean, and that of the rule `mean`."""

    round: int
    applied: float
    mean: float


class Harm:
    """Collects the effect of the attacks from the events and results of honest peers."""

    def __init__(self, roles: Mapping[str, Attackers], names: Mapping[str, str]) -> None:
        self.distances: list[Distance] = []
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

    def ended(self, averaged: Averaged, codec: Codec, cut: Sequence[tuple[Floats, int]]) -> None:
        """Measure a round that an honest peer ended certified; `cut` holds (contribution, tokens) of its contributors."""
        outcome = averaged.outcome
        if outcome.slot.round <= self._round or outcome.certificate is None:
            return  # Another peer ended this round first.
        self._round = outcome.slot.round
        self.flagged.update(outcome.members[index] for index in value_of(outcome.certificate).flagged)
        honest = [contribution for peer, contribution in zip(outcome.cut, cut, strict=True) if peer not in self._roles]
        if not self._roles or not honest:
            return
        bounds, span = outcome.value.bounds, elements_of(range(outcome.value.bounds[0], outcome.value.bounds[-1]))
        right = _mean(honest)[span]
        g = np.empty_like(right)
        decode_outputs(codec, bounds, averaged.outputs, span, g)
        by_mean = np.empty_like(g)
        try:
            decode_outputs(codec, bounds, encoded_mean(codec, bounds, cut), span, by_mean)
        except LocalError:  # Not finite, or beyond the range of the codec.
            by_mean.fill(math.inf)
        self.distances.append(Distance(self._round, _apart(g, right), _apart(by_mean, right)))

    def lines(self) -> Iterator[str]:
        """Yield the effect as lines of text."""
        yield f"{'attack':<26} {'peers':<14} {'made':<11} {'flagged':<11} {'banned':<8} noticed"
        for attack, peers in self._by_attack():
            names = " ".join(self._names[peer] for peer in peers) if attack != HONEST else f"{len(peers)} peers"
            made, flagged = (f"{sum(times[peer] for peer in peers)} times" for times in (self.made, self.flagged))
            banned = f"{sum(peer in self.banned for peer in peers)} of {len(peers)}"
            noticed = ", ".join(f"{event} {count}" for event, count in self._noticed(peers).items())
            yield f"{attack:<26} {names:<14} {made:<11} {flagged:<11} {banned:<8} {noticed or '-'}"
        for peer, reasons in self.banned.items():
            name = f"{self._names[peer]} ({self._roles.get(peer, HONEST)})"
            yield f"{name} was banned by {len(reasons)} honest peers: {next(iter(reasons.values()))}"
        if self.distances:
            yield "distance of the outputs from the mean of the honest contributions, relative to its norm:"
            for name, values in (
                ("applied", [d.applied for d in self.distances]),
                ("mean", [d.mean for d in self.distances]),
            ):
                worst = max(self.distances, key=lambda distance: getattr(distance, name))
                yield f"  {name:<10} median {median(values):.3f}, worst {max(values):.3f} in round {worst.round}"

    def figures(self) -> dict[str, object]:
        """Return the effect for `--json`; a distance that is not finite is null."""
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
        """Yield the ids of the peers of each attack, then those of the honest ones."""
        for attackers in dict.fromkeys(self._roles.values()):
            yield str(attackers), [peer for peer, role in self._roles.items() if role == attackers]
        yield HONEST, [peer for peer in self._names if peer not in self._roles]

    def _noticed(self, peers: Sequence[str]) -> Counter[str]:
        return sum((self.noticed[peer] for peer in peers), Counter[str]())


def encoded_mean(codec: Codec, bounds: Sequence[int], cut: Sequence[tuple[Floats, int]]) -> list[Encoded]:
    """Compute the outputs of the rule `mean` from contributions (x, tokens), part by part."""
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
