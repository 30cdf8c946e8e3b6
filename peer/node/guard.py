"""Bans, and budgets of what each peer may send: messages, bytes and signatures to verify. Pure.

A peer of a full round sends at most a few hundred messages in a burst, and a few per second on average; after I was
stopped, all its messages arrive at once. A peer that sends more is flooding: its stream ends, it is charged once, and
no message of it is accepted until its budget has recovered.

Peer ids cost nothing, so what peers without a vote send counts against two more budgets: that of their address, and that
of its network. In an open run a key is a member once it has said so over a session, so members are no exception; only who
may vote is. What strangers send counts against one budget of all strangers, too. A peer whose address or network has used
its budget up is refused and not charged, since somebody else may have done it.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..base.errors import ProtocolViolation, StreamClosed
from ..base.transport import PeerId
from ..log.telemetry import Telemetry
from ..quota.origins import Origin

BURST = 4096
"""Messages in a burst: twice the queue that a session keeps for a peer that does not read."""
PER_SECOND = 64.0
BURST_BYTES = 32 << 20
"""Bytes in a burst: a round of 64 members has 3 MB from each, most of it sketches."""
BYTES_PER_SECOND = float(1 << 20)
BURST_SIGNATURES = 8192
"""Signatures in a burst, 0.8 s of a core: each of the messages has one, a Void or a certificate up to 66."""
SIGNATURES_PER_SECOND = 128.0
QUESTION_MESSAGES = 4
"""A question costs as many messages: to answer one takes 0.2 ms."""
ADDRESS_SHARE = 2
"""The burst of all peers without a vote at one address, in those of one peer: several may be in one office or behind one
relay."""
NETWORK_SHARE = 4
BULKY = 8
"""Of bytes, which cost little, these two have so many times more: a round's from a full roster behind one relay."""
BEATS = 4
"""Of messages a second these two have so many times more: 64 members send as many heartbeats, and 680 messages in a round.
Of signatures and bytes an address has a second what one peer has, since all of it is at most 5 % of a core."""
STRANGERS_SHARE = 16
"""The budget of all strangers, in those of one peer."""
MAX_BUDGETS = 4096
"""As many as the members that a member table holds."""
STRANGERS = "strangers"


class Standing(Enum):
    """What a peer is to me: which budgets it shares with others."""

    VOTER = "voter"
    MEMBER = "member"
    STRANGER = "stranger"


class Cost(NamedTuple):
    """What something that a peer sent takes of its budgets. One for each message: a tuple is made in half the time."""

    messages: int = 0
    num_bytes: int = 0
    signatures: int = 0


@dataclass(slots=True)
class _Budget:
    """What was spent of a budget, as of a time; `charged` once it was overdrawn."""

    share: int
    """How many bursts of one peer it holds."""
    time: float
    messages: float = 0.0
    num_bytes: float = 0.0
    signatures: float = 0.0
    charged: bool = False
    bulky: int = 1
    pace: int = 1
    """How many times faster than that of one peer it recovers; of messages `beats` times that."""
    beats: int = 1

    def take(self, cost: Cost, now: float) -> bool:
        """Spend a cost if it is there; returns whether it was."""
        share, gone = self.share, (now - self.time) * self.pace
        messages, num_bytes, signatures = self.messages, self.num_bytes, self.signatures
        if gone > 0:
            messages = max(0.0, messages - PER_SECOND * self.beats * gone)
            num_bytes = max(0.0, num_bytes - BYTES_PER_SECOND * gone)
            signatures = max(0.0, signatures - SIGNATURES_PER_SECOND * gone)
        messages, num_bytes, signatures = messages + cost.messages, num_bytes + cost.num_bytes, signatures + cost.signatures
        most_bytes = BURST_BYTES * self.bulky * share
        if messages > BURST * share or num_bytes > most_bytes or signatures > BURST_SIGNATURES * share:
            return False
        self.time, self.messages, self.num_bytes, self.signatures = now, messages, num_bytes, signatures
        if self.charged:
            used = max(messages / BURST / share, num_bytes / most_bytes, signatures / BURST_SIGNATURES / share)
            self.charged = used > 0.5
        return True

    def is_unused(self, now: float) -> bool:
        """Return True if all of it is there."""
        gone, per_second = (now - self.time) * self.pace, PER_SECOND * self.beats
        rates = (self.messages, per_second), (self.num_bytes, BYTES_PER_SECOND), (self.signatures, SIGNATURES_PER_SECOND)
        return all(spent <= rate * gone for spent, rate in rates)


