"""One measurement: real peers on shaped lines, from the published run to the figures.

    public      a bridge, 44.0.0.1/16
    boot        44.0.0.10; its line has no limit
    peer i      44.0.<i + 1>.1, with the line of the case

The addresses count as public, so peers announce them; nothing leaves the namespaces. Every packet passes two lines, the
sender's and the receiver's: each has a quarter of the round trip as its delay, and its share of the loss.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError
from ....peer.log.telemetry import log_path, read_events
from ...demo.local_run import ADDRESS, LINK, START_SECONDS
from ...demo.processes import Processes
from ..bench.group import Group, Worker, settled_machine
from ..bench.worker import OPENING_SECONDS, WorkerAnswer
from ..namespaces import Namespaces, ShapedLine, check_compiler, check_namespaces
from .cases import UtilizationCase
from .figures import (
    Boundary,
    LineSample,
    interface_counters,
    means_of,
    measured,
    peak_rate,
    round_parts,
    rounds_ended,
    stalled_between,
)

UtilizationRow: TypeAlias = dict[str, Any]
"""A case and its figures as written in JSON: seconds, Mbit/s, shares of 1; None where it failed, with its `reason`."""
FIGURES = ("utilization", "steps_taken", "peak_rate_share", "idle_s_per_round", "stalled_s_per_round", "line_s_per_round")
"""Those that are one number, and None where a case failed."""

BOOTSTRAP = "boot"
DEVICE = "eth0"
SAMPLE_SECONDS = 0.05
"""Between two readings of the counters: 20 in each window of the peak rate."""
BITS_AT_MOST = 64
"""Bits a parameter that a round moves each way, at most: fp32 both ways. For timeouts only."""
REPORT_POLL = 0.2
"""Seconds to wait for the report of one peer before it is the next one's turn: the first that fails ends the case."""
EXTRA_SECONDS = 300.0
"""Beyond the arithmetic: rounds that are void, and a machine that others use."""


def shaped_line(case: UtilizationCase) -> ShapedLine:
    """Return the line of each peer, so that two of them in a row have this round trip and loss."""
    return ShapedLine(case.rate, case.rate, case.round_trip / 4, 1 - (1 - case.loss) ** 0.5)


def check_lines(case: UtilizationCase) -> None:
    """Raise `LocalError` if this machine cannot make such lines."""
    check_namespaces(("ip", "tc"))
    if case.round_trip or case.loss:
        check_compiler()


def measure_utilization(case: UtilizationCase, folder: Path, progress: Callable[[str], None]) -> UtilizationRow:
    """Measure a case. One that fails gives a row with the reason: the others are measured all the same."""
    folder.mkdir(parents=True)
    try:
        with Namespaces(folder) as network, Processes() as processes:
            network.add_bridge("public", "44.0.0.1/16")
            places = {f"peer{index}": (f"44.0.{index + 1}.1/16", shaped_line(case)) for index in range(case.peers)}
            for name, (address, line) in {BOOTSTRAP: ("44.0.0.10/16", ShapedLine()), **places}.items():
                network.add(name)
                network.connect(name, DEVICE, "public", f"to-{name}", line)
                network.address(name, DEVICE, address)
            link = publish_run(case, network, processes, folder)
            progress("the run is published, the peers join")
            with Group(sys.executable, "utilization.peer", [network.command(name) for name in places], folder) as group:
                return row_of(case, **_trained(case, group, link, folder, progress))
    except LocalError as error:
        return row_of(case, reason=str(error))


