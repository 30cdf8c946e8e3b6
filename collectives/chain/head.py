"""The published head: the chain's newest certificate, as a value in the run's directory.

The value is the newest certificate itself, packed. It needs no signature but its quorum's, so any peer that has it may
publish it; the proposer of a round does. Of several values the one of the later round wins.

The published head is a hint. Members state their own heads, and their states prove them (`fork_choice`). It decides
nothing, since a certificate without the one before it says only that its voters may vote, not that they were the voters. It
is used only by a joiner without state when no member of the run is reachable: the joiner waits instead of starting the
run anew.
"""

import math
from collections.abc import Callable

import trio

from ...dht import published
from ...dht.directory.interface import Directory
from ...dht.keys import head_key, run_key
from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.errors import LocalError, MalformedMessage, NetworkError, RemoteError
from ...peer.log.telemetry import Telemetry
from ...peer.wire import Certificate
from .certificate import check_right_to_vote, value_of
from .chain import ChainLink, Head, position_after
from .packed import pack_certificate, unpack_certificate


def validate_run_value(key: str, value: bytes) -> int:
    """Validate a value for the directory; returns its sequence number. Raises `RemoteError` for any other value or key.

    A head must be valid in itself: without the certificate before it, who was entitled to sign it is not known (`RunValues`
    narrows that down).
    """
    match key.split("/"):
        case ["", "flockstep", run_id, "head"]:
            if len(value) > wire.MAX_PACKED_BYTES:
                raise MalformedMessage(f"a head of {len(value)} bytes, at most {wire.MAX_PACKED_BYTES} are allowed")
            return position_after(unpack_certificate(value), run_id).round
    return published.validate_published(key, value)


class RunValues:
    """Validates values for the directory, and heads also by the manifest of their run, where that is known.

    Otherwise free keys sign themselves a head of a far round, and the real one is older than that for ever.
    """

    def __init__(self) -> None:
        self.charter_of: Callable[[str], Charter | None] = lambda run: None
        """Returns the admission rules of a run; None where its manifest is not known."""

    def __call__(self, key: str, value: bytes) -> int:
        """Validate a value; returns its sequence number. Raises `RemoteError` for any other value or key."""
        sequence = validate_run_value(key, value)
        run = key.removeprefix(run_key("")).partition("/")[0]
        if key == head_key(run) and (charter := self.charter_of(run)) is not None:
            check_right_to_vote(unpack_certificate(value), charter)
        return sequence


HEAD_PERIOD = 30.0
"""Seconds between publications by one peer, the period of its member record: a directory lookup is not free."""


class Heads:
    """One peer's view of the published head."""

    def __init__(self, directory: Directory, run: str, charter: Charter, telemetry: Telemetry) -> None:
        self._directory = directory
        self._run = run
        self._charter = charter
        self._telemetry = telemetry
        self._newest: Certificate | None = None
        """The one to publish at the end of the period; None where none waits."""
        self._published = -math.inf
        self.ahead: Head | None = None
        """The published head, if it was of a later round than mine at the lookup; else None."""
        self.revision = b""
        """The revision of the run's settings that the published head names; empty without one."""
        self.looked = trio.Event()
        """Set after the first lookup."""

    async def publish(self, certificate: Certificate, *, is_last: bool = False) -> None:
        """Publish the newest certificate: once in `HEAD_PERIOD`, at its end, but the last one of the run at once."""
        is_waited_for, self._newest = self._newest is not None, certificate
        if is_waited_for and not is_last:
            return
        if not is_last:
            await trio.sleep_until(self._published + HEAD_PERIOD)
        newest, self._newest = self._newest, None
        if newest is None:  # The run has ended meanwhile.
            return
        self._published = trio.current_time()
        try:
            await self._directory.put(head_key(self._run), pack_certificate(newest))
        except (NetworkError, LocalError) as error:
            self._telemetry.emit("head.unpublished", step="publish the head", reason=str(error))

    async def look(self, mine: Head) -> None:
        """Look up the published head; set `ahead` and emit an event if it is of a later round than mine."""
        try:
            packed = await self._directory.get(head_key(self._run))
        except NetworkError as error:
            self._telemetry.emit("directory.failed", step="find the head", reason=str(error))
            return
        finally:
            self.looked.set()
        if packed is None:
            return
        certificate = unpack_certificate(packed)
        try:
            position_after(certificate, self._run, self._charter)
            check_right_to_vote(certificate, self._charter)
        except RemoteError as error:
            self._telemetry.emit("head.refused", step="find the head", reason=str(error), round=certificate.slot.round)
            return
        head = ChainLink.of(certificate).head
        if head.round > mine.round:
            self.ahead, self.revision = head, value_of(certificate).revision
            reason = "a later round than mine is published: a member that holds its state can provide it"
            self._telemetry.emit("head.ahead", step="join", reason=reason, round=head.round, tokens=head.tokens)
