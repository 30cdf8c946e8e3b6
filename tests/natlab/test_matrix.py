"""Every pair of kinds of homes: the rung that it must reach, how soon, and bytes both ways.

The figures are left in `matrix.md` of the tests' temporary folder (`--basetemp`); docs/network.md has those of one run.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from flockstep.peer.base.transport import Rung
from natlab.lab import Home, Lab
from natlab.people import Person, start_bootstrap

DELAY = 0.0125
"""One way from a home to the middle: 25 ms round trip to a bootstrap, 50 ms to another home."""

HOMES = ("cone", "cone", "symmetric", "symmetric", "shift", "shift", "open", "open")
BULK = 4 << 20

STREAM_SECONDS = 5.0
FINAL_SECONDS = 10.0
"""What is promised to users, with all 9 peers on one machine: not a measure of the code's speed."""


def expected(dialling: str, dialled: str) -> Rung:
    """The rung on which two different homes must end, or on a better one."""
    if dialled == "open":
        return Rung.DIRECT
    # Of an open peer and one behind a router both dial: either one's connection serves.
    return Rung.RELAYED if "symmetric" in (dialling, dialled) and dialling != "open" else Rung.PUNCHED


@dataclass(frozen=True, slots=True)
class Town:
    """The laboratory with everybody in."""

    people: dict[str, Person]
    where: dict[str, dict[str, Any]]
    rows: list[list[Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("natlab")
    homes = [Home(kind, delay=DELAY, computers=2 if number == 0 else 1) for number, kind in enumerate(HOMES)]
    with Lab(homes, bootstraps=2, folder=folder) as lab:
        bootstraps = [start_bootstrap(lab, number, folder / f"boot{number}") for number in range(2)]
        names = [f"home{number}" for number in range(len(HOMES))]
        people = {name: Person(lab, name, bootstraps) for name in [*names, "home0b"]}
        for person in people.values():
            person.await_entry()
        where = {name: person.ask("settle") for name, person in people.items()}
        town = Town(people, where)
        yield town
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in town.rows]
    (folder / "matrix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pairs() -> list[tuple[int, int]]:
    """Both directions of every pair of kinds, each between computers that have not met."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one, other in itertools.permutations(range(len(HOMES)), 2):
        taken = {frozenset(pair) for pair in found.values()}
        if frozenset((one, other)) not in taken:
            found.setdefault((HOMES[one], HOMES[other]), (one, other))
    return list(found.values())


@pytest.mark.parametrize(("one", "other"), pairs(), ids=lambda number: HOMES[number])
def test_a_pair_climbs_to_its_rung(town: Town, one: int, other: int) -> None:
    dialling, dialled = town.people[f"home{one}"], town.people[f"home{other}"]
    addresses = town.where[dialled.computer]["addresses"]
    reached = dialling.ask("reach", peer=dialled.id, addresses=addresses)
    bulk = dialling.ask("bulk", peer=dialled.id, size=BULK)
    back = dialled.ask("bulk", peer=dialling.id, size=BULK)
    row = [HOMES[one], HOMES[other], reached["first"], reached["stream_s"], reached["final"], reached["final_s"]]
    town.rows.append([*row, bulk["mbit_s"], back["mbit_s"]])
    ladder = list(Rung)
    rung = Rung(reached["final"])
    assert ladder.index(rung) <= ladder.index(expected(HOMES[one], HOMES[other]))
    assert reached["stream_s"] <= STREAM_SECONDS
    assert reached["final_s"] <= FINAL_SECONDS


def test_two_computers_of_one_home_meet_in_it(town: Town) -> None:
    reached = town.people["home0"].ask(
        "reach", peer=town.people["home0b"].id, addresses=town.where["home0b"]["addresses"]
    )
    assert reached["final"] == Rung.LAN


@pytest.mark.parametrize(
    ("kind", "rung"), [("cone", "punched"), ("symmetric", "relayed"), ("shift", "punched"), ("open", "direct")]
)
def test_everybody_knows_how_it_is_reached_and_why(town: Town, kind: str, rung: str) -> None:
    for number, home in enumerate(HOMES):
        if home == kind:
            found = town.where[f"home{number}"]
            assert found["rung"] == rung, found["reason"]
            relays = [address for address in found["addresses"] if address.endswith("/p2p-circuit")]
            assert len(relays) == (0 if kind == "open" else 2)


def test_every_rung_that_failed_is_told_with_its_cause(town: Town) -> None:
    events = [event for person in town.people.values() for event in person.ask("events")["events"]]
    failed = [event for event in events if event["event"] == "dial.failed"]
    assert {event["step"] for event in failed} >= {Rung.LAN, Rung.PUNCHED}
    assert all(event["peer"] and event["reason"] for event in failed)
