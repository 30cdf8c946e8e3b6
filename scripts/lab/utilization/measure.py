"""One measurement: real peers on shaped lines, from the published run to the figures.

    public      a bridge, 44.0.0.1/16
    boot        44.0.0.10; its line has no limit
    peer i      44.0.<i + 1>.1, with the line of the case

The addresses count as public, so peers announce them; nothing leaves the namespaces. Every packet passes two lines, the
sender's and the receiver's: each has a quarter of the round trip as its delay.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError
from ....peer.log.telemetry import Event, log_path, read_events
from ...demo.local_run import ADDRESS, LINK, START_SECONDS
from ...demo.processes import Processes
from ..bench.group import Group, Worker, ask
from ..bench.worker import OPENING_SECONDS
from ..namespaces import Namespaces, ShapedLine
from .cases import UtilizationCase

UtilizationRow: TypeAlias = dict[str, Any]
"""A case and its figures as written in JSON: seconds, Mbit/s, shares of 1; None where it failed, with its `reason`."""
Boundary: TypeAlias = tuple[float, float, int]
"""A peer has the result of a round: (time, seconds in inner steps since its start, round)."""
FIGURES = ("utilization", "steps_taken", "idle_s_per_round", "rounds_certified", "rounds_void")
"""None where a case failed."""

BOOTSTRAP = "boot"
DEVICE = "eth0"
BITS_AT_MOST = 64
"""Bits a parameter that a round moves each way, at most: fp32 both ways. For timeouts only."""
EXTRA_SECONDS = 300.0
"""Beyond the arithmetic: rounds that are void, and a machine that others use."""


def measure_utilization(case: UtilizationCase, folder: Path, progress: Callable[[str], None]) -> UtilizationRow:
    """Measure a case. One that fails gives a row with the reason: the others are measured all the same."""
    folder.mkdir(parents=True)
    try:
        with Namespaces(folder) as network, Processes() as processes:
            network.add_bridge("public", "44.0.0.1/16")
            line = ShapedLine(case.rate, case.rate, case.round_trip / 4)
            places = {f"peer{index}": (f"44.0.{index + 1}.1/16", line) for index in range(case.peers)}
            for name, (address, its) in {BOOTSTRAP: ("44.0.0.10/16", ShapedLine()), **places}.items():
                network.add(name)
                network.connect(name, DEVICE, "public", f"to-{name}", its)
                network.address(name, DEVICE, address)
            link = publish_run(case, network, processes, folder)
            progress("the run is published, the peers join")
            with Group(sys.executable, "utilization.peer", [network.command(name) for name in places], folder) as group:
                return row_of(case, **_trained(case, group.workers, link, folder, progress))
    except LocalError as error:
        return row_of(case, reason=str(error))


def row_of(case: UtilizationCase, **figures: Any) -> UtilizationRow:
    """Return the row of a case with these figures."""
    return {
        "mode": case.mode,
        "codec": case.codec,
        "peers": case.peers,
        "params": case.params,
        "rate_mbit": case.rate,
        "round_trip_ms": round(case.round_trip * 1000, 3),
        "step_s": case.step_seconds,
        "steps": case.steps,
        "rounds": case.rounds * case.cycle,
        "planned_utilization": round(case.planned_share, 4),
        "utilization_of_peers": [],
        "reason": "",
        **dict.fromkeys(FIGURES),
        **figures,
    }


def publish_run(case: UtilizationCase, network: Namespaces, processes: Processes, folder: Path) -> str:
    """Start a bootstrap, publish the run of the case there in the name of the first peer, and return its link."""
    inside = network.command(BOOTSTRAP)
    listen = ["--home", str(folder / BOOTSTRAP), "--port", "4001"]
    bootstrap = processes.start("the bootstrap", ["bootstrap", *listen], folder / "bootstrap.log", inside)
    address = bootstrap.await_line(ADDRESS.replace(r"127\.0\.0\.1", r"44\.0\.0\.10"), START_SECONDS)
    toml = folder / "run.toml"
    write_whole(toml, case.run_toml().encode())
    create = ["run", "create", str(toml), "--via", address, "--home", str(folder / "peer0")]
    owner = processes.start("flockstep run create", create, folder / "owner.log", inside)
    link = owner.await_line(LINK, START_SECONDS)
    owner.kill()  # It would go on as a keeper, in the home folder of the first peer.
    return link


def _trained(
    case: UtilizationCase, workers: Sequence[Worker], link: str, folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    homes = [folder / f"peer{index}" for index in range(case.peers)]
    given = {"link": link, "params": case.params, "step_seconds": case.step_seconds, "steps": case.steps}
    commands = [{"op": "open", **given, "index": index, "home": str(home)} for index, home in enumerate(homes)]
    ask(workers, commands, OPENING_SECONDS)
    progress("all have joined and train")
    reports = ask(workers, [{"op": "train"}] * case.peers, patience(case))
    logs = [[event for _, event in read_events(log_path(home))] for home in homes]
    return figures_of(case, [report["boundaries"] for report in reports], logs)


def figures_of(
    case: UtilizationCase, boundaries: Sequence[Sequence[Boundary]], logs: Iterable[Iterable[Event]]
) -> dict[str, Any]:
    """Return the figures of a case from what each peer recorded.

    They are between a peer's first and last boundary from the end of the first `cycle` rounds on, when each fragment was
    averaged once. Raises `LocalError` if a peer has less than two.
    """
    shares, idle, steps = list[float](), list[float](), list[float]()
    for index, those in enumerate(boundaries):
        ends = [boundary for boundary in those if boundary[2] >= case.cycle]
        if len(ends) < 2:
            raise LocalError(f"peer {index} has the results of {len(ends)} rounds, and it takes two to measure")
        seconds, trained, rounds = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
        shares.append(trained / seconds)
        idle.append((seconds - trained) / rounds)
        steps.append(case.cycle * trained / case.step_seconds / rounds)
    certified, void = set[object](), set[tuple[object, object]]()
    for event in (event for log in logs for event in log):
        number = event.get("round")
        if isinstance(number, int) and case.cycle < number <= case.cycle * (case.rounds + 1):
            if event["event"] == "round.done":
                certified.add(number)
            elif event["event"] == "round.void":
                void.add((number, event["attempt"]))
    return {
        "utilization": round(statistics.fmean(shares), 4),
        "utilization_of_peers": [round(share, 4) for share in shares],
        "steps_taken": round(statistics.fmean(steps), 2),
        "idle_s_per_round": round(statistics.fmean(idle), 4),
        "rounds_certified": len(certified),
        "rounds_void": len(void),
    }


def patience(case: UtilizationCase) -> float:
    """Return the timeout of a measurement in seconds: three times what the arithmetic says, and some more."""
    transfer = case.params * BITS_AT_MOST / (case.rate * 1e6)
    return 3 * (case.rounds + 1) * ((case.steps + 1) * case.step_seconds + transfer) + EXTRA_SECONDS
