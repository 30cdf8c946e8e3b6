"""The store of a directory server, in memory and on disk: eviction, and the cost of damage."""

from pathlib import Path

import pytest
from flockstep.dht.directory.store import (
    MAX_ANSWERED,
    MAX_PROVIDERS,
    PROVIDER_SECONDS,
    VALUE_SECONDS,
    Entry,
    Store,
)
from flockstep.dht.directory.store_file import MAX_ENTRY_BYTES, SLACK, SLACK_BYTES, StoreFile
from flockstep.peer.log.file import LogFile
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from hypothesis import given, settings
from hypothesis import strategies as st

RUN = b"/flockstep/a-run"
HONEST = "198.51.100.1"


def value(key: bytes, ip: str = HONEST, data: bytes = b"data", expires: float = 100.0) -> Entry:
    return Entry(key, "", data, (), ip, expires)


def provider(peer: str, ip: str = HONEST, key: bytes = RUN, expires: float = 100.0) -> Entry:
    return Entry(key, peer, b"", (b"address",), ip, expires)


def test_a_later_entry_takes_the_place_of_an_earlier_one_and_ends() -> None:
    store = Store(BootstrapLimits())
    store.put(value(RUN))
    assert store.put(value(RUN, data=b"newer", expires=50.0)) == 0
    store.put(provider("anna"))
    assert len(store) == 2
    assert store.value(RUN, 49.0) == value(RUN, data=b"newer", expires=50.0)
    assert store.value(RUN, 50.0) is None
    assert [entry.peer for entry in store.providers(RUN, 99.0)] == ["anna"]
    assert store.providers(RUN, 100.0) == []
    store.expire(60.0)
    assert [entry.peer for entry in store] == ["anna"]
    store.expire(100.0)
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_a_wrong_clock_has_taken_in_lives_for_one_lifetime_after_a_restart(tmp_path: Path) -> None:
    ahead, now = 10 * 365 * 86_400.0, 1000.0
    taken = (value(RUN, expires=ahead + VALUE_SECONDS), provider("anna", expires=ahead + PROVIDER_SECONDS))
    store, file = Store(BootstrapLimits()), StoreFile(tmp_path / "store", Telemetry())
    for entry in taken:
        store.put(entry)
        file.append(entry, store)
    again = Store(BootstrapLimits())
    StoreFile(tmp_path / "store", Telemetry()).load(again, now)
    assert [entry.expires for entry in again] == [now + VALUE_SECONDS, now + PROVIDER_SECONDS]


def test_the_oldest_of_an_address_and_of_a_network_gives_way() -> None:
    store = Store(BootstrapLimits(records_per_address=3, records_per_network=4))
    store.put(value(b"honest"))
    for number in range(10):
        store.put(value(b"one %d" % number, "203.0.113.1"))
    assert [entry.key for entry in store][1:] == [b"one 7", b"one 8", b"one 9"]
    for number in range(3):
        store.put(value(b"two %d" % number, "203.0.113.2"))
    assert [entry.key for entry in store] == [b"honest", b"one 9", b"two 0", b"two 1", b"two 2"]


def test_an_exempt_network_has_only_the_limits_of_all() -> None:
    store = Store(BootstrapLimits(records_per_address=3, store_bytes=20_000, exempt=("127.0.0.0/8",)))
    for number in range(100):
        store.put(value(b"%d" % number, "127.0.0.1"))
    assert 3 < len(store) < 20
    assert store.num_bytes <= 20_000


def test_in_a_full_store_the_network_that_has_the_most_gives_way() -> None:
    limits = BootstrapLimits(store_bytes=1_000_000, records_per_address=10**6, records_per_network=10**6)
    store = Store(limits)
    store.put(value(RUN))
    store.put(provider("anna"))
    for number in range(3000):
        store.put(value(b"spam %d" % number, f"203.0.{number % 20}.1", bytes(1000)))
    assert store.num_bytes <= limits.store_bytes
    assert store.value(RUN, 0.0)
    assert store.provider(RUN, "anna", 0.0)


def test_one_network_cannot_crowd_out_the_providers_of_a_run() -> None:
    store = Store(BootstrapLimits(providers_per_network=4))
    store.put(provider("anna"))
    for number in range(50):
        store.put(provider(f"sybil {number}", f"203.0.113.{number}"))
    assert [entry.peer for entry in store.providers(RUN, 0.0)] == [
        *("sybil 49", "anna", "sybil 48", "sybil 47", "sybil 46"),
    ]


def test_many_networks_cannot_either() -> None:
    store = Store(BootstrapLimits(records_per_network=10**6))
    store.put(provider("anna"))
    for number in range(2 * MAX_PROVIDERS):
        store.put(provider(f"sybil {number}", f"203.0.{number % 40}.{number // 40}"))
    told = [entry.peer for entry in store.providers(RUN, 0.0)]
    assert len(told) == MAX_ANSWERED
    assert "anna" in told
    assert len(store) <= MAX_PROVIDERS


renewals = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 120), st.integers(1, 50)), max_size=400)


