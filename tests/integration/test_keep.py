"""Keepers as real processes: a run outlives all that train."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.run.manifest import Manifest
from flockstep.optim.models.kept import save_tensors
from flockstep.optim.models.registry import build_model
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.scripts.runs.run import create_run
from support.bootstraps import TINY_RUN
from support.commands import Command, flockstep

KEEPERS = tuple(Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))
HERE = ("--host", "127.0.0.1", "--port", "0")


@contextmanager
def processes() -> Iterator[list[Command]]:
    """The processes that a test starts; they are ended with it."""
    started: list[Command] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def join(link: str, home: Path, *options: str) -> Command:
    return Command("join", link, "--home", str(home), *HERE, "--threads", "1", "--json", "--yes", *options)


def line_with(process: Command, text: str) -> str:
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"it ended without {text!r}")


def event_of(process: Command, name: str, least: int = 0) -> dict[str, Any]:
    """The next event of this name, of round `least` or a later one."""
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == name and event.get("round", 0) >= least:
            return event
    raise AssertionError(f"it ended without {name}")


def all_killed(peers: Sequence[Command]) -> None:
    for peer in peers:
        peer.kill()
        peer.wait()


def test_run_create_keeps_the_run_when_all_that_train_are_killed(bootstrap_address: str, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TINY_RUN)
    with processes() as started:
        owner = Command(
            "run", "create", str(toml), "--via", bootstrap_address, "--home", str(tmp_path / "owner"), *HERE
        )
        started.append(owner)
        link = line_with(owner, "flockstep://").split("'")[1]
        assert "its owner decides, as its only keeper" in line_with(owner, "Who decides")
        homes = [tmp_path / "anna", tmp_path / "bert"]
        peers = [join(link, home) for home in homes]
        started += peers
        last = max(event_of(peer, "round.done", 4)["round"] for peer in peers)
        all_killed(peers)
        peers = [join(link, home) for home in homes]
        started += peers
        for peer in peers:
            assert event_of(peer, "state.synced")["round"] >= last
            assert event_of(peer, "round.done")["round"] > last
        shown = flockstep("run", "info", link, "--home", str(tmp_path / "visitor"), "--json", check=True)
        voting = json.loads(shown.stdout)["voting"]
        assert (voting["votes"], voting["quorum"], voting["total"], voting["missing"]) == (1, 1, 1, [])
        shown = flockstep("status", link, "--home", str(tmp_path / "visitor"), "--json", check=True)
        rounds = json.loads(shown.stdout)["rounds"]  # Who looks for the first time sees the losses of rounds that are over.
        assert dict(zip(rounds["round"], rounds["loss"], strict=True))[last] is not None
        owner.send_signal(signal.SIGINT)
        assert owner.wait(120) == 130


def test_volunteers_take_the_state_that_the_owner_starts_the_run_from(bootstrap_address: str, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TINY_RUN.replace("[model]", '[model]\nfrom = "given.safetensors"'))
    manifest = Manifest.from_toml(TINY_RUN, where="", owner="")
    model = build_model(manifest.model.name, manifest.model.options, seed=manifest.seed + 1)
    save_tensors({name: parameter.detach() for name, parameter in model.named_parameters()}, tmp_path / "given.safetensors")
    with processes() as started:
        owner = Command(
            "run", "create", str(toml), "--via", bootstrap_address, "--home", str(tmp_path / "owner"), *HERE
        )
        started.append(owner)
        link = line_with(owner, "flockstep://").split("'")[1]
        root = line_with(owner, "It starts from the state").split("state ")[1][:8]
        peer = join(link, tmp_path / "anna")
        started.append(peer)
        assert event_of(peer, "state.synced")["root"].startswith(root)
        event_of(peer, "round.done", 1)


@pytest.mark.parametrize("rules", ["", f'keepers = "{KEEPERS[0]}"'])
def test_no_keep_is_refused_where_the_others_cannot_decide(tmp_path: Path, rules: str) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(f"{TINY_RUN}[admission]\n{rules}\n")
    address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
    with pytest.raises(UsageError, match="too few may vote"):
        create_run(toml, [address], PeerConfig(home=tmp_path), print, keeps=False)


def test_no_keep_publishes_a_run_whose_other_keepers_can_decide(bootstrap_address: str, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(f'{TINY_RUN}[admission]\nkeepers = "{" ".join(KEEPERS)}"\n')
    config = PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0)
    said: list[str] = []
    assert create_run(toml, [bootstrap_address], config, said.append, keeps=False) == ""
    assert any("its 3 keepers decide, 2 of 3 votes" in line for line in said)
    assert "Back up this key: " in said[-1]