def row_of(case: UtilizationCase, **figures: Any) -> UtilizationRow:
    """Return the row of a case with these figures."""
    return {
        "system": "flockstep",
        "mode": case.mode,
        "codec": case.codec,
        "peers": case.peers,
        "params": case.params,
        "rate_mbit": case.rate,
        "round_trip_ms": round(case.round_trip * 1000, 3),
        "loss_percent": round(case.loss * 100, 6),
        "step_s": list(case.step_seconds),
        "steps": case.steps,
        "rounds": case.rounds,
        "cycle": case.cycle,
        "fragments": case.fragments,
        "planned_utilization": _rounded(case.planned_share),
        "utilization_of_peers": [],
        "round_s": {},
        "sent_bytes_of_peers": [],
        "received_bytes_of_peers": [],
        "rounds_certified": 0,
        "rounds_void": 0,
        "results_missed": 0,
        "reason": "",
        **dict.fromkeys(FIGURES),
        **figures,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


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
    case: UtilizationCase, group: Group, link: str, folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    homes = [folder / f"peer{index}" for index in range(case.peers)]
    fastest = min(case.step_seconds)
    for index, (worker, seconds) in enumerate(zip(group.workers, case.step_seconds, strict=True)):
        # A slow one moves all of its model in as many steps as it will make.
        cover = max(1, round(case.steps * fastest / seconds))
        opening = {"index": index, "home": str(homes[index]), "step_seconds": seconds, "cover": cover}
        worker.send({"op": "open", "link": link, "params": case.params, **opening})
    for worker in group.workers:
        settled_machine(worker, "open", OPENING_SECONDS)
    progress("all have joined and train")
    began = time.monotonic()
    samples: list[list[LineSample]] = [[] for _ in group.workers]
    over = threading.Event()
    counters = threading.Thread(target=_sample, args=([worker.pid for worker in group.workers], samples, over), daemon=True)
    counters.start()
    try:
        reports = reports_of(group.workers, {"op": "train"}, patience(case))
    finally:
        over.set()
        counters.join()
    progress(f"all rounds are done after {time.monotonic() - began:.0f} s")
    boundaries = [measured([Boundary(*values) for values in report["boundaries"]], case.cycle) for report in reports]
    for index, those in enumerate(boundaries):
        if len(those) < 2:
            raise LocalError(f"peer {index} has the results of {len(those)} rounds, and it takes two to measure")
    logs = [[event for _, event in read_events(log_path(home))] for home in homes]
    return figures_of(case, boundaries, [report["stalls"] for report in reports], samples, logs)


def _sample(pids: Sequence[int], samples: Sequence[list[LineSample]], over: threading.Event) -> None:
    """Read the interfaces' counters of these processes, each in a namespace of its own, until it is over."""
    while not over.wait(SAMPLE_SECONDS):
        for pid, those in zip(pids, samples, strict=True):
            try:
                found = interface_counters(Path(f"/proc/{pid}/net/dev").read_text(), DEVICE)
            except OSError:  # A process that has just ended.
                continue
            if found is not None:  # It may not have entered its namespace yet.
                those.append(LineSample(time.time(), *found))


def figures_of(
    case: UtilizationCase,
    boundaries: Sequence[Sequence[Boundary]],
    stalls: Sequence[Sequence[tuple[float, float]]],
    samples: Sequence[Sequence[LineSample]],
    logs: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    """Return the figures of a case, each between a peer's first and last boundary, from what each peer recorded."""
    cycle, mean = case.cycle, statistics.fmean
    spans = [(those[0], those[-1]) for those in boundaries]
    rounds = [last.round - first.round for first, last in spans]
    trained, lasted = ([getattr(last, of) - getattr(first, of) for first, last in spans] for of in ("trained", "time"))
    shares = [each / seconds for each, seconds in zip(trained, lasted, strict=True)]
    idle = [seconds - each for each, seconds in zip(trained, lasted, strict=True)]
    steps = [cycle * each / seconds for each, seconds in zip(trained, case.step_seconds, strict=True)]
    waited = [stalled_between(those, first.time, last.time) for those, (first, last) in zip(stalls, spans, strict=True)]
    inside = [
        [sample for sample in those if first.time <= sample.time <= last.time]
        for those, (first, last) in zip(samples, spans, strict=True)
    ]
    sent = [those[-1].sent - those[0].sent if those else 0 for those in inside]
    received = [those[-1].received - those[0].received if those else 0 for those in inside]
    counters = [[(one.time, getattr(one, way)) for one in those] for those in inside for way in ("sent", "received")]
    numbers = cycle + 1, cycle * (case.rounds + 1)
    certified, void, missed = rounds_ended(logs, *numbers)
    parts = [each for log, those in zip(logs, stalls, strict=True) for each in round_parts(log, those, *numbers)]

    def per_round(values: Sequence[float]) -> float | None:
        return _rounded(mean(value / number for value, number in zip(values, rounds, strict=True)))

    return {
        "utilization": _rounded(mean(shares)),
        "utilization_of_peers": [_rounded(share) for share in shares],
        "steps_taken": per_round(steps),
        "peak_rate_share": _rounded(max(map(peak_rate, counters)) * 8e-6 / case.rate),
        "idle_s_per_round": per_round(idle),
        "stalled_s_per_round": per_round(waited),
        "line_s_per_round": per_round([max(pair) * 8e-6 / case.rate for pair in zip(sent, received, strict=True)]),
        "round_s": {name: _rounded(seconds) for name, seconds in means_of(parts).items()},
        "sent_bytes_of_peers": sent,
        "received_bytes_of_peers": received,
        "rounds_certified": certified,
        "rounds_void": void,
        "results_missed": missed,
    }


def reports_of(workers: Sequence[Worker], command: WorkerAnswer, seconds: float) -> list[WorkerAnswer]:
    """Return the answers of all to a long command. Raises `LocalError` as soon as one has failed, or after the timeout."""
    for worker in workers:
        worker.send(command)
    answers: dict[Worker, WorkerAnswer] = {}
    deadline = time.monotonic() + seconds
    while missing := [worker for worker in workers if worker not in answers]:
        for worker in missing:
            try:
                _, answers[worker] = worker.receive(time.monotonic() + REPORT_POLL)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise LocalError(f"{worker.log.stem}: not all rounds were done after {seconds:.0f} s") from None
                continue
            if answers[worker].get("outcome") == "failed":
                raise LocalError(f"{worker.log.stem}: {answers[worker]['reason']}")
    return [answers[worker] for worker in workers]


def patience(case: UtilizationCase) -> float:
    """Return the timeout of a measurement in seconds: three times what the arithmetic says, and some more."""
    transfer = case.params * BITS_AT_MOST / (case.rate * 1e6)
    a_round = case.steps * min(case.step_seconds) + max(case.step_seconds) + transfer
    return 3 * (case.rounds + 1) * a_round + EXTRA_SECONDS
