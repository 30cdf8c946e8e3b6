"""Many simulated rounds of honest peers with churn, loss and stalls: bans and violations.

    cd tests && python -m attacks.honest_rounds --seeds 0:200 --rounds 50
    cd tests && python -m attacks.honest_rounds --seeds 0:40 --rounds 250 --peers 6 --rule mean --seconds 900

It prints one line for each violation, and after ten seeds and at the end the numbers of certified rounds, void attempts and
flags of honest peers, and why attempts were void. It begins no
other seed after `--seconds` of CPU. The exit code is 1 if any invariant was violated; a ban or charge violates one.
"""

import argparse
import math
import re
import sys
import time
from collections import Counter
from dataclasses import replace

from flockstep.scripts.lab.simulate.options import SimulateOptions, Span
from flockstep.scripts.lab.simulate.world import simulate
from support.simulations import CALM


def restless(seed: int, peers: int, rounds: int, rule: str) -> SimulateOptions:
    """Everything that roads and people do, at once; nobody lies."""
    people = replace(CALM, loss=0.02, churn=0.5, stall=0.2, stall_time=Span(5.0, 20.0), steps_time=Span(10.0, 12.0))
    return replace(people, peers=peers, rounds=rounds, seed=seed, rule=rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="from:to")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rule", default="gramguard")
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    totals, reasons = Counter[str](), Counter[str]()
    began = time.process_time()
    for seed in range(first, last):
        if time.process_time() > began + given.seconds:
            break
        report = simulate(restless(seed, given.peers, given.rounds, given.rule))
        reasons.update(re.sub(r"\w*\d[\w.]*", "#", reason) for row in report.rows for reason in row.void.values())
        totals["rounds"] += sum(bool(row.certified) for row in report.rows)
        totals["void attempts"] += sum(len({attempt for attempt, _ in row.void}) for row in report.rows)
        totals["honest flagged"] += report.harm.flagged.total()
        totals["bans"] += len(report.harm.banned)
        for violation in report.violations:
            totals[f"violations of {violation.invariant}"] += 1
            sys.stdout.write(f"seed {seed}: {violation.invariant}: {violation.text}\n")
        if seed % 10 == 9:
            sys.stdout.write(f"after seed {seed}: {dict(totals)}, {time.process_time() - began:.0f} CPU-s\n")
        sys.stdout.flush()
    for reason, count in reasons.most_common():
        sys.stdout.write(f"{count} peers gave an attempt up: {reason}\n")
    sys.stdout.write(f"{dict(totals)}\n")
    sys.exit(any(name.startswith("violations") for name in totals))


if __name__ == "__main__":
    main()
