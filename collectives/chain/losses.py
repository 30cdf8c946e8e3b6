"""The loss of each round, as a member saw it: the median of what the others stated when the round ended.

A claim of the member that shows it, and no part of what is certified: it draws the curve for whoever comes late. Of rounds
before it came, or that it missed, a member keeps what it was sent with their certificates. The file has four bytes a round,
in order; a round without a loss has zeros.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

from ...dht.members.evaluation import MAX_STATED_LOSS
from ...peer.base.disk import disk_errors
from ...peer.base.errors import LocalError
from ...peer.log.telemetry import Telemetry

_ONE = struct.Struct("<f")
MAX_NOTED_ROUNDS = 1_000_000
"""Rounds that are noted: 4 MB."""


class Losses:
    """One run's losses by round, in the file at `path`. All methods may wait for the disk."""

    def __init__(self, path: Path, telemetry: Telemetry) -> None:
        self._path, self._telemetry = path, telemetry

    def note(self, round_: int, loss: float | None) -> None:
        """Keep the loss of a round; a disk that fails is an event, since nothing but a curve needs it."""
        if loss is not None:
            self._write({round_: loss})

    def learn(self, claimed: Mapping[int, float]) -> None:
        """Keep what a member claims as losses of rounds of which none is known here."""
        first = min(claimed, default=1)
        known = known_losses(first, self.since(first, max(claimed, default=0) - first + 1))
        self._write({round_: loss for round_, loss in claimed.items() if round_ not in known})

    def _write(self, losses: Mapping[int, float]) -> None:
        losses = {round_: loss for round_, loss in losses.items() if round_ <= MAX_NOTED_ROUNDS}
        if not losses:
            return
        try:
            with disk_errors(f"write {self._path}"):
                self._path.touch()
                with self._path.open("r+b") as file:
                    for round_, loss in losses.items():
                        file.seek((round_ - 1) * _ONE.size)
                        file.write(_ONE.pack(loss))
        except LocalError as error:
            self._telemetry.emit("losses.unwritten", step="note a loss", reason=str(error), round=min(losses))

    def since(self, round_: int, limit: int) -> tuple[float, ...]:
        """Return the losses of up to `limit` rounds from `round_` on, as far as the file goes; 0 where none is known."""
        try:
            with self._path.open("rb") as file:
                file.seek((round_ - 1) * _ONE.size)
                data = file.read(limit * _ONE.size)
        except OSError:
            return ()
        stated = (loss for (loss,) in _ONE.iter_unpack(data[: len(data) // _ONE.size * _ONE.size]))
        return tuple(loss if 0 < loss <= MAX_STATED_LOSS else 0.0 for loss in stated)  # Flipped bits may be no number.


def known_losses(round_: int, losses: tuple[float, ...]) -> dict[int, float]:
    """Return by round what a member shows as the losses from `round_` on, without what can be none."""
    return {number: loss for number, loss in enumerate(losses, round_) if 0 < loss <= MAX_STATED_LOSS}
