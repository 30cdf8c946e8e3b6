"""The signing guard: signs the statements of rounds, and never two different ones on one subject in a slot.

Theory of operation. A peer that signs two different statements on one subject in a slot (one attempt of one round)
equivocates and convicts itself (`evidence`). No bug, no liar and no restart may lead me to that. So whatever a machine
says goes through `sign`, as with validators (CometBFT's `priv_validator_state.json`). Within an attempt the guard
remembers the hash of each statement, and refuses a second, different one; the driver then gives the attempt up.

What must be on the disk, and when. A later process does not know what this one has signed. It need not know the
statements, only the slots: it takes no part in a slot in which an earlier one may have signed. So a slot is persisted
before the first convicting signature in it, and the statements themselves are not. That is one synced write of a few kB
an attempt, not one a message: a machine signs some ten of them, and a sync takes up to 0.1 s. A slot that cannot
be persisted is not signed in. The lock, which is the proof that a Precommit answers, is on the disk before that is signed: a
later process must not accept another value. One process can also meet a round twice, when its chain was replaced by
another one.

The record holds the last slot of each of the newest decisions (a round on a chain), and for all older ones the greatest
round and attempt: attempts continue from there.

A record can be lost, damaged, or that of a backup. A checksum shows damage. A missing record is lost if the ledger has
rounds, or certificates name me. A restored one is a copy, with a later modification time than the record states. A
snapshot of a whole machine, and a backup that restores times, do not show that; but a certificate does which names me in a
later round than the record, since each member of a roster has signed a Ready. Only one that is less than a round old shows
nothing. Then I do not know in which slots of the
present rounds I have signed. To abstain would stop a run of one or two, so I begin far ahead instead, at an
attempt that the clock gives: later than any that I can have signed, also if I lose the record once more. Up to three
voters follow such a leap at once; of more I am no voter until I know again (`agreement.machine`), and follow by certificates.
Those of three rounds that two others have signed show that the run has left the rounds that I may have signed in, unless
they name me: then another process has my key.
"""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ...peer import wire
from ...peer.base.digest import DIGEST_BYTES, digest
from ...peer.base.disk import draft_of
from ...peer.base.errors import LocalError, MalformedMessage
from ...peer.identity import Identity
from ...peer.log.telemetry import Telemetry
from ...peer.wire import Count
from ...peer.wire.fields import Hash
from ...peer.wire.schema import Between, Size, decode, encode
from ...peer.wire.signed import sign_encoded
from .statements import STATEMENTS

MAX_DECISIONS = 64
"""Decisions whose last slots are kept one by one. A peer whose chain gave way to another one, less than so many rounds after
they parted, votes at once in the rounds that it goes through again: it has signed nothing there yet."""
MAX_BYTES = 100 + 60 * MAX_DECISIONS
LOCK_NAME = "lock"
"""The file beside the record that holds the lock of the newest Precommit. A damaged one counts as a lost record."""
FAR = 1 << 12
"""How far ahead an attempt is at least after the record was lost: nobody has tried one round so often."""
TICK, CLOCK_TICKS = 8.0, 1 << 19
"""The clock adds one attempt in so many seconds, which attempts do not outrun, and begins anew after 48 days."""
LEAVES_AFTER = 3
"""Rounds that others certified after the loss: I may have signed in the round after the newest one, and hear
of that one a round late."""
COPIED_AFTER = 10.0
"""Seconds between the time in a record and its last write, at most. Not of its inode (ctime): `chown` changes that, too."""
MAX_SLOTS = 1 << 12
"""Slots of one round: with deadlines at their ceiling so many attempts take five days."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The last slot of a decision that I signed in."""

    round: Count
    previous: Hash
    attempt: Annotated[int, Between(0, wire.MAX_ATTEMPT)]


