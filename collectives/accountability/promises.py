"""The signing guard: persists the slots that I signed in, to rule out equivocation.

Theory of operation. A peer that signs two different statements in one slot (one attempt of one round) equivocates and
convicts itself (`evidence`). A killed process does not know what it had signed. So a slot is persisted before its first
signature, and a later process starts behind it (as validators do: CometBFT's `priv_validator_state.json`). One process
can also meet a round twice: when its chain was replaced by another one.

The record holds the latest round with its last attempt, and the greatest attempt of any earlier round: attempts
continue from there. It has 60 bytes, written and synced once per attempt.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...peer import wire
from ...peer.disk import write_whole
from ...peer.errors import LocalError, MalformedMessage
from ...peer.telemetry import Telemetry
from ...peer.wire import Count
from ...peer.wire.schema import Between, decode, encode

MAX_BYTES = 100


@dataclass(frozen=True, slots=True)
class SpokenSlots:
    """The latest round that I signed in, its last attempt, and the greatest attempt of any earlier round."""

    round: Count = 0
    attempt: Annotated[int, Between(-1, 1 << 20)] = -1
    before: Annotated[int, Between(-1, 1 << 20)] = -1

    def first_free(self, round_: int) -> int:
        """Return the first attempt of a round in which I have certainly signed nothing."""
        if round_ > self.round:
            return 0
        return (self.attempt if round_ == self.round else max(self.attempt, self.before)) + 1

    def after(self, slot: wire.Slot) -> "SpokenSlots":
        """Return the record that includes a slot."""
        if slot.round > self.round:
            return SpokenSlots(slot.round, slot.attempt, max(self.attempt, self.before))
        if slot.round == self.round:
            return SpokenSlots(self.round, max(self.attempt, slot.attempt), self.before)
        return SpokenSlots(self.round, self.attempt, max(self.before, slot.attempt))


class Promises:
    """One peer's record of the slots that it signed in; without a `path` only of this process."""

    def __init__(self, telemetry: Telemetry, path: Path | None = None) -> None:
        self._telemetry = telemetry
        self._path = path
        self._spoken = self._read()
        self._slot: wire.Slot | None = None

    def first_free(self, round_: int) -> int:
        """Return the first attempt of a round in which I have certainly signed nothing."""
        return self._spoken.first_free(round_)

    def speak(self, slot: wire.Slot) -> None:
        """Persist a slot before the first signature in it. Waits for the disk, once per slot."""
        if slot == self._slot:
            return
        self._slot, self._spoken = slot, self._spoken.after(slot)
        if self._path is None:
            return
        try:
            write_whole(self._path, encode(self._spoken))
        except LocalError as error:
            # Training goes on (invariant 5); only a crash in this very attempt could make me equivocate.
            self._telemetry.emit("promise.unwritten", step="speak", reason=str(error), round=slot.round)

    def _read(self) -> SpokenSlots:
        if self._path is None:
            return SpokenSlots()
        try:
            return decode(SpokenSlots, self._path.read_bytes(), max_bytes=MAX_BYTES)
        except FileNotFoundError:
            pass  # The first process in this run.
        except (OSError, MalformedMessage) as error:
            self._telemetry.emit("promise.unreadable", step="open", reason=f"{self._path}: {error}")
        return SpokenSlots()