@given(renewals, st.integers(0, 50))
@settings(max_examples=30)
def test_an_answer_lists_the_networks_in_turns_and_of_each_the_latest_first(
    renewals: list[tuple[int, int, int]], now: int
) -> None:
    store = Store(BootstrapLimits())
    naive: dict[str, tuple[Entry, int]] = {}
    for number, network, expires in renewals:
        renewed = provider(f"peer {number}", f"203.0.{network}.{number}", expires=float(expires))
        store.put(renewed)
        naive.pop(renewed.peer, None)
        naive[renewed.peer] = renewed, network
    latest = {network: turn for turn, (_, network, _) in enumerate(renewals)}
    queues: dict[int, list[Entry]] = {network: [] for network in sorted(latest, key=latest.__getitem__, reverse=True)}
    for renewed, network in reversed(naive.values()):
        if renewed.is_alive(now):
            queues[network].append(renewed)
    turns = [queue[turn] for turn in range(len(renewals)) for queue in queues.values() if turn < len(queue)]
    assert store.providers(RUN, now) == turns[:MAX_ANSWERED]


steps = st.tuples(
    st.sampled_from([b"k1", b"k2", b"k3"]),
    st.sampled_from(["", "a", "b", "c", "d"]),
    st.integers(0, 400),
    st.sampled_from(["203.0.113.1", "203.0.113.2", "198.51.100.1", "127.0.0.1", "2001:db8::1", "no ip"]),
    st.floats(1, 50),
)


@given(st.lists(steps, max_size=60))
def test_every_count_is_that_of_the_entries(entries: list[tuple[bytes, str, int, str, float]]) -> None:
    limits = BootstrapLimits(records_per_address=4, records_per_network=6, providers_per_network=2, store_bytes=15_000)
    store = Store(limits)
    for turn, (key, peer, size, ip, expires) in enumerate(entries):
        store.put(Entry(key, peer, bytes(size), (), ip, expires))
        if turn % 7 == 6:
            store.expire(20.0)
        held = list(store)
        assert store.num_bytes == sum(entry.num_bytes for entry in held) <= limits.store_bytes
        by_network = [sum(entry.ip == ip for entry in held) for ip in ("203.0.113.1", "203.0.113.2")]
        assert max(by_network) <= 4
        assert sum(by_network) <= 6
    store.expire(1e9)
    hidden = (store._of_address, store._of_network, store._providers, store._bytes_of_network)
    assert not any(hidden)


class Disk:
    """A file, and the events that it leaves."""

    def __init__(self, path: Path, limits: BootstrapLimits | None = None) -> None:
        self.events: list[Event] = []
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        self.path = path
        self.store = Store(limits or BootstrapLimits())
        self.file = StoreFile(path, telemetry)
        self.file.load(self.store, 0.0)

    def put(self, entry: Entry) -> None:
        self.store.put(entry)
        self.file.append(entry, self.store)


def test_what_was_taken_in_is_there_after_a_kill(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "directory")
    entries = [value(RUN), provider("anna"), value(b"other", data=b"newer"), value(b"gone", expires=0.0)]
    for entry in (value(b"other"), *entries):
        disk.put(entry)
    again = Disk(tmp_path / "directory")  # The first is not closed: there is nothing to close.
    assert list(again.store) == entries[:3]
    assert again.events == []


@given(st.data())
def test_damage_costs_what_it_touches(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("store") / "directory"
    disk = Disk(path)
    entries = [value(b"key %d" % number, data=bytes([number]) * 50) for number in range(8)]
    for entry in entries:
        disk.put(entry)
    whole = path.read_bytes()
    raw = bytearray(whole)
    size = len(raw) // len(entries)
    start = data.draw(st.integers(0, len(raw) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=20))
    cut = data.draw(st.booleans())
    raw[start : len(raw) if cut else start + len(junk)] = junk
    path.write_bytes(raw)
    again = Disk(path)
    kept = list(again.store)
    touched = range(start // size, 8 if cut else (start + len(junk) - 1) // size + 1)
    assert set(kept) <= set(entries)
    assert {entry for number, entry in enumerate(entries) if number not in touched} <= set(kept)
    looks_whole = len(raw) % size == 0 and whole.startswith(raw)  # What is cut off after a record is not missed.
    assert len(again.events) == (not looks_whole)
    assert {event["event"] for event in again.events} <= {"file.damaged", "file.torn"}
    assert [*Disk(path).store] == kept


def test_the_file_stays_small_and_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "directory")
    for number in range(200):
        disk.put(value(RUN, data=bytes([number % 256]) * 30_000))
        assert disk.path.stat().st_size <= SLACK * disk.store.num_bytes + SLACK_BYTES
    disk.path.unlink()
    disk.path.mkdir()
    for number in range(3):
        disk.put(value(b"%d" % number))
    assert [event["event"] for event in disk.events] == ["store.not_kept"]
    disk.path.rmdir()
    disk.put(value(b"last"))
    assert {entry.key for entry in Disk(disk.path).store} == {RUN, b"0", b"1", b"2", b"last"}


def test_nothing_is_synced_and_no_record_is_longer_than_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as syncs:
        syncs.delattr("os.fsync")
        disk = Disk(tmp_path / "directory")
        disk.put(value(RUN))
    LogFile(disk.path, Telemetry()).append(bytes(MAX_ENTRY_BYTES + 1))
    again = Disk(disk.path)
    assert [entry.key for entry in again.store] == [RUN]
    assert [event["event"] for event in again.events] == ["file.torn"]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "something").touch()
    disk = Disk(tmp_path / "directory")
    assert [event["event"] for event in disk.events] == ["file.unavailable", "store.not_kept"]
