"""The members of a run on disk: a restarted peer finds them again without any bootstrap.

Theory of operation. While I am in a run the newest records of its members are written beside the run's manifest into
`<home>/runs/<run id>/`, whole or not at all. A restarted peer whose bootstraps are all down dials the addresses in these
records; one member that still has its address is enough, since it knows the others. A record here states where a member
was and never that it is there: its lifetime has run out. Each one is checked again when it is read, as if a stranger
had sent it. A program that can write the file can therefore name only members, and no manifest but the run's. The
statements of the run's owner are kept there as well, so that a restarted peer bans whom it has banned before.
"""

from collections.abc import Iterable
from pathlib import Path

from ...peer.base.disk import write_whole
from ...peer.base.errors import LocalError, MalformedMessage, OtherProtocol, RemoteError, UsageError
from ...peer.base.home_lock import append_lock
from ...peer.base.transport import Address, PeerId
from ...peer.identity import Identity
from ...peer.log.telemetry import Telemetry
from ...peer.wire import MAX_INVITE_BYTES, Members
from ...peer.wire.schema import decode, encode
from ..records import MAX_RECORD_BYTES, Record
from ..run.admission import Ticket
from ..run.link import is_run_id
from ..run.manifest import SignedManifest
from ..run.statements import MAX_OWNER_LOG_BYTES, OwnerStatement, OwnerStatements, unpack_statements
from .body import MemberBody, open_member
from .table import Member

MAX_KEPT = 64
"""The limit of members in the file: one that answers is enough, and of a full roster some are reachable."""
MAX_REMEMBERED_BYTES = MAX_KEPT * (MAX_RECORD_BYTES + 8)
"""The limit of the file: of each member the record and its length."""

MAX_TICKET_BYTES = 2 * MAX_INVITE_BYTES
"""The limit of an invitation as text: base32 takes 8 letters for 5 bytes."""


class Remembered:
    """One run's folder. Nothing here but `append` raises: a failed read or write is an event."""

    def __init__(self, folder: Path, run_id: str, telemetry: Telemetry) -> None:
        self._members = folder / "members"
        self._manifest = folder / "manifest"
        self._statements = folder / "statements"
        self._ticket = folder / "ticket"
        self._successor = folder / "successor"
        self._run_id = run_id
        self._telemetry = telemetry

    def keep_manifest(self, signed: SignedManifest) -> None:
        """Write the run's manifest."""
        self._write(self._manifest, signed.publishable)

    def manifest(self) -> SignedManifest | None:
        """Read the run's manifest; None if it is not here. Raises `OtherProtocol`."""
        data = self._read(self._manifest, MAX_RECORD_BYTES)
        try:
            return SignedManifest.decode(data, self._run_id) if data else None
        except OtherProtocol:
            raise  # The run id is its hash: no other source has one of this protocol.
        except RemoteError as error:
            self._telemetry.emit("run.forgotten", step="read the manifest", reason=str(error))
            return None

    def keep_successor(self, run: str) -> None:
        """Write as which run mine goes on, once and for all: a later call changes nothing."""
        if not self.successor():
            self._write(self._successor, run.encode())

    def successor(self) -> str:
        """Read as which run mine goes on, as this computer has followed it; empty while it has not."""
        text = self._read(self._successor, 64).decode(errors="replace")
        return text if is_run_id(text) else ""

    def keep_ticket(self, text: str) -> None:
        """Write the invitation with which I have been let in, so that the next start needs none."""
        self._write(self._ticket, text.encode(), private=True)

    def ticket(self) -> str:
        """Read my invitation; empty if no whole one is here."""
        text = self._read(self._ticket, MAX_TICKET_BYTES).decode(errors="replace")
        try:
            return str(Ticket.parse(text)) if text else ""
        except UsageError as error:
            self._telemetry.emit("run.forgotten", step=f"read {self._ticket}", reason=str(error))
            return ""

    def append(
        self, known: OwnerStatements, identity: Identity, stated: Iterable[OwnerStatement]
    ) -> OwnerStatements:
        """Sign statements as the run's owner, after all that are known and all in the file, and write them to it.

        Returns the log, which is synced before anybody sees it: another process of the owner gives no number of it to
        another statement. Raises `LocalError`, also if the file is there and cannot be read: it may hold a number that nobody
        else knows, and of two statements with one number every peer keeps only one.
        """
        with append_lock(self._statements.with_suffix(".lock")):
            try:
                signed = self._kept_statements(known)
            except (OSError, RemoteError) as error:
                remedy = "restore it; if that is impossible, remove it once a bootstrap holds all that you have stated"
                raise LocalError(f"{self._statements} cannot be used: {error}", remedy=remedy) from error
            for one in stated:
                signed = signed.sign(identity, one)
            write_whole(self._statements, signed.packed)
        return signed

    def keep_statements(self, statements: OwnerStatements) -> None:
        """Write the owner's statements, merged with those of the file: `flockstep run ban` may have written it meanwhile."""
        try:
            with append_lock(self._statements.with_suffix(".lock")):
                self._write(self._statements, self.statements(statements).packed)
        except LocalError as error:
            self._telemetry.emit("run.not_remembered", step="write the statements", reason=str(error))

    def statements(self, known: OwnerStatements) -> OwnerStatements:
        """Read the owner's statements, and return their union with the known ones."""
        try:
            return self._kept_statements(known)
        except (OSError, RemoteError) as error:
            self._telemetry.emit("run.forgotten", step="read the owner's statements", reason=str(error))
            return known

    def _kept_statements(self, known: OwnerStatements) -> OwnerStatements:
        """Return the union of the known statements with those of the file. Raises `OSError`, `RemoteError`."""
        try:
            with self._statements.open("rb") as file:
                data = file.read(MAX_OWNER_LOG_BYTES + 1)
        except FileNotFoundError:
            return known
        return known.merge(unpack_statements(data)) if data else known

    def keep(self, members: Iterable[Member]) -> None:
        """Write the records of these members: of more than fit, the newest."""
        found = [member for member in members if member.body.addresses]
        latest = sorted(found, key=lambda member: (-member.expires, member.peer))[:MAX_KEPT]
        self._write(self._members, encode(Members(tuple(member.record.encode() for member in latest))))

    def addresses(self) -> dict[PeerId, tuple[Address, ...]]:
        """Read the last known addresses of the members."""
        return {peer: body.addresses for peer, body in self.bodies().items()}

    def bodies(self) -> dict[PeerId, MemberBody]:
        """Read what the members stated last."""
        data = self._read(self._members, MAX_REMEMBERED_BYTES)
        found: dict[PeerId, MemberBody] = {}
        try:
            for written in decode(Members, data, max_bytes=MAX_REMEMBERED_BYTES).records if data else ():
                record = Record.decode(written)
                body = open_member(record)
                if record.run != self._run_id:
                    raise MalformedMessage(f"a record of another run, {record.run!r}")
                found[record.peer] = body
        except RemoteError as error:
            self._telemetry.emit("run.forgotten", step="read the members", reason=str(error))
        return found

    def _write(self, path: Path, data: bytes, *, private: bool = False) -> None:
        try:
            write_whole(path, data, private=private)
        except LocalError as error:
            self._telemetry.emit("run.not_remembered", step=f"write the {path.name}", reason=str(error))

    def _read(self, path: Path, max_bytes: int) -> bytes:
        try:
            with path.open("rb") as file:
                return file.read(max_bytes + 1)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._telemetry.emit("run.forgotten", step=f"read the {path.name}", reason=str(error))
            return b""