@dataclass(frozen=True, slots=True)
class SpokenSlots:
    """The last slots of the newest decisions that I signed in, and a bound for all older ones."""

    newest: Annotated[tuple[Spoken, ...], Size(MAX_DECISIONS)] = ()
    """In the order in which I first signed in them."""
    before_round: Count = 0
    """The greatest round of the older decisions, and their greatest attempt."""
    before: Annotated[int, Between(-1, wire.MAX_ATTEMPT)] = -1
    far: Annotated[int, Between(0, 1 << 20)] = 0
    """The first attempt of any round while I do not know what I have signed in it; 0 if I know."""
    made: Count = 0
    """When the record was written, in nanoseconds of the file system's clock."""

    @property
    def round(self) -> int:
        """The latest round that I signed in; 0 before."""
        return max([self.before_round, *(it.round for it in self.newest)])

    def first_free(self, slot: wire.Slot) -> int:
        """Return the first attempt of the decision of `slot` in which I have certainly signed nothing."""
        known = self._known(slot)
        if known is None and slot.round > self.before_round:
            return self.far
        return max(self.far, 1 + (self.before if known is None else known.attempt))

    def after(self, slot: wire.Slot) -> "SpokenSlots":
        """Return the record that includes a slot, of a decision of which it was `first_free` or a later one."""
        known = self._known(slot)
        if known is not None:
            newer = replace(known, attempt=max(known.attempt, slot.attempt))
            return replace(self, newest=tuple(newer if it is known else it for it in self.newest))
        newest = (*self.newest, Spoken(slot.round, slot.previous, slot.attempt))
        if len(newest) <= MAX_DECISIONS:
            return replace(self, newest=newest)
        oldest = newest[0]
        before_round, before = max(self.before_round, oldest.round), max(self.before, oldest.attempt)
        return replace(self, newest=newest[1:], before_round=before_round, before=before)

    def _known(self, slot: wire.Slot) -> Spoken | None:
        """Return the last slot of the decision of `slot`; None if it is none of the newest."""
        of_it = (it for it in self.newest if (it.round, it.previous) == (slot.round, slot.previous))
        return next(of_it, None)


