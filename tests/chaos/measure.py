"""The cost of a fault: the extra time of its round against undisturbed rounds beside it.

cd tests && python -m chaos.measure --peers 4 --peers 8 --params 25000000 --codec int4 --codec int8 --repeats 3

Every fault has a round of its own, right after an undisturbed one of the same group, since the speed of a machine changes
with its other load. `lost` is the time from the strike until the last survivor has detected the loss; `after` is from then
to the certified result. --json prints one line a fault.
"""

import argparse
import json
import signal
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass

from chaos.group import Event, Group, Report

FAULTS = (
    ("sender", "Commit"),
    ("owner", "Have"),
    ("owner", "Serve"),
    ("proposer", "Roster"),
    ("proposer", "Cut"),
)
"""Who is struck and when: those of the promise in docs/log.md. `Serve` is in the middle of its Result."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Row:
    """One fault in one round."""

    peers: int
    codec: str
    signal: str
    victim: str
    at: str
    undisturbed: float
    seconds: float
    struck: float
    """When the strike fell, from the survivors' first word of the round."""
    lost: float
    after: float
    contributors: int
    attempts: int


def time_of(event: Event | None) -> float | None:
    return None if event is None else event["time"]


def row_of(group: Group, fault: tuple[str, str, str], before: Report, report: Report, victim: int) -> Row:
    name, role, word = fault
    survivors = [index for index in report.events if index != victim]
    struck = time_of(report.first(victim, "struck")) or 0.0
    losses = [time_of(report.first(index, "peer.lost", peer=group.peers[victim].id)) for index in survivors]
    starts = [time_of(report.first(index, "round.said")) for index in survivors]
    start = min(when for when in starts if when is not None)
    known = max((when for when in losses if when is not None), default=struck)
    return Row(
        peers=len(report.events),
        codec=str(group.setting["codec"]),
        signal=name,
        victim=role,
        at=word,
        undisturbed=before.seconds,
        seconds=report.seconds,
        struck=struck - start,
        lost=known - struck,
        after=start + report.seconds - known,
        contributors=len(report.cut),
        attempts=report.attempts,
    )


def strike(group: Group, fault: tuple[str, str, str]) -> tuple[Row, Report]:
    name, role, word = fault
    before = group.round()
    order = group.order()
    victim = order[0 if role == "proposer" else len(order) // 2].index
    report = group.round({victim: (word, SIGNALS[name])})
    row = row_of(group, fault, before, report, victim)
    if name == "SIGKILL":
        group.revive(victim)
    else:
        group.resume(victim)
    return row, report


def show(rows: list[Row]) -> None:
    say = sys.stdout.write
    say("| peers | codec | signal | struck | undisturbed s | added s | lost after s | then s | attempts |\n")
    say("|---|---|---|---|---|---|---|---|---|\n")
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.peers, row.codec, row.signal, f"{row.victim} after {row.at}"].append(row)
    for key, found in groups.items():
        columns = (
            [row.undisturbed for row in found],
            [row.seconds - row.undisturbed for row in found],
            [row.lost for row in found],
            [row.after for row in found],
        )
        medians = " | ".join(f"{statistics.median(column):.2f}" for column in columns)
        say(f"| {' | '.join(map(str, key))} | {medians} | {max(row.attempts for row in found)} |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--peers", type=int, action="append")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--floor", type=float, default=2.0, help="the least of every deadline; a manifest's default is 2")
    parser.add_argument("--signal", choices=SIGNALS, action="append")
    parser.add_argument("--at", action="append", help="only the faults at these words")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", action="store_true", help="every word and event of the rounds with a fault")
    options = parser.parse_args()
    rows: list[Row] = []
    for peers in options.peers or [4]:
        for codec in options.codec or ["int4"]:
            with Group(peers, params=options.params, codec=codec, floor=options.floor) as group:
                group.round()  # The first round has nothing measured to plan by.
                for _ in range(options.repeats):
                    for name in options.signal or SIGNALS:
                        for role, word in FAULTS:
                            if options.at and word not in options.at:
                                continue
                            row, report = strike(group, (name, role, word))
                            rows.append(row)
                            if options.json:
                                sys.stdout.write(json.dumps(asdict(row)) + "\n")
                                sys.stdout.flush()
                            if options.trace:
                                trace(report)
    if not options.json:
        show(rows)


def trace(report: Report) -> None:
    told = [(index, event) for index, log in report.events.items() for event in log if "time" in event]
    events = sorted(((event["time"], index, event) for index, event in told), key=lambda entry: entry[:2])
    for when, index, event in events:
        rest = " ".join(str(event[name]) for name in ("step", "peer", "reason") if name in event)
        sys.stdout.write(f"{when - events[0][0]:8.3f} {index} {event['event']} {rest[:150]}\n")


if __name__ == "__main__":
    main()
