"""Validation of the values in the directory: manifest, members, listing, evaluations, statements of the owner. Pure."""

from ..peer.base.errors import ProtocolViolation
from .members.body import MEMBER_KIND, open_member
from .members.evaluation import open_evaluation
from .records import Record
from .run.listing import open_listing
from .run.manifest import SignedManifest
from .run.statements import validate_page


def validate_published(key: str, value: bytes) -> int:
    """Return the sequence of a valid value under a key. Raises `RemoteError` for any other value or key."""
    match key.split("/"):
        case ["", "flockstep", run_id]:
            return SignedManifest.decode(value, run_id).manifest.revision
        case ["", "flockstep", run_id, "listing", owner]:
            return open_listing(run_id, owner, value)[0].sequence
        case ["", "flockstep", run_id, peer]:
            record = Record.decode(value)
            if (record.kind, record.run, record.peer) != (MEMBER_KIND, run_id, peer):
                raise ProtocolViolation(f"a {record.kind!r} record of {record.peer!r} does not belong under {key!r}")
            open_member(record)
            return record.sequence
        case ["", "flockstep", run_id, "eval", peer]:
            record = Record.decode(value)
            if (record.run, record.peer) != (run_id, peer):
                raise ProtocolViolation(f"a {record.kind!r} record of {record.peer!r} does not belong under {key!r}")
            return open_evaluation(record).round
        case ["", "flockstep", run_id, "owner", owner, page]:
            return validate_page(run_id, owner, page, value)
    raise ProtocolViolation(f"nothing is kept under the key {key!r}")
