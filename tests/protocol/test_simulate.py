"""`flockstep simulate`: its invariants, reproducibility, and detection of violations."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.driver.work import Work
from flockstep.collectives.robust.rule import Floats64, Weighting
from flockstep.optim.member.apply import OuterState
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.cli import main
from flockstep.scripts.lab.simulate.options import RATES, SECONDS, Partition, Span, Strike
from flockstep.scripts.lab.simulate.report import Report
from flockstep.scripts.lab.simulate.world import LOG, simulate
from support.simulations import CALM


def outcomes(report: Report) -> list[dict[str, Any]]:
    lines: list[str] = []
    report.show(lines.append, as_json=True)
    rows: list[dict[str, Any]] = json.loads(lines[0])["rounds"]
    return rows


def test_undisturbed_every_round_is_of_all_and_ends_equal() -> None:
    report = simulate(CALM)
    assert not report.violations
    assert [(row["round"], row["outcome"], row["roster"], row["cut"], row["states"]) for row in outcomes(report)] == [
        (number, "done", "5", "5", "equal on 5") for number in (1, 2, 3)
    ]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]


def test_the_log_has_every_event_of_every_peer_in_the_order_of_time(tmp_path: Path) -> None:
    simulate(replace(CALM, rounds=1, out=tmp_path))
    log = events(tmp_path)
    assert [event["time"] for event in log] == sorted(event["time"] for event in log)
    for name in ("p0", "p1", "p2", "p3", "p4"):
        said = [event["step"] for event in log if event["at"] == name and event["event"] == "round.said"]
        assert {"Ready", "Commit", "Have", "Sketch", "Result", "Prevote", "Precommit"} <= set(said)
    (done,) = [event for event in log if event["at"] == "p0" and event["event"] == "round.done"]
    assert sorted(done["cut"]) == ["p0", "p1", "p2", "p3", "p4"]


TRACED = (
    *("simulate", "--rounds", "1", "--peers", "4", "--json"),
    *("--churn", "1", "--stall", "0.5", "--loss", "0.05", "--bandwidth", "2Mbit..50Mbit"),
)


def trace(hash_seed: int) -> str:
    command = [sys.executable, "-m", "flockstep", *TRACED]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    found: str = json.loads(result.stdout)["trace"]
    return found


def test_the_same_seed_gives_the_same_events_in_any_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = {trace(hash_seed) for hash_seed in (0, 4711)}
    assert len(traces) == 1
    monkeypatch.setattr(sys, "argv", ["flockstep", *TRACED, "--seed", "1"])
    with pytest.raises(SystemExit):
        main.main()
    assert json.loads(capsys.readouterr().out)["trace"] not in traces


STRIKES = [
    "round=2,after=Roster,kill=proposer",
    "round=2,after=Have,kill=owner",
    "round=2,after=Propose,kill=proposer",
    "round=2,after=Precommit,kill=owner",
    "round=2,after=Prevote,cut=owner,for=12s",
    "round=2,after=Cut,stall=proposer,for=12s",
    "round=2,after=Commit,leave=owner",
]
STREAMED = STRIKES[1:2]
"""What the gate tries in streaming mode, too, where a simulation takes ten times as long."""
STRUCK = [
    pytest.param(text, seed, fragments, marks=[pytest.mark.explore] * (seed == 2 or (fragments > 1 and text not in STREAMED)))
    for seed, fragments in ((1, 1), (2, 1), (3, 4))
    for text in STRIKES
]


@pytest.mark.parametrize(("text", "seed", "fragments"), STRUCK)
def test_whoever_is_struck_whenever_the_invariants_hold(text: str, seed: int, fragments: int, tmp_path: Path) -> None:
    strike = Strike.parse(text, 4)
    report = simulate(replace(CALM, peers=4, seed=seed, strikes=(strike,), fragments=fragments, out=tmp_path))
    assert not report.violations
    assert not report.unmet
    blows = [event for event in events(tmp_path) if event["event"] == f"chaos.{strike.blow}"]
    assert len(blows) == 1
    assert report.living == 4 - (strike.blow in ("kill", "leave"))


def test_who_says_goodbye_in_a_round_is_not_waited_for() -> None:
    strikes = (Strike.parse("round=2,after=Commit,leave=owner", 5),)
    seconds = [
        outcomes(report)[1]["seconds"] for report in (simulate(CALM), simulate(replace(CALM, strikes=strikes)))
    ]
    assert seconds[1] < seconds[0] + 1.0  # Virtual ones: a loss by silence would take three more.


def test_a_strike_whose_moment_never_comes_is_told() -> None:
    report = simulate(replace(CALM, rounds=1, strikes=(Strike.parse("round=1,after=Void,kill=owner", 5),)))
    assert list(report.unmet) == ["kill the owner after Void of round 1"]


def test_who_was_cut_off_from_a_quorum_that_went_on_catches_up() -> None:
    report = simulate(replace(CALM, peers=5, rounds=7, partitions=(Partition((4, 1), 2, 18.0),)))
    assert not report.violations
    assert [row["cut"] for row in outcomes(report)[1:4]] == ["4"] * 3
    assert outcomes(report)[-1]["states"] == "equal on 5"


@pytest.mark.parametrize(
    ("seed", "fragments"),
    [(0, 1), *(pytest.param(*each, marks=pytest.mark.explore) for each in ((1, 1), (2, 1), (3, 3), (4, 3)))],
)
def test_a_swarm_that_comes_and_goes_stays_one(seed: int, fragments: int) -> None:
    stormy = replace(
        CALM,
        peers=6,
        rounds=4 + fragments - 1,
        seed=seed,
        churn=1.0,
        stall=0.3,
        loss=0.05,
        bandwidth=Span(1e6, 5e6, True),
        fragments=fragments,
    )
    assert not simulate(stormy).violations


def test_a_state_that_drifts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = OuterState.apply
    wrong: list[OuterState] = []

    def drift(state: OuterState, bounds: Any, outputs: Any) -> None:
        apply(state, bounds, outputs)
        if not wrong:
            wrong.append(state)
            state.theta[0] += 1
            state.forget()

    monkeypatch.setattr(OuterState, "apply", drift)
    assert "equal states" in {violation.invariant for violation in simulate(CALM).violations}


def test_an_average_that_leaves_somebody_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_one(*, weights: Floats64, flagged: dict[int, str]) -> Weighting:
        return Weighting(weights=np.hstack([0 * weights[:, :1], weights[:, 1:]]), flagged=flagged)

    monkeypatch.setattr("flockstep.collectives.driver.work.Weighting", lose_one)
    (first, *_) = simulate(replace(CALM, rule="mean", rounds=1)).violations
    assert first.invariant == "all or nothing"
    assert "not what the rule makes of the cut" in first.text


def test_an_honest_peer_that_is_charged_is_named_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve_other_bytes(self: Work, key: bytes, data: bytes, *, readers: object) -> None:
        self.node.blobs.put(key, bytes(len(data)))

    monkeypatch.setattr(Work, "_serve", serve_other_bytes)
    arguments = ["flockstep", "simulate", "--rounds", "1", "--peers", "3", "--steps-time", "1s"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("flockstep.scripts.lab.simulate.world.STANDSTILL", 60.0)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "honest peers     VIOLATED" in out
    assert "do not match their hash" in out


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: Span.parse("20", SECONDS), "no number with a unit"),
        (lambda: Span.parse("20parsecs", SECONDS), "no number with a unit"),
        (lambda: Span.parse("100ms..20ms", SECONDS), "not a range"),
        (lambda: Span.parse("0Mbit", RATES, logarithmic=True), "not a range"),
        (lambda: Partition.parse("5@round=2", 8), "not a partition"),
        (lambda: Partition.parse("5+4@round=2,for=9s", 8), "does not fit 8 peers"),
        (lambda: Strike.parse("round=3,after=Cut", 8), "not a strike"),
        (lambda: Strike.parse("round=3,after=Lunch,kill=owner", 8), "not a strike"),
        (lambda: Strike.parse("round=3,after=Cut,kill=owner,stall=owner", 8), "not a strike"),
        (lambda: Strike.parse("round=3,after=Cut,kill=8", 8), "names no valid victim"),
        (lambda: Strike.parse("after=Cut,kill=owner", 8), "no valid victim or round"),
        (lambda: Strike.parse("round=3,after=Cut,kill=owner,kill=1", 8), "not a strike"),
        (lambda: Strike.parse("round=3,after=Cut,leave=owner,for=5s", 8), "leave= has no duration"),
        (lambda: replace(CALM, strikes=(Strike(4, "Cut", "kill", "owner", 1.0),)), "the rounds are 1 to 3"),
        (lambda: replace(CALM, partitions=(Partition((2, 3), 0, 9.0),)), "the rounds are 1 to 3"),
        (lambda: replace(CALM, steps_time=Span(0.5, 1.0)), "too short"),
        (lambda: replace(CALM, peers=0), "peers must be 1"),
        (lambda: replace(CALM, loss=1.0), "loss must be 0"),
    ],
)
def test_words_that_make_no_sense_are_refused_with_an_example(read: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read()
