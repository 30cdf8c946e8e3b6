"""Draws my share of a dataset as batches: leases units, publishes the leases, keeps my progress on disk.

Theory of operation. A dataset is read in units (`Units`). Drawing an item asks the lease machine (`leases`) for the next
unit, reads the network's last view of the other members, and publishes what has changed, all in the trainer's thread. An
item counts as trained when its batch is handed out, not when a worker has been sent for it. Of several datasets the first
is shared by leases; a member's record has room for one. My progress is kept on disk, so that a peer that is started again
resumes with what it had not finished.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from ...peer.base.disk import write_whole
from ...peer.base.errors import FlockstepError, LocalError, UsageError
from ...peer.log.telemetry import Telemetry
from ...peer.wire.schema import encode
from ..data.datasets import Indexed, Units, units_of
from ..data.leases import CLAIMED, UNSETTLED, Lease, Leases, Ranking, Share, UnitId, View

if TYPE_CHECKING:
    from .client import PeerClient

SHARE_PUBLISH_PERIOD = 0.25
"""Least seconds between two publications of my leases: with tiny units something changes at every step."""
SHARE_KEEP_PERIOD = 5.0
"""Least seconds between two writes of my progress."""
SHARE_REPORT_PERIOD = 5.0
"""Least seconds between two events on the epoch, and two on units that are not settled: tiny data has many of them."""
EMPTY_EPOCHS = 4
"""Passes over units that give nothing, after which the data counts as empty: short documents fill a sequence together."""
WAIT_SECONDS = (1.0, 60.0)
"""Seconds of the first wait for data that cannot be read now, and of the longest; each is twice the one before."""
MAX_KEPT_BYTES = 16_384
"""The file is written by this program, and is well below 4 kB."""


class Shares:
    """One peer's shares of the datasets that it trains on. Use from one thread."""

    def __init__(
        self, client: "PeerClient", telemetry: Telemetry, folder: Path, *, seed: int, stop: threading.Event
    ) -> None:
        self._client = client
        self.stop = stop
        self._telemetry = telemetry
        self._path = folder / "data.json"
        self._seed = seed
        self._walks: dict[bytes, Walk] = {}
        self._shared: Walk | None = None
        self._view: View | None = None
        self._published = Share()
        self._published_at = self._kept_at = -math.inf
        self._reported: dict[str, float] = {}

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int,
        workers: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield batches of a dataset, collated as torch's DataLoader does, until a stop. Raises `UsageError`.

        Once a batch was there, data that cannot be read is waited for, and each wait is an event.
        """
        if hasattr(dataset, "dataset") and hasattr(dataset, "collate_fn"):  # Of torch, or made like it.
            raise UsageError(
                f"share_of makes the batches itself, and {type(dataset).__name__} is a loader of some",
                remedy="give it loader.dataset, with the loader's batch_size=, workers= and collate_fn=",
            )
        units = units_of(dataset, self._seed)
        walk = self._walks.get(units.source)
        if walk is None:
            walk = self._walks[units.source] = Walk(units, self._lease(units), self)
            self._start(walk)
        loader: Iterable[Any]
        if isinstance(units, Indexed):
            loader = loaded(
                DataLoader(
                    dataset,
                    batch_sampler=walk.draw(batch_size),
                    num_workers=workers,
                    # Spawned: a forked worker would hold the pipe to the network process open if the trainer dies.
                    multiprocessing_context="spawn" if workers else None,
                    generator=torch.Generator(),  # The caller's random state is left alone.
                    collate_fn=collate_fn or collated,
                )
            )
        elif workers:
            raise UsageError(
                f"workers={workers} needs a dataset that can be indexed, and {type(dataset).__name__} is read in turn",
                remedy="leave workers at 0, or give share_of a map-style dataset",
            )
        else:
            loader = map(collate_fn or collated, walk.draw(batch_size))
        for batch in loader:
            walk.hand_out()
            yield batch

    def look(self, walk: "Walk") -> None:
        """Apply the newest view of the other members' leases, if there is a new one."""
        view = self._client.pulse.leases
        if walk is not self._shared or view is None or view is self._view:
            return
        self._view = view
        for (epoch, unit), why in walk.leases.look(view, time.monotonic()):
            self._telemetry.emit("unit.dropped", step="train a unit", reason=why, epoch=epoch, unit=unit)

    def publish(self, walk: "Walk", *, last: bool = False) -> None:
        """Publish what has changed in my leases, and keep my progress on disk; each no more often than its period."""
        now, share = time.monotonic(), walk.leases.share()
        if walk is not self._shared:
            return
        if share != self._published and (last or now - self._published_at >= SHARE_PUBLISH_PERIOD):
            urgent = last or _outline(share) != _outline(self._published)
            self._published, self._published_at = share, now
            self._client.publish_leases(share, walk.leases.ranking, urgent=urgent)
        if last or now - self._kept_at >= SHARE_KEEP_PERIOD:
            self._kept_at = now
            self._keep(share)

    def hand_back(self) -> None:
        """Publish my progress before I leave, so that others resume from there."""
        if self._shared is not None:
            self.publish(self._shared, last=True)

    def await_data(self, reason: str, waits: int) -> bool:
        """Wait for data that cannot be read now, for the time after so many waits; return False at a stop."""
        first, longest = WAIT_SECONDS
        seconds = min(first * 2.0 ** min(waits, 10), longest)
        self._telemetry.emit("data.awaited", step="read the data", reason=reason, seconds=seconds)
        return not self.stop.wait(seconds)

    def report_begun(self, walk: "Walk", lease: Lease, why: str) -> None:
        """Emit an event for a unit that begins half finished or unsettled, or that others only claim."""
        if walk is self._shared and (lease.done or (why in (UNSETTLED, CLAIMED) and self._is_due(why))):
            self._telemetry.emit(
                "unit.begun", step="train a unit", reason=why, epoch=lease.epoch, unit=lease.unit, done=lease.done or 0
            )

    def report_epoch(self, epoch: int) -> None:
        """Emit an event when the oldest unfinished epoch changes."""
        if self._is_due("epoch"):
            self._telemetry.emit("data.epoch", epoch=epoch)

    def _is_due(self, subject: str) -> bool:
        """Limit the rate of events that may happen many times a second: whether one on this subject may be emitted."""
        now = time.monotonic()
        if now - self._reported.get(subject, -math.inf) < SHARE_REPORT_PERIOD:
            return False
        self._reported[subject] = now
        return True

    def _lease(self, units: Units) -> Leases:
        return Leases(
            self._client.peer_id, units.source, Ranking(self._seed, units.num_units), forward=units.forward
        )

    def _start(self, walk: "Walk") -> None:
        """Share a dataset by leases, if it is the first; progress that an earlier process kept on disk counts."""
        units, leases = walk.units, walk.leases
        if self._shared is not None:
            reason = "only the first dataset is shared by leases: of this one every peer trains all, in its own order"
            self._telemetry.emit("data.unshared", step="share", reason=reason, units=units.num_units)
            return
        self._shared = walk
        if (kept := self._kept(units.source)) is not None:
            leases.restore(kept)
        view = self._client.publish_first(leases.share(), leases.ranking)
        if view is not None:
            leases.look(view, time.monotonic())
        peers = 1 if view is None else view.peers
        self._telemetry.emit("data.shared", units=units.num_units, epoch=leases.epoch, peers=peers, name=units.name)

    def _keep(self, share: Share) -> None:
        about = {
            "source": share.source.hex(),
            "epoch": share.epoch,
            "finished": [bits.hex() for bits in share.finished],
            "units": [[lease.epoch, lease.unit, lease.done] for lease in share.leases if lease.done is not None],
        }
        try:
            write_whole(self._path, json.dumps(about).encode())
        except LocalError as error:
            self._telemetry.emit("data.not_kept", step="write data.json", reason=str(error))

    def _kept(self, source: bytes) -> Share | None:
        try:
            share = read_share(self._path)
        except (OSError, UsageError) as error:
            self._telemetry.emit("data.forgotten", step="read data.json", reason=str(error))
            return None
        return share if share is not None and share.source == source else None


