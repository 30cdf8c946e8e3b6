"""`bench outer`: its options, its lines and its table."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.bench import outer
from flockstep.scripts.lab.bench.outer import baseline_of, outer_trainings, run_outer
from flockstep.scripts.lab.training.swarm import Training, TrainingResult

RESULTS = {"parallel": 2.0, "blocking": 2.2, "streaming": 2.211}


def pretended(training: Training) -> TrainingResult:
    loss = RESULTS[training.mode] if training.contribution != "int8" else math.inf
    loss += 0.1 if training.mode == "streaming" and training.seed else 0.0
    loss += 0.05 * abs(training.size.rate - (2 if training.mode == "parallel" else 1))
    return TrainingResult(((12, loss + 0.2), (24, loss)), 32768)


def cases(**changes: Any) -> list[Training]:
    given: dict[str, Any] = {
        "modes": ["blocking,streaming"],
        "codecs": ["fp32,int4,lloyd2"],
        "delays": ["1"],
        "fragments": 4,
        "outer": ["0.9/0.8/10"],
        "ramps": ["1"],
        "peers": ["8"],
        "seeds": ["0"],
        "rates": ["1"],
        "size": "tiny",
        "optimizer": "",
        "steps": None,
        "rounds": None,
        "baseline": True,
        "device": "cpu",
    }
    return outer_trainings(**(given | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"modes": ["parallel"]}, {"codecs": ["int7"]}, {"codecs": ["int4/int7"]}, {"delays": ["12"]}),
        *({"delays": ["x"]}, {"outer": ["0.9"]}, {"outer": ["3/0.5"]}, {"outer": ["a/b"]}, {"seeds": ["x"]}),
        *({"fragments": 13}, {"size": "big"}, {"peers": ["0"]}, {"peers": ["x"]}, {"optimizer": "sgd"}),
        *({"steps": 0}, {"rounds": 0}, {"delays": ["-1"]}, {"modes": [","]}),
        *({"rates": ["0"]}, {"rates": ["x"]}, {"rates": ["65"]}, {"ramps": ["x"]}),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_trains(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        cases(**wrong)
    assert caught.value.remedy


def test_every_case_is_trained_once_after_its_baseline() -> None:
    trainings = cases(delays=["0,1"], outer=["0.8/0.5,0.9/0.8"], peers=["2,4"], seeds=["0,1"])
    baselines = [one for one in trainings if one.mode == "parallel"]
    assert {(one.peers, one.seed) for one in baselines} == {(n, s) for n in (2, 4) for s in (0, 1)}
    per_setting = {"blocking": 3, "streaming": 2 * 3}  # Three codecs; blocking has no delay.
    for mode, number in per_setting.items():
        assert sum(one.mode == mode for one in trainings) == number * 2 * 2 * 2
    assert len(set(trainings)) == len(trainings)
    assert not [one for one in cases(baseline=False) if one.mode == "parallel"]
    sizes = {one.size for one in cases(steps=7, rounds=2, optimizer="muon")}
    assert [(size.steps, size.rounds, size.optimizer) for size in sizes] == [(7, 2, "muon")]


def test_a_line_for_each_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "train", pretended)
    written: list[str] = []
    given: dict[str, Any] = {"codecs": ["lloyd2/int4"], "seeds": ["3"], "outer": ["0.9/0.8/5"]}
    run_outer(cases(modes=["streaming"], rates=["2"], ramps=["8"], **given), 1, written.append, as_json=True)
    assert [json.loads(line) for line in written] == [
        {
            "mode": "streaming",
            "codec": "lloyd2/int4",
            "bits": 6.3125,
            "fragments": 4,
            "delay": 1,
            "steps": 12,
            "rounds": 24,
            "lr": 0.9,
            "momentum": 0.8,
            "momentum_warmup": 5,
            "ramp": 8,
            "inner_momentum": 0.8,
            "rate": 2.0,
            "peers": 8,
            "params": 32768,
            "seed": 3,
            "tokens": 8 * 24 * 12 * 4 * 32,
            "loss": pytest.approx(2.361),
            "baseline": "parallel adamw",
            "baseline_loss": 2.0,
            "curve": [[12, pytest.approx(2.561)], [24, pytest.approx(2.361)]],
            "baseline_curve": [[12, 2.2], [24, 2.0]],
        }
    ]
    written.clear()
    run_outer(cases(modes=["blocking"], codecs=["int8"], baseline=False), 1, written.append, as_json=True)
    assert [json.loads(line)[key] for line in written for key in ("loss", "baseline", "baseline_loss")] == [None] * 3


def test_the_table_compares_with_blocking_and_with_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "train", pretended)
    written: list[str] = []
    chosen = cases(codecs=["fp32,lloyd2,int8"], seeds=["0,1"], rates=["4,2,1"])
    run_outer(chosen, 1, written.append, as_json=False)
    rows = [" ".join(line.split()) for line in written]
    # Each side at the best of its own rates.
    assert "8 data parallel 2 2.0000" in rows
    assert "8 blocking, fp32 0.9/0.8/10 1 64 2.2000 +10.00 %" in rows
    assert "8 streaming 4 1, lloyd2 0.9/0.8/10 1 4.125 2.2610 +2.77 % +13.05 %" in rows
    assert any("int8" in row and "diverged" in row for row in rows)
    assert "8 blocking, fp32 0.9/0.8/10 +9.09 % +10.00 %" in rows


def test_the_baseline_is_that_of_the_same_batches() -> None:
    case = cases(seeds=["5"], peers=["3"], steps=6)[-1]
    baseline = baseline_of(case)
    assert (baseline.mode, baseline.seed, baseline.peers, baseline.size) == ("parallel", 5, 3, case.size)
    assert baseline_of(replace(case, ramp=4)) == replace(baseline, ramp=4)
    assert baseline.tokens == case.tokens
