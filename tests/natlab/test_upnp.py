"""Routers that open a port when asked: behind one of them even a symmetric NAT is no obstacle."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.base.transport import Rung
from natlab.lab import Home, Lab, environment
from natlab.people import Person, start_bootstrap

DELAY = 0.0125
PATIENCE = 30.0
"""Seconds: a dial back, a search for routers, and another dial back take about 8."""


@dataclass(frozen=True, slots=True)
class Street:
    """A home of two computers whose router speaks UPnP, and one whose router does not; both are symmetric."""

    lab: Lab
    people: dict[str, Person]

    def wait_for_port(self, computer: str) -> dict[str, Any]:
        """Where a computer is once strangers reach it."""
        deadline = time.monotonic() + PATIENCE
        while (where := self.people[computer].ask("where"))["rung"] != Rung.DIRECT:
            assert time.monotonic() < deadline, (where, self.events(computer))
            time.sleep(0.2)
        return where

    def events(self, computer: str, name: str = "") -> list[dict[str, Any]]:
        found = self.people[computer].ask("events")["events"]
        return [event for event in found if str(event["event"]).startswith(name or "upnp.")]


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    folder = tmp_path_factory.mktemp("natlab")
    homes = [Home("symmetric", delay=DELAY, upnp=True, computers=2), Home("symmetric", delay=DELAY)]
    with Lab(homes, bootstraps=2, folder=folder) as lab:
        bootstraps = [start_bootstrap(lab, number, folder / f"boot{number}") for number in range(2)]
        people = {name: Person(lab, name, bootstraps) for name in ("home0", "home1")}
        for person in people.values():
            person.await_entry()
            person.ask("settle")
        street = Street(lab, people)
        street.wait_for_port("home0")
        people["home0b"] = Person(lab, "home0b", bootstraps)
        people["home0b"].await_entry()
        yield street


def opened(lab: Lab) -> str:
    return lab.inside("router0", "nft list chain ip nat upnp")


def test_a_port_of_the_router_is_asked_for_proven_and_announced(street: Street) -> None:
    where = street.wait_for_port("home0")
    assert where["addresses"][0] == f"/ip4/{street.lab.public_ip(0)}/tcp/4001"
    assert not [address for address in where["addresses"] if address.endswith("/p2p-circuit")]
    (event,) = street.events("home0")
    assert (event["event"], event["port"]) == ("upnp.opened", 4001)
    reached = street.people["home1"].ask("reach", peer=street.people["home0"].id, addresses=where["addresses"])
    assert reached["final"] == Rung.DIRECT


def test_the_second_computer_of_a_home_gets_another_port(street: Street) -> None:
    where = street.wait_for_port("home0b")
    assert where["addresses"][0] == f"/ip4/{street.lab.public_ip(0)}/tcp/4002"
    reached = street.people["home1"].ask("reach", peer=street.people["home0b"].id, addresses=where["addresses"])
    assert reached["final"] == Rung.DIRECT


def test_the_doctor_finds_the_router_and_opens_nothing(street: Street, tmp_path: Path) -> None:
    before = opened(street.lab)
    doctor = street.lab.start(
        "home0b",
        [sys.executable, "-m", "flockstep", "doctor", "--json", "--home", str(tmp_path)],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    checks = [json.loads(line) for line in doctor.communicate(timeout=PATIENCE)[0].splitlines()]
    (router,) = [check for check in checks if check["name"] == "UPnP"]
    assert router["ok"]
    assert street.lab.public_ip(0) in router["cause"]
    assert opened(street.lab) == before


def test_a_router_that_does_not_answer_is_told_once(street: Street) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (told := street.events("home1")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [(event["event"], event["step"]) for event in told] == [("upnp.failed", "open")]
    assert street.people["home1"].ask("where")["rung"] == Rung.RELAYED


def test_who_leaves_gives_the_port_back(street: Street) -> None:
    assert "dport 4001" in opened(street.lab)
    street.people["home0"].end()
    assert "dport 4001" not in opened(street.lab)
    assert "dport 4002" in opened(street.lab)
