"""Networks that let nothing but HTTPS out, directly or through a proxy: their peers meet all others through a relay."""

import json
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

PROXIED, WEB_ONLY, SHUT, ORDINARY = range(4)
DELAY = 0.0125
PATIENCE = 120.0
HOMES = [
    Home("cone", delay=DELAY, lets_out="nothing", proxy=("--only-port", "443", "--login", "anna:secret")),
    Home("cone", delay=DELAY, lets_out="tcp dport 443"),
    Home("cone", delay=DELAY, lets_out="nothing", proxy=("--only-port", "80")),
    Home("cone", delay=DELAY),
]


@dataclass(frozen=True, slots=True)
class Town:
    """The four homes, and a bootstrap with two addresses."""

    lab: Lab
    vias: list[str]
    root: Path
    folder: Path
    people: dict[int, Person]

    def extra(self, number: int) -> dict[str, str]:
        """The environment of a home's computer."""
        login = "anna:secret@" if number == PROXIED else ""
        has_proxy = HOMES[number].proxy is not None
        proxy = {"HTTPS_PROXY": f"http://{login}10.{number}.0.1:{PROXY_PORT}"} if has_proxy else {}
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

    def doctor(self, number: int, link: str) -> dict[str, dict[str, Any]]:
        """The checks in a home."""
        doctor = self.start(number, "doctor", link, "--json", "--home", str(self.folder / f"doctor{number}"))
        out, _ = doctor.communicate(timeout=PATIENCE)
        return {check["name"]: check for check in map(json.loads, out.splitlines())}


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


@pytest.fixture(scope="module")
def link(town: Town) -> str:
    signed = publish(town.lab, town.vias[:1], town.folder, rounds=10, min_peers=1)
    return signed.partition("?")[0] + "?" + "&".join(f"via={via}" for via in town.vias)


@pytest.mark.parametrize(
    ("number", "how"), [(PROXIED, f"through the proxy 10.{PROXIED}.0.1:{PROXY_PORT}"), (WEB_ONLY, "directly")]
)
def test_a_peer_holds_its_bootstrap_over_https(town: Town, number: int, how: str) -> None:
    assert town.people[number].ask("settle")["rung"] == Rung.RELAYED
    events = town.people[number].ask("events")["events"]
    assert [event["reason"] for event in events if event["event"] == "bootstrap.over_https"] == [how]


def test_a_peer_of_an_ordinary_home_holds_it_over_tcp(town: Town) -> None:
    assert town.people[ORDINARY].ask("settle")["rung"] == Rung.PUNCHED
    events = town.people[ORDINARY].ask("events")["events"]
    assert [event for event in events if event["event"] == "bootstrap.over_https"] == []


@pytest.mark.parametrize(("one", "other"), [(PROXIED, WEB_ONLY), (WEB_ONLY, ORDINARY), (ORDINARY, PROXIED)])
def test_the_peers_of_all_these_homes_meet_through_the_relay(town: Town, one: int, other: int) -> None:
    there = town.people[other].ask("settle")
    reached = town.people[one].ask("reach", peer=town.people[other].id, addresses=there["addresses"])
    assert reached["final"] == Rung.RELAYED
    assert town.people[one].ask("bulk", peer=town.people[other].id, size=4 << 20)["seconds"] > 0


def test_the_doctor_says_that_only_https_leaves_the_network(town: Town, link: str) -> None:
    for number, how in ((PROXIED, f"through the proxy 10.{PROXIED}.0.1:{PROXY_PORT}"), (WEB_ONLY, "directly")):
        checks = town.doctor(number, link)
        words = f"relayed: only HTTPS leaves this network, {how}; relayed through bootstrap 2"
        assert checks["reachability"]["cause"] == words, checks
        network = ("bootstrap", "reachability", "run", "manifest", "clock")
        assert [name for name, check in checks.items() if check["ok"] is False and name.startswith(network)] == []


def test_where_nothing_leads_out_doctor_and_join_say_what_the_proxy_said(town: Town, link: str) -> None:
    proxy = f"10.{SHUT}.0.1:{PROXY_PORT}"
    answer = f"the HTTPS proxy refuses the connection: {proxy} answered 403 Forbidden to CONNECT 44.0.0.10:443"
    check = town.doctor(SHUT, link)["bootstrap 2: TCP"]
    assert check["ok"] is False
    assert check["cause"].endswith(answer)
    assert "ask its operator to allow CONNECT to that host and port" in check["remedy"]
    join = town.start(SHUT, "join", link, "--home", str(town.folder / "join"), "--threads", "1", "--yes")
    out, _ = join.communicate(timeout=PATIENCE)
    assert join.returncode == 1
    (line,) = [line for line in out.splitlines() if answer in line]
    assert check["remedy"] in line


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
