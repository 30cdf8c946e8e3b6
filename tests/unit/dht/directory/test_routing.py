"""The routing table of directory servers: admission, eviction, and the peers of a lookup."""

from flockstep.dht.directory.routing import (
    BUCKET_SIZE,
    MAX_SERVER_FAILURES,
    PER_BUCKET,
    PER_TABLE,
    Candidates,
    Servers,
    position,
    position_of_key,
    shared_bits,
)
from flockstep.peer.identity import Identity

ME, *OTHERS = [Identity.from_seed(number.to_bytes(32, "big")).peer_id for number in range(200)]
KEY = b"/flockstep/a-run"


def at(ip: str) -> tuple[str, ...]:
    return (f"/ip4/{ip}/tcp/4001",)


def test_a_server_is_known_once_it_has_answered_and_forgotten_when_it_does_not() -> None:
    servers = Servers(ME)
    servers.answered(ME, at("203.0.113.1"))
    servers.answered(OTHERS[0], ())
    assert len(servers) == 0
    servers.answered(OTHERS[0], at("203.0.113.1"))
    for _ in range(MAX_SERVER_FAILURES - 1):
        servers.failed(OTHERS[0])
    servers.answered(OTHERS[0], at("203.0.113.1"))
    for _ in range(MAX_SERVER_FAILURES - 1):
        servers.failed(OTHERS[0])
    assert OTHERS[0] in servers
    servers.failed(OTHERS[0])
    assert OTHERS[0] not in servers


def test_a_pinned_server_stays_and_is_always_asked() -> None:
    servers = Servers(ME)
    far = max(OTHERS, key=lambda peer: position(peer) ^ position_of_key(KEY))
    servers.pin(far, at("203.0.113.1"))
    for _ in range(2 * MAX_SERVER_FAILURES):
        servers.failed(far)
    for number, peer in enumerate(OTHERS):
        servers.answered(peer, at(f"198.51.{number}.1"))
    near = servers.nearest(KEY)
    assert len(near) == BUCKET_SIZE + 1
    assert far in near
    assert set(servers.unasked(KEY, near, [], [])) == set(near)
    asked = list(near)[:5]
    assert set(servers.unasked(KEY, near, [], asked)) == set(near) - set(asked)


def test_one_network_has_few_places_in_the_table() -> None:
    servers = Servers(ME)
    for number, peer in enumerate(OTHERS):
        servers.answered(peer, at(f"203.0.113.{number}"))
    assert len(servers) == PER_TABLE
    counts = [shared_bits(position(ME), position(peer)) for peer in servers.nearest(KEY)]
    assert max(map(counts.count, counts)) <= PER_BUCKET
    servers.answered(OTHERS[150], at("198.51.100.1"))
    assert OTHERS[150] in servers or len([peer for peer in OTHERS if peer in servers]) == PER_TABLE + 1


def test_a_bucket_is_bounded_and_those_who_are_there_stay() -> None:
    servers = Servers(ME)
    for number, peer in enumerate(OTHERS):
        servers.answered(peer, at(f"10.0.{number}.1"))  # At home, where no network is limited.
    first = [peer for peer in OTHERS if shared_bits(position(ME), position(peer)) == 0]
    assert [peer for peer in first if peer in servers] == first[:BUCKET_SIZE]
    assert servers.buckets() >= {0, 1, 2}


def test_names_without_an_ip_count_as_one_network() -> None:
    servers = Servers(ME)
    for number, peer in enumerate(OTHERS):
        servers.answered(peer, (f"/dns4/host{number}.example/tcp/4001",))
    assert len(servers) == PER_TABLE


def test_one_walk_asks_few_of_one_network_and_a_bounded_number() -> None:
    candidates = Candidates([ME])
    assert not candidates.take(ME, at("203.0.113.1"))
    assert not candidates.take(OTHERS[0], ())
    taken = [candidates.take(peer, at("203.0.113.1")) for peer in OTHERS[:10]]
    assert sum(taken) == PER_TABLE
    taken = [candidates.take(peer, at(f"198.{number}.1.1")) for number, peer in enumerate(OTHERS)]
    assert sum(taken) == 5 * BUCKET_SIZE - PER_TABLE - 1
