"""`flockstep simulate --attack`: every defence reports its attack, the honest are unharmed."""

from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.robust.rules import rule_named
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.attacks.gradients import Attackers
from flockstep.scripts.lab.attacks.protocol import LIARS
from flockstep.scripts.lab.simulate.check import Checks
from flockstep.scripts.lab.simulate.options import SimulateOptions
from flockstep.scripts.lab.simulate.report import Report
from flockstep.scripts.lab.simulate.world import simulate
from support.simulations import CALM


def attacked(*attacks: str, **changes: Any) -> SimulateOptions:
    return replace(CALM, attacks=tuple(Attackers.parse(text, LIARS) for text in attacks), **changes)


def noticed(report: Report, attack: int = 0) -> dict[str, int]:
    found: dict[str, int] = report.harm.figures()[attack]["noticed"]
    return found


def test_two_attacks_at_a_time_are_told_apart_from_each_other_and_from_the_honest() -> None:
    report = simulate(attacked("lazy:1", "lying_sender:1", peers=7, rounds=1))
    assert not report.violations
    attacks = report.harm.figures()
    assert [(one["attack"], one["peers"]) for one in attacks] == [
        ("lazy:1", ["p5"]),
        ("lying_sender:1", ["p6"]),
        ("honest", ["p0", "p1", "p2", "p3", "p4"]),
    ]
    assert [list(one["banned"]) for one in attacks] == [[], ["p6"], []]
    assert attacks[0]["flagged"] == {"p5": 1}  # Zeros are no work.
    assert attacks[1]["banned"]["p6"]["by"] == 5
    lines: list[str] = []
    report.show(lines.append, as_json=False)
    assert any(line.startswith("p6 (lying_sender:1) was banned by 5 honest peers") for line in lines)


@pytest.mark.parametrize(
    ("attack", "notice"),
    [
        ("equivocating_proposer:1", "peer.banned"),
        ("censoring_owner:1", ""),
        ("lying_owner:1", "round.output_doubted"),
        ("lying_sender:1", "peer.banned"),
        ("lying_sender_with_owner:2", "peer.banned"),
        ("mute:1", "round.left_out"),
        ("withholding:1", "round.left_out"),
        ("selective:1", ""),
        ("lazy:1", ""),
    ],
)
def test_a_liar_is_stopped_by_what_stops_it_and_nobody_else_is_hurt(attack: str, notice: str) -> None:
    judged = "lying" in attack or "mute" in attack
    peers, rounds = (7, 1) if attack.endswith(":2") else (5, 2)
    if "proposer" in attack:
        rounds = peers  # The voters take turns.
    report = simulate(attacked(attack, seed=3, peers=peers, rounds=rounds, rule="gramguard" if judged else "mean"))
    assert not report.violations
    assert len(report.rows) == rounds
    harm = report.harm
    assert harm.made.total() > 0
    assert not notice or noticed(report)[notice]
    if not notice:
        assert not noticed(report)
    assert set(harm.banned) == (set(harm.made) if notice == "peer.banned" else set())


def test_a_ban_or_a_charge_of_an_honest_peer_is_a_violation_and_of_an_attacker_is_none() -> None:
    checks = Checks(str, rule_named("mean"), {"liar"})
    for event in ("peer.banned", "peer.charged"):
        checks.event("p0", {"event": event, "peer": "liar", "reason": ""})
    assert not checks.violations
    checks.event("p0", {"event": "peer.banned", "peer": "honest", "reason": ""})
    assert [violation.invariant for violation in checks.violations] == ["honest peers"]


@pytest.mark.parametrize(
    ("attacks", "words"),
    [
        (("lazy:5",), "none of 5 peers is honest"),
        (("lazy:3", "mute:2"), "lazy:3, mute:2: none"),
        (("sign_flip:1",), "no attack 'sign_flip'"),
        (("lazy:1:2",), "has no scale"),
        (("lying_sender_with_owner:1",), "no fellow to collude with"),
        (("witholding:1",), "did you mean 'withholding'"),
    ],
)
def test_attacks_that_make_no_sense_are_refused(attacks: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attacked(*attacks)


def test_a_rule_that_no_run_has_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no defence 'gram'"):
        replace(CALM, rule="gram")
