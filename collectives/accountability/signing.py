"""The signing guard: signs the statements of rounds, and never two different ones on one subject in a slot.

Theory of operation. A peer that signs two different statements on one subject in a slot (one attempt of one round)
equivocates and convicts itself (`evidence`). No bug, no liar and no restart may lead me to that. So whatever a machine
says goes through `sign`, as with validators (CometBFT's `priv_validator_state.json`). Within an attempt the guard
remembers the hash of each statement, and refuses a second, different one; the driver then gives the attempt up.

What must be on the disk, and when. A later process does not know what this one has signed. It need not know the
statements, only the slots: it takes no part in a slot in which an earlier one may have signed. So a slot is persisted
before the first convicting signature in it, and the statements themselves are not. That is one synced write of some 80
bytes an attempt, not one a message: a machine signs some ten of them, and a sync takes up to 0.1 s. A slot that cannot
be persisted is not signed in. One process can also meet a round twice, when its chain was replaced by another one.

The record holds the latest round with its last attempt, and the greatest attempt of any earlier round: attempts
continue from there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...peer import wire
from ...peer.digest import digest
from ...peer.disk import write_whole
from ...peer.errors import LocalError, MalformedMessage
from ...peer.identity import Identity
from ...peer.telemetry import Telemetry
from ...peer.wire import Count
from ...peer.wire.schema import Between, decode, encode
from ...peer.wire.signed import sign
from .statements import STATEMENTS

MAX_BYTES = 100
MAX_SLOTS = 64
"""Slots that one attempt may sign in: its own, and those to which others that are ahead move it. More is a liar's doing."""


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


class SigningGuard:
    """One peer's signature under statements of rounds; without a `path` it remembers those of this process only."""

    def __init__(self, identity: Identity, telemetry: Telemetry, path: Path | None = None) -> None:
        self._identity = identity
        self._telemetry = telemetry
        self._path = path
        self._spoken = self._read()
        self._before = self._spoken
        """What was signed before the running attempt."""
        self._said: dict[wire.Slot, dict[tuple[int, object], bytes]] = {}
        """What the running attempt has signed: the hash of the statement on each subject, by slot."""

    def first_free(self, round_: int) -> int:
        """Return the first attempt of a round in which I have certainly signed nothing."""
        return self._spoken.first_free(round_)

    def begin(self, round_: int) -> int:
        """Begin an attempt: return `first_free`, and refuse from now on to sign in any slot before."""
        self._before = self._spoken
        self._said.clear()
        return self.first_free(round_)

    def sign(self, message: wire.RoundMessage) -> wire.Signed | str:
        """Sign a statement, or return the reason not to. Waits for the disk, once per slot."""
        kind = STATEMENTS[type(message)]
        if kind.convicts and (why_not := self._why_not_sign(message, kind.subject(message))):
            slot = message.slot
            self._telemetry.emit(
                "promise.kept", step=type(message).__name__, reason=why_not, round=slot.round, attempt=slot.attempt
            )
            return why_not
        return sign(self._identity, message)

    def _why_not_sign(self, message: wire.RoundMessage, subject: object) -> str:
        """Record a statement; returns why it must not be signed, empty if it may be."""
        said = self._said.get(message.slot)
        if said is None:
            if message.slot.attempt < self._before.first_free(message.slot.round):
                return "I may have signed in this slot before"
            if len(self._said) >= MAX_SLOTS:
                return f"this attempt has signed in {MAX_SLOTS} slots"
            if why_not := self._why_not_reserve(message.slot):
                return why_not
            said = self._said[message.slot] = {}
        payload = digest(encode(message))
        earlier = said.setdefault((wire.code_of(message), subject), payload)
        return "" if earlier == payload else "I have signed a different one in this slot"

    def _why_not_reserve(self, slot: wire.Slot) -> str:
        """Persist a slot before the first signature in it; returns why that failed, empty if it is on the disk."""
        spoken = self._spoken.after(slot)
        if self._path is not None:
            try:
                write_whole(self._path, encode(spoken))
            except LocalError as error:
                # Training goes on (invariant 5). A signature now could be the first of two after a crash.
                self._telemetry.emit("promise.unwritten", step="reserve", reason=str(error), round=slot.round)
                return f"the slot cannot be written down: {error}"
        self._spoken = spoken
        return ""

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
