"""Leases: which units of the data are mine to train now, so that peers neither do the same work twice nor leave any out.

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

Whoever finds nothing free in an epoch goes on with the next, and there are `EPOCHS_AHEAD` of them at a time. They move
on when the oldest is finished; or when somebody finds nothing free in any of them: then whoever leases what is left of
the oldest still trains it, but nobody takes it over if that peer dies.

What members say is believed within bounds: who lies can have units left out, no more. My epoch follows that of active
members with my data: with each view by at most `EPOCHS_AHEAD`, a newcomer's by `MAX_JUMP`, and by `EPOCHS_AHEAD` again if
all units of these are finished. What I take over always fits the schema of my share. Why one member is enough to move it:
whoever goes on forgets which units of older epochs were finished, so those who stay behind would train them again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
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
MAX_EPOCH = 1 << 31
"""Epochs are numbered from 0 to this one and then from 0 again: a pass in each second of 68 years."""
MAX_DONE = 1 << 40
"""Items of a unit that are counted as trained; no unit has so many."""

SETTLE = 5.0
"""Seconds. News takes less than one among 64 members, who all talk to each other, and two or three among a thousand."""
MAX_RESUMED = 64
"""Half-finished units of gone members that a view names."""

UNSETTLED = "unsettled"

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


def look(others: Iterable[tuple[PeerId, Share, bool]], me: PeerId, mine: Share, ranking: Ranking) -> View:
    """What the others' shares mean for me. Each comes with whether its peer still counts as a member.

    A member that has not said what its data is counts as one with mine: it is about to begin. Nothing else that it states
    is believed.
    """
    same = [
        (peer, share if share.source else NO_SHARE, counts)
        for peer, share, counts in others
        if share.source in (mine.source, b"")
    ]
    here = frozenset(peer for peer, _, counts in same if counts)
    is_new = not (mine.epoch or any(mine.finished))
    newest = max((share.epoch for _, share, counts in same if counts), default=0)
    epoch = max(mine.epoch, min(newest, mine.epoch + (MAX_JUMP if is_new else EPOCHS_AHEAD)))
    window = range(epoch, epoch + EPOCHS_AHEAD)
    finished, taken = dict.fromkeys(window, 0), dict.fromkeys(window, 0)
    held = {(lease.epoch, lease.unit) for lease in mine.leases}
    rivals: set[tuple[int, int, bool, bool]] = set()
    resume: dict[UnitId, int] = {}
    for peer, share, counts in same:
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
    )


@dataclass(slots=True)
class _Held:
    """A lease of mine, since when, and when I began it."""

    since: float
    done: int | None = None
    begun: float = 0.0


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
    _view: View | None = None
    _known_since: float | None = None
    _unit_seconds: float = SETTLE
    _last: int = -1

    def restore(self, share: Share) -> None:
        """Go on where my former life was: what was finished, and where I was in what was not."""
        self.epoch = share.epoch
        finished = enumerate(share.finished, share.epoch)
        self._finished = {at: int.from_bytes(bits, "little") & self._all for at, bits in finished}
        self._resume = {(lease.epoch, lease.unit): lease.done for lease in share.leases if lease.done}

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
        self.epoch = max(self.epoch, view.epoch)
        for at, bits in enumerate(view.finished, view.epoch):
            self._finished[at] = self._finished.get(at, 0) | bits & self._all
        self._advance()
        for epoch, unit, done in view.resume:
            self._resume[epoch, unit] = max(done, self._resume.get((epoch, unit), 0))
        self._resume = {place: done for place, done in self._resume.items() if place[0] in self._window()}
        dropped = [(place, why) for place, held in self._held.items() if (why := self._why_drop(place, held))]
        for place, _ in dropped:
            del self._held[place]
        return dropped

    def claim(self, now: float) -> None:
        """Lease what I shall train next, and no more than what is settled by the time that I come to it."""
        wanted = min(MAX_LEASES - 1, max(1, round(2 * SETTLE / self._unit_seconds)))
        wanted = min(wanted - sum(held.done is None for held in self._held.values()), MAX_LEASES - len(self._held))
        for epoch in self._window():
            if wanted <= 0:
                return
            free = self._free(epoch)
            # The last units of an epoch are for all: whoever is fast must not lease what others have no more of.
            share = max(1, free.bit_count() // (self._view.peers if self._view else 1))
            for unit in self._in_order(epoch, free)[: min(wanted, share)]:
                self._held[epoch, unit] = _Held(now)
                wanted -= 1

    def begin(self, now: float) -> tuple[Lease, str]:
        """The unit to train now, which I lease from here on, and why it is mine."""
        while (found := self._settled(now) or self._by_rank(now) or self._unsettled()) is None:
            self._next_epoch()  # All is finished or leased by others.
        place, why = found
        held = self._held.setdefault(place, _Held(now))
        held.done, held.begun = self._resume.pop(place, 0), now
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
        if (held := self._held.pop(place, None)) is not None:
            self._unit_seconds = max(now - held.begun, 1e-3)
        epoch, unit = place
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
            if units := self._in_order(epoch, (self._free(epoch) | claimed) & ranked):
                return (epoch, units[0]), "by rank"
        return None

    def _unsettled(self) -> tuple[UnitId, str] | None:
        if pending := self.pending():
            return min(pending, key=lambda at: self._held[at].since), UNSETTLED
        for epoch in self._window():
            if units := self._in_order(epoch, self._free(epoch)):
                return (epoch, units[0]), UNSETTLED
        return None

    def _free(self, epoch: int) -> Bits:
        mine = sum(1 << unit for at, unit in self._held if at == epoch)
        taken = self._of(self._view.taken, epoch) if self._view else 0
        return self._all & ~(self._finished.get(epoch, 0) | taken | mine)

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
        if any((has_begun, above) > (begun, False) for *at, has_begun, above in self._view.rivals if at == [epoch, unit]):
            return "another peer has the better right to it"
        return "another peer has finished it" if self._finished.get(epoch, 0) >> unit & 1 else ""

    def _advance(self) -> None:
        while self._finished.get(self.epoch, 0) == self._all:
            self._next_epoch()
        self._finished = {at: bits for at, bits in self._finished.items() if at >= self.epoch}

    def _next_epoch(self) -> None:
        self._finished.pop(self.epoch, None)
        self.epoch = self.epoch + 1 if self.epoch < MAX_EPOCH else 0

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
