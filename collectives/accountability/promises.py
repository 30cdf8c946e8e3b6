"""In which slots I may have spoken: so that no restart makes me contradict myself.

Theory of operation. What a peer signs in a slot (one attempt of one round) it must not sign otherwise in the same slot,
or it convicts itself (`evidence`). A process that was killed does not know what it had said, so before the first word
of a slot that slot is written down, and a later life begins behind it (as validators do, CometBFT's
`priv_validator_state.json`). A round can come twice to one life as well: when its chain gave way to another one.

Kept are the latest round with its last attempt, and the greatest attempt in any round before it: for these the attempts
go on from there. That is 60 bytes, written and synced once in an attempt.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...peer import wire
from ...peer.errors import MalformedMessage
from ...peer.telemetry import Telemetry
from ...peer.wire.fields import Count
from ...peer.wire.schema import Between, decode, encode

MAX_BYTES = 100


@dataclass(frozen=True, slots=True)
class Spoken:
    """The latest round in which I have spoken, in which of its attempts last, and the greatest attempt before it."""

    round: Count = 0
    attempt: Annotated[int, Between(-1, 1 << 20)] = -1
    before: Annotated[int, Between(-1, 1 << 20)] = -1

    def first_free(self, round_: int) -> int:
        """The first attempt of a round in which I have certainly said nothing."""
        if round_ > self.round:
            return 0
        return (self.attempt if round_ == self.round else max(self.attempt, self.before)) + 1

    def after(self, slot: wire.Slot) -> "Spoken":
        """The same once I have spoken in a slot as well."""
        if slot.round > self.round:
            return Spoken(slot.round, slot.attempt, max(self.attempt, self.before))
        if slot.round == self.round:
            return Spoken(self.round, max(self.attempt, slot.attempt), self.before)
        return Spoken(self.round, self.attempt, max(self.before, slot.attempt))


class Promises:
    """One peer's memory of where it has spoken; of this life only where there is no `path`."""

    def __init__(self, telemetry: Telemetry, path: Path | None = None) -> None:
        self._telemetry = telemetry
        self._path = path
        self._spoken = self._read()
        self._slot: wire.Slot | None = None

    def first_free(self, round_: int) -> int:
        """The first attempt of a round in which I have certainly said nothing."""
        return self._spoken.first_free(round_)

    def speak(self, slot: wire.Slot) -> None:
        """I am about to sign something in a slot. Waits for the disk, once in a slot."""
        if slot == self._slot:
            return
        self._slot, self._spoken = slot, self._spoken.after(slot)
        if self._path is None:
            return
        draft = self._path.with_name(f".{self._path.name}.draft")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(encode(self._spoken))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._path)
        except OSError as error:
            # Training goes on (invariant 5); only a crash in this very attempt could bring me to contradict myself.
            self._telemetry.emit("promise.unwritten", step="speak", reason=str(error), round=slot.round)

    def _read(self) -> Spoken:
        if self._path is None:
            return Spoken()
        try:
            return decode(Spoken, self._path.read_bytes(), max_bytes=MAX_BYTES)
        except FileNotFoundError:
            pass  # My first life in this run.
        except (OSError, MalformedMessage) as error:
            self._telemetry.emit("promise.unreadable", step="open", reason=f"{self._path}: {error}")
        return Spoken()