def loaded(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the batches of a loader. Raises `UsageError` where its workers cannot be given the dataset."""
    try:
        return iter(loader)
    except Exception as error:  # Of pickle, and of what the dataset's parts raise when they are pickled.
        if isinstance(error, FlockstepError):
            raise
        raise UsageError(
            f"the dataset cannot be sent to its {loader.num_workers} workers: {error}",
            remedy="define it and collate_fn at the top of a module, without lambdas and open files, or leave workers at 0",
        ) from error


def collated(samples: list[Any]) -> Any:
    """Return samples as one batch, as torch's DataLoader does. Raises `UsageError` for samples that differ in form."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "pass share_of the collate_fn= that makes a batch of them, as a DataLoader has"
        raise UsageError(f"samples of the dataset do not make a batch: {reason}", remedy=remedy) from error


def _outline(share: Share) -> Share:
    """The part of a share that is urgent: all but the numbers of trained items."""
    return replace(share, leases=tuple(replace(lease, done=None if lease.done is None else 0) for lease in share.leases))


def read_share(path: Path) -> Share | None:
    """Read the progress that an earlier process kept, None if there is none. Raises `OSError`, `UsageError` if damaged."""
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
    """Reads one dataset unit by unit, in the order of my leases."""

    def __init__(self, units: Units, leases: Leases, shares: Shares) -> None:
        self.units = units
        self.leases = leases
        self._shares = shares
        self._items = self._read()
        self._has_begun = False
        self._drawn: deque[list[tuple[UnitId, bool]]] = deque()

    def draw(self, batch_size: int) -> Iterator[list[Any]]:
        """Yield the items of one batch after the other, as far ahead as workers prefetch."""
        while True:
            self._shares.look(self)
            self.leases.claim(time.monotonic())
            self.units.expect([unit for _, unit in self.leases.pending()])
            drawn = list(islice(self._items, batch_size))
            if len(drawn) < batch_size:  # A stop.
                return
            self._drawn.append([mark for _, mark in drawn])
            yield [item for item, _ in drawn]

    def hand_out(self) -> None:
        """Count the oldest batch that was drawn as trained."""
        epoch = self.leases.epoch
        for unit_id, ended in self._drawn.popleft():
            self.leases.trained(unit_id, 1)
            if ended:
                self.leases.finish(unit_id, time.monotonic())
        self._shares.publish(self)
        if self.leases.epoch != epoch:
            self._shares.report_epoch(self.leases.epoch)

    def _read(self) -> Iterator[tuple[Any, tuple[UnitId, bool]]]:
        """Yield items until a stop, each with its unit and whether it is the unit's last one."""
        empty = 0
        while True:
            lease, why = self.leases.begin(time.monotonic())
            unit_id = lease.epoch, lease.unit
            self._shares.report_begun(self, lease, why)
            items = self._unit(lease.epoch, lease.unit, lease.done or 0)
            item = next(items, _END)
            if item is _STOP:
                return
            if item is not _END:
                empty = 0
            else:
                # What another peer claims to have trained of a unit proves nothing about my data.
                empty += not lease.done
                if self._shares.stop.is_set():
                    return
                if empty > EMPTY_EPOCHS * self.units.num_units:
                    nothing = f"{self.units.name} holds nothing to train on"
                    if not self._has_begun:
                        raise UsageError(nothing, remedy="check the data")
                    if not self._shares.await_data(nothing, empty):
                        return
                self.leases.finish(unit_id, time.monotonic())
            while item is not _END and self.leases.holds(unit_id):
                after = next(items, _END)
                self._has_begun = True
                yield item, (unit_id, after is _END)
                if after is _STOP:
                    return
                item = after

    def _unit(self, epoch: int, unit: int, done: int) -> Iterator[Any]:
        """Yield the items of a unit, then `_STOP` if a stop came while its data could not be read.

        Raises `LocalError` where nothing was read yet.
        """
        waits = 0
        while True:
            try:
                for item in self.units.read(epoch, unit, done):
                    done, waits = done + 1, 0
                    yield item
                return
            except LocalError as error:
                if not self._has_begun:
                    raise
                if not self._shares.await_data(str(error), waits):
                    yield _STOP
                    return
                waits += 1


_END = object()
_STOP = object()
