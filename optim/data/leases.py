"""Leases: which units of the data a peer trains now, so that none is trained twice or left out. Pure.

Theory of operation. An epoch has at most 1024 units (`units`). Each member's record says which units it knows to be
finished, a set that only grows and that everybody passes on, and which few it leases: what it trains, and what it will
train next. What a dead member leased is free again; what it had finished stays finished. Nobody decides, so two may
lease the same unit; then the one that has begun it keeps it, else the one that ranks higher for it by hash (rendezvous
hashing, Thaler and Ravishankar 1998), and the other drops it. A unit may be begun

    settled    when its lease has been known for `SETTLE` seconds, many times what news takes to reach everybody;
    by rank    at once, if nobody has leased it and I rank highest for it among all members that I know. So peers that
               know each other never take the same one, without a word. Those who do not know a newcomer yet are in the
               oldest epoch: until it is known, it begins by rank in the newest one only.
    unsettled  at once, if there is nothing else, since nobody waits: then, and when two start at the same moment who
               do not know each other, the same work may be done twice for as long as news takes.

A peer that finds nothing free in an epoch goes on with the next, and there are `EPOCHS_AHEAD` of them at a time. The
oldest ends when all of its units are finished, or when a peer finds nothing free in any of them: then the members that
lease the rest of the oldest still train it, but no other peer takes it over if they die.

Statements of other members (finished, leased, half finished) order the units of this peer: such units come last. They
exclude none, since one liar could otherwise leave a single unit to train, epoch after epoch. An epoch therefore ends by
what certificates bound, in one of two ways:

    own part   this peer has trained `PART` of its part of an epoch, which is its share of the speeds that the certified
               contributors state. Until then it leases the units for which it ranks highest, and at the end trains units
               that others only claim to have finished or leased, from their first item (`CLAIMED`), last those that it
               saw leased.
    followed   members with half of the others' certified tokens are in a later epoch. The epoch moves by at most
               `EPOCHS_AHEAD` with each view, a newcomer's by `MAX_JUMP`. A later epoch of fewer members is a statement that
               the units before it are finished, as they keep nothing of older epochs. Before the first certificate
               nobody is followed: keys are free.

Certified tokens and speeds count by trust here, with the cap of an open run, as they do in an update: beside four
contributors of tenure all others have a fifth of them together. So a liar orders the units of an epoch, but each epoch
holds `PART` of the work of the honest: with one liar among ten members, whose speed counts four times the median, no unit
is trained more than 1 / (0.8 · 9/13) = 1.81 times as often as the mean. The price of a lower cap is work that is done twice
beside an honest peer that is as much faster: slow peers believe that they owe more of an epoch than they do. Up to a fifth
of an epoch can be left out. Values taken over from others always fit the schema of the share.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from ...dht.members.body import MAX_SHARE_BYTES
from ...dht.members.table import MAX_MEMBERS
from ...peer.base.transport import PeerId
from ...peer.wire.schema import Between, Size, decode
from .units import MAX_UNITS, SOURCE_BYTES, drawn

EPOCHS_AHEAD = 4
"""Epochs in which units are leased at the same time: a member that finds nothing free in one goes on with the next."""
MAX_LEASES = 8
"""Of one member at a time."""
MAX_JUMP = 1 << 10
"""Epochs that a newcomer passes over at once. If a liar had it do so, the others need about a minute to be there."""
PART = 0.8
"""Fraction of its certified part of an epoch that a peer trains before it ends the epoch: its speed and theirs change."""
RESERVE = 0.5
"""Epochs of work that a peer carries over: units that it trained ahead. A liar can end as many epochs at once."""
MAX_EPOCH = 1 << 31
"""Epochs are numbered from 0 to this one and then from 0 again: a pass in each second of 68 years."""
MAX_DONE = 1 << 40
"""Items of a unit that are counted as trained; no unit has so many."""

SETTLE = 5.0
"""Seconds. News takes less than one among 64 members, who all talk to each other, and two or three among a thousand."""
MAX_RESUMED = 64
"""Half-finished units of gone members that a view names."""

UNSETTLED = "unsettled"
CLAIMED = "only claimed by others to be finished or leased"

Bits: TypeAlias = int
"""A set of units: bit u is unit u."""
UnitId: TypeAlias = tuple[int, int]
"""An epoch and a unit."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A unit of the data that a member is training, or will train next."""

    epoch: Annotated[int, Between(0, MAX_EPOCH + EPOCHS_AHEAD)]
    unit: Annotated[int, Between(0, MAX_UNITS - 1)]
    done: Annotated[int, Between(0, MAX_DONE)] | None = None
    """How many of its sequences are trained; None while it is only claimed."""


