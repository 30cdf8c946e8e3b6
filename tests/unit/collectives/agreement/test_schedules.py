"""Random schedules: weights, liars, crashes, lost disks and partitions against the invariants of docs/round.md.

300 by default; 100,000 with `pytest --hypothesis-profile=long tests/unit/collectives/agreement`.
"""

from collections import Counter

from flockstep.collectives.agreement.machine import VoterMachine
from hypothesis import settings
from support import agreement_flaws as flaws
from support.agreement_swarm import Swarm, Violation

EXAMPLES: int = settings.default.max_examples  # type: ignore[union-attr]  # A profile is loaded.
SCHEDULES = 300 if EXAMPLES <= 100 else 100_000


def play(seed: int, machine: type[VoterMachine] = VoterMachine) -> Counter[str]:
    swarm = Swarm(seed, machine)
    swarm.disturb(swarm.random.randint(20, 300))
    swarm.check()
    swarm.seen["calm"] += swarm.calm()
    swarm.check()
    return swarm.seen


def test_invariants_1_to_8_hold_in_random_schedules() -> None:
    # 1 and 3, one value; 2, that of the newest proof; 4, one statement a slot and kind; 6, bytes of a proof; 7, a decision
    # in calm; 8, nobody is moved by liars. `Swarm` names each where it checks it; 5 is in test_electorate.
    seen = Counter[str]()
    for seed in range(SCHEDULES):
        try:
            seen += play(seed)
        except Violation as violation:
            raise AssertionError(f"schedule {seed}: {violation}") from violation
    # Not in vain: what the invariants are about has happened.
    rare = ("calm", "decision", "crash", "lost disk", "partition", "agreement.equivocation", "pause")
    for what in rare:
        assert seen[what] > SCHEDULES / 500, what
    assert seen["calm"] > SCHEDULES / 2


def test_a_quorum_of_those_present_is_found() -> None:
    # A partition lets both sides decide. The search over states has no partition.
    for seed in range(200):
        try:
            play(seed, flaws.CountsThosePresent)
        except Violation as violation:
            if str(violation).startswith("invariant 1"):
                return
    raise AssertionError("200 schedules found nothing")
