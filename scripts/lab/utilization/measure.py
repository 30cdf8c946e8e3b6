"""One measurement: real peers on shaped lines, from the published run to the figures."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError
from ....peer.log.telemetry import log_path, read_events
from ...demo.local_run import ADDRESS, LINK, START_SECONDS
from ...demo.processes import Processes
from ..bench.group import Group, Worker, settled_machine
from ..bench.worker import OPENING_SECONDS, WorkerAnswer
from .figures import (
    Boundary,
    PeerFigures,
    means_of,
    measured,
    peer_figures,
    round_parts,
    rounds_ended,
    stalled_between,
)
from .lines import BOOTSTRAP, LineCounters, SwarmLines, peer_address, peer_name, shaped_line
from .options import UtilizationCase, real_sizes

BITS_AT_MOST = 64
"""Bits a parameter that a round moves each way, at most: fp32 both ways. For timeouts only."""
REAL_STEP_AT_MOST = 60.0
"""Seconds of a real step on a busy CPU, for timeouts only."""
REPORT_POLL = 0.2
"""Seconds to wait for the report of one peer before it is the next one's turn: the first that fails ends the case."""
EXTRA_SECONDS = 300.0
"""Beyond the arithmetic: rounds that are void, and a machine that others use."""


@dataclass(frozen=True, slots=True)
class PeerTrace:
    """What one peer did."""

    boundaries: tuple[Boundary, ...]
    stalls: tuple[tuple[float, float], ...]
    """Waits inside of `Swarm.step`, (start, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationRow:
    """A case and its figures; none where it failed."""

    case: UtilizationCase
    peers: tuple[PeerFigures, ...] = ()
    traces: tuple[PeerTrace, ...] = ()
    certified: int = 0
    void: int = 0
    missed: int = 0
    round_seconds: dict[str, float] = field(default_factory=dict)
    """Means of the `ROUND_PARTS`, over peers and rounds that were waited for."""
    failure: str = ""

    @property
    def utilization(self) -> float | None:
        """The mean over the peers."""
        return statistics.fmean(peer.utilization for peer in self.peers) if self.peers else None

    @property
    def peak_rate_share(self) -> float | None:
        """The greatest rate of any peer, sending or receiving, as a share of the line's."""
        if not self.peers:
            return None
        return max(max(peer.peak_up, peer.peak_down) for peer in self.peers) * 8e-6 / self.case.rate

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without training a round, the mean over the peers."""
        if not self.peers:
            return None
        return statistics.fmean((peer.seconds - peer.trained) / peer.rounds for peer in self.peers)

    @property
    def steps_taken(self) -> float | None:
        """Inner steps between two averages of the same parameters, the mean over the peers: H, or more on a thin line."""
        if not self.peers or not self.case.step_seconds:
            return None
        each = zip(self.peers, self.case.step_seconds, strict=True)
        return self.case.cycle * statistics.fmean(peer.trained / peer.rounds / seconds for peer, seconds in each)

    @property
    def stalled_seconds(self) -> float | None:
        """The idle seconds a round in waits that are long enough to be drawn; the rest is what each step costs."""
        if not self.peers:
            return None
        return statistics.fmean(
            stalled_between(trace.stalls, trace.boundaries[0].time, trace.boundaries[-1].time) / peer.rounds
            for trace, peer in zip(self.traces, self.peers, strict=True)
        )

    @property
    def line_seconds(self) -> float | None:
        """Seconds that the bytes of a round take on the line at its full rate, the mean over the peers."""
        if not self.peers:
            return None
        fuller = statistics.fmean(max(peer.sent, peer.received) / peer.rounds for peer in self.peers)
        return fuller * 8e-6 / self.case.rate

    def as_json(self) -> dict[str, Any]:
        """Return the row for programs."""
        case = self.case
        return {
            "system": case.system,
            "mode": case.mode,
            "codec": case.codec,
            "peers": case.peers,
            "params": case.params,
            "rate_mbit": case.rate,
            "round_trip_ms": round(case.round_trip * 1000, 3),
            "loss_percent": round(case.loss * 100, 6),
            "step_s": list(case.step_seconds) or "real",
            "steps": case.steps,
            "steps_taken": _rounded(self.steps_taken),
            "rounds": case.rounds,
            "fragments": case.fragments,
            "phase_s": case.phase_seconds,
            "utilization": _rounded(self.utilization),
            "planned_utilization": _rounded(case.planned_share),
            "utilization_of_peers": [_rounded(peer.utilization) for peer in self.peers],
            "peak_rate_share": _rounded(self.peak_rate_share),
            "idle_s_per_round": _rounded(self.idle_seconds),
            "stalled_s_per_round": _rounded(self.stalled_seconds),
            "line_s_per_round": _rounded(self.line_seconds),
            "round_s": {name: _rounded(seconds) for name, seconds in self.round_seconds.items()},
            "sent_bytes_of_peers": [peer.sent for peer in self.peers],
            "received_bytes_of_peers": [peer.received for peer in self.peers],
            "rounds_certified": self.certified,
            "rounds_void": self.void,
            "results_missed": self.missed,
            "reason": self.failure,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def measure_utilization(case: UtilizationCase, folder: Path, progress: Callable[[str], None]) -> UtilizationRow:
    """Measure a case. A system that fails gives a row with the reason: the others are measured all the same."""
    folder.mkdir(parents=True)
    line = shaped_line(case.rate, case.round_trip, case.loss)
    try:
        with SwarmLines(folder, [line] * case.peers) as lines, Processes() as processes:
            if case.system == "flockstep":
                link = publish_run(case, lines, processes, folder)
                progress("the run is published, the peers join")
            else:
                link = ""
            module = "utilization.peer" if case.system == "flockstep" else f"utilization.{case.system}"
            places = [lines.command(peer_name(index)) for index in range(case.peers)]
            with Group(case.python, module, places, folder) as group:
                return _trained(case, group, link, folder, progress)
    except LocalError as error:
        return UtilizationRow(case=case, failure=str(error))


def publish_run(case: UtilizationCase, lines: SwarmLines, processes: Processes, folder: Path) -> str:
    """Start a bootstrap, publish the run of the case there in the name of the first peer, and return its link."""
    inside = lines.command(BOOTSTRAP)
    listen = ["--home", str(folder / BOOTSTRAP), "--port", "4001"]
    bootstrap = processes.start("the bootstrap", ["bootstrap", *listen], folder / "bootstrap.log", inside)
    address = bootstrap.await_line(ADDRESS.replace(r"127\.0\.0\.1", r"44\.0\.0\.10"), START_SECONDS)
    toml = folder / "run.toml"
    write_whole(toml, case.run_toml().encode())
    home = folder / peer_name(0)
    create = ["run", "create", str(toml), "--via", address, "--home", str(home)]
    owner = processes.start("flockstep run create", create, folder / "owner.log", inside)
    link = owner.await_line(LINK, START_SECONDS)
    owner.kill()  # It would go on as a keeper, in the home folder of the first peer.
    return link


def _trained(
    case: UtilizationCase, group: Group, link: str, folder: Path, progress: Callable[[str], None]
) -> UtilizationRow:
    openings = _openings(case, link, folder)
    # The first one alone, since the others may join through it.
    for some in (slice(0, 1), slice(1, None)):
        for worker, opening in zip(group.workers[some], openings[some], strict=True):
            worker.send(opening)
        answers = [settled_machine(worker, "open", OPENING_SECONDS) for worker in group.workers[some]]
        for opening in openings:
            opening["first"] = opening["first"] or answers[0]
    progress("all have joined and train")
    began = time.monotonic()
    with LineCounters([worker.pid for worker in group.workers]) as counters:
        reports = reports_of(group.workers, {"op": "train", "rounds": case.rounds + 1}, patience(case))
    progress(f"all rounds are done after {time.monotonic() - began:.0f} s")
    boundaries = [measured([Boundary(*values) for values in report["boundaries"]], case.cycle) for report in reports]
    for index, those in enumerate(boundaries):
        if len(those) < 2:
            raise LocalError(f"peer {index} has the results of {len(those)} rounds, and it takes two to measure")
    figures = [peer_figures(those, samples) for those, samples in zip(boundaries, counters.samples, strict=True)]
    traces = [
        PeerTrace(those, tuple((start, end) for start, end in report["stalls"]))
        for those, report in zip(boundaries, reports, strict=True)
    ]
    row = UtilizationRow(case=case, peers=tuple(figures), traces=tuple(traces))
    if case.system != "flockstep":
        return replace(row, certified=min(those[-1].round - those[0].round for those in boundaries))
    rounds = case.cycle + 1, case.cycle * (case.rounds + 1)
    logs = [[event for _, event in read_events(log_path(folder / peer_name(index)))] for index in range(case.peers)]
    certified, void, missed = rounds_ended(logs, *rounds)
    parts = [
        seconds
        for log, trace in zip(logs, traces, strict=True)
        for seconds in round_parts(log, trace.stalls, *rounds)
    ]
    return replace(row, certified=certified, void=void, missed=missed, round_seconds=means_of(parts))


def _openings(case: UtilizationCase, link: str, folder: Path) -> list[WorkerAnswer]:
    """Return what each peer needs to start. A slow one moves all of its model in as many steps as it will make."""
    openings: list[WorkerAnswer] = []
    for index in range(case.peers):
        seconds = case.step_seconds[index] if case.step_seconds else None
        fastest = min(case.step_seconds, default=0.0)
        openings.append(
            {
                "op": "open",
                "index": index,
                "peers": case.peers,
                "link": link,
                "home": str(folder / peer_name(index)),
                "address": peer_address(index),
                "params": case.params,
                "size": real_sizes().get(case.params, ""),
                "step_seconds": seconds,
                "steps": case.steps,
                "cover": max(1, round(case.steps * fastest / seconds)) if seconds else 1,
                "first": None,
            }
        )
    return openings


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
    step = min(case.step_seconds) if case.step_seconds else REAL_STEP_AT_MOST
    slowest = max(case.step_seconds, default=REAL_STEP_AT_MOST)
    transfer = case.params * BITS_AT_MOST / (case.rate * 1e6)
    return 3 * (case.rounds + 1) * (case.steps * step + slowest + transfer) + EXTRA_SECONDS
