"""`Swarm` for a custom module: real processes, real sockets, and a peer that is killed."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from flockstep import PeerConfig, Swarm
from flockstep.collectives.chain.ledger import Ledger
from flockstep.dht.run.layout import UNPINNED
from flockstep.optim.models.needs import Memory
from flockstep.optim.train.evaluating import HeldOutResult
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.process.bridge import NetworkDied
from flockstep.peer.wire.signed import verify_signed
from support.trainers import RUN, TRUTH, Trainer, run_rounds
from torch import nn


def test_two_peers_with_different_beginnings_end_bit_identical(publish: Callable[..., str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=4, peers=2), "a")
    kinds = (torch.float32, torch.bfloat16)  # The dtype of a peer's parameters is its own matter.
    peers = [Trainer(link, tmp_path / name, seed, dtype=kinds[seed]) for seed, name in enumerate("ab")]
    assert not torch.equal(peers[0].model.weight, peers[1].model.weight)
    peers[0].start()
    peers[0].heard("round.awaited")
    pids = [peers[0].network_pid]
    run_rounds(peers[1:])
    peers[0].join(timeout=120)
    assert peers[0].error is None
    assert [event["reason"] for event in peers[0].named("layout.unpinned")] == [UNPINNED]
    # Who was alone trained on, said so once, and tried no round before the other one came.
    told = [event["event"] for event in peers[0].events if str(event["event"]).startswith("round.")]
    assert [name for name in told if name != "round.said"] == ["round.awaited", "round.possible", *["round.done"] * 4]
    assert peers[0].roots == peers[1].roots
    assert len(set(peers[0].roots)) == 4
    assert torch.equal(peers[0].model.weight.bfloat16(), peers[1].model.weight)
    assert (peers[0].model.weight - TRUTH).abs().max() < 0.5
    assert not any(map(psutil.pid_exists, pids))
    for name in "ab":  # The run's last state is on disk, whatever its round.
        assert (tmp_path / name / "runs" / peers[0].swarm.run_id / "checkpoints" / "4" / "checkpoint.json").exists()


def test_another_model_than_the_runs_is_refused_here_and_nobody_is_charged(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    layout = Swarm.layout_of(nn.Linear(3, 1, bias=False))
    link = publish(f'layout = "{layout}"{RUN.format(rounds=2, peers=1)}', "a")
    peer, other = Trainer(link, tmp_path / "a", 0), nn.Linear(4, 1)
    config = PeerConfig(home=tmp_path / "b", host="127.0.0.1", port=0)
    with pytest.raises(UsageError, match="the run trains 1 tensors with 3 parameters, this model has 2 with 5"):
        Swarm(link, other, torch.optim.SGD(other.parameters()), config=config).__enter__()
    run_rounds([peer])
    assert peer.error is None
    assert not peer.named("peer.charged")
    assert not peer.named("layout.unpinned")


@pytest.mark.parametrize(("free", "why"), [(0, "0 MB of memory are free"), (1 << 40, "no room for")])
def test_vectors_that_do_not_fit_into_the_memory_lie_in_a_file_without_a_name(
    publish: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, why: str
) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")  # As in a container with a limit below the free memory.

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    monkeypatch.setattr("flockstep.optim.train.swarm.memory", lambda: Memory(free, free))
    peer = Trainer(publish(RUN.format(rounds=2, peers=1)), tmp_path, 0)
    run_rounds([peer])
    assert [event["round"] for event in peer.named("round.done")] == [1, 2]
    (told,) = peer.named("vectors.on_disk")
    assert str(told["reason"]).startswith(why)
    assert not [*tmp_path.glob("runs/*/flockstep-*")]


def test_a_killed_network_process_ends_its_peer_which_goes_on_when_it_is_started_again(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    link = publish(RUN.format(rounds=8, peers=1))

    def strike(event: Event) -> None:
        if event["event"] == "round.done" and event["round"] == 3:
            peer.signal_network(signal.SIGKILL)

    peer = Trainer(link, tmp_path, 0, strike)
    peer.start()
    peer.join(timeout=120)
    assert isinstance(peer.error, NetworkDied)
    assert len(peer.named("network.died")) == 1
    again = Trainer(link, tmp_path, 0)
    run_rounds([again])
    assert again.error is None
    assert again.named("state.restored")[0]["round"] == 3
    assert [event["round"] for event in again.named("round.done")] == list(range(4, 9))
    kept = tmp_path / "runs" / again.swarm.run_id / "ledger"
    ledger = Ledger.open(kept, again.swarm.run_id, verify=verify_signed, telemetry=Telemetry())
    assert [ledger.first, ledger.head.round] == [1, 8]


def test_join_ends_with_one_line_and_exit_code_1_where_its_network_process_is_killed(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    """Here one `join` of the tests starts as a user starts it, and is not forked from a warm process."""
    link = publish(RUN.format(rounds=1000, peers=1).replace('"own"', '"text:{stdlib}"') + '[model]\nsize = "0.2m"\n')
    home = ["--home", str(tmp_path), "--host", "127.0.0.1", "--port", "0", "--json", "--yes"]
    command = [sys.executable, "-m", "flockstep", "join", link, *home]  # Its network process is its child.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as peer:  # type: ignore[call-overload]
        assert peer.stdout is not None
        chosen = next(line for line in peer.stdout if '"device.threads"' in line)
        assert json.loads(chosen)["most"] == 2
        next(line for line in peer.stdout if '"phase.end"' in line)  # A round runs.
        (network,) = psutil.Process(peer.pid).children()
        network.kill()
        told, said = peer.communicate(timeout=120)
    assert (peer.returncode, said.count("\n"), "start this peer again" in said) == (1, 1, True)
    assert '"network.died"' in told


def test_what_is_not_finite_is_not_sent(publish: Callable[..., str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=2, peers=1))
    peer = Trainer(link, tmp_path, 0)

    def spoil(event: Event) -> None:
        if event["event"] == "step" and len(peer.named("step")) == 1:
            with torch.no_grad():
                peer.model.weight[0, 0] = float("nan")

    peer.listen = spoil
    run_rounds([peer])
    (abstained,) = peer.named("round.abstained")
    assert "weight is not finite" in str(abstained["reason"])
    assert [event["round"] for event in peer.named("round.done")] == [1, 2]
    assert torch.isfinite(peer.model.weight).all()


def test_an_evaluation_that_fails_in_the_callers_model_costs_a_figure_and_no_training(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    text = RUN.format(rounds=2, peers=1).replace('"own"', '"text:{stdlib}"')
    peer = Trainer(publish(text + "[eval]\nevery = 1\n"), tmp_path, 0)

    def evaluated(model: nn.Module, seconds: float) -> HeldOutResult:
        raise IndexError("no such token")

    peer.swarm.evaluate_with(evaluated)
    run_rounds([peer])
    assert [event["round"] for event in peer.named("round.done")] == [1, 2]
    assert {event["reason"] for event in peer.named("eval.failed")} == {"IndexError: no such token"}
