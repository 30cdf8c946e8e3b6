"""Networks that change under the peers: another public address, a silent cut, a bootstrap that dies."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from flockstep.peer.base.transport import Rung
from natlab.lab import Home, Lab
from natlab.people import Person, start_bootstrap

DELAY = 0.0125
NOTICE_SECONDS = 60.0
"""A check every 15 s, 5 s for its answer, and the way back in."""


@dataclass(frozen=True, slots=True)
class Street:
    """Two homes behind cone routers."""

    lab: Lab
    people: list[Person]

    def wait(self, person: Person, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask where a person is until that `holds`."""
        deadline = time.monotonic() + NOTICE_SECONDS
        while not holds(where := person.ask("where")):
            assert time.monotonic() < deadline, where
            time.sleep(0.5)
        return where


@pytest.fixture
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    folder = tmp_path_factory.mktemp("natlab")
    with Lab([Home("cone", delay=DELAY)] * 2, bootstraps=2, folder=folder) as lab:
        bootstraps = [start_bootstrap(lab, number, folder / f"boot{number}") for number in range(2)]
        people = [Person(lab, f"home{number}", bootstraps) for number in range(2)]
        for person in people:
            person.await_entry()
            person.ask("settle")
        yield Street(lab, people)


def num_relays(where: dict[str, Any]) -> int:
    return sum(address.endswith("/p2p-circuit") for address in where["addresses"])


def reach(street: Street) -> dict[str, Any]:
    mover, other = street.people
    addresses = mover.ask("where")["addresses"]
    return other.ask("reach", peer=mover.id, addresses=addresses)


def test_a_home_with_a_new_address_is_reached_again(street: Street) -> None:
    assert reach(street)["final"] == Rung.PUNCHED
    street.lab.move(0, "44.0.77.1")
    mover, other = street.people
    street.wait(mover, lambda _: any("44.0.77.1" in aim for aim in mover.ask("aims")["aims"]))
    street.wait(mover, lambda where: num_relays(where) == 2 and where["rung"] == Rung.PUNCHED)
    other.ask("leave", peer=mover.id)
    assert reach(street)["final"] == Rung.PUNCHED


def test_a_home_that_was_cut_comes_back(street: Street) -> None:
    mover = street.people[0]
    street.lab.cut(0)
    street.wait(mover, lambda where: num_relays(where) == 0)
    street.lab.mend(0)
    street.wait(mover, lambda where: num_relays(where) == 2)
    assert reach(street)["final"] == Rung.PUNCHED


def test_one_of_two_bootstraps_is_enough(street: Street) -> None:
    street.lab.kill("boot0")
    for person in street.people:
        where = street.wait(person, lambda where: num_relays(where) == 1)
        assert where["rung"] == Rung.PUNCHED
    assert reach(street)["final"] == Rung.PUNCHED
