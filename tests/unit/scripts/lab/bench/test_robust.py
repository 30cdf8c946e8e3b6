"""`bench robust`: its options, its figures, and one small training under attack."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.robust.rule import Weighting
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.attacks.gradients import Attackers
from flockstep.scripts.lab.bench import robust
from flockstep.scripts.lab.bench.robust import NAMED, RobustOptions, oracle_of, robust_options, run_robust
from flockstep.scripts.lab.training.attacked import SIZES, Training, TrainingSwarm, train_under_attack

SMALLEST = replace(
    SIZES["tiny"], model={"layers": 1, "heads": 1, "width": 8, "context": 16}, length=16, steps=3, rounds=4
)


@pytest.fixture(autouse=True)
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", SMALLEST)


def options(**changes: Any) -> RobustOptions:
    words: dict[str, Any] = {
        "rules": ["gramguard,mean"],
        "attacks": ["none", "sign_flip:2:10"],
        "seeds": ["0,1"],
        "peers": 5,
        "size": "tiny",
        "device": "cpu",
        "jobs": 1,
        "as_json": True,
    }
    return robust_options(**(words | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rules": ["gramgard"]},
        {"attacks": ["alie"]},
        {"attacks": ["alie:5"]},
        {"seeds": ["x"]},
        {"seeds": ["-1"]},
        {"seeds": [""]},
        {"peers": 1},
        {"size": "huge"},
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        options(**wrong)
    assert caught.value.remedy


def test_all_stands_for_every_named_attack_and_each_oracle_is_trained_once() -> None:
    chosen = options(attacks=["all"], peers=10)
    assert len(chosen.attackers()) == len(NAMED)
    oracles = [training for training in chosen.trainings() if training.oracle]
    assert {(one.attackers.count, one.seed) for one in oracles} == {(n, s) for n in (0, 2, 4) for s in (0, 1)}
    assert len(oracles) == 6
    assert len(chosen.trainings()) == 6 + 2 * 2 * len(NAMED)


def pretended_loss(training: Training) -> float:
    return 2.0 if training.oracle else math.inf if training.rule == "mean" else 2.5


def test_a_line_for_each_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "train_under_attack", pretended_loss)
    written: list[str] = []
    run_robust(options(seeds=["3"]), written.append)
    assert json.loads(written[2]) == {
        "rule": "gramguard",
        "attack": "sign_flip:10",
        "attackers": 2,
        "peers": 5,
        "seed": 3,
        "loss": 2.5,
        "oracle_loss": 2.0,
    }
    assert json.loads(written[3])["loss"] is None
    assert [json.loads(line)["attack"] for line in written] == ["none", "none", "sign_flip:10", "sign_flip:10"]


def test_the_table_says_what_each_rule_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(robust, "train_under_attack", pretended_loss)
    run_robust(options(as_json=False), lambda line: None)
    shown = capsys.readouterr().out
    assert "sign_flip:2:10" in shown
    assert "+25.0 % (+25.0)" in shown
    assert "diverged" in shown


def test_a_training_is_the_same_twice_and_its_liars_are_found() -> None:
    weightings: list[Weighting] = []
    training = Training(size="tiny", rule="gramguard", attackers=Attackers("sign_flip", 1, 10.0), peers=5, seed=0)
    loss = train_under_attack(training, lambda number, weighting: weightings.append(weighting))
    assert math.isfinite(loss)
    assert len(weightings) == SMALLEST.rounds
    assert all({4} <= set(weighting.flagged) and not weighting.weights[:, 4:].any() for weighting in weightings)
    assert train_under_attack(training) == loss
    assert abs(train_under_attack(oracle_of(training)) / loss - 1) < 0.02


def test_what_cannot_be_encoded_counts_nothing_and_breaks_nothing() -> None:
    for name in ("nan", "median", "mean"):
        rule = "gramguard" if name == "nan" else name
        training = Training(size="tiny", rule=rule, attackers=Attackers("nan", 1), peers=4, seed=0)
        assert math.isfinite(train_under_attack(training))


def test_without_a_defence_one_peer_ruins_a_training() -> None:
    attackers = Attackers("huge", 1, 1e12)
    # No better than chance among 256 bytes, or not finite at all.
    assert train_under_attack(Training(size="tiny", rule="mean", attackers=attackers, peers=4, seed=0)) > math.log(256) - 0.01


def test_flipped_labels_are_the_trainers_part() -> None:
    training = Training(size="tiny", rule="mean", attackers=Attackers("label_flip", 2), peers=4, seed=0)
    swarm = TrainingSwarm(training)
    assert [peer.poisoned for peer in swarm.peers] == [False, False, True, True]
