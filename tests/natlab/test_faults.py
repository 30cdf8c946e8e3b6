"""Planted faults that need routers, a firewall or a file system: what `doctor` and `join` say, both as real processes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from natlab.lab import PORT, Home, Lab, environment
from natlab.test_training import command, publish

CONE, SYMMETRIC = 0, 1
DOCTOR_SECONDS = 20.0
"""What is promised, whatever is broken."""
PATIENCE = 120.0

FULL_RELAY = """
import sys
from pathlib import Path
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.scripts.peers.bootstrap import BootstrapOptions, run_bootstrap
options = BootstrapOptions(limits=BootstrapLimits(reservations=0))
run_bootstrap(PeerConfig(home=Path(sys.argv[1])), options, lambda line: print(line, flush=True))
"""


@dataclass(frozen=True, slots=True)
class Town:
    """Two homes; the bootstraps' relays have no place left."""

    lab: Lab
    bootstraps: list[str]
    folder: Path

    def doctor(self, number: int, link: str, home: str = "doctor") -> dict[str, dict[str, Any]]:
        """The checks that failed in a home."""
        words = command("doctor", link, "--json", "--home", str(self.folder / home))
        began = time.monotonic()
        out, _ = self._start(number, words).communicate(timeout=PATIENCE)
        assert time.monotonic() - began < DOCTOR_SECONDS
        checks = [json.loads(line) for line in out.splitlines()]
        return {check["name"]: check for check in checks if check["ok"] is False}

    def join(self, number: int, link: str, until: str, home: str = "join") -> str:
        """The line of `join` with such words."""
        process = self._start(number, command("join", link, "--yes", "--threads", "1", "--home", str(self.folder / home)))
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if until in line:
                process.kill()
                return line
        raise AssertionError(f"{until!r} was not said, but {said}")

    def both_say(self, number: int, link: str, name: str, cause: str, remedy: str) -> None:
        check = self.doctor(number, link)[name]
        assert cause in check["cause"]
        assert remedy in check["remedy"]
        assert check["remedy"] in self.join(number, link, cause)

    def _start(self, number: int, words: list[str]) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.lab.start(f"home{number}", words, env=environment(), **pipes)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("natlab")
    with Lab([Home("cone"), Home("symmetric")], bootstraps=3, folder=folder) as lab:
        bootstraps = []
        for number in range(2):
            words = [sys.executable, "-c", FULL_RELAY, str(folder / f"boot{number}")]
            process = lab.start(f"boot{number}", words, stdout=subprocess.PIPE, text=True, env=environment())
            assert process.stdout is not None
            bootstraps.append(next(line.strip() for line in process.stdout if line.startswith("/ip4/44.")))
        yield Town(lab, bootstraps, folder)


@pytest.fixture(scope="module")
def link(town: Town) -> str:
    return publish(town.lab, town.bootstraps, town.folder, rounds=10, min_peers=1)


def test_a_symmetric_router_and_relays_without_a_place(town: Town, link: str) -> None:
    full = "the relay is full, or so is the share of one peer or address"
    words = f"no relay has a place for this peer: {full} (the router gives each destination another port"
    town.both_say(SYMMETRIC, link, "reachability", words, "forward the listen port in your router")


def test_a_port_that_may_not_be_dialled(town: Town, link: str) -> None:
    town.lab.inside("router0", f"nft insert rule ip filter forward ip daddr 44.0.0.10/31 tcp dport {PORT} drop")
    try:
        words = f"a firewall blocks the port: {PORT} is silent, though the host answers on port"
        town.both_say(CONE, link, "bootstrap 1: TCP", words, "allow outgoing TCP to this port")
    finally:
        town.lab.inside("router0", "nft flush chain ip filter forward")
        town.lab.inside("router0", "nft add rule ip filter forward ct state established,related accept")
        town.lab.inside("router0", 'nft add rule ip filter forward iifname "lan" accept')


def test_a_disk_that_is_full(town: Town, link: str) -> None:
    home = town.folder / "full"
    home.mkdir()
    # `ip netns exec` gives every process a mount table of its own: what is mounted here goes with it.
    fill = f"mount -t tmpfs -o size=64k none {home} && head -c 65536 /dev/zero > {home}/film; exec "
    said = {}
    for verb in ("doctor", "join"):
        words = " ".join(command(verb, f"'{link}'", "--home", str(home)))
        out, _ = town._start(CONE, ["sh", "-c", fill + words]).communicate(timeout=PATIENCE)
        (said[verb],) = [line for line in out.splitlines() if "free some space" in line]
    assert said["doctor"].startswith("✗ disk")
    assert "too little disk" in said["doctor"]
    assert "No space left on device" in said["join"]
    assert not list(home.iterdir())


def test_everything_is_broken(town: Town) -> None:
    run_id, peer = "a" * 52, town.bootstraps[0].rpartition("/")[2]
    vias = [f"/ip4/44.0.0.99/tcp/{PORT}", "/ip4/44.0.0.12/tcp/1", "/dns/nowhere.example/tcp/4001", "/ip4/44.0.0.98/tcp/80"]
    town.lab.inside("router0", "nft insert rule ip filter forward ip daddr 44.0.0.98 drop")
    failed = town.doctor(CONE, f"flockstep://{run_id}?" + "&".join(f"via={via}/p2p/{peer}" for via in vias))
    assert set(failed) == {"bootstrap 1: TCP", "bootstrap 2: TCP", "bootstrap 3: name", "bootstrap 4: TCP"}
    assert all(check["remedy"] for check in failed.values()), failed
    assert "nothing comes back from that host" in failed["bootstrap 4: TCP"]["cause"]
