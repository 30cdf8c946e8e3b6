"""Finding runs: an owner lists one, and a bootstrap shows it."""

import json
import os
import re
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import load_manifest
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.cli.main import app
from flockstep.scripts.runs.listed import FoundRun, FoundRuns, find_runs, list_run, show_runs
from flockstep.scripts.runs.run import create_run
from support.bootstraps import TINY_RUN, kept
from support.commands import Command
from typer.testing import CliRunner

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
README_TOML = next(block for block in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if '"own"' in block)


def config(home: Path) -> PeerConfig:
    return PeerConfig(home=home, host="127.0.0.1", port=0, upnp=False)


def awaited(via: tuple[str, ...], me: PeerConfig, count: int) -> list[FoundRun]:
    """The listed runs, once there are so many: a bootstrap makes its list anew every few seconds."""
    while len(found := find_runs(via, me).runs) != count:
        pass
    return list(found)


def test_the_program_of_the_readme_trains_and_prints_its_rounds(
    bootstrap_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its three files as they stand there, and a keeper, as `run create` goes on to be one. The run pins the model."""
    for text in re.findall(r"```python\n(# (?:my_model|train)\.py.*?)```", README, re.DOTALL):
        (tmp_path / text[2:].split(".py")[0]).with_suffix(".py").write_text(text)
    (tmp_path / "run.toml").write_text(README_TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_model", None)  # To forget it again.
    monkeypatch.delitem(sys.modules, "my_model")
    owner, said, before = config(tmp_path / "owner"), list[str](), list(sys.path)
    link = create_run(Path("run.toml"), [bootstrap_address], owner, said.append, model="my_model:MyModel")
    assert load_manifest(tmp_path / "mine.flockstep").manifest.layout
    assert not any("Not pinned" in line for line in said)
    assert sys.path == before
    environment = {**os.environ, "FLOCKSTEP_HOME": str(tmp_path / "volunteer")}
    with kept(link, owner.home), Command(link, program=tmp_path / "train.py", env=environment) as trainer:
        lines = list(islice((line for line in trainer.stdout if line.startswith("round ")), 2))
        trainer.kill()
    assert [line.split(":")[0] for line in lines] == ["round 1", "round 2"]


def test_a_listed_run_is_found_with_the_line_that_joins_it(
    publish: Callable[..., str], bootstrap_address: str, tmp_path: Path
) -> None:
    me, via, said = config(tmp_path / "volunteer"), (bootstrap_address,), list[str]()
    links = [publish(TINY_RUN, owner) for owner in ("anna", "bert")]
    assert find_runs(via, me) == FoundRuns((), 0)
    with pytest.raises(UsageError, match="only its owner"):
        list_run(links[0], config(tmp_path / "bert"), said.append, listed=True)

    list_run(links[0], config(tmp_path / "anna"), said.append, listed=True)
    assert "listed for a week" in said[-1]
    (run,) = awaited(via, me, 1)
    assert run.signed.run_id == JoinLink.parse(links[0]).run_id
    show_runs(via, me, said.append, as_json=True)
    (figures,) = json.loads(said[-1])
    assert (figures["name"], figures["round"], figures["followed"]) == ("tiny", 0, False)
    assert figures["parameters"] > 100_000
    show_runs(via, me, said.append, as_json=False)
    assert f"    flockstep join '{links[0]}'" in said

    # The service starts where nobody can be asked.
    alone = ["--home", str(tmp_path / "another"), "--host", "127.0.0.1", "--no-upnp"]
    installed = CliRunner().invoke(app, ["service", "install", links[0], *alone], env={"PATH": ""})
    assert "there is no terminal to ask on" in str(installed.exception)

    list_run(links[1], config(tmp_path / "bert"), said.append, listed=True)
    awaited(via, me, 2)

    list_run(links[0], config(tmp_path / "anna"), said.append, listed=False)
    assert awaited(via, me, 1)[0].signed.run_id == JoinLink.parse(links[1]).run_id
