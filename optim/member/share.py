"""My share of a dataset, as batches: what to read next by the leases (`shards`), where I am, and telling the others.

Theory of operation. A dataset is read in units (`Units`). Whoever draws items asks the machine which unit is next, looks
at what the network last said of the others, and tells them what has changed, all in the trainer's thread. An item counts
as trained when its batch is handed out, not when a worker has been sent for it. Of several datasets the first is shared
by leases; a member's record has room for one. Where I am is written down, so that a peer that is started again goes on
with what it had not finished.
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from ...dht.members.table import Lease, Share
from ...dht.run.manifest import write_whole
from ...peer.errors import FlockstepError, UsageError
from ...peer.telemetry import Telemetry
from ...peer.wire.schema import encode
from ..data.datasets import Indexed, Units, units_of
from ..data.leases import UNSETTLED, Leases, Place, Ranking, View
from ..network import Network

TELL_PERIOD = 0.25
"""Least seconds between two words to the network process: where units are tiny something changes at every step."""
KEEP_PERIOD = 5.0
"""Least seconds between two writings of where I am."""
SAY_PERIOD = 5.0
"""Least seconds between two events on the epoch, and two on units that are not settled: where data is tiny they are many."""
MAX_KEPT_BYTES = 16_384
"""The file is written by this program, and is well below 4 kB."""


class Shares:
    """One peer's shares of the datasets that it trains on. Use from one thread."""

    def __init__(self, network: Network, telemetry: Telemetry, folder: Path, *, seed: int) -> None:
        self._network = network
        self._telemetry = telemetry
        self._path = folder / "data.json"
        self._seed = seed
        self._walks: dict[bytes, Walk] = {}
        self._shared: Walk | None = None
        self._view: object = None
        self._told = Share()
        self._told_at = self._kept_at = -math.inf
        self._said: dict[str, float] = {}

    def batches(self, dataset: Any, *, batch_size: int, workers: int) -> Iterator[Any]:
        """Endless batches of a dataset, collated as torch's DataLoader does. Raises `UsageError`."""
        units = units_of(dataset, self._seed)
        walk = self._walks.get(units.source)
        if walk is None:
            walk = self._walks[units.source] = Walk(units, self._lease(units), self)
            self._start(walk)
        loader: Iterable[Any]
        if isinstance(units, Indexed):
            loader = DataLoader(
                dataset,
                batch_sampler=walk.draw(batch_size),
                num_workers=workers,
                # Spawned: a forked worker would hold the pipe to the network process open if the trainer dies.
                multiprocessing_context="spawn" if workers else None,
                generator=torch.Generator(),  # The caller's random state is left alone.
            )
        elif workers:
            raise UsageError(
                f"workers={workers} needs a dataset that can be indexed, and {type(dataset).__name__} is read in turn",
                remedy="leave workers at 0, or give share_of a map-style dataset",
            )
        else:
            loader = map(default_collate, walk.draw(batch_size))
        for batch in loader:
            walk.hand_out()
            yield batch

    def look(self, walk: "Walk") -> None:
        """Take in what is known of the others, if there is news."""
        view = self._network.pulse.share
        if walk is not self._shared or view is None or view is self._view:
            return
        self._view = view
        for (epoch, unit), why in walk.leases.look(_view(view), time.monotonic()):
            self._telemetry.emit("unit.dropped", step="train a unit", reason=why, epoch=epoch, unit=unit)

    def tell(self, walk: "Walk", *, last: bool = False) -> None:
        """Tell the others what has changed, and write it down."""
        now, share = time.monotonic(), walk.leases.share()
        if walk is not self._shared:
            return
        if share != self._told and (last or now - self._told_at >= TELL_PERIOD):
            urgent = last or _outline(share) != _outline(self._told)
            self._told, self._told_at = share, now
            self._network.share(self._payload(walk, share), urgent=urgent)
        if last or now - self._kept_at >= KEEP_PERIOD:
            self._kept_at = now
            self._keep(share)

    def hand_back(self) -> None:
        """Before I leave: how far I have come, so that others go on from there."""
        if self._shared is not None:
            self.tell(self._shared, last=True)

    def tell_begun(self, walk: "Walk", lease: Lease, why: str) -> None:
        """A unit begins: said where it is no matter of course."""
        if walk is self._shared and (lease.done or (why == UNSETTLED and self._is_time_for(why))):
            self._telemetry.emit(
                "unit.begun", step="train a unit", reason=why, epoch=lease.epoch, unit=lease.unit, done=lease.done or 0
            )

    def tell_epoch(self, epoch: int) -> None:
        """The oldest epoch that is not finished is another one now."""
        if self._is_time_for("epoch"):
            self._telemetry.emit("data.epoch", epoch=epoch)

    def _is_time_for(self, word: str) -> bool:
        """Whether something was not said lately that may happen many times a second."""
        now = time.monotonic()
        if now - self._said.get(word, -math.inf) < SAY_PERIOD:
            return False
        self._said[word] = now
        return True

    def _lease(self, units: Units) -> Leases:
        return Leases(
            self._network.peer_id, units.source, Ranking(self._seed, units.num_units), forward=units.forward
        )

    def _start(self, walk: "Walk") -> None:
        """Share a dataset by leases, if it is the first; what I have of it from a former life counts."""
        units, leases = walk.units, walk.leases
        if self._shared is not None:
            reason = "only the first dataset is shared by leases: of this one every peer trains all, in its own order"
            self._telemetry.emit("data.unshared", step="share", reason=reason, units=units.num_units)
            return
        self._shared = walk
        if (kept := self._kept(units.source)) is not None:
            leases.restore(kept)
        payload = self._network.share_first(self._payload(walk, leases.share()))
        if payload is not None:
            leases.look(_view(payload), time.monotonic())
        peers = payload["peers"] if payload else 1
        self._telemetry.emit("data.shared", units=units.num_units, epoch=leases.epoch, peers=peers, name=units.name)

    def _payload(self, walk: "Walk", share: Share) -> dict[str, Any]:
        return {"share": encode(share).hex(), "seed": self._seed, "num_units": walk.units.num_units}

    def _keep(self, share: Share) -> None:
        about = {
            "source": share.source.hex(),
            "epoch": share.epoch,
            "finished": [bits.hex() for bits in share.finished],
            "units": [[lease.epoch, lease.unit, lease.done] for lease in share.leases if lease.done is not None],
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(about).encode())
        except OSError as error:
            self._telemetry.emit("data.not_kept", step="write data.json", reason=str(error))

    def _kept(self, source: bytes) -> Share | None:
        try:
            share = read_share(self._path)
        except (OSError, UsageError) as error:
            self._telemetry.emit("data.forgotten", step="read data.json", reason=str(error))
            return None
        return share if share is not None and share.source == source else None


