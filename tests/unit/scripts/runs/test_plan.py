"""The plan of a run: its figures by hand, its warnings at their boundaries, and that each remedy works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.run.layout import LayoutPin
from flockstep.dht.run.manifest import Manifest
from flockstep.optim.models.needs import ModelSize
from flockstep.optim.train.fit import LINE_FACTOR, MOST_STEPS, ROUND_SECONDS, TRAINED_SHARE, Pace, pace_of, rate_of
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import FlockstepError, UsageError
from flockstep.scripts.runs.plan import (
    GPUS,
    LEAST_ROUNDS,
    LEAST_STEP,
    PEAK_SHARE,
    Fleet,
    Plan,
    gpu_named,
    plan_of,
)
from flockstep.scripts.runs.run import create_run, plan_run

MILLION = ModelSize(1_000_000, 4_000_000)
LARGE = ModelSize(100_000_000, 400_000_000)


def run(outer: str = "", inner: str = "", more: str = "", data: str = "") -> Manifest:
    text = f'name = "x"\n{more}\n[data]\nsource = "text:{{stdlib}}"\n{data}\n[inner]\n{inner}\n[outer]\n{outer}\n'
    return Manifest.from_toml(text, where="", owner="")


def fleet(rate: float = 50.0, *, peers: int = 8, tokens_per_s: float = 4096.0, gpu: str = "4090") -> Fleet:
    return Fleet(peers=peers, gpu=gpu_named(gpu), rate=rate, tokens_per_s=tokens_per_s)


def planned(manifest: Manifest, computers: Fleet, size: ModelSize = LARGE) -> Plan:
    return plan_of(manifest, size, size.num_trained, computers)


def test_the_figures_of_a_blocking_run_follow_from_its_settings() -> None:
    manifest = run('mode = "blocking"\nrounds = 40', "steps = 50", data="batch_size = 16\nsequence_length = 256")
    plan = planned(manifest, fleet(100.0))
    # 8.5 bits of 100M parameters, but for the eighth that stays at home.
    assert plan.bytes_per_round == 100_000_000 * 8.5 / 8 * 7 / 8
    waits = ROUND_SECONDS + LINE_FACTOR * plan.bytes_per_round * 8 / 100e6
    assert plan.step_seconds == 1.0
    assert plan.pace == pytest.approx(Pace(50.0, 50.0, waits, waits))
    assert plan.hours == pytest.approx(40 * (50 + waits) / 3600)
    assert plan.tokens == pytest.approx(8 * 40 * 50 * 4096)
    assert plan.tokens_per_day == pytest.approx(plan.tokens / plan.hours * 24)
    assert plan.kilowatt_hours == pytest.approx(8 * 0.45 * plan.hours)


def test_one_peer_sends_nothing_and_a_measured_speed_replaces_the_estimate() -> None:
    alone = planned(run(), fleet(0.1, peers=1))
    assert (alone.bytes_per_round, alone.pace.round) == (0, ROUND_SECONDS)
    estimated = planned(run(), fleet(tokens_per_s=0.0))
    assert estimated.tokens_per_s == pytest.approx(PEAK_SHARE * 165e12 / 6e8)
    # Frozen weights have no gradient of their own: four operations in place of six.
    adapters = plan_of(run(), ModelSize(0, 400_000_000), 100_000_000, fleet(tokens_per_s=0.0))
    assert adapters.tokens_per_s == pytest.approx(PEAK_SHARE * 165e12 / 4e8)


def test_training_goes_on_while_a_round_runs_for_as_many_steps_as_h() -> None:
    streaming = run('mode = "streaming"\nfragments = 5', "steps = 100")
    taken = pace_of(streaming, LARGE.num_trained, 8, 50.0, 1.0).round
    # A round within a phase; one that outlasts it, and lengthens it; one that outlasts H.
    for step_seconds, training, waits in ((taken / 8, 2.5, 0.0), (taken / 40, 1.0, 0.0), (taken / 200, 0.5, 0.5)):
        pace = pace_of(streaming, LARGE.num_trained, 8, 50.0, step_seconds)
        assert pace == pytest.approx(Pace(20 * step_seconds, training * taken, taken, waits * taken))
        assert pace.share == pytest.approx(training / (training + waits))
        assert pace.kept == pytest.approx(20 * step_seconds / taken / (training + waits))
    assert rate_of(streaming, LARGE.num_trained, 8, taken) == pytest.approx(50.0)
    phases = run('mode = "blocking"', "seconds = 90.0")
    assert pace_of(phases, LARGE.num_trained, 8, 50.0, 1.0).training == 90.0


def warned(manifest: Manifest, computers: Fleet, size: ModelSize = LARGE) -> str:
    return "\n".join(planned(manifest, computers, size).warnings)


def test_a_line_is_too_thin_below_nine_tenths_of_training() -> None:
    manifest = run('mode = "blocking"\nrounds = 100', "steps = 50")
    phase = 50 * TRAINED_SHARE
    # The rate at which a round takes a ninth of the phase.
    payload = 100e6 * 8.5 * 7 / 8 * 1e-6
    enough = LINE_FACTOR * payload / ((50 - phase) / TRAINED_SHARE - ROUND_SECONDS)
    assert "too thin" not in warned(manifest, fleet(enough * 1.0001))
    assert "too thin" in warned(manifest, fleet(enough * 0.9999))
    # While peers train on, a round may take as long as the phase, and a ninth.
    enough = LINE_FACTOR * payload / 5 / (20 / TRAINED_SHARE - ROUND_SECONDS)
    streaming = run('mode = "streaming"\nrounds = 100', "steps = 100")
    assert warned(streaming, fleet(enough * 1.0001)) == ""
    assert "too thin: a round takes 22.2 s, so that H becomes 1.1 times" in warned(streaming, fleet(enough * 0.9999))


def settings(text: str) -> dict[str, dict[str, str]]:
    """The tables of a `run.toml` that a remedy names."""
    tables: dict[str, dict[str, str]] = {}
    for table, keys in re.findall(r"\[(\w+)\] ((?:(?:\w+ and )?\w+ = (?:\"\w+\"|[\d.]+)(?:, (?=\w+ =))?)+)", text):
        for names, value in re.findall(r"((?:\w+ and )?\w+) = (\"\w+\"|[\d.]+)", keys):
            tables.setdefault(table, {}).update(dict.fromkeys(names.split(" and "), value))
    return tables


def changed(base: dict[str, dict[str, str]], text: str) -> Manifest:
    tables = {
        name: {**base.get(name, {}), **settings(text).get(name, {})} for name in ("data", "inner", "outer", "codec")
    }
    toml = "\n".join(
        f"[{name}]\n" + "\n".join(f"{key} = {value}" for key, value in keys.items()) for name, keys in tables.items()
    )
    return Manifest.from_toml(f'name = "x"\n{toml}', where="", owner="")


@pytest.mark.parametrize(
    ("outer", "speed", "rate", "remedies"),
    [
        ({"mode": '"blocking"'}, 4096.0, 30.0, 3),
        ({"mode": '"streaming"'}, 25_000.0, 30.0, 2),
        ({"mode": '"blocking"'}, 80_000.0, 50.0, 1),
        ({"mode": '"streaming"', "fragments": "5"}, 80_000.0, 20.0, 1),
    ],
)
def test_every_remedy_for_a_thin_line_is_a_valid_run_in_which_peers_train(
    outer: dict[str, str], speed: float, rate: float, remedies: int
) -> None:
    source = '"text:{stdlib}"'
    base = {"data": {"source": source}, "inner": {"steps": "100"}, "outer": {**outer, "rounds": "1000"}}
    computers = fleet(rate, tokens_per_s=speed)
    (warning,) = planned(changed(base, ""), computers).warnings
    texts = warning.partition("; ")[2].split(" or ")
    assert len(texts) == remedies
    for text in texts:
        other = changed(base, text)
        assert other != changed(base, "")
        assert planned(other, computers).pace.kept >= TRAINED_SHARE, text


def test_a_line_that_no_setting_helps_asks_for_phases_of_seconds_or_fewer_parameters() -> None:
    thin = fleet(0.1, tokens_per_s=1e5)
    text = warned(run('mode = "blocking"\nrounds = 100', "steps = 500"), thin)
    assert text.startswith("the line is too thin")
    assert "adapters ([model] lora_rank)" in text
    seconds = settings(text)["inner"]["seconds"]
    assert warned(run('mode = "blocking"', f"seconds = {seconds}.0"), thin) == ""
    text = warned(run('mode = "streaming"\nrounds = 100', "steps = 500"), thin)
    assert "so that H becomes" in text
    seconds = settings(text)["inner"]["seconds"]
    assert warned(run('mode = "streaming"', f"steps = 500\nseconds = {seconds}.0"), thin) == ""


def test_a_phase_that_is_shorter_than_a_round_on_any_line_is_not_the_lines_fault() -> None:
    small = ModelSize(1000, 4000)
    manifest = run('mode = "blocking"\nrounds = 100', "steps = 50")
    # The step of a small model is bound by its kernels, not by the peak.
    assert planned(manifest, fleet(tokens_per_s=0.0), small).step_seconds == LEAST_STEP
    assert warned(manifest, fleet(100_000.0, tokens_per_s=0.0), small).startswith("a phase is too short")


def test_h_is_too_long_for_few_rounds_and_beyond_what_is_known() -> None:
    wide = fleet(100_000.0, tokens_per_s=1.0)
    assert "H is too long" in warned(run(f'mode = "blocking"\nrounds = {LEAST_ROUNDS - 1}'), wide)
    assert warned(run(f'mode = "blocking"\nrounds = {LEAST_ROUNDS}'), wide) == ""
    assert warned(run('mode = "blocking"\nrounds = 100', f"steps = {MOST_STEPS}"), wide) == ""
    assert "H is too long" in warned(run('mode = "blocking"\nrounds = 100', f"steps = {MOST_STEPS + 1}"), wide)
    assert warned(run('mode = "blocking"\nrounds = 3', "seconds = 60.0"), wide) == ""
    for mode, fragments in (("blocking", 1), ("streaming", 5)):
        text = warned(run(f'mode = "{mode}"\nfragments = {fragments}\nrounds = 10', "steps = 100"), wide)
        found = settings(text)
        steps, rounds = int(found["inner"]["steps"]), int(found["outer"]["rounds"])
        assert rounds >= LEAST_ROUNDS
        assert steps % fragments == 0
        assert 1000 <= steps * rounds <= 1000 + steps


def test_weights_gradients_and_moments_must_fit_the_gpu() -> None:
    wide, manifest = fleet(100_000.0, tokens_per_s=1.0), run('mode = "blocking"\nrounds = 100')
    fits = GPUS["4090"].memory * 10**9 // 12
    assert warned(manifest, wide, ModelSize(fits, 4 * fits)) == ""
    assert "[model] lora_rank" in warned(manifest, wide, ModelSize(fits + 1, 4 * fits + 4))


def written(tmp_path: Path, toml: str, **options: Any) -> list[str]:
    (tmp_path / "run.toml").write_text(toml)
    lines: list[str] = []
    plan_run(tmp_path / "run.toml", fleet(), lines.append, **options)
    return lines


def test_a_plan_needs_no_torch_for_a_gpt_and_a_size_for_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = 'name = "x"\n[data]\nsource = "text:{stdlib}"\n[model]\nsize = "25m"\n'
    own = 'name = "x"\n[data]\nsource = "own"\n'
    pin = LayoutPin.of([("a", (1000, 1000))])
    assert "1.0 M trained" in written(tmp_path, f'layout = "{pin}"\n{own}')[0]
    with pytest.raises(UsageError, match="its size is not known"):
        written(tmp_path, own)
    monkeypatch.setattr("flockstep.scripts.runs.run.find_spec", lambda name: None)
    (figures,) = written(tmp_path, gpt, as_json=True)
    assert json.loads(figures)["pace"]["training"] == 50.0


def test_the_plan_of_an_architecture_is_of_what_it_trains(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    llama = (
        '[model]\nname = "hf:llama"\nvocab_size = 64\nhidden_size = 32\nintermediate_size = 48\nnum_hidden_layers = 2\n'
    )
    toml = f'name = "x"\n[data]\nsource = "text:{{stdlib}}"\n{llama}num_attention_heads = 4\n'
    full, adapters = (json.loads(written(tmp_path, toml + lora, as_json=True)[0]) for lora in ("", "lora_rank = 1\n"))
    assert 0 < adapters["bytes_per_round"] < full["bytes_per_round"] / 4


def test_run_create_shows_the_plan_before_it_publishes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\n[data]\nsource = "text:{stdlib}"\n[model]\nsize = "0.2m"\n')
    lines: list[str] = []
    with pytest.raises(FlockstepError, match="has no via="):
        create_run(tmp_path / "run.toml", [], PeerConfig(home=tmp_path), lines.append, fleet=fleet())
    assert lines[0].startswith("plan ")
    assert "213.0 k trained parameters" in lines[0]
