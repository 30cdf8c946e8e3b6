"""`bench outer`: its options, its lines and its table."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.lab.bench import outer
from flockstep.scripts.lab.bench.outer import OuterOptions, baseline_of, run_outer
from flockstep.scripts.lab.training.outer import OuterResult, OuterTraining

RESULTS = {"parallel": 2.0, "blocking": 2.2, "streaming": 2.211}


def pretended(training: OuterTraining) -> OuterResult:
    loss = RESULTS[training.mode] if training.contribution != "int8" else math.inf
    loss += 0.1 if training.mode == "streaming" and training.seed else 0.0
    loss += 0.05 * abs(training.size.rate - (2 if training.mode == "parallel" else 1))
    return OuterResult(((12, loss + 0.2), (24, loss)), 32768)


def options(**changes: Any) -> OuterOptions:
    given: dict[str, Any] = {"size": "tiny", "jobs": 1, "as_json": True}
    return OuterOptions(**(given | changes))


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
        options(**wrong).trainings()
    assert caught.value.remedy


def test_every_case_is_trained_once_after_its_baseline() -> None:
    chosen = options(delays=["0,1"], outer=["0.8/0.5,0.9/0.8"], peers=["2,4"], seeds=["0,1"])
    trainings = chosen.trainings()
    baselines = [one for one in trainings if one.mode == "parallel"]
    assert {(one.peers, one.seed) for one in baselines} == {(n, s) for n in (2, 4) for s in (0, 1)}
    per_setting = {"blocking": 3, "streaming": 2 * 3}  # Three codecs; blocking has no delay.
    for mode, number in per_setting.items():
        assert sum(one.mode == mode for one in trainings) == number * 2 * 2 * 2
    assert len(set(trainings)) == len(trainings)
    assert not [one for one in options(baseline=False).trainings() if one.mode == "parallel"]
    sizes = {one.size for one in options(steps=7, rounds=2, optimizer="muon").trainings()}
    assert [(size.steps, size.rounds, size.optimizer) for size in sizes] == [(7, 2, "muon")]


def test_a_line_for_each_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "train_outer", pretended)
    written: list[str] = []
    given: dict[str, Any] = {"codecs": ["lloyd2/int4"], "seeds": ["3"], "outer": ["0.9/0.8/5"], "momentum": 0.7}
    cases = options(modes=["streaming"], rates=["2"], ramps=["8"], **given)
    run_outer(cases, written.append)
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
            "inner_momentum": 0.7,
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
    run_outer(options(modes=["blocking"], codecs=["int8"], baseline=False), written.append)
    assert [json.loads(line)[key] for line in written for key in ("loss", "baseline", "baseline_loss")] == [None] * 3


def test_the_table_compares_with_blocking_and_with_data_parallel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outer, "train_outer", pretended)
    chosen = options(codecs=["fp32,lloyd2,int8"], seeds=["0,1"], rates=["4,2,1"], as_json=False)
    run_outer(chosen, lambda line: None)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # Each side at the best of its own rates.
    assert "8 data parallel 2 2.0000" in rows
    assert "8 blocking, fp32 0.9/0.8/10 1 64 2.2000 +10.00 %" in rows
    assert "8 streaming 4 1, lloyd2 0.9/0.8/10 1 4.125 2.2610 +2.77 % +13.05 %" in rows
    assert any("int8" in row and "diverged" in row for row in rows)
    assert "8 peers, blocking, fp32 +9.1 +10.0" in rows


def test_a_training_in_the_results_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[OuterTraining] = []

    def counted(training: OuterTraining) -> OuterResult:
        made.append(training)
        return pretended(training)

    monkeypatch.setattr(outer, "train_outer", counted)
    lines: list[list[str]] = [[], []]
    path = tmp_path / "results.jsonl"
    run_outer(options(codecs=["fp32"], modes=["blocking"], results=path), lines[0].append)
    assert len(made) == 2
    run_outer(options(codecs=["fp32,int8"], modes=["blocking"], results=path), lines[1].append)
    assert [training.contribution for training in made[2:]] == ["int8"]
    assert lines[1][0] == lines[0][0]
    with path.open("a") as file:
        file.write('{"training": 1')
    with pytest.raises(UsageError, match=r"results\.jsonl"):
        run_outer(options(results=path), lines[1].append)


def test_the_baseline_is_that_of_the_same_batches() -> None:
    case = options(seeds=["5"], peers=["3"], steps=6).trainings()[-1]
    baseline = baseline_of(case)
    assert (baseline.mode, baseline.seed, baseline.peers, baseline.size) == ("parallel", 5, 3, case.size)
    assert baseline_of(replace(case, ramp=4)) == replace(baseline, ramp=4)
    assert baseline.tokens == case.tokens


def test_a_picture_has_a_line_for_each_case_and_its_gap_at_each_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outer, "train_outer", pretended)
    picture = tmp_path / "gap.svg"
    chosen = options(codecs=["fp32,int8"], outer=["0.8/0.5,0.9/0.8"], modes=["blocking"], picture=picture)
    run_outer(chosen, lambda line: None)
    drawn = ElementTree.parse(picture).getroot()
    lines = [it.attrib["points"].split() for it in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line) for line in lines] == [2, 0, 2, 0]  # What diverged is named alone.
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights[0] > heights[1]  # The gap of the later round is greater: higher up.
    names = [text for it in drawn.iter() if (text := str(it.text)).startswith("8 peers")]
    assert names == [f"8 peers, blocking, {codec}, {it}/0" for it in ("0.8/0.5", "0.9/0.8") for codec in ("fp32", "int8")]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"baseline": False}, "no gap"),
        ({"codecs": ["int8"]}, "no gap"),
        ({"picture": Path("/nowhere/gap.svg")}, "cannot write"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    monkeypatch.setattr(outer, "train_outer", pretended)
    with pytest.raises((UsageError, LocalError), match=match):
        run_outer(options(**({"picture": tmp_path / "gap.svg"} | changes)), lambda line: None)