class Guard:
    """One node's bans and budgets. Time is an argument."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._banned: dict[PeerId, str] = {}
        self._refused: set[PeerId] = set()
        self._budgets: dict[str, _Budget] = {}
        self._shared: dict[str, _Budget] = {}
        """Those of addresses and networks, apart: new ids must not push them out. The one last used stands last."""

    @property
    def banned(self) -> AbstractSet[PeerId]:
        """The banned peers."""
        return self._banned.keys()

    def ban(self, peer: PeerId, reason: str) -> None:
        """Ban `peer`."""
        self._banned[peer] = reason

    def pardon(self, peer: PeerId) -> None:
        """Lift the ban of `peer`."""
        self._banned.pop(peer, None)
        self._refused.discard(peer)

    def check(self, peer: PeerId) -> None:
        """Raise `StreamClosed` if `peer` is banned."""
        if peer in self._banned:
            raise StreamClosed(f"{peer} is banned: {self._banned[peer]}")

    def refuses(self, peer: PeerId) -> bool:
        """Return True if a stream of `peer` must be refused; emits one event per peer."""
        if peer in self._banned and peer not in self._refused:
            self._refused.add(peer)
            self._telemetry.emit("peer.refused", peer=peer, step="serve", reason=f"banned: {self._banned[peer]}")
        return peer in self._banned

    def take(self, peer: PeerId, cost: Cost, now: float, origin: Origin, standing: Standing) -> None:
        """Take a cost from the budgets of `peer`, whose connection comes from `origin`.

        Raises `ProtocolViolation` for the first excess of the peer itself, then `StreamClosed`.
        """
        if peer in self._banned:
            self.check(peer)
        budget = self._budgets.get(peer)
        if budget is None:
            if len(self._budgets) >= MAX_BUDGETS:
                _forget(self._budgets, now)
            budget = self._budgets[peer] = _Budget(1, now)
        if not budget.take(cost, now):
            if budget.charged:
                raise StreamClosed(f"{peer} exceeds its message budget")
            budget.charged = True
            raise ProtocolViolation(
                f"{peer} sends more than {BURST} messages, {BURST_BYTES} bytes or {BURST_SIGNATURES} signatures in a "
                f"burst, or {PER_SECOND:g}, {BYTES_PER_SECOND:g} or {SIGNATURES_PER_SECOND:g} a second"
            )
        if standing is Standing.VOTER:
            return
        if not origin.exempt or standing is Standing.STRANGER:
            of_address = _Budget(ADDRESS_SHARE, now, bulky=BULKY, beats=BEATS)
            self._take_shared(f"address {origin.address}", of_address, cost, now)
        if not origin.exempt:
            of_network = _Budget(NETWORK_SHARE, now, bulky=BULKY, pace=NETWORK_SHARE // ADDRESS_SHARE, beats=BEATS)
            self._take_shared(f"network {origin.network}", of_network, cost, now)
        if standing is Standing.STRANGER:
            self._take_shared(STRANGERS, _Budget(STRANGERS_SHARE, now, pace=STRANGERS_SHARE), cost, now)

    def _take_shared(self, name: str, fresh: _Budget, cost: Cost, now: float) -> None:
        """Take a cost from a budget of several peers, which is `fresh` if there is none. Raises `StreamClosed`."""
        budget = self._shared[name] = self._shared.pop(name, fresh)
        if len(self._shared) > MAX_BUDGETS:
            strangers = self._shared.pop(STRANGERS, None)
            _forget(self._shared, now)
            if strangers is not None:
                self._shared[STRANGERS] = strangers
        if not budget.take(cost, now):
            raise StreamClosed(f"the budget of {name} is used up")


def _forget(budgets: dict[str, _Budget], now: float) -> None:
    """Evict budgets: those that are not used are not needed, and in a flood of names the first quarter is dropped."""
    unused = [name for name, budget in budgets.items() if budget.is_unused(now)]
    for name in {*unused, *list(budgets)[: MAX_BUDGETS // 4]}:
        del budgets[name]
