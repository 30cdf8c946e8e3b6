"""A glimpse of the laboratory in every run of the tests: two homes punch through their routers."""

from collections.abc import Iterator

import pytest
from flockstep.peer.base.transport import Rung
from natlab.lab import Home, Lab
from natlab.people import Person, start_bootstrap

HOMES = ("cone", "shift")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Person]]:
    folder = tmp_path_factory.mktemp("natlab")
    with Lab([Home(kind) for kind in HOMES], bootstraps=2, folder=folder) as lab:
        bootstraps = [start_bootstrap(lab, number, folder / f"boot{number}") for number in range(2)]
        people = [Person(lab, f"home{number}", bootstraps) for number in range(len(HOMES))]
        for person in people:
            person.await_entry()
        yield people


def test_two_homes_behind_routers_reach_each_other(people: list[Person]) -> None:
    one, other = people
    where = other.ask("settle")
    assert where["rung"] == Rung.PUNCHED
    assert one.ask("reach", peer=other.id, addresses=where["addresses"])["final"] == Rung.PUNCHED