class SigningGuard:
    """One peer's signature under statements of rounds; without a `path` it remembers those of this process only.

    `is_known`: the run's folder shows that I took part before, so there must be a record.
    """

    def __init__(
        self,
        identity: Identity,
        telemetry: Telemetry,
        path: Path | None = None,
        *,
        is_known: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._telemetry = telemetry
        self._path = path
        self._clock = clock
        self._spoken = SpokenSlots()
        self._is_new = False
        """True if nothing was ever written down here, and nothing shows that a record is missing."""
        self._first_heard = 0
        """The first round that others certified since the record was lost; 0 if there is none yet."""
        self._left = 0
        """The round up to which it does not matter any more what is missing in the record."""
        self._lock: wire.Proof | None = None
        if path is not None:
            self._open(path, is_known)
            self._read_lock(path.with_name(LOCK_NAME))
        self._before = self._spoken
        """What was signed before the present round began here."""
        self._said: dict[wire.Slot, dict[tuple[int, object], bytes]] = {}
        """What was signed in the present round: the hash of the statement on each subject, by slot."""

    def first_free(self, slot: wire.Slot) -> int:
        """Return the first attempt of the decision of `slot` in which I have certainly signed nothing."""
        return self._spoken.first_free(slot)

    @property
    def is_lost(self) -> bool:
        """True while it is not known what I have signed."""
        return bool(self._spoken.far)

    def begin(self, slot: wire.Slot) -> int:
        """Begin the decision of `slot`: return `first_free`, and refuse from now on to sign in any slot before."""
        self._before = self._spoken
        self._said.clear()
        return self.first_free(slot)

    def named(self, round_: int) -> None:
        """Learn that the roster of this certified round is the last one that names me: it shows a Ready that I signed."""
        if self._is_new:
            self._forget("there is no record, and certificates name this peer")
        elif self._path is None or round_ <= max(self._spoken.round, self._left):
            return
        elif not self._spoken.far:
            self._forget(f"the record ends with round {self._spoken.round}, and this peer signed in round {round_}")
        elif self._first_heard:  # Another process signs with my key now.
            self._first_heard = max(self._first_heard, round_)

    def certified(self, round_: int, signers: Collection[str]) -> None:
        """Learn that a round was certified, which may show that the rounds are over in which I may have signed."""
        if not self._spoken.far or len(set(signers) - {self._identity.peer_id}) < 2:
            return
        self._first_heard = self._first_heard or round_
        if round_ >= self._first_heard + LEAVES_AFTER - 1:  # A catch-up may skip some between.
            self._spoken, self._left = replace(self._spoken, far=0), round_

    def lock_in(self, decision: tuple[str, int, bytes]) -> wire.Proof | None:
        """Return the lock that I signed a Precommit with in this decision; None if there is none."""
        return self._lock if self._lock is not None and self._lock.slot.decision == decision else None

    def sign(self, message: wire.RoundMessage, lock: wire.Proof | None = None) -> wire.Signed | str:
        """Sign a statement, or return the reason not to. Waits for the disk, once per slot and once for a `lock`."""
        if lock is not None and (why_not := self._why_not_lock(lock)):
            return why_not
        try:
            kind, payload = STATEMENTS[type(message)], encode(message)
        except LocalError as error:  # Of what others have put into it: an attempt is given up, and nobody's process ends.
            return str(error)
        if kind.convicts and (why_not := self._why_not_sign(message, kind.subject(message), digest(payload))):
            slot = message.slot
            self._telemetry.emit(
                "promise.kept", step=type(message).__name__, reason=why_not, round=slot.round, attempt=slot.attempt
            )
            return why_not
        return sign_encoded(self._identity, wire.code_of(message), payload)

    def _why_not_sign(self, message: wire.RoundMessage, subject: object, hash_: bytes) -> str:
        """Record a statement by its hash; returns why it must not be signed, empty if it may be."""
        said = self._said.get(message.slot)
        if said is None:
            if message.slot.attempt < self._before.first_free(message.slot):
                return "I may have signed in this slot before"
            if len(self._said) >= MAX_SLOTS:
                return f"this round has had {MAX_SLOTS} slots"
            if why_not := self._why_not_reserve(message.slot):
                return why_not
            said = self._said[message.slot] = {}
        is_known = said.setdefault((wire.code_of(message), subject), hash_) == hash_
        return "" if is_known else "I have signed a different one in this slot"

    def _why_not_reserve(self, slot: wire.Slot) -> str:
        """Persist a slot before the first signature in it; returns why that failed, empty if it is on the disk."""
        spoken = self._spoken.after(slot)
        if self._path is not None:
            try:
                _write(self._path, spoken)
            except LocalError as error:
                # Training goes on (invariant 5). A signature now could be the first of two after a crash.
                self._telemetry.emit("promise.unwritten", step="reserve", reason=str(error), round=slot.round)
                return f"the slot cannot be written down: {error}"
        self._spoken = spoken
        self._is_new = False
        return ""

    def _why_not_lock(self, lock: wire.Proof) -> str:
        """Persist a lock before the Precommit that it belongs to; returns why that failed, empty if it is on the disk."""
        if self._path is not None:
            try:
                with draft_of(self._path.with_name(LOCK_NAME)) as draft:
                    payload = encode(lock)
                    draft.write_bytes(digest(payload) + payload)
            except LocalError as error:
                self._telemetry.emit("promise.unwritten", step="lock", reason=str(error), round=lock.slot.round)
                return f"the lock cannot be written down: {error}"
        self._lock = lock
        return ""

    def _read_lock(self, path: Path) -> None:
        """Read the lock of an earlier process; one that cannot be read counts as a lost record."""
        try:
            data = path.read_bytes()
            if data[:DIGEST_BYTES] != digest(data[DIGEST_BYTES:]):
                raise MalformedMessage("its checksum is wrong")
            self._lock = decode(wire.Proof, data[DIGEST_BYTES:], max_bytes=wire.MAX_SIGNED_BYTES)
        except FileNotFoundError:
            return
        except (OSError, MalformedMessage) as error:
            self._telemetry.emit("promise.unreadable", step="open", reason=f"{path}: {error}")
            self._forget(f"{path} cannot be read")

    def _open(self, path: Path, is_known: bool) -> None:
        """Read the record of earlier processes, or begin one."""
        try:
            self._spoken, is_copy = _read(path)
            # One that was begun and never used says no more than none: an earlier process may have ended before it heard
            # of the certificates that name me.
            self._is_new = replace(self._spoken, made=0) == SpokenSlots()
            if is_copy:
                self._forget(f"{path} was copied, as from a backup")
        except FileNotFoundError:
            if is_known:
                self._forget(f"{path} is missing")
                return
            self._is_new = True
            try:
                _write(path, self._spoken)  # So that it is known to be missing once it is.
            except LocalError as error:
                self._telemetry.emit("promise.unwritten", step="open", reason=str(error))
        except (OSError, MalformedMessage) as error:
            self._telemetry.emit("promise.unreadable", step="open", reason=f"{path}: {error}")
            self._forget(f"{path} cannot be read")

    def _forget(self, reason: str) -> None:
        """Begin far ahead from now on: it is not known what I have signed."""
        far = FAR + int(self._clock() / TICK) % CLOCK_TICKS
        self._spoken = replace(self._spoken, far=max(far, self._spoken.far))
        self._is_new, self._first_heard = False, 0
        self._telemetry.emit("promise.forgotten", step="open", reason=reason, attempt=far)


def _write(path: Path, spoken: SpokenSlots) -> None:
    """Write a record with its checksum and time. Raises `LocalError`."""
    with draft_of(path) as draft:
        payload = encode(replace(spoken, made=draft.stat().st_mtime_ns))
        draft.write_bytes(digest(payload) + payload)


def _read(path: Path) -> tuple[SpokenSlots, bool]:
    """Return a record, and whether its file is a copy of the one that was written. Raises as `decode` or `open` do."""
    with path.open("rb") as file:
        status, data = os.fstat(file.fileno()), file.read(MAX_BYTES + 1)
    payload = data[DIGEST_BYTES:]
    if data[:DIGEST_BYTES] != digest(payload):
        raise MalformedMessage("its checksum is wrong")
    spoken = decode(SpokenSlots, payload, max_bytes=MAX_BYTES)
    return spoken, abs(status.st_mtime_ns - spoken.made) > COPIED_AFTER * 1e9