def _view(payload: dict[str, Any]) -> View:
    """A view as it came through the pipe, where tuples are lists."""
    return View(**{name: _tuple(value) for name, value in payload.items()})


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, (list, tuple)) else value


def _outline(share: Share) -> Share:
    """What others must hear at once, which the number of trained items is not."""
    return replace(share, leases=tuple(replace(lease, done=None if lease.done is None else 0) for lease in share.leases))


def read_share(path: Path) -> Share | None:
    """What a former life of this peer wrote down, None if there is nothing. Raises `OSError`, or `UsageError` if broken."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEPT_BYTES)
    except FileNotFoundError:
        return None
    try:
        about = json.loads(data)
        share = Share(
            source=bytes.fromhex(about["source"]),
            epoch=about["epoch"],
            finished=tuple(bytes.fromhex(bits) for bits in about["finished"]),
            leases=tuple(Lease(epoch, unit, done) for epoch, unit, done in about["units"]),
        )
        encode(share)  # Checks every limit.
    except (ValueError, TypeError, KeyError, RecursionError, FlockstepError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    return share


class Walk:
    """One peer's way through one dataset."""

    def __init__(self, units: Units, leases: Leases, shares: Shares) -> None:
        self.units = units
        self.leases = leases
        self._shares = shares
        self._items = self._read()
        self._drawn: deque[list[tuple[Place, bool]]] = deque()

    def draw(self, batch_size: int) -> Iterator[list[Any]]:
        """The items of one batch after the other, as far ahead as workers want them."""
        while True:
            self._shares.look(self)
            self.leases.claim(time.monotonic())
            drawn = list(islice(self._items, batch_size))
            self._drawn.append([mark for _, mark in drawn])
            yield [item for item, _ in drawn]

    def hand_out(self) -> None:
        """The oldest batch that was drawn is trained now."""
        epoch = self.leases.epoch
        for place, ended in self._drawn.popleft():
            self.leases.trained(place, 1)
            if ended:
                self.leases.finish(place, time.monotonic())
        self._shares.tell(self)
        if self.leases.epoch != epoch:
            self._shares.tell_epoch(self.leases.epoch)

    def _read(self) -> Iterator[tuple[Any, tuple[Place, bool]]]:
        """Endless items, each with its unit, and whether it is the last one there."""
        empty = 0
        while True:
            lease, why = self.leases.begin(time.monotonic())
            place = lease.epoch, lease.unit
            self._shares.tell_begun(self, lease, why)
            items = self.units.read(lease.epoch, lease.unit, lease.done or 0)
            item = next(items, _END)
            if item is not _END:
                empty = 0
            elif (empty := empty + 1) > self.units.num_units:
                raise UsageError(f"{self.units.name} holds nothing to train on", remedy="check the data")
            else:
                self.leases.finish(place, time.monotonic())
            while item is not _END and self.leases.holds(place):
                after = next(items, _END)
                yield item, (place, after is _END)
                item = after


_END = object()
