"""`bench outer`: its options, its lines and its table."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.bench.outer import baseline_of, outer_tables, outer_trainings
from flockstep.scripts.lab.training import rows
from flockstep.scripts.lab.training.rows import run_trainings
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
        "codecs": ["fp32,int4,lloyd2/int4"],
        "outer": ["0.9/0.8/10"],
        "ramps": ["1"],
        "peers": ["8"],
        "seeds": ["0"],
        "rates": ["1"],
        "size": "tiny",
        "steps": None,
        "rounds": None,
        "device": "cpu",
    }
    return outer_trainings(**(given | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"modes": ["parallel"]}, {"codecs": ["int7"]}, {"codecs": ["int4/int7"]}, {"modes": [","]}, {"ramps": ["x"]}),
        *({"outer": ["0.9"]}, {"outer": ["3/0.5"]}, {"outer": ["a/b"]}, {"seeds": ["x"]}, {"rates": ["0"]}),
        *({"rates": ["65"]}, {"size": "big"}, {"peers": ["0"]}, {"peers": ["x"]}, {"steps": 0}, {"rounds": 0}, {"steps": 3}),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_trains(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        cases(**wrong)
    assert caught.value.remedy


def test_every_case_is_trained_once_after_its_baseline() -> None:
    trainings = cases(outer=["0.8/0.5,0.9/0.8"], peers=["2,4"], seeds=["0,1"])
    baselines = [one for one in trainings if one.mode == "parallel"]
    assert {(one.peers, one.seed) for one in baselines} == {(n, s) for n in (2, 4) for s in (0, 1)}
    for mode in ("blocking", "streaming"):
        assert sum(one.mode == mode for one in trainings) == 3 * 2 * 2 * 2
    assert len(set(trainings)) == len(trainings)
    sizes = {one.size for one in cases(steps=7, rounds=2)}
    assert [(size.steps, size.rounds) for size in sizes] == [(7, 2)]


def ran(trainings: list[Training], monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> list[str]:
    monkeypatch.setattr(rows, "train", pretended)
    written: list[str] = []
    run_trainings(trainings, baseline_of, outer_tables, written.append, as_json=as_json)
    return written


def test_a_line_for_each_training_with_its_curve_and_that_of_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = cases(modes=["streaming"], codecs=["lloyd2/int8,int8"], rates=["2"], seeds=["3"], outer=["0.9/0.8/5"])
    line, diverged = map(json.loads, ran(chosen, monkeypatch, as_json=True))
    assert (line["mode"], line["contribution"], line["result"], line["fragments"]) == ("streaming", "lloyd2", "int8", 4)
    assert (line["outer"]["lr"], line["outer"]["momentum"], line["outer"]["warmup"]) == (0.9, 0.8, 5)
    assert (line["size"]["rate"], line["peers"], line["seed"], line["params"]) == (2.0, 8, 3, 32768)
    assert line["tokens"] == 8 * 24 * 12 * 4 * 32
    assert (line["loss"], line["baseline_loss"]) == (pytest.approx(2.361), 2.0)
    assert line["curve"] == [[12, pytest.approx(2.561)], [24, pytest.approx(2.361)]]
    assert line["baseline_curve"] == [[12, 2.2], [24, 2.0]]
    assert (diverged["loss"], diverged["curve"]) == (None, [[12, None], [24, None]])


def test_a_terminal_shows_which_training_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = cases(modes=["blocking"], codecs=["fp32"])
    ran(chosen, monkeypatch, as_json=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    ran(chosen, monkeypatch, as_json=True)
    assert "training 2 of 2" in capsys.readouterr().err


def test_the_table_compares_with_blocking_and_with_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = cases(codecs=["fp32,lloyd2,int8"], seeds=["0,1"], rates=["4,2,1"])
    lines = [" ".join(line.split()) for line in ran(chosen, monkeypatch, as_json=False)]
    # Each side at the best of its own rates.
    assert "8 data parallel 2 2.0000" in lines
    assert "8 blocking, fp32 0.9/0.8/10 1 64 2.2000 +10.00 %" in lines
    assert "8 streaming, lloyd2 0.9/0.8/10 1 4.125 2.2610 +2.77 % +13.05 %" in lines
    assert any("int8" in row and "diverged" in row for row in lines)
    assert "8 blocking, fp32 0.9/0.8/10 +9.09 % +10.00 %" in lines


def test_the_baseline_is_that_of_the_same_batches() -> None:
    case = cases(seeds=["5"], peers=["3"], steps=6)[-1]
    baseline = baseline_of(case)
    assert (baseline.mode, baseline.seed, baseline.peers, baseline.size) == ("parallel", 5, 3, case.size)
    assert baseline_of(replace(case, ramp=4)) == replace(baseline, ramp=4)
    assert baseline.tokens == case.tokens
