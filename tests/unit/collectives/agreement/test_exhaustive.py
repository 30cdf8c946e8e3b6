"""Every state of three honest voters and a liar, and flaws that the search must find (docs/round.md).

Three attempts by default: a conflict takes one attempt to decide, one to forget, one to decide otherwise. Four with
`pytest --hypothesis-profile=long tests/unit/collectives/agreement`: five times as many states, and each rule for all
first proposers. The gate searches with crashes, for the first proposer that finds most; `scripts/test --explore` searches
for the others, too. Crashes are part of all searches in the long profile.
"""

from collections.abc import Callable

import pytest
from flockstep.collectives.agreement.machine import VoterMachine
from hypothesis import settings
from support import agreement_flaws as flaws
from support.agreement_states import Disk, Search, next_slot

EXAMPLES: int = settings.default.max_examples  # type: ignore[union-attr]  # A profile is loaded.
ATTEMPTS = 3 if EXAMPLES <= 100 else 4
FIRSTS = range(4)
"""The place of the first proposer among A, B, C and the liar M: each attempt of the liar's is among them."""

BY_TELLING = (2, 1, 0, 3)
"""The same, beginning with C: the liar proposes next, and what neither of the two rules forbids is found soonest."""


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.explore] * (first != BY_TELLING[0])) for first in FIRSTS]
)
def test_no_state_violates_an_invariant(first: int) -> None:
    search = Search(first, ATTEMPTS, restart=next_slot if ATTEMPTS > 3 or first == BY_TELLING[0] else None)
    assert search.run() is None
    # Not in vain: proofs and decisions of every attempt were among the states.
    assert search.reached == {(kind, attempt) for kind in ("proof", "decision") for attempt in range(ATTEMPTS)}


@pytest.mark.parametrize(
    ("flaw", "invariant"),
    [
        (flaws.UnlocksByNone, "invariant 3"),
        (flaws.NeitherRule, "invariant 3"),
        (flaws.LocksByAnyProof, "invariant 3"),
        (flaws.PrecommitsLate, "invariant 3"),
    ],
)
def test_a_planted_flaw_is_found(flaw: type[VoterMachine], invariant: str) -> None:
    stories = (Search(first, 3, flaw).run() for first in BY_TELLING)
    assert any(story is not None and story.startswith(invariant) for story in stories)


@pytest.mark.parametrize(
    ("disk", "invariant"), [(flaws.forgets_its_lock, "invariant 3"), (flaws.forgets_what_it_signed, "invariant 4")]
)
def test_a_disk_that_forgets_is_found(disk: Callable[..., Disk], invariant: str) -> None:
    stories = (Search(first, 3, restart=disk).run() for first in BY_TELLING)
    assert any(story is not None and story.startswith(invariant) for story in stories)


@pytest.mark.explore  # About a machine with one rule less: no change of ours can fail it.
@pytest.mark.parametrize("rule", [flaws.OnlyReadys, flaws.OnlyLocks])
def test_within_a_term_either_rule_for_proposals_is_enough(rule: type[VoterMachine]) -> None:
    # docs/round.md says so; whoever takes one of the two away reads there what remains.
    for first in FIRSTS if ATTEMPTS > 3 else BY_TELLING[:1]:
        assert Search(first, 3, rule).run() is None
