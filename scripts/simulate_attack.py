"""Who attacks in a simulation: founders that lie in what they contribute, or break the protocol.

Theory of operation. An attacker is corrupted once it stands, before its first word. From then on it breaks the protocol in
one way (`liars`), or it contributes what an attack (`attacks`) makes of the contributions of all honest peers who are
there, and of those that the attackers would send if they were honest. They know all of these before anybody has
committed to any, which is more than real ones can. All else that they do is the production code.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from ..collectives.averager import Averaged
from ..collectives.codec import CELL, Codec, Floats
from ..peer.digest import keyed
from ..peer.errors import LocalError, UsageError
from .attacks.gradients import Attackers
from .attacks.protocol import LIARS, TOGETHER, changes
from .simulate.options import SimulateOptions
from .simulate.peer import SimulatedPeer
from .simulate.state import State

KEPT_ROUNDS = 3
"""For how long what was sent is kept: attempts of a round send the same."""


class Puppet(State):
    """The state of a peer that sends what others make up; it writes even what cannot be written."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, tensors=True)
        self.codec = careless(self.codec)

    def apply(self, averaged: Averaged, x: Floats | None) -> None:
        """As anybody, but without error feedback: x is not what was sent."""
        super().apply(averaged, None)


class Plot:
    """The attackers of one attack, who act together."""

    def __init__(self, attackers: Attackers, seed: int, honest: Callable[[], Iterable[SimulatedPeer]]) -> None:
        self.members: dict[str, Puppet] = {}
        """By id, in the order of the founders."""
        self._attackers = attackers
        self._attack = attackers.fresh()
        self._honest = honest
        self._generator = np.random.default_rng(int.from_bytes(keyed("attack", str(attackers).encode(), b"%d" % seed)))
        self._sent: dict[int, Floats] = {}

    def sent(self, member: str, round_: int) -> Floats:
        """What this member sends in a round, made up for all of them when the first of them asks."""
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
                f"the attack {self._attackers.name} makes nothing that {own.shape} float32 can be filled with: {error}",
                remedy="see the head of scripts/attacks/gradients.py",
            ) from error


class Cast:
    """Which founders attack, and how."""

    def __init__(self, options: SimulateOptions, honest: Callable[[], Iterable[SimulatedPeer]]) -> None:
        self.roles: dict[str, Attackers] = {}
        """By peer id."""
        self._seed = options.seed
        self._tensors = options.tensors
        parts = [attackers for attackers in options.attacks for _ in range(attackers.count)]
        self._parts = dict(enumerate(parts, options.peers - len(parts)))
        self._plots = {a: Plot(a, options.seed, honest) for a in {*parts} if a.name not in LIARS}

    def state(self, number: int, peer: str) -> State:
        """What the peer of this number begins with."""
        attackers = self._parts.get(number)
        if attackers is not None:
            self.roles[peer] = attackers
        plot = self._plots.get(attackers) if attackers is not None else None
        if plot is None:
            return State(self._seed, tensors=self._tensors)
        plot.members[peer] = puppet = Puppet(self._seed)
        return puppet

    def corrupt(self, peer: SimulatedPeer) -> None:
        """Turn a peer that stands into what it is to be."""
        attackers = self.roles.get(peer.peer)
        if attackers is None:
            return
        plot = self._plots.get(attackers)
        if plot is not None:
            changes(peer, lambda honest: replace(honest, vector=plot.sent(peer.peer, honest.round)))
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
    """Writes even what is not finite: as bytes that no honest codec writes."""
    encode, careless = codec.encode, copy(codec)

    def write(x: Floats) -> memoryview:
        try:
            return encode(x)
        except LocalError:
            return memoryview(b"\xff" * codec.num_bytes(x.size // CELL))

    careless.encode = write  # type: ignore[method-assign]
    return careless
