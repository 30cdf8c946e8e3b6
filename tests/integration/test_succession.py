"""Successions with real processes: a run whose voters are gone for good goes on, with its owner's key and without it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.bootstraps import TINY_RUN
from support.commands import Command, flockstep

HERE = ("--host", "127.0.0.1", "--port", "0")


class Joined:
    """A trainer as a process, and its events."""

    def __init__(self, stack: ExitStack, link: str, home: Path) -> None:
        join = ("join", link, "--home", str(home), *HERE, "--threads", "1", "--json", "--yes")
        self._process = stack.enter_context(Command(*join))
        self._events: Iterator[dict[str, Any]] = (json.loads(line) for line in self._process.stdout)

    def heard(self, name: str, matches: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
        """Wait for the next such event."""
        return next(event for event in self._events if event["event"] == name and matches(event))

    def kill(self) -> None:
        self._process.kill()


def link_in(command: Command) -> str:
    line = next(line for line in command.stdout if "flockstep://" in line)
    return line.strip().removeprefix("flockstep join ").strip("'")


def test_a_run_whose_only_keeper_lost_its_disk_goes_on_by_one_command_of_its_owner(
    bootstrap_address: str, tmp_path: Path
) -> None:
    toml, home, elsewhere = tmp_path / "run.toml", tmp_path / "owner", tmp_path / "elsewhere"
    toml.write_text(TINY_RUN)
    with ExitStack() as stack:
        create = ("run", "create", str(toml), "--via", bootstrap_address, "--home", str(home), *HERE)
        owner = stack.enter_context(Command(*create))
        link = link_in(owner)
        trainers = [Joined(stack, link, tmp_path / name) for name in ("anna", "ben")]
        for trainer in trainers:
            trainer.heard("round.done", lambda event: event["round"] >= 2)
        owner.kill()
        elsewhere.mkdir()
        shutil.copy(home / "identity.key", elsewhere)
        shutil.rmtree(home)

        succeed = stack.enter_context(Command("run", "succeed", link, "--home", str(elsewhere), *HERE))
        following = link_in(succeed)
        run = following.removeprefix("flockstep://").partition("?")[0]
        ended = [trainer.heard("run.ended") for trainer in trainers]
        last = max(event["round"] for event in ended)
        roots = {event["root"] for event in ended if event["round"] == last}
        for trainer in trainers:
            assert trainer.heard("run.succeeded")["run"] == run
            assert trainer.heard("run.joined")["run"] == run
        first = [trainer.heard("round.done") for trainer in trainers]
        assert {event["round"] for event in first} <= {1, 2}

        visitor = ("--home", str(tmp_path / "visitor"), "--json")
        credit = json.loads(flockstep("run", "credit", following, *visitor, check=True).stdout)
        assert credit["rounds_before"] == last
        assert sum(row["rounds"] for row in credit["credit"]) > credit["round"]
        shown = json.loads(flockstep("status", link, *visitor, check=True).stdout)
        assert f"goes on as {following}" in shown["goes_on"]
        assert shown["progress"]["state"] == "over"
        again = flockstep("run", "succeed", link, "--home", str(elsewhere), "--no-keep", check=True).stdout
        assert f"goes on as run {run} already" in again
        late = Joined(stack, link, tmp_path / "late")
        assert late.heard("run.joined")["run"] == run

        signed = json.loads(flockstep("run", "info", following, "--json", check=True).stdout)
        assert signed["manifest"]["start"] in roots
        assert signed["manifest"]["follows"]["round"] == last
        for trainer in (*trainers, late):
            trainer.kill()
        succeed.kill()


def test_a_run_whose_owner_is_gone_for_good_goes_on_as_one_that_a_trainer_publishes(
    bootstrap_address: str, tmp_path: Path
) -> None:
    toml, home, anna = tmp_path / "run.toml", tmp_path / "owner", tmp_path / "anna"
    toml.write_text(TINY_RUN)
    with ExitStack() as stack:
        create = ("run", "create", str(toml), "--via", bootstrap_address, "--home", str(home), *HERE)
        owner = stack.enter_context(Command(*create))
        link = link_in(owner)
        trainer = Joined(stack, link, anna)
        trainer.heard("checkpoint.written", lambda event: event["round"] >= 2)
        owner.kill()
        shutil.rmtree(home)
        trainer.kill()

        refused = flockstep("run", "succeed", link, "--home", str(anna), *HERE)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "only its owner" in refused.stderr
        flockstep("export", str(anna), str(tmp_path / "my-model"), check=True)
        toml.write_text(TINY_RUN.replace("[model]", f'[model]\nfrom = "{tmp_path}/my-model"'))
        create = ("run", "create", str(toml), "--via", bootstrap_address, "--home", str(anna), *HERE)
        mine = stack.enter_context(Command(*create))
        other = Joined(stack, link_in(mine), tmp_path / "ben")
        assert other.heard("round.done")["round"] >= 1
        other.kill()
        mine.kill()
