"""Homes with IPv6: no router translates it, so that even two symmetric homes punch through to each other."""

from collections.abc import Iterator
from typing import Any

import pytest
from flockstep.peer.base.transport import Rung
from natlab.lab import Home, Lab
from natlab.people import Person, start_bootstrap

HOMES = ("symmetric", "symmetric", "cone")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Person]]:
    folder = tmp_path_factory.mktemp("natlab")
    homes = [Home(kind, delay=0.0125, ipv6=number < 2) for number, kind in enumerate(HOMES)]
    with Lab(homes, bootstraps=2, folder=folder) as lab:
        bootstraps = [start_bootstrap(lab, number, folder / f"boot{number}") for number in range(2)]
        people = [Person(lab, f"home{number}", bootstraps) for number in range(len(HOMES))]
        for person in people:
            person.await_entry()
        yield people


def reach(dialling: Person, dialled: Person) -> dict[str, Any]:
    return dialling.ask("reach", peer=dialled.id, addresses=dialled.ask("settle")["addresses"])


def test_two_symmetric_homes_meet_on_ipv6(people: list[Person]) -> None:
    assert "/ip6/2a0f:44:1::2/tcp/4001" in people[0].ask("settle")["addresses"]
    assert reach(people[1], people[0])["final"] == Rung.PUNCHED


def test_a_home_without_ipv6_is_no_worse_off(people: list[Person]) -> None:
    reached = reach(people[2], people[0])
    assert reached["final"] == Rung.RELAYED
    assert reached["stream_s"] <= 5.0
