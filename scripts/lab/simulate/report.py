"""The report of a simulation: a table of its rounds, and a summary of every invariant."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..table import table_lines
from .check import RoundRow, Violation
from .harm import Harm
from .options import SimulateOptions

INVARIANTS = ("equal states", "all or nothing", "reasons", "honest peers", "progress")
MAX_SHOWN = 10
"""Violations that are printed; most follow from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a simulation."""

    options: SimulateOptions
    rows: Sequence[RoundRow]
    violations: Sequence[Violation]
    unmet: Sequence[str]
    """The strikes whose moment never came."""
    harm: Harm
    """The effect of the attacks."""
    living: int
    seconds: float
    """Virtual seconds."""
    cpu: Mapping[str, float]
    """CPU seconds by purpose."""
    trace: str
    """A hash of the sequence of all events: the same for the same options."""

    def show(self, write_line: Callable[[str], None], *, as_json: bool) -> None:
        """Write the table and the summary, or one JSON object with the same figures."""
        if as_json:
            write_line(json.dumps(self._figures()))
            return
        headings = ("round", "outcome", "roster", "cut", "seconds", "states")
        for line in table_lines("", headings, [[_figures(row)[name] for name in headings] for row in self.rows]):
            write_line(line)
        write_line("")
        reasons = Counter(reason for row in self.rows for reason in sorted({*row.void.values()}))
        for reason, count in reasons.most_common(MAX_SHOWN):
            write_line(f"void {count} times: {reason}")
        write_line(f"{len(self.stalled)} of {len(self.rows)} rounds stalled")
        for row in self.stalled[:MAX_SHOWN]:
            write_line(f"  round {row.number} stalled for {len(row.stalled)} peers: {next(iter(row.stalled.values()))}")
        for strike in self.unmet:
            write_line(f"its moment never came: {strike}")
        for line in self.harm.lines() if self.options.attacks else ():
            write_line(line)
        broken = Counter(violation.invariant for violation in self.violations)
        for invariant in INVARIANTS:
            write_line(f"{invariant:<16} {f'VIOLATED {broken[invariant]} times' if broken[invariant] else 'held'}")
        for violation in self.violations[:MAX_SHOWN]:
            write_line(f"  {violation.invariant}: {violation.text}")
        write_line(
            f"{self._num_done()} rounds certified, {self.living} peers alive at the end, {self.seconds:.1f} virtual s, "
            f"{sum(self.cpu.values()):.1f} CPU-s ("
            + ", ".join(f"{purpose} {seconds:.1f}" for purpose, seconds in self.cpu.items())
            + f"), trace {self.trace}"
        )

    @property
    def stalled(self) -> list[RoundRow]:
        """The rounds that stalled."""
        return [row for row in self.rows if row.stalled]

    def _num_done(self) -> int:
        return sum(bool(row.certified) for row in self.rows)

    def _figures(self) -> dict[str, object]:
        return ({"attacks": self.harm.figures()} if self.options.attacks else {}) | {
            "peers": self.options.peers,
            "rule": self.options.rule,
            "seed": self.options.seed,
            "rounds": [_figures(row) for row in self.rows],
            "certified": self._num_done(),
            "living": self.living,
            "virtual_s": round(self.seconds, 3),
            "cpu_s": round(sum(self.cpu.values()), 3),
            **{f"cpu_{purpose}_s": round(seconds, 3) for purpose, seconds in self.cpu.items()},
            "trace": self.trace,
            "unmet": list(self.unmet),
            "violations": [asdict(violation) for violation in self.violations],
        }


def _figures(row: RoundRow) -> dict[str, object]:
    attempts = {attempt for attempt, _ in row.void} - row.done
    outcome = "done" if row.certified else "void"
    if row.certified and attempts:
        outcome += f" after {len(attempts)} void"
    sizes = [(len(result.members), len(result.cut)) for result in row.results.values()]
    return {
        "round": row.number,
        "outcome": outcome,
        "void_attempts": len(attempts),
        "void_reasons": sorted({*row.void.values()}),
        "stalled": sorted(set(row.stalled.values())),
        "roster": "+".join(str(roster) for roster, _ in sizes),
        "cut": "+".join(str(cut) for _, cut in sizes),
        "seconds": round(row.certified - row.began, 3) if row.certified else 0.0,
        "states": _states(row),
        "holders": len(row.holders),
    }


def _states(row: RoundRow) -> str:
    held = Counter(row.holders.values())
    apart = "apart: " + " + ".join(str(count) for count in sorted(held.values(), reverse=True))
    return apart if len(held) > 1 else f"equal on {len(row.holders)}"
