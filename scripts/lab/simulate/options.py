"""Options of a simulation: numbers with units, ranges, partitions and strikes.

A text that cannot be parsed is a `UsageError` with a valid example.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ....collectives.robust.rules import rule_named
from ....dht.run.manifest import MOST_FRAGMENTS
from ....peer.base.errors import UsageError
from ..attacks.gradients import Attackers
from ..attacks.protocol import TOGETHER

SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
RATES: Mapping[str, float] = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
"""Bytes per second; line rates are stated in bits."""

MEETING_TRIPS = 10
"""One-way trips until founders have met: a dial, a stream, a request. With a faster phase a founder begins alone."""

CONVENER_MESSAGES = frozenset({"Roster", "Cut", "Outputs", "Propose"})
"""Sent by the proposer alone: a strike after one of these happens when the proposer sends it, whoever the victim is."""
MESSAGES = (
    *("Ready", "Roster", "Commit", "Have", "Cut", "Sketch", "Result", "Outputs", "Propose", "Prevote", "Precommit"),
    "Void",
)
BLOWS = ("kill", "stall", "cut", "leave")
ROLES = ("proposer", "owner", "sender")


@dataclass(frozen=True, slots=True)
class Span:
    """A uniform or log-uniform distribution from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def parse(cls, text: str, units: Mapping[str, float], *, logarithmic: bool = False) -> Self:
        """Parse `20ms`, or `20ms..100ms`. Raises `UsageError`."""
        ends = [_quantity(end, text, units) for end in text.split("..")]
        if len(ends) > 2 or ends[0] > ends[-1] or (logarithmic and not ends[0]):
            raise UsageError(f"{text!r} is not a range", remedy=f"write it as in {_example(units)}")
        return cls(ends[0], ends[-1], logarithmic)

    def draw(self, source: random.Random) -> float:
        """Draw one value."""
        if self.logarithmic:
            return math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return source.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Partition:
    """A network partition into groups of founders, from the beginning of a round for some seconds."""

    groups: tuple[int, ...]
    round: int
    seconds: float

    @classmethod
    def parse(cls, text: str, peers: int) -> Self:
        """Parse `5+3@round=2,for=60s`: the first five peers, and the next three. Raises `UsageError`."""
        found = re.fullmatch(r"(\d+(?:\+\d+)+)@round=(\d+),for=(\w+)", text)
        if found is None:
            raise UsageError(f"{text!r} is not a partition", remedy="write it as in 5+3@round=2,for=60s")
        groups = tuple(int(size) for size in found[1].split("+"))
        if sum(groups) > peers or not all(groups):
            raise UsageError(f"the partition {text!r} does not fit {peers} peers")
        return cls(groups, int(found[2]), _quantity(found[3], text, SECONDS))


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault after the message `after` of `round`: the victim is killed, stalled, cut off, or leaves.

    Who leaves does so in order, and for good.
    """

    round: int
    after: str
    blow: str
    victim: str | int
    """A role, or the number of a peer."""
    seconds: float
    """Until a stalled or cut peer goes on, and a killed one starts again; of one killed 0: never."""

    @classmethod
    def parse(cls, text: str, peers: int) -> Self:
        """Parse `round=3,after=Cut,kill=proposer`; `for=20s` may follow. Raises `UsageError`."""
        remedy = f"write it as in round=3,after=Cut,kill=proposer; after is one of {', '.join(MESSAGES)}"
        parts = [part.strip().partition("=")[::2] for part in text.split(",")]
        fields = dict(parts)
        blows = [blow for blow in BLOWS if blow in fields]
        known = {"round", "after", "for", *BLOWS}
        if (
            len(blows) != 1
            or len(fields) != len(parts)
            or not fields.keys() <= known
            or fields.get("after") not in MESSAGES
        ):
            raise UsageError(f"{text!r} is not a strike", remedy=remedy)
        if "for" in fields and blows[0] == "leave":
            raise UsageError(f"{text!r}: leave= has no duration", remedy="for= goes with kill, stall and cut")
        victim = fields[blows[0]]
        number = int(victim) if victim.isdecimal() else None
        if not fields.get("round", "").isdecimal() or (victim not in ROLES and (number is None or number >= peers)):
            raise UsageError(f"{text!r} names no valid victim or round", remedy=remedy)
        seconds = _quantity(fields.get("for", "0s" if blows[0] == "kill" else "10s"), text, SECONDS)
        return cls(int(fields["round"]), fields["after"], blows[0], victim if number is None else number, seconds)

    def __str__(self) -> str:
        whom = f"peer {self.victim}" if isinstance(self.victim, int) else f"the {self.victim}"
        return f"{self.blow} {whom} after {self.after} of round {self.round}"


VOTERS = ("founders", "honest", "keepers")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of one simulation. Raises `UsageError` if one is out of its range."""

    peers: int
    """Number of founders."""

    rounds: int
    """Number of rounds to train."""

    seed: int
    """Seed of all randomness."""

    bandwidth: Span | None
    """Up- and downlink of each peer in bytes/s; None is unlimited."""

    latency: Span
    """Seconds from one peer to another; each end adds half."""

    loss: float
    """Probability of a packet to be retransmitted."""

    churn: float
    """Expected joins, and as many leaves, in a round."""

    stall: float
    """Expected stalls in a round."""

    stall_time: Span
    """Duration of a stall in seconds."""

    partitions: tuple[Partition, ...]
    """Network partitions; one that ends heals all."""

    strikes: tuple[Strike, ...]
    """Faults at moments of the protocol."""

    attacks: tuple[Attackers, ...]
    """Attacks of the last founders, in this order."""

    rule: str
    """The aggregation rule."""

    steps_time: Span
    """Seconds of a peer's inner phase, drawn for each phase."""

    out: Path | None
    """Folder for the event log."""

    voters: str = "founders"
    """Who votes on the first round: the `founders`, at most 64, or the `honest` ones of them. With `keepers` the founders
    do, in all rounds."""

    fragments: int = 1
    """Fragments of the vector; with more than one, peers train on while a round averages the next of them."""

    def __post_init__(self) -> None:
        for name, low, high in (
            *(("peers", 1, 4096), ("rounds", 1, 1_000_000), ("fragments", 1, MOST_FRAGMENTS)),
        ):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} must be {low} to {high}, got {getattr(self, name)}")
        if self.voters not in VOTERS:
            raise UsageError(f"{self.voters!r} are no voters", remedy=f"name {', '.join(VOTERS[:-1])} or {VOTERS[-1]}")
        for name, least, most in (("loss", 0.0, 0.9), ("churn", 0.0, 1000.0), ("stall", 0.0, 1000.0)):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be {least:g} to {most:g}, got {getattr(self, name):g}")
        if self.steps_time.low < MEETING_TRIPS * self.latency.high:
            raise UsageError(
                f"inner phases of {self.steps_time.low:g} s are too short for peers {self.latency.high:g} s apart to meet",
                remedy=f"--steps-time must be at least {MEETING_TRIPS} times --latency",
            )
        faults: tuple[Strike | Partition, ...] = (*self.strikes, *self.partitions)
        for fault in faults:
            if not 1 <= fault.round <= self.rounds:
                raise UsageError(f"{fault}: the rounds are 1 to {self.rounds}")
        rule_named(self.rule)
        if sum(attackers.count for attackers in self.attacks) >= self.peers:
            named = ", ".join(map(str, self.attacks))
            raise UsageError(
                f"{named}: none of {self.peers} peers is honest", remedy="lower the count, or raise --peers"
            )
        for attackers in self.attacks:
            if attackers.scale is not None:
                remedy = f"write {attackers.name}:COUNT"
                raise UsageError(f"{attackers}: an attack on the protocol has no scale", remedy=remedy)
            if attackers.name in TOGETHER and attackers.count == 1:
                remedy = f"use two: {attackers.name}:2"
                raise UsageError(f"{attackers}: one attacker has no fellow to collude with", remedy=remedy)


def _quantity(text: str, whole: str, units: Mapping[str, float]) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if found is None or found[2] not in units:
        raise UsageError(f"{whole!r} has no number with a unit", remedy=f"write it as in {_example(units)}")
    return float(found[1]) * units[found[2]]


def _example(units: Mapping[str, float]) -> str:
    example = "20ms or 20ms..100ms" if units is SECONDS else "20Mbit or 10Mbit..100Mbit"
    return f"{example}; units are {', '.join(units)}"
