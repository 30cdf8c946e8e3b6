"""A run's picture as its page fetches it: the newest rounds each time, those before them once. Pure.

A picture of 64 peers and 5,000 rounds has 500 kB of JSON, nearly all of it about rounds that change no more. So
`picture.json` has the rounds since the last multiple of `ROUNDS_APART`, and names another file with those before. That
file is named by a hash of what is in it: who has fetched it need never ask for it again.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from ...collectives.picture.figures import figures_of, recent_figures, round_columns, thinned
from ...collectives.picture.fold import MAX_RECENT
from ...collectives.picture.picture import CertifiedRound, Picture, RecentRound
from .assets import Asset, asset_of

JsonValue = Any
"""What `json.loads` returns."""

ROUNDS_APART = 64
"""Rounds after which the older ones are fetched anew, 80 kB at most for 64 peers; the newest take 12 kB beside them."""
NAMED_BEFORE = MAX_RECENT - ROUNDS_APART
"""Older rounds of which a page names who took part: as many as a picture has at each moment."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page fetches: the newest picture or list, and, of a run of many rounds, a file of older ones."""

    picture: JsonValue
    older: Asset | None = None

    @property
    def older_name(self) -> str:
        """The name of the file of older rounds; empty where there is none."""
        return f"rounds-{self.older.digest}.json" if self.older is not None else ""


class PictureSplitter:
    """Splits each picture of one run; the file of older rounds is made anew only where they are others."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._rounds: tuple[tuple[CertifiedRound, ...], tuple[RecentRound, ...]] = (), ()
        self._older: Asset | None = None

    def split(self, picture: Picture) -> Page:
        """Return what the page of the run fetches now."""
        rows = tuple(thinned(picture.rounds))
        until = (rows[-1].round - 1) // ROUNDS_APART * ROUNDS_APART if rows else 0
        named = tuple(row for row in picture.recent if until - NAMED_BEFORE < row.round <= until)
        old = tuple(row for row in rows if row.round <= until), named
        if old != self._rounds:  # Rows that are held are the same objects each time, so this takes microseconds.
            self._rounds = old
            self._older = packed(_older_figures(*old)) if old[0] else None
        recent = tuple(row for row in picture.recent if row.round > until)
        newest = replace(picture, rounds=rows[len(old[0]) :], recent=recent)
        return Page(figures_of(newest, self._version), self._older)


def _older_figures(rows: tuple[CertifiedRound, ...], recent: tuple[RecentRound, ...]) -> JsonValue:
    peers: dict[str, int] = {}
    named = [recent_figures(row, peers) for row in recent]
    return {"rounds": round_columns(rows), "peers": list(peers), "recent": named}


def packed(value: JsonValue) -> Asset:
    """Return the file of a JSON value: null for a number that is none, since peers state their losses themselves."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _name: None)
    body = json.dumps(finite, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    return asset_of("application/json", body)
