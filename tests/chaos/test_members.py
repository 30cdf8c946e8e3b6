"""Members that crash, and whose bootstraps all die: real processes under `Swarm`."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos.door import free_port
from flockstep.dht.rendezvous import fetch_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import ConnectFailed
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.process.bridge import NetworkDied
from support.bootstraps import Bootstrap, publish_run
from support.trainers import RUN, Trainer

LIVELY = RUN.replace("floor = 20.0", "floor = 5.0")
"""Who is gone is waited for, for as long as the shortest deadline at most: this bounds how long these tests take."""
ROUNDS = 100_000
"""More than any test waits for: the members are told to stop."""


@pytest.fixture
def bootstraps(tmp_path: Path) -> Iterator[list[Bootstrap]]:
    bootstraps = [Bootstrap(tmp_path / f"bootstrap {number}", port=free_port()) for number in range(2)]
    yield bootstraps
    for bootstrap in bootstraps:
        bootstrap.kill()


@contextmanager
def running(members: list[Trainer]) -> Iterator[None]:
    for member in members:
        member.start()
    try:
        yield
    finally:
        for member in members:
            member.stop.set()
        for member in members:
            member.join()
    for member in members:
        assert member.error is None, member.error


def with_all(members: list[Trainer]) -> Callable[[Event], bool]:
    """Whether all members' contributions are in the cut of a `round.done`."""
    everybody = sorted(member.peer_id for member in members)
    return lambda event: sorted(event["cut"]) == everybody  # type: ignore[arg-type]


def test_a_run_outlives_its_bootstraps_and_who_crashes_or_comes_finds_it(
    bootstraps: list[Bootstrap], tmp_path: Path
) -> None:
    addresses = tuple(bootstrap.address() for bootstrap in bootstraps)
    ports = [int(address.split("/")[4]) for address in addresses]
    link = publish_run(LIVELY.format(rounds=ROUNDS, peers=2), addresses, tmp_path / "a")
    members = [Trainer(link, tmp_path / name, seed) for seed, name in enumerate("ab")]
    stays, crashes = members
    with running(members):
        stays.heard("round.done", with_all(members))
        for bootstrap in bootstraps:
            bootstrap.kill()
        before = len(stays.events)
        last = stays.heard("round.done", since=before)["round"]
        # Both before the crash and behind it the run goes on, and nobody is there who could tell where it is.
        stays.heard("round.done", lambda event: int(str(event["round"])) > int(str(last)) + 2, since=before)
        assert not {"round.void", "peer.lost"} & {event["event"] for event in stays.events[before:]}
        with pytest.raises(ConnectFailed, match="the bootstrap is down: connection refused") as caught:
            fetch_manifest(JoinLink.parse(link), PeerConfig(home=tmp_path, host="127.0.0.1", port=0), Telemetry())
        assert "ask for a new one" in caught.value.remedy
        crashes.signal_network(signal.SIGKILL)
        crashes.join(timeout=120)
        assert isinstance(crashes.error, NetworkDied)
        crashes = Trainer(link, tmp_path / "b", 1)
        members[1] = crashes
        crashes.start()
        crashes.heard("bootstrap.unreachable")
        assert crashes.heard("door.remembered")["peer"] == stays.peer_id
        crashes.heard("round.done", with_all(members))
        bootstraps[0] = Bootstrap(tmp_path / "bootstrap 0", port=ports[0])
        bootstraps[0].address()
        newcomer = Trainer(link, tmp_path / "c", 2)
        with running([newcomer]):
            newcomer.heard("round.done", with_all([*members, newcomer]))
    common = min(len(member.roots) for member in members)
    assert common
    assert set(stays.roots) & set(crashes.roots)
