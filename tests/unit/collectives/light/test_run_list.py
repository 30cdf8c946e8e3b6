"""The list of runs of a bootstrap: only what owners list, bounded, and shared among networks."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from flockstep.collectives.light import run_list
from flockstep.collectives.light.marks import Mark
from flockstep.collectives.light.run_list import LIST_PERIOD, RunLists
from flockstep.dht.directory.store import Entry, Store
from flockstep.dht.keys import RUNS_KEY, listing_key, run_key
from flockstep.dht.published import validate_published
from flockstep.dht.run.listing import (
    MAX_LISTED_RUNS,
    MAX_LISTED_SECONDS,
    MAX_RUN_LIST_BYTES,
    Listing,
    RunList,
    open_listing,
    sign_listing,
    why_not_listed,
)
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.peer.base.errors import RemoteError
from flockstep.peer.identity import Identity
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.wire.schema import decode

OWNER, STRANGER = Identity.from_seed(b"o" * 32), Identity.from_seed(b"s" * 32)
NOW = time.time()
TOML = 'name = "tiny"\n[model]\nsize = "0.2m"\n[data]\nsource = "text:{stdlib}"\nsequence_length = 16\nbatch_size = 1\n'
MANIFEST = Manifest.from_toml(TOML, where="run.toml", owner=OWNER.peer_id)


def signed(seed: int = 0, by: Identity = OWNER) -> SignedManifest:
    return SignedManifest.sign(replace(MANIFEST, owner=by.peer_id, seed=seed), by)


class Shelf:
    """A bootstrap's directory and its list."""

    def __init__(self, exempt: tuple[str, ...] = ()) -> None:
        self.now = NOW
        self.store = Store(BootstrapLimits(exempt=exempt))
        self.heads: dict[str, Mark] = {}
        self.lists = RunLists(self.store, self.heads.get, exempt, clock=lambda: self.now)

    def put(self, key: str, value: bytes, ip: str = "192.0.2.1") -> None:
        validate_published(key, value)
        self.store.put(Entry(key.encode(), "", value, (), ip, self.now + 48 * 3600))

    def publish(self, run: SignedManifest, by: Identity = OWNER, ip: str = "192.0.2.1", *, listed: bool = True) -> None:
        self.put(run_key(run.run_id), run.publishable, ip)
        self.put(listing_key(run.run_id, by.peer_id), sign_listing(by, run.run_id, self.now, listed=listed).encode(), ip)

    def shown(self) -> RunList:
        self.now += LIST_PERIOD  # A new list.
        answer = self.lists.answer(RUNS_KEY)
        assert answer is not None
        assert len(answer) <= MAX_RUN_LIST_BYTES
        return decode(RunList, answer, max_bytes=MAX_RUN_LIST_BYTES)


def test_a_run_is_shown_once_its_owner_lists_it_and_until_it_withdraws_that() -> None:
    shelf, run = Shelf(), signed()
    shelf.put(run_key(run.run_id), run.publishable)
    assert shelf.shown().runs == ()
    shelf.publish(run)
    (shown,) = shelf.shown().runs
    assert (shown.run, shown.round, shown.is_followed, shown.num_peers) == (run.run_id, 0, False, 0)
    shelf.heads[run.run_id] = Mark(7, bytes(32))
    shelf.store.put(Entry(run_key(run.run_id).encode(), STRANGER.peer_id, b"", (), "192.0.2.9", shelf.now + 60))
    (shown,) = shelf.shown().runs
    assert (shown.round, shown.is_followed, shown.num_peers) == (7, True, 1)
    shelf.publish(run, listed=False)
    assert shelf.shown().runs == ()


def test_a_listing_ends_by_itself() -> None:
    shelf = Shelf()
    shelf.publish(signed())
    shelf.now += MAX_LISTED_SECONDS
    for entry in list(shelf.store):
        shelf.store.put(replace(entry, expires=shelf.now + 3600))  # Somebody publishes it again.
    assert shelf.shown().runs == ()


def test_nobody_else_lists_a_run_or_keeps_its_owner_from_it() -> None:
    shelf, run = Shelf(), signed()
    shelf.publish(run, by=STRANGER)
    assert shelf.shown().runs == ()
    false = sign_listing(STRANGER, run.run_id, NOW).encode()
    with pytest.raises(RemoteError, match="is no listing of run"):
        validate_published(listing_key(run.run_id, OWNER.peer_id), false)
    shelf.publish(run)
    assert len(shelf.shown().runs) == 1
    forged = replace(sign_listing(OWNER, run.run_id, NOW), sequence=1).encode()
    with pytest.raises(RemoteError, match="not signed by that peer"):
        validate_published(listing_key(run.run_id, OWNER.peer_id), forged)


def test_a_listing_too_far_ahead_is_not_shown() -> None:
    run = signed()
    record = sign_listing(OWNER, run.run_id, NOW + 3 * MAX_LISTED_SECONDS)
    assert isinstance(open_listing(run.run_id, OWNER.peer_id, record.encode())[1], Listing)
    assert "too far" in why_not_listed(run.run_id, record.encode(), OWNER.peer_id, NOW)


def test_a_stranger_with_many_runs_takes_only_places_that_are_left() -> None:
    shelf = Shelf()
    shelf.publish(signed(), ip="203.0.113.5")
    for seed in range(1, MAX_LISTED_RUNS + 10):
        shelf.publish(signed(seed, STRANGER), STRANGER, ip="198.51.100.7")
    shown = shelf.shown().runs
    assert len(shown) <= MAX_LISTED_RUNS
    assert signed().run_id in {run.run for run in shown}


def test_asking_often_costs_one_list_a_period() -> None:
    shelf = Shelf()
    first = shelf.lists.answer(RUNS_KEY)
    shelf.publish(signed())
    assert shelf.lists.answer(RUNS_KEY) == first
    assert shelf.lists.answer(run_key(signed().run_id)) is None
    assert len(shelf.shown().runs) == 1


def test_a_run_named_as_the_kind_of_a_listing_does_not_end_the_list() -> None:
    shelf = Shelf()
    shelf.publish(signed())
    shelf.store.put(Entry(f"/flockstep/listing/{OWNER.peer_id}".encode(), "", b"member", (), "192.0.2.9", NOW + 3600))
    assert [run.run for run in shelf.shown().runs] == [signed().run_id]


def test_a_withdrawn_listing_costs_one_signature_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, opened, decoded = Shelf(), list[str](), list[str]()
    shelf.publish(signed(), listed=False)

    def opening(run: str, owner: str, data: bytes) -> tuple[object, Listing]:
        opened.append(run)
        return open_listing(run, owner, data)

    def decoding(data: bytes, run: str) -> SignedManifest:
        decoded.append(run)
        return SignedManifest.decode(data, run)

    monkeypatch.setattr(run_list, "open_listing", opening)
    monkeypatch.setattr(run_list, "SignedManifest", SimpleNamespace(decode=decoding))
    for _ in range(3):
        assert shelf.shown().runs == ()
    assert (opened, decoded) == ([signed().run_id], [])
    shelf.publish(signed())
    assert len(shelf.shown().runs) == 1
    assert (len(opened), len(decoded)) == (2, 1)
