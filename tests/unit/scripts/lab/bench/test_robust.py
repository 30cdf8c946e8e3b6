"""`bench robust`: its options, its lines and its table."""

import json
import math
from typing import Any

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.bench.robust import ALL_ATTACKS, oracle_of, robust_table, robust_trainings
from flockstep.scripts.lab.training import rows
from flockstep.scripts.lab.training.rows import run_trainings
from flockstep.scripts.lab.training.swarm import Training, TrainingResult


def cases(**changes: Any) -> list[Training]:
    words: dict[str, Any] = {
        "rules": ["gramguard,mean"],
        "attacks": ["none", "sign_flip:2:10"],
        "seeds": ["0,1"],
        "peers": 5,
        "size": "tiny",
        "device": "cpu",
    }
    return robust_trainings(**(words | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rules": ["gramgard"]}, {"attacks": ["alie"]}, {"attacks": ["alie:5"]}, {"seeds": ["x"]}, {"seeds": ["-1"]}),
        *({"seeds": [""]}, {"peers": 65}, {"size": "huge"}),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        cases(**wrong)
    assert caught.value.remedy


def test_all_stands_for_every_named_attack_and_each_oracle_is_trained_once() -> None:
    chosen = cases(attacks=["all"], peers=10)
    oracles = [training for training in chosen if training.oracle]
    assert {(one.attackers.count, one.seed) for one in oracles} == {(n, s) for n in (0, 2, 4) for s in (0, 1)}
    assert len(oracles) == 6
    assert len(chosen) == 6 + 2 * 2 * len(ALL_ATTACKS)


def pretended(training: Training) -> TrainingResult:
    loss = 2.0 if training.oracle else math.inf if training.rule == "mean" else 2.5
    return TrainingResult(((24, loss),), 1)


def ran(trainings: list[Training], monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> list[str]:
    monkeypatch.setattr(rows, "train", pretended)
    written: list[str] = []
    run_trainings(trainings, oracle_of, robust_table, written.append, as_json=as_json)
    return written


def test_a_line_for_each_training_beside_its_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [json.loads(line) for line in ran(cases(seeds=["3"]), monkeypatch, as_json=True)]
    assert [(one["rule"], one["loss"]) for one in found] == [("gramguard", 2.5), ("mean", None)] * 2
    assert {one["baseline_loss"] for one in found} == {2.0}
    assert [one["attackers"]["count"] for one in found] == [0, 0, 2, 2]
    assert found[2]["attackers"] == {"name": "sign_flip", "count": 2, "scale": 10.0}


def test_the_table_says_what_each_rule_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [" ".join(line.split()) for line in ran(cases(), monkeypatch, as_json=False)]
    assert "attack oracle gramguard mean" in lines
    assert "sign_flip:2:10 2.000 +25.0 % (+25.0) diverged" in lines
