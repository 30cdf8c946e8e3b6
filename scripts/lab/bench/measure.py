"""One measurement of the bench: some rounds of one system, with a peer killed on request.

A round's wall time runs from the command to average until the last survivor has the decoded average.
"""

import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ....peer.base.errors import LocalError
from .group import Group, Worker, cpu_seconds, interface_bytes, peak_memory, reset_peaks, settled_machine
from .worker import OPENING_SECONDS, WorkerAnswer

PROGRAMS = {"flockstep": "peer"}
"""The programs of the bench that are not named after their system."""
MEASURE_PATIENCE = 90.0
"""Seconds after which a peer without a result counts as hung: hivemind's own timeouts end within 40."""


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
"""One round as the survivors saw it, or a case: seconds, bytes; None if not measured, or without a meaning for a system."""
MEDIANS = ("wall_s", "cpu_s", "bytes_per_peer", "peak_memory_bytes", "rel_l2")
"""The figures of a round of which a case has the median."""


def row_of(case: Case, rounds: Sequence[Figures], disturbance: str = "", failure: str = "") -> Figures:
    """Return a case as written in JSON, from its rounds and a signal to the last peer in each."""
    known = {name: [figures[name] for figures in rounds if figures[name] is not None] for name in MEDIANS}
    last = rounds[-1] if rounds else {"exact": None, "contributors": None}
    outcomes = dict.fromkeys([*(figures["outcome"] for figures in rounds), *(["failed"] if failure else [])])
    return {
        "system": case.system,
        "peers": case.peers,
        "params": case.params,
        "codec": case.codec,
        "rule": case.rule,
        **{name: statistics.median(values) if values else None for name, values in known.items()},
        "bit_identical": not failure and all(figures["bit_identical"] for figures in rounds),
        "exact": last["exact"],
        "outcome": ", ".join(outcomes),
        "reason": failure or next((figures["reason"] for figures in rounds if figures["reason"]), ""),
        "contributors": last["contributors"],
        "attempts": max((figures["attempts"] for figures in rounds), default=None),
        "bytes_from": "interface" if interface_bytes() is not None else "transport",
        "disturbance": disturbance or None,
        "wall_s_of_rounds": [round(figures["wall_s"], 4) for figures in rounds],
        "rounds": list(rounds),
    }


def measure_case(case: Case, repeat: int, kill_after: float | None, folder: Path) -> Figures:
    """Run a case. A system that fails gives a row with the reason: the others are measured all the same.

    With `kill_after` the last peer gets SIGKILL so many seconds into each round.
    """
    rounds: list[Figures] = []
    disturbance = "" if kill_after is None else f"SIGKILL of one peer after {kill_after:g} s"
    groups, each = (1, repeat) if kill_after is None else (repeat, 1)  # A system that lost a peer starts afresh.
    try:
        for number in range(groups):
            place = folder / str(number)
            place.mkdir(parents=True)
            with Group(case.python, f"bench.{PROGRAMS.get(case.system, case.system)}", [()] * case.peers, place) as group:
                _open(group, case)
                for _ in range(each):
                    rounds.append(_round(group, kill_after))
                    if "hung" in rounds[-1]["outcome"]:
                        return row_of(case, rounds, disturbance)
    except LocalError as error:
        return row_of(case, rounds, disturbance, str(error))
    return row_of(case, rounds, disturbance)


def _open(group: Group, case: Case) -> None:
    first, *others = group.workers
    opening = {"op": "open", "params": case.params, "codec": case.codec, "peers": case.peers, "rule": case.rule}
    first.send({**opening, "index": 0, "first": None})
    greetings = [settled_machine(first, "open", OPENING_SECONDS)]
    for index, worker in enumerate(others, 1):
        worker.send({**opening, "index": index, "first": greetings[0]})
    greetings += [settled_machine(worker, "open", OPENING_SECONDS) for worker in others]
    group.call({"op": "meet", "greetings": greetings}, OPENING_SECONDS)


def _round(group: Group, kill_after: float | None) -> Figures:
    workers = group.workers
    group.call({"op": "fill"}, OPENING_SECONDS)
    survivors = workers if kill_after is None else workers[:-1]
    reset_peaks(survivors)
    cpu, sent = cpu_seconds(survivors), interface_bytes()
    began = time.monotonic()
    for worker in workers:
        worker.send({"op": "go", "patience": MEASURE_PATIENCE})
    if kill_after is not None:
        time.sleep(kill_after)
        workers[-1].signal(signal.SIGKILL)
    answers = [_answer(worker, began + MEASURE_PATIENCE) for worker in survivors]
    wall = max(at for at, _ in answers) - began
    early = kill_after is not None and wall < kill_after
    spent, arrived = cpu_seconds(survivors), interface_bytes()
    peaks = [peak for worker in survivors if (peak := peak_memory(worker)) is not None]
    if sent is not None and arrived is not None:
        per_peer: float | None = (arrived - sent) / len(workers)
    else:
        own = [answer["sent"] for _, answer in answers if "sent" in answer]
        per_peer = sum(own) / len(own) if own else None
    results = [answer for _, answer in answers]
    checks = _check(survivors, results, len(workers))
    return {
        "wall_s": wall,
        "cpu_s": spent - cpu,
        "bytes_per_peer": per_peer,
        "peak_memory_bytes": max(peaks, default=None),
        "rel_l2": max((check["rel_l2"] for check in checks), default=None),
        "bit_identical": len(checks) == len(survivors) and len({check["digest"] for check in checks}) == 1,
        "exact": all(check["exact"] for check in checks) if checks and checks[0].get("exact") is not None else None,
        "outcome": measure_summary([result["outcome"] for result in results]),
        "reason": "over before that" if early else _reason(results),
        "contributors": min((len(result["contributors"]) for result in results if "contributors" in result), default=None),
        "attempts": max(result.get("attempts", 1) for result in results),
    }


def _answer(worker: Worker, deadline: float) -> tuple[float, WorkerAnswer]:
    try:
        return worker.receive(deadline)
    except TimeoutError:
        return time.monotonic(), {"outcome": "hung", "reason": f"no result after {MEASURE_PATIENCE:g} s"}


def _reason(results: Sequence[WorkerAnswer]) -> str:
    """Return why a round was incomplete, from the first peer that reports a reason."""
    reasons = [(result["outcome"] == "done", result["reason"]) for result in results if result.get("reason")]
    return min(reasons, default=(True, ""))[1]


def _check(survivors: Sequence[Worker], results: Sequence[WorkerAnswer], peers: int) -> list[WorkerAnswer]:
    """Return each survivor's distance from the mean of its reported contributors, else of all, or of the survivors."""
    done = [(worker, result) for worker, result in zip(survivors, results, strict=True) if result["outcome"] == "done"]
    possible = [list(range(peers)), list(range(len(survivors)))]
    for worker, result in done:
        worker.send({"op": "check", "groups": [result["contributors"]] if "contributors" in result else possible})
    return [settled_machine(worker, "check", OPENING_SECONDS) for worker, _ in done]


def measure_summary(outcomes: Sequence[str]) -> str:
    """Return `done` if all are, else a count of each such as `done ×2, hung ×1`."""
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    return outcomes[0] if len(counts) == 1 else ", ".join(f"{outcome} ×{count}" for outcome, count in counts.items())
