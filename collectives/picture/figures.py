"""A picture as JSON, as `flockstep status --json` and the page show it. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from ...peer.base.transport import PeerId
from .picture import CertifiedRound, Picture, RecentRound

FORMAT = 1
MAX_ROWS_SHOWN = 5_000
WHOLE_ROWS = 1_000
"""Of more rounds than `MAX_ROWS_SHOWN` the last so many are all shown, and of those before every n-th."""
THINNED_AT_ONCE = 250
"""Rounds after which older ones are thinned: a page fetches them anew only where they are others."""


def figures_of(picture: Picture, version: str) -> dict[str, Any]:
    """Return the JSON object of a picture, taken by a flockstep of this version."""
    peers: dict[PeerId, int] = {}
    recent = [recent_figures(row, peers) for row in picture.recent]
    votes = picture.votes
    return {
        "flockstep": version,
        "format": FORMAT,
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
        "goes_on": picture.goes_on,
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
    shown = list(thinned(rows))
    columns = {name: [getattr(row, name) for row in shown] for name in CertifiedRound.__slots__}
    columns["time"] = [None if time is None else round(time) for time in columns["time"]]
    columns["loss"] = [_number(loss) for loss in columns["loss"]]
    return columns


def thinned(rows: Sequence[CertifiedRound]) -> Iterator[CertifiedRound]:
    """Yield the rows that are shown: of a long run the older ones evenly."""
    if len(rows) <= MAX_ROWS_SHOWN:
        yield from rows
        return
    whole = (rows[-1].round - WHOLE_ROWS) // THINNED_AT_ONCE * THINNED_AT_ONCE
    step = -(-len(rows) // (MAX_ROWS_SHOWN - WHOLE_ROWS - THINNED_AT_ONCE))
    yield from (row for row in rows if row.round > whole or (row.round - 1) % step == 0)


def recent_figures(row: RecentRound, peers: dict[PeerId, int]) -> dict[str, Any]:
    """Return the JSON object of a round; peers are named by their places in `peers`, which grows."""
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
        "attempt": row.attempt,
    }


def _plain(item: Any) -> dict[str, Any]:
    """Return a flat record's fields; texts of an enumeration as texts, and figures with four digits."""
    return {name: _number(getattr(item, name)) for name in item.__slots__}


def _number(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return str(value) if isinstance(value, str) else value
