"""Networks that let nothing but HTTPS out, directly or through a proxy: their peers meet all others through a relay."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.base.transport import Rung
from natlab.lab import PROXY_PORT, Home, Lab, environment
from natlab.people import Person, start_bootstrap
from natlab.test_training import command, publish
from support.tls import Authority

PROXIED, WEB_ONLY, ORDINARY = range(3)
DELAY = 0.0125
PATIENCE = 120.0
HOMES = [
    Home("cone", delay=DELAY, lets_out="nothing", proxy=("--only-port", "443", "--login", "anna:secret")),
    Home("cone", delay=DELAY, lets_out="tcp dport 443"),
    Home("cone", delay=DELAY),
]


@dataclass(frozen=True, slots=True)
class Town:
    """The three homes, and a bootstrap with two addresses."""

    lab: Lab
    vias: list[str]
    root: Path
    folder: Path
    people: dict[int, Person]

    def extra(self, number: int) -> dict[str, str]:
        """The environment of a home's computer."""
        proxy = {"HTTPS_PROXY": f"http://anna:secret@10.{number}.0.1:{PROXY_PORT}"} if number == PROXIED else {}
        return {"SSL_CERT_FILE": str(self.root), **proxy}

    def enter(self, number: int) -> Person:
        """A peer in a home."""
        person = self.people[number] = Person(self.lab, f"home{number}", self.vias, self.extra(number))
        person.await_entry()
        return person

    def start(self, number: int, *words: str) -> "subprocess.Popen[str]":
        """A command on a home's computer, with its errors among its lines."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.lab.start(f"home{number}", command(*words), env=environment(self.extra(number)), **pipes)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("natlab")
    authority = Authority(folder / "tls")
    chain, key = map(str, authority.issue("44.0.0.10"))
    with Lab(HOMES, folder=folder) as lab:
        options = ("--wss", "44.0.0.10:443", "--tls-certificate", chain, "--tls-key", key)
        plain = start_bootstrap(lab, 0, folder / "boot0", *options)
        secure = f"/ip4/44.0.0.10/tcp/443/tls/ws/p2p/{plain.rpartition('/')[2]}"
        town = Town(lab, [plain, secure], authority.root, folder, {})
        for number in (PROXIED, WEB_ONLY, ORDINARY):
            town.enter(number)
        yield town


@pytest.mark.parametrize(("one", "other"), [(PROXIED, WEB_ONLY), (WEB_ONLY, ORDINARY), (ORDINARY, PROXIED)])
def test_the_peers_of_all_these_homes_meet_through_the_relay(town: Town, one: int, other: int) -> None:
    there = town.people[other].ask("settle")
    reached = town.people[one].ask("reach", peer=town.people[other].id, addresses=there["addresses"])
    assert reached["final"] == Rung.RELAYED
    assert town.people[one].ask("bulk", peer=town.people[other].id, size=4 << 20)["seconds"] > 0


def test_a_peer_behind_a_proxy_trains_with_an_ordinary_one(town: Town) -> None:
    signed = publish(town.lab, town.vias[:1], town.folder, rounds=2, min_peers=2)
    link = signed.partition("?")[0] + "?" + "&".join(f"via={via}" for via in town.vias)
    # The first one is the run's owner, whose home folder `publish` has used.
    peers = [
        town.start(number, "join", link, "--home", str(town.folder / home), "--threads", "1", "--yes")
        for number, home in ((ORDINARY, "peer0"), (PROXIED, "peer1"))
    ]
    for peer in peers:
        out, _ = peer.communicate(timeout=PATIENCE)
        assert "round 2: averaged the work of 2 peers" in out
        assert peer.returncode == 0
