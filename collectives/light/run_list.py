"""The list of runs that a bootstrap shows: those that their owners list, of its directory, with what it knows of them.

Theory of operation. Keys are free, and so are manifests and listings signed by them. What one origin may put into the
directory is bounded there (`dht.directory.store`). Here the places of the list go to the networks in turns, so a stranger
with thousands of runs takes only places that nobody else wants. Asking is free, so the list is made once in `LIST_PERIOD`.
"""

import time
from collections.abc import Callable
from itertools import chain, islice, zip_longest

from ...dht.directory.store import Entry, Store
from ...dht.keys import RUNS_KEY, head_key, run_key
from ...dht.run.listing import (
    MAX_LISTED_RUNS,
    MAX_RUN_LIST_BYTES,
    ListedRun,
    Listing,
    RunList,
    open_listing,
    why_not_now,
)
from ...dht.run.manifest import SignedManifest
from ...peer.base.errors import RemoteError
from ...peer.base.transport import PeerId
from ...peer.quota.origins import Origins
from ...peer.wire.schema import encode
from ..chain.packed import unpack_certificate
from .marks import Mark

LIST_PERIOD = 10.0
"""Seconds. Making the list checks a signature or two for each run: some 50 ms for a full one."""
MAX_LISTINGS_CHECKED = 4 * MAX_LISTED_RUNS
"""Listings whose signatures are checked for one list: of runs of other owners anybody can publish any number."""


class RunLists:
    """The list of one bootstrap. `head` returns the head of a run that it follows."""

    def __init__(
        self,
        store: Store,
        head: Callable[[str], Mark | None],
        exempt: tuple[str, ...],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._head = head
        self._origins = Origins(exempt)
        self._clock = clock
        self._made_at = 0.0
        self._made = b""
        self._checked: dict[tuple[bytes, bytes], Listing | None] = {}
        """The listings of the last list by key and value: a signature is checked once, and not for each list."""

    def answer(self, key: str) -> bytes | None:
        """Return the list for its key; None for all others."""
        if key != RUNS_KEY:
            return None
        now = self._clock()
        if not self._made or not 0 <= now - self._made_at < LIST_PERIOD:
            self._made, self._made_at = self._make(now), now
        return self._made

    def _make(self, now: float) -> bytes:
        networks: dict[str, list[Entry]] = {}
        for entry in self._store:
            if not entry.peer and _is_listing(entry) and entry.is_alive(now):
                origin = self._origins.of(entry.ip)
                networks.setdefault(origin.address if origin.exempt else origin.network, []).append(entry)
        runs: list[ListedRun] = []
        before, self._checked = self._checked, {}
        turns = chain.from_iterable(zip_longest(*(reversed(entries) for entries in networks.values())))
        for entry in islice(filter(None, turns), MAX_LISTINGS_CHECKED):
            known = entry.key, entry.value
            self._checked[known] = before[known] if known in before else _opened(entry)
            if (listed := self._listed(entry, self._checked[known], now)) is not None:
                runs.append(listed)
            if len(runs) == MAX_LISTED_RUNS:
                break
        while len(made := encode(RunList(tuple(runs)))) > MAX_RUN_LIST_BYTES:
            runs.pop()
        return made

    def _listed(self, entry: Entry, listing: Listing | None, now: float) -> ListedRun | None:
        if listing is None or why_not_now(listing, now):
            return None
        run, owner = _named(entry)
        manifest, head = self._store.value(run_key(run).encode(), now), self._store.value(head_key(run).encode(), now)
        try:
            if manifest is None or SignedManifest.decode(manifest.value, run).manifest.owner != owner:
                return None
            published = unpack_certificate(head.value).slot.round if head is not None else 0
        except RemoteError:  # Entries on disk are not validated again.
            return None
        followed = self._head(run)
        num_peers = self._store.num_providers(run_key(run).encode())
        return ListedRun(run, entry.value, followed.round if followed else published, followed is not None, num_peers)


def _is_listing(entry: Entry) -> bool:
    """Return True under `listing_key`; a run, too, can have the name of the kind."""
    parts = entry.key.split(b"/")
    return len(parts) == 5 and parts[3] == b"listing"


def _named(entry: Entry) -> tuple[str, PeerId]:
    """Return the run of a listing's key, and whose listing it is."""
    _, _, run, _, owner = entry.key.decode().split("/")
    return run, owner


def _opened(entry: Entry) -> Listing | None:
    run, owner = _named(entry)
    try:
        return open_listing(run, owner, entry.value)[1]
    except RemoteError:  # Entries on disk are not validated again.
        return None