@dataclass(frozen=True, slots=True)
class Share:
    """A member's part in the data: the schema of `MemberBody.share`."""

    source: Annotated[bytes, Size(SOURCE_BYTES)] = b""
    """A hash of what the data is: shares are compared only where it is the same. Empty while it has none."""
    epoch: Annotated[int, Between(0, MAX_EPOCH)] = 0
    """The oldest epoch that is not finished, as far as it knows."""
    finished: Annotated[tuple[Annotated[bytes, Size(MAX_UNITS // 8)], ...], Size(EPOCHS_AHEAD)] = ()
    """Which units of that epoch, and of those after it, anybody has finished: bit u % 8 of byte u // 8."""
    leases: Annotated[tuple[Lease, ...], Size(MAX_LEASES)] = ()


NO_SHARE = Share()
"""Of a member that has not yet stated what its data is."""
NO_CREDIT: Mapping[PeerId, float] = MappingProxyType({})
"""The certified tokens of each contributor, and the stated speeds, before the first certificate."""


@lru_cache(maxsize=MAX_MEMBERS)  # The same bytes are read several times a second, until their member states others.
def open_share(data: bytes) -> Share:
    """The share in a member's record. Raises `MalformedMessage`."""
    return decode(Share, data, max_bytes=MAX_SHARE_BYTES) if data else NO_SHARE


@dataclass(frozen=True, slots=True)
class View:
    """What I know of the members that train on the same data. The bits are those of `epoch` and the epochs after it."""

    peers: int
    """How many they are, I among them."""
    epoch: int
    """The oldest epoch that is not finished."""
    finished: tuple[Bits, ...]
    taken: tuple[Bits, ...]
    """What others lease."""
    ranked: tuple[Bits, ...]
    """Where nobody ranks above me."""
    rivals: tuple[tuple[int, int, bool, bool], ...] = ()
    """(epoch, unit, begun, above): others' leases of what I lease: whether they have begun it, whether they rank above me."""
    resume: tuple[tuple[int, int, int], ...] = ()
    """(epoch, unit, done): what members that are gone have left half finished."""
    work: float = 1.0
    """The speeds of all of them, as a multiple of this peer's."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Who has the better right to a unit of which epoch."""

    seed: int
    num_units: int

    def scores(self, epoch: int, peer: PeerId) -> npt.NDArray[np.uint64]:
        """A peer's rank for each unit: of two peers the one with the higher score has the better right."""
        return _scores(self.seed, self.num_units, epoch, peer)

    def ranked(self, epoch: int, me: PeerId, others: frozenset[PeerId]) -> Bits:
        """The units for which I rank above all the others."""
        return _ranked(self, epoch, me, others)


@lru_cache(maxsize=256)
def _scores(seed: int, num_units: int, epoch: int, peer: PeerId) -> npt.NDArray[np.uint64]:
    return drawn(num_units, "leases", str(seed).encode(), str(epoch).encode(), peer.encode())


@lru_cache(maxsize=1024)
def _ranked(ranking: Ranking, epoch: int, me: PeerId, others: frozenset[PeerId]) -> Bits:
    best = np.ones(ranking.num_units, np.bool_)
    for peer in others:
        best &= ranking.scores(epoch, me) > ranking.scores(epoch, peer)
    return int.from_bytes(np.packbits(best, bitorder="little").tobytes(), "little")


def look(
    others: Iterable[tuple[PeerId, Share, bool]],
    me: PeerId,
    mine: Share,
    ranking: Ranking,
    credit: Mapping[PeerId, float] = NO_CREDIT,
    speeds: Mapping[PeerId, float] = NO_CREDIT,
) -> View:
    """What the others' shares mean for me. Each comes with whether its peer still counts as a member.

    A member that has not said what its data is counts as one with mine: it is about to begin. Nothing else that it states
    is believed. `credit` holds what the newest certificate counts for each contributor, and `speeds` what counts of the
    speed that it states, each in any unit.
    """
    same = [
        (peer, share if share.source else NO_SHARE, counts)
        for peer, share, counts in others
        if share.source in (mine.source, b"")
    ]
    here = frozenset(peer for peer, _, counts in same if counts)
    is_new = not (mine.epoch or any(mine.finished))
    epochs = {peer: share.epoch for peer, share, counts in same if counts and share.source}
    reached = _reached(epochs, credit)
    weights = _weights(me, epochs, speeds)
    epoch = max(mine.epoch, min(reached, mine.epoch + (MAX_JUMP if is_new else EPOCHS_AHEAD)))
    window = range(epoch, epoch + EPOCHS_AHEAD)
    finished, taken = dict.fromkeys(window, 0), dict.fromkeys(window, 0)
    held = {(lease.epoch, lease.unit) for lease in mine.leases}
    rivals: set[tuple[int, int, bool, bool]] = set()
    resume: dict[UnitId, int] = {}
    for peer, share, counts in same:
        for at in range(epoch, min(share.epoch, window.stop) if counts else epoch):
            finished[at] = (1 << ranking.num_units) - 1
        for at, bits in enumerate(share.finished, share.epoch):
            if at in finished:
                finished[at] |= int.from_bytes(bits, "little")
        for lease in share.leases:
            place = (lease.epoch, lease.unit)
            if counts and lease.epoch in taken:
                taken[lease.epoch] |= 1 << lease.unit
            if counts and place in held:
                above = ranking.scores(lease.epoch, peer)[lease.unit] > ranking.scores(lease.epoch, me)[lease.unit]
                rivals.add((*place, lease.done is not None, bool(above)))
            if not counts and lease.done and lease.unit < ranking.num_units:
                resume[place] = max(lease.done, resume.get(place, 0))
    kept = sorted((*place, done) for place, done in resume.items() if place[0] in finished)[:MAX_RESUMED]
    return View(
        peers=len(here) + 1,
        epoch=epoch,
        finished=tuple(finished.values()),
        taken=tuple(taken.values()),
        ranked=tuple(ranking.ranked(at, me, here) for at in window),
        rivals=tuple(sorted(rivals)),
        resume=tuple(kept),
        work=sum(weights.values()) / weights[me],
    )


def _weights(me: PeerId, others: Collection[PeerId], speeds: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Speeds of this peer and of the others; without any of its own it counts like the mean of them.

    All count alike while none has any, as before the first certificate.
    """
    known = {peer: float(speeds.get(peer, 0.0)) for peer in (*others, me)}
    counted = [speed for speed in known.values() if speed]
    if not counted:
        return dict.fromkeys(known, 1.0)
    return known | {me: known[me] or sum(counted) / len(counted)}


def _reached(epochs: Mapping[PeerId, int], credit: Mapping[PeerId, float]) -> int:
    """The greatest epoch that members with half of these members' credit are in or beyond; 0 if none of them has any."""
    weight, least = 0.0, sum(credit.get(peer, 0.0) for peer in epochs) / 2
    for peer in sorted(epochs, key=epochs.__getitem__, reverse=True):
        weight += credit.get(peer, 0.0)
        if weight >= least and weight:
            return epochs[peer]
    return 0


@dataclass(slots=True)
class _Held:
    """A lease of mine, since when, and when I began it."""

    since: float
    done: int | None = None
    begun: float = 0.0
    skipped: int = 0
    """Its first items, which others claim to have trained."""
    is_claimed: bool = False
    """Whether others call it finished or leased, and this peer trains it all the same."""


@dataclass(slots=True)
class Leases:
    """One peer's leases: a machine whose clock is an argument. `forward` is for data that is best read from front to back."""

    peer: PeerId
    source: bytes
    ranking: Ranking
    forward: bool = False
    epoch: int = 0
    _finished: dict[int, Bits] = field(default_factory=dict)
    _held: dict[UnitId, _Held] = field(default_factory=dict)
    _resume: dict[UnitId, int] = field(default_factory=dict)
    """How many items of a unit members that are gone claim to have trained."""
    _progress: dict[UnitId, int] = field(default_factory=dict)
    """How many items of a unit that it does not lease now this peer has trained itself."""
    _trained: dict[int, Bits] = field(default_factory=dict)
    """The units of each epoch that this peer has trained from the first item to the last."""
    _leased: dict[int, Bits] = field(default_factory=dict)
    """The units of each epoch that others were seen to lease."""
    _work: float = 0.0
    """The run's work in units, as this peer's own and its certified part tell, less that of the epochs that it has ended."""
    _view: View | None = None
    _known_since: float | None = None
    _unit_seconds: float = SETTLE
    _last: int = -1

    def restore(self, share: Share) -> None:
        """Go on where my former life was: what was finished, and where I was in what was not."""
        self.epoch = share.epoch
        finished = enumerate(share.finished, share.epoch)
        self._finished = {at: int.from_bytes(bits, "little") & self._all for at, bits in finished}
        self._progress = {(lease.epoch, lease.unit): lease.done for lease in share.leases if lease.done}

    def share(self) -> Share:
        """What the others are to know. Of more leases than a share has room for, those of units that I have begun."""
        bits = [self._finished.get(at, 0) for at in self._window()]
        size = (self.ranking.num_units + 7) // 8
        held = sorted(self._held.items(), key=lambda item: (item[1].done is None, item[0]))[:MAX_LEASES]
        return Share(
            source=self.source,
            epoch=self.epoch,
            finished=tuple(value.to_bytes(size, "little").rstrip(b"\0") for value in bits),
            leases=tuple(sorted((Lease(*place, one.done) for place, one in held), key=_place_of)),
        )

    def look(self, view: View, now: float) -> list[tuple[UnitId, str]]:
        """Take in what has become known; the leases that I drop, and why."""
        if self._known_since is None:
            self._known_since = now
        self._view = view
        if view.epoch > self.epoch:
            self._pass(view.epoch - self.epoch)
            self.epoch = view.epoch
        for units, seen in (self._finished, view.finished), (self._leased, view.taken):
            for at, bits in enumerate(seen, view.epoch):
                units[at] = units.get(at, 0) | bits & self._all
        self._advance()
        for epoch, unit, done in view.resume:
            self._resume[epoch, unit] = max(done, self._resume.get((epoch, unit), 0))
        for known in (self._resume, self._progress):
            for place in [place for place in known if place[0] not in self._window()]:
                del known[place]
        dropped = [(place, why) for place, held in self._held.items() if (why := self._why_drop(place, held))]
        for place, _ in dropped:
            if (held := self._held.pop(place)).done and not held.skipped:
                self._progress[place] = held.done
        return dropped

    def claim(self, now: float) -> None:
        """Lease what I shall train next, and no more than what is settled by the time that I come to it."""
        wanted = min(MAX_LEASES - 1, max(1, round(2 * SETTLE / self._unit_seconds)))
        wanted = min(wanted - sum(held.done is None for held in self._held.values()), MAX_LEASES - len(self._held))
        for epoch in self._window():
            if wanted <= 0:
                return
            free = self._unclaimed(epoch) & (self._all if self._may_end() else self._ranked(epoch))
            # The last units of an epoch are for all: whoever is fast must not lease what others have no more of.
            share = max(1, free.bit_count() // (self._view.peers if self._view else 1))
            for unit in self._in_order(epoch, free)[: min(wanted, share)]:
                self._held[epoch, unit] = _Held(now)
                wanted -= 1

    def begin(self, now: float) -> tuple[Lease, str]:
        """The unit to train now, which I lease from here on, and why it is mine."""
        while (found := self._settled(now) or self._by_rank(now) or self._claimed() or self._unsettled()) is None:
            self._next_epoch()  # All is finished or leased.
        place, why = found
        held = self._held.setdefault(place, _Held(now))
        held.is_claimed, own = why == CLAIMED, self._progress.pop(place, 0)
        held.done = own if held.is_claimed else max(own, self._resume.pop(place, 0))
        held.begun, held.skipped = now, held.done - own
        self._last = place[1]
        return Lease(*place, held.done), why

    def pending(self) -> list[UnitId]:
        """What I lease and have not begun."""
        return [place for place, held in self._held.items() if held.done is None]

    def holds(self, place: UnitId) -> bool:
        """Whether a unit that I have begun is still mine."""
        return place in self._held

    def trained(self, place: UnitId, count: int) -> None:
        """So many more items of a unit are done."""
        if (held := self._held.get(place)) is not None and held.done is not None:
            held.done = min(held.done + count, MAX_DONE)

    def finish(self, place: UnitId, now: float) -> None:
        """All items of a unit are done."""
        epoch, unit = place
        if (held := self._held.pop(place, None)) is not None:
            self._unit_seconds = max(now - held.begun, 1e-3)
            if not held.skipped:
                self._trained[epoch] = self._trained.get(epoch, 0) | 1 << unit
            work = (self._view.work if self._view else 1.0) / PART
            own = 1 - held.skipped / held.done if held.done else 1.0
            self._work = min(self._work + own * work, RESERVE * self.ranking.num_units)
        if epoch in self._window():
            self._finished[epoch] = self._finished.get(epoch, 0) | 1 << unit
        self._advance()

    def _settled(self, now: float) -> tuple[UnitId, str] | None:
        ready = [at for at, held in self._held.items() if held.done is None and now - held.since >= SETTLE]
        if not ready:
            return None
        epoch = min(ready)[0]
        return (epoch, self._in_order(epoch, sum(1 << unit for at, unit in ready if at == epoch))[0]), "settled"

    def _by_rank(self, now: float) -> tuple[UnitId, str] | None:
        view = self._view
        known = view is None or view.peers == 1 or self.forward or now - (self._known_since or 0.0) >= SETTLE
        for epoch in self._window() if view is None or known else [max(self.epoch, view.epoch + EPOCHS_AHEAD - 1)]:
            ranked = self._ranked(epoch)
            claimed = sum(1 << unit for at, unit in self.pending() if at == epoch)
            if units := self._in_order(epoch, (self._unclaimed(epoch) | claimed) & ranked):
                return (epoch, units[0]), "by rank"
        return None

    def _unsettled(self) -> tuple[UnitId, str] | None:
        if pending := self.pending():
            return min(pending, key=lambda at: self._held[at].since), UNSETTLED
        for epoch in self._window():
            if units := self._in_order(epoch, self._unclaimed(epoch)):
                return (epoch, units[0]), UNSETTLED
        return None

    def _claimed(self) -> tuple[UnitId, str] | None:
        if self._may_end():
            return None
        for epoch in self._window():
            free = self._free(epoch)
            if units := self._in_order(epoch, free & ~self._leased.get(epoch, 0) or free):
                return (epoch, units[0]), CLAIMED
        return None

    def _free(self, epoch: int) -> Bits:
        mine = sum(1 << unit for at, unit in self._held if at == epoch)
        return self._all & ~(self._trained.get(epoch, 0) | mine)

    def _unclaimed(self, epoch: int) -> Bits:
        taken = self._of(self._view.taken, epoch) if self._view else 0
        return self._free(epoch) & ~(self._finished.get(epoch, 0) | taken)

    def _ranked(self, epoch: int) -> Bits:
        view = self._view
        return self._all if view is None or view.peers == 1 else self._of(view.ranked, epoch)

    def _of(self, bits: tuple[Bits, ...], epoch: int) -> Bits:
        assert self._view is not None
        at = epoch - self._view.epoch
        return bits[at] & self._all if 0 <= at < len(bits) else 0

    def _in_order(self, epoch: int, units: Bits) -> list[int]:
        """These units, first those that I like best: half-finished ones, then where I rank above the others."""
        if self.forward:
            ahead = self._last + 1
            return sorted(_members(units), key=lambda unit: (unit - ahead) % self.ranking.num_units)
        scores = self.ranking.scores(epoch, self.peer)
        ranked = self._ranked(epoch)
        return sorted(
            _members(units),
            key=lambda unit: ((epoch, unit) not in self._resume, not ranked >> unit & 1, -int(scores[unit])),
        )

    def _why_drop(self, place: UnitId, held: _Held) -> str:
        assert self._view is not None
        epoch, unit = place
        begun = held.done is not None
        if begun and held.is_claimed:
            return ""
        if any((has_begun, above) > (begun, False) for *at, has_begun, above in self._view.rivals if at == [epoch, unit]):
            return "another peer has the better right to it"
        return "another peer has finished it" if self._finished.get(epoch, 0) >> unit & 1 else ""

    def _advance(self) -> None:
        while self._finished.get(self.epoch, 0) == self._all and self._may_end():
            self._next_epoch()
        for known in (self._finished, self._trained, self._leased):
            for at in [at for at in known if at < self.epoch]:
                del known[at]

    def _may_end(self) -> bool:
        """Whether this peer has trained its own part of the oldest epoch, or all of it."""
        return self._work >= 0 or self._trained.get(self.epoch, 0) == self._all

    def _next_epoch(self) -> None:
        for known in (self._finished, self._trained, self._leased):
            known.pop(self.epoch, None)
        self._pass(1)
        self.epoch = self.epoch + 1 if self.epoch < MAX_EPOCH else 0

    def _pass(self, epochs: int) -> None:
        """Subtract the work of so many epochs; a debt is forgiven beyond one of them, as to a newcomer."""
        num_units = self.ranking.num_units
        self._work = max(self._work - epochs * num_units, -float(num_units))

    def _window(self) -> range:
        return range(self.epoch, self.epoch + EPOCHS_AHEAD)

    @property
    def _all(self) -> Bits:
        return (1 << self.ranking.num_units) - 1


def _place_of(lease: Lease) -> UnitId:
    return lease.epoch, lease.unit


def _members(bits: Bits) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
