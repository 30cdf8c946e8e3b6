"""A picture as JSON, signed by the peer that took it, and its check.

The file is one JSON object. Its last key, `signature`, is the ed25519 signature in hex of `taken_by` over
`SNAPSHOT_CONTEXT` and all bytes of the file before `,"signature":`, closed by `}`: the bytes themselves, so that nobody
has to write numbers as Python does. It proves who has taken the snapshot, not that what it shows is so.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...peer.base.errors import LocalError, MalformedMessage
from ...peer.base.plain import shortened
from ...peer.base.transport import PeerId
from ...peer.identity import SIGNATURE_BYTES, Identity, verify
from .picture import CertifiedRound, Picture, RecentRound

SNAPSHOT_FORMAT = 1
SNAPSHOT_CONTEXT = b"flockstep snapshot 1\x00"
"""Separates these signatures from other uses of the key."""
MAX_SNAPSHOT_BYTES = 1 << 20
MAX_ROWS_SHOWN = 5_000
WHOLE_ROWS = 1_000
"""Of more rounds than `MAX_ROWS_SHOWN` the last so many are all shown, and of those before every n-th."""
THINNED_AT_ONCE = 250
"""Rounds after which older ones are thinned: a view that is sent what changed must not be sent all anew each round."""
TRIMMED = ("recent", "members", "credit", "troubles", "evaluations", "rounds")
"""The fields of a picture that are shortened for a snapshot that has too many bytes, in order."""
_SEAL = b',"signature":"'
_SEAL_BYTES = len(_SEAL) + 2 * SIGNATURE_BYTES + len(b'"}')


def figures_of(picture: Picture, version: str) -> dict[str, Any]:
    """Return the JSON object of a picture, taken by a flockstep of this version."""
    peers: dict[PeerId, int] = {}
    recent = [_recent_figures(row, peers) for row in picture.recent]
    votes = picture.votes
    return {
        "flockstep": version,
        "format": SNAPSHOT_FORMAT,
        "run": picture.run,
        "name": picture.name,
        "model": picture.model,
        "by": picture.by,
        "contact": picture.contact,
        "data": picture.data,
        "params": picture.params,
        "link": picture.link,
        "owner": picture.owner,
        "taken_at": round(picture.taken_at, 3),
        "taken_by": picture.taken_by,
        "decides": picture.decides,
        "joining": picture.joining,
        "verified": picture.verified,
        "progress": _plain(picture.progress),
        "rounds": round_columns(picture.rounds),
        "peers": list(peers),
        "recent": recent,
        "members": [_plain(member) | {"root": member.root[:8]} for member in picture.members],
        "votes": None if votes is None else votes.figures,
        "evaluations": [
            {
                "round": one.round,
                "loss": one.loss,
                "by": list(one.by),
                "samples": [{"prompt": sample.prompt, "text": sample.text} for sample in one.samples],
            }
            for one in picture.evaluations
        ],
        "credit": [_plain(one) for one in picture.credit],
        "troubles": [_plain(one) for one in picture.troubles],
    }


def round_columns(rows: Sequence[CertifiedRound]) -> dict[str, list[Any]]:
    """Return rows as columns, of a long run with the older ones thinned evenly."""
    shown = list(_thinned(rows))
    columns = {name: [getattr(row, name) for row in shown] for name in CertifiedRound.__slots__}
    columns["time"] = [None if time is None else round(time) for time in columns["time"]]
    columns["loss"] = [_number(loss) for loss in columns["loss"]]
    return columns


def encode_snapshot(picture: Picture, version: str, identity: Identity) -> bytes:
    """Encode and sign a picture, in `MAX_SNAPSHOT_BYTES`: of too many rounds by name the oldest are left out.

    If that is not enough, half of each of `TRIMMED` goes after it. Raises `LocalError` if nothing is left to leave out.
    """
    picture = replace(picture, taken_by=identity.peer_id)
    while len(body := _packed(figures_of(picture, version))) + _SEAL_BYTES > MAX_SNAPSHOT_BYTES:
        field = next((field for field in TRIMMED if getattr(picture, field)), None)
        if field is None:
            raise LocalError(f"a snapshot of this run has more than {MAX_SNAPSHOT_BYTES:,} bytes")
        picture = _halved(picture, field)
    signature = identity.sign(SNAPSHOT_CONTEXT + body)
    return body[:-1] + _SEAL + signature.hex().encode() + b'"}'


def check_snapshot(data: bytes) -> dict[str, Any]:
    """Return the object of a snapshot whose signature is that of `taken_by`. Raises `MalformedMessage`."""
    data = data.strip()
    body, seal = data[:-_SEAL_BYTES] + b"}", data[-_SEAL_BYTES:]
    if len(data) > MAX_SNAPSHOT_BYTES or not seal.startswith(_SEAL) or not seal.endswith(b'"}'):
        raise MalformedMessage("it does not end in a signature")
    try:
        signature = bytes.fromhex(seal[len(_SEAL) : -2].decode())
        figures: dict[str, Any] = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"it is no JSON: {error}") from error
    author = figures.get("taken_by") if isinstance(figures, dict) else None
    if not isinstance(author, str) or figures.get("format") != SNAPSHOT_FORMAT:
        raise MalformedMessage(f"it is no snapshot of format {SNAPSHOT_FORMAT}")
    if not verify(author, SNAPSHOT_CONTEXT + body, signature):
        raise MalformedMessage(f"{shortened(author, 60)} has not signed it")
    return figures


def _halved(picture: Picture, field: str) -> Picture:
    """Leave out the less telling half of a field: of the rounds, which alone end with the newest, the first."""
    rows = getattr(picture, field)
    kept = len(rows) // 2
    return replace(picture, **{field: rows[len(rows) - kept :] if field == "rounds" else rows[:kept]})


def _packed(figures: dict[str, Any]) -> bytes:
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).encode()


def _thinned(rows: Sequence[CertifiedRound]) -> Iterator[CertifiedRound]:
    if len(rows) <= MAX_ROWS_SHOWN:
        yield from rows
        return
    old = (len(rows) - WHOLE_ROWS) // THINNED_AT_ONCE * THINNED_AT_ONCE
    step = -(-old // (MAX_ROWS_SHOWN - WHOLE_ROWS - THINNED_AT_ONCE))
    yield from rows[:old:step]
    yield from rows[old:]


def _recent_figures(row: RecentRound, peers: dict[PeerId, int]) -> dict[str, Any]:
    def places(named: Sequence[PeerId]) -> list[int]:
        return [peers.setdefault(peer, len(peers)) for peer in named]

    return {
        "round": row.round,
        "root": row.root,
        "hash": row.hash,
        "tokens": row.tokens,
        "roster": places(row.roster),
        "cut": places(row.cut),
        "flagged": places(row.flagged),
        "out": [{"peer": places([peer])[0], "reason": reason} for peer, reason in row.away],
        "voters": places(row.voters),
        "quorum": row.quorum,
        "total": row.total,
        "term": row.term,
        "attempt": row.attempt,
    }


def _plain(item: Any) -> dict[str, Any]:
    """Return a flat record's fields; texts of an enumeration as texts, and figures with four digits."""
    return {name: _number(getattr(item, name)) for name in item.__slots__}


def _number(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return str(value) if isinstance(value, str) else value
