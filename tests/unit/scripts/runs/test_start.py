"""`[model] from`: a run's first state from checkpoints and exports, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flockstep.collectives.state.checkpoint_file import load_checkpoint
from flockstep.dht.run.manifest import Data, Manifest, Model, SignedManifest
from flockstep.optim.models.kept import save_tensors
from flockstep.optim.models.registry import build_model
from flockstep.optim.step.flat import FlatLayout
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.scripts.checkpoints.export import export
from flockstep.scripts.runs.run import create_run
from flockstep.scripts.runs.start import FirstState, read_first_state
from torch.distributed import checkpoint

SHAPE = (("context", "32"), ("heads", "2"), ("layers", "1"), ("width", "16"))
TINY = Model("gpt", SHAPE)
VIA = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer_id}"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    model = build_model(TINY.name, TINY.options, seed=7)
    out = tmp_path / "exported" / "model.safetensors"
    out.parent.mkdir()
    save_tensors({name: parameter.detach() for name, parameter in model.named_parameters()}, out)
    return out.parent


def first_of(exported: Path) -> FirstState:
    return read_first_state(exported, TINY)


def test_exports_and_checkpoints_give_the_same_first_state(exported: Path, tmp_path: Path) -> None:
    first = first_of(exported)
    wanted = np.empty_like(first.theta)
    FlatLayout.of(model := build_model(TINY.name, TINY.options, seed=7)).gather(model, wanted)
    assert np.array_equal(first.theta, wanted)
    run_folder = tmp_path / "home" / "runs" / "a"
    folder = first.keep("a", run_folder)
    kept = load_checkpoint(folder)
    assert (kept.run, kept.place.round, kept.place.certificate) == ("a", 0, None)
    assert kept.place.root == first.root
    export(run_folder, tmp_path / "again", lambda line: None)
    sources = (exported / "model.safetensors", folder, run_folder, tmp_path / "home", tmp_path / "again")
    assert {read_first_state(source, TINY).root for source in sources} == {first.root}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that no other process takes part.
def test_checkpoints_of_torch_distributed_are_read_and_made_as_the_manual_says(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text()
    load, convert = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exported.rename(tmp_path / "my-model")
    model = build_model(TINY.name, TINY.options, seed=8)
    exec(load, {"model": model})
    checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "my-checkpoint")  # type: ignore[attr-defined]
    exec(convert, {})
    assert read_first_state(tmp_path / "start.safetensors", TINY).root == first_of(tmp_path / "my-model").root


def test_a_keepers_checkpoint_has_the_names_of_its_runs_model(exported: Path, tmp_path: Path) -> None:
    first, run_folder, owner = first_of(exported), tmp_path / "runs" / "a", Identity.from_seed(bytes(32))
    description = first.keep("a", run_folder) / "checkpoint.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"tensors": []}))
    manifest = Manifest(owner.peer_id, "kept", Data("text:x"), model=TINY)
    (run_folder / "manifest").write_bytes(SignedManifest.sign(manifest, owner).publishable)
    assert read_first_state(tmp_path, TINY).root == first.root
    with pytest.raises(UsageError, match="holds another model"):
        read_first_state(tmp_path, replace(TINY, options_json=(SHAPE[0], ("heads", "4"), *SHAPE[2:])))
    (run_folder / "manifest").unlink()
    with pytest.raises(UsageError, match="is not known"):
        read_first_state(tmp_path, TINY)


def test_what_is_no_state_of_the_model_is_refused_in_one_line(exported: Path, tmp_path: Path) -> None:
    first = first_of(exported)
    folder = first.keep("a", tmp_path / "kept")
    cases: list[tuple[Path, Model, str]] = [
        (tmp_path / "nowhere", TINY, "there is no such file or folder"),
        (tmp_path, TINY, "there is no checkpoint in"),
        (exported, replace(TINY, options_json=(*SHAPE[:-1], ("width", "32"))), r"key.weight has the shape \(16, 16\) there"),
        (folder, replace(TINY, options_json=(*SHAPE[:2], ("layers", "2"), SHAPE[3])), "is missing there, and has the shape"),
        (folder / "state.safetensors", TINY, "holds another model"),
        (folder / "checkpoint.json", TINY, "cannot read"),
        (exported, Model("hf:llama"), "hf:llama is no gpt"),
    ]
    for source, model, reason in cases:
        with pytest.raises(UsageError, match=reason) as raised:
            read_first_state(source, model)
        assert "\n" not in str(raised.value)
        assert raised.value.remedy


def test_a_first_state_that_is_not_finite_is_refused(exported: Path) -> None:
    model = build_model(TINY.name, TINY.options, seed=7)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    next(iter(tensors.values()))[0, 0] = torch.inf
    save_tensors(tensors, exported / "model.safetensors")
    with pytest.raises(UsageError, match="is not finite"):
        first_of(exported)


@pytest.mark.parametrize(
    ("begin", "model", "reason"),
    [
        (f'start = "{"00" * 32}"', "", "start names a first state that nobody has"),
        (f'start = "{"00" * 32}"', 'from = "exported"', r"start is 00.*, but the root of \[model\] from is"),
        ("", 'from = "elsewhere"', "elsewhere: there is no such file or folder"),
    ],
)
def test_a_run_is_not_created_from_a_state_that_is_not_there(
    begin: str, model: str, reason: str, exported: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    shape = "\n".join(f"{key} = {value}" for key, value in SHAPE)
    path.write_text(f'name = "x"\n{begin}\n[data]\nsource = "text:x"\n[model]\n{shape}\n{model}\n')
    with pytest.raises(UsageError, match=reason):
        create_run(path, [VIA], PeerConfig(home=tmp_path / "home"), lambda line: None)
    assert not list(tmp_path.glob("*.flockstep"))
