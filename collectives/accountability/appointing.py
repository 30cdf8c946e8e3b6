"""The memory of whoever appoints voters: one appointment a term, on disk before anybody sees it.

Theory of operation. Two appointments for one term would make two electorates, each of which could decide. So the newest
one is written and synced before it leaves this process, and another one is signed only for a later round, or for a later
term of the same round: rounds and terms never go back, on whatever chain. The record is read at each use, under a lock,
since two commands may run at once. Of a lost record the run's members are the copy: they show the appointments that they
hold (`learn`). A damaged one is an error, not an empty record.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from ...peer import wire
from ...peer.base.digest import DIGEST_BYTES, digest
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import LocalError, MalformedMessage
from ...peer.base.home_lock import home_lock
from ...peer.base.transport import PeerId
from ...peer.identity import Identity
from ...peer.wire.schema import encode
from ...peer.wire.signed import open_signed, sign
from ..chain.voters import open_appointment

MAX_APPOINTED_BYTES = DIGEST_BYTES + wire.MAX_APPOINTMENT_BYTES
MadeAppointment: TypeAlias = tuple[wire.Signed, wire.Appointment]


class AppointmentRecord:
    """The newest appointment that one key has signed in a run, in the folder `appointed` of the run's folder."""

    def __init__(self, identity: Identity, run_folder: Path) -> None:
        self._identity = identity
        self._folder = run_folder / "appointed"
        self._path = self._folder / "newest"

    @property
    def author(self) -> PeerId:
        """Whose appointments these are."""
        return self._identity.peer_id

    @property
    def newest(self) -> MadeAppointment | None:
        """The newest appointment; None if there is none. Raises `LocalError` if the record cannot be read."""
        try:
            with disk_errors(f"read {self._path}"):
                try:
                    data = self._path.read_bytes()
                except FileNotFoundError:
                    return None
            if len(data) > MAX_APPOINTED_BYTES or data[:DIGEST_BYTES] != digest(data[DIGEST_BYTES:]):
                raise MalformedMessage("its checksum is wrong")
            return open_appointment(data[DIGEST_BYTES:])
        except MalformedMessage as error:
            remedy = "restore it; if that is impossible, remove it once every voter of the run is in a later round"
            raise LocalError(f"{self._path} is damaged: {error}", remedy=remedy) from error

    def learn(self, signed: wire.Signed) -> None:
        """Take an appointment that somebody shows as signed by me: the record may have been lost. Raises `LocalError`."""
        message = open_signed(signed)
        if signed.sender == self.author and isinstance(message, wire.Appointment):
            with self._locked():
                newest = self.newest
                if newest is None or _order(newest[1].slot) < _order(message.slot):
                    self._write(signed)

    def sign(self, slot: wire.Slot, voters: tuple[PeerId, ...]) -> MadeAppointment:
        """Sign an appointment, or return the one that was signed for this term. Raises `LocalError` if it is another one."""
        message = wire.Appointment(slot, voters)
        with self._locked():
            newest = self.newest
            if newest is not None and newest[1] == message:
                return newest
            if newest is not None and _order(newest[1].slot) >= _order(slot):
                kept = newest[1].slot
                raise LocalError(
                    f"refusing to appoint for term {slot.term} of round {slot.round}: this key has appointed for term "
                    f"{kept.term} of round {kept.round}",
                    remedy="run the command again",
                )
            signed = sign(self._identity, message)
            self._write(signed)
        return signed, message

    def _write(self, signed: wire.Signed) -> None:
        payload = encode(signed)
        write_whole(self._path, digest(payload) + payload)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with home_lock(self._folder, pid=os.getpid()):
            yield


def _order(slot: wire.Slot) -> tuple[int, int]:
    return slot.round, slot.term
