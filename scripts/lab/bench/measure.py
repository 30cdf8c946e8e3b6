"""One measurement of the bench: some rounds of one system.

A round's wall time runs from the command to average until the last peer has the decoded average.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ....peer.base.errors import LocalError
from ..namespaces import Namespaces, check_namespaces
from .group import Group, Worker, ask, cpu_seconds, interface_bytes
from .worker import OPENING_SECONDS

PROGRAMS = {"flockstep": "peer"}
"""The programs of the bench that are not named after their system."""
MEASURE_PATIENCE = 90.0
"""Seconds after which a peer without a result ends its case: hivemind's own timeouts end within 40."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measured case: a system with the interpreter of its workers and its codec, and the size of the task."""

    system: str
    python: str
    codec: str
    peers: int
    params: int
    rule: str = "mean"
    """The aggregation rule; the baseline has no choice."""


Figures: TypeAlias = dict[str, Any]
"""One round, or a case: seconds, bytes; None if not measured, or without a meaning for a system."""
MEDIANS = ("wall_s", "cpu_s", "bytes_per_peer", "rel_l2")
"""The figures of a round of which a case has the median."""


def row_of(case: Case, rounds: Sequence[Figures], failure: str = "") -> Figures:
    """Return a case as written in JSON, from its rounds, and the reason where it failed."""
    known = {name: [figures[name] for figures in rounds if figures[name] is not None] for name in MEDIANS}
    return {
        **{name: value for name, value in asdict(case).items() if name != "python"},
        **{name: statistics.median(values) if values else None for name, values in known.items()},
        "bit_identical": not failure and all(figures["bit_identical"] for figures in rounds),
        "exact": all(figures["exact"] for figures in rounds) if rounds and rounds[0]["exact"] is not None else None,
        "reason": failure,
        "rounds": list(rounds),
    }


def measure_case(case: Case, repeat: int, folder: Path) -> Figures:
    """Run a case. A system that fails gives a row with the reason: the others are measured all the same."""
    rounds: list[Figures] = []
    folder.mkdir(parents=True)
    program = f"bench.{PROGRAMS.get(case.system, case.system)}"
    try:
        with Namespaces(folder) as network:
            inside = place_in(network)
            with Group(case.python, program, [inside] * case.peers, folder) as group:
                _open(group.workers, case)
                for _ in range(repeat):
                    rounds.append(_round(group.workers, is_alone=bool(inside)))
    except LocalError as error:
        return row_of(case, rounds, str(error))
    return row_of(case, rounds)


def place_in(network: Namespaces) -> list[str]:
    """Return the start of a command in a new namespace; nothing where the system or the user can make none."""
    try:
        check_namespaces(("ip",))
    except LocalError:
        return []
    network.add("bench")
    return network.command("bench")


def _open(workers: Sequence[Worker], case: Case) -> None:
    opening = {"op": "open", "params": case.params, "codec": case.codec, "peers": case.peers, "rule": case.rule}
    first = ask(workers[:1], [{**opening, "index": 0, "first": None}], OPENING_SECONDS)
    commands = [{**opening, "index": index, "first": first[0]} for index in range(1, case.peers)]
    greetings = first + ask(workers[1:], commands, OPENING_SECONDS)
    ask(workers, [{"op": "meet", "greetings": greetings}] * case.peers, OPENING_SECONDS)


def _round(workers: Sequence[Worker], *, is_alone: bool) -> Figures:
    ask(workers, [{"op": "fill"}] * len(workers), OPENING_SECONDS)
    cpu, sent = cpu_seconds(workers), interface_bytes(workers[0]) if is_alone else 0
    began = time.monotonic()
    ask(workers, [{"op": "go", "patience": MEASURE_PATIENCE}] * len(workers), MEASURE_PATIENCE)
    wall = time.monotonic() - began
    spent, arrived = cpu_seconds(workers), interface_bytes(workers[0]) if is_alone else 0
    checks = ask(workers, [{"op": "check"}] * len(workers), OPENING_SECONDS)
    return {
        "wall_s": wall,
        "cpu_s": spent - cpu,
        "bytes_per_peer": (arrived - sent) / len(workers) if is_alone else None,
        "rel_l2": max(check["rel_l2"] for check in checks),
        "bit_identical": len({check["digest"] for check in checks}) == 1,
        "exact": None if checks[0].get("exact") is None else all(check["exact"] for check in checks),
    }
