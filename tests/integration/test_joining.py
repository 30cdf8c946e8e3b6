"""Newcomers in a running swarm: their weight ramps up, and another model is refused."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flockstep import PeerConfig, Swarm
from flockstep.peer.base.errors import UsageError
from support.bootstraps import kept
from support.commands import Command
from support.trainers import RUN, Trainer
from torch import nn


@pytest.fixture
def founder(publish: Callable[..., str], tmp_path: Path) -> Trainer:
    return Trainer(publish(RUN.format(rounds=100_000, peers=1), "founder"), tmp_path / "founder", 0)


def test_a_newcomers_first_rounds_count_less_and_another_model_is_turned_away(
    founder: Trainer, tmp_path: Path
) -> None:
    link = founder.swarm._link
    newcomer = Trainer(link, tmp_path / "newcomer", 1)
    founder.start()
    try:
        founder.heard("round.done")
        frozen = nn.Linear(3, 1)
        frozen.bias.requires_grad_(False)
        for model, message in [
            (nn.Linear(3, 2, bias=False), "other names or shapes of its trained"),
            (frozen, "other values of its frozen"),
        ]:
            config = PeerConfig(home=tmp_path / "stranger", host="127.0.0.1", port=0)
            with pytest.raises(UsageError, match=message):
                Swarm(link, model, torch.optim.SGD([model.weight]), config=config).__enter__()

        newcomer.start()
        newcomer.heard("phase.end", lambda event: event["ramp"] == 1.0)
    finally:
        for peer in (founder, newcomer):
            peer.stop.set()
            if peer.ident is not None:
                peer.join()
    assert founder.error is newcomer.error is None
    assert {event["ramp"] for event in founder.named("phase.end")} == {1.0}
    seen = {event["round"]: event["ramp"] for event in newcomer.named("phase.end")}
    assert list(dict.fromkeys(seen.values())) == [0.25, 0.5, 1.0]
    done, both = newcomer.named("round.done"), sorted([founder.peer_id, newcomer.peer_id])
    assert both in [sorted(event["cut"]) for event in done]  # type: ignore[arg-type]  # a list
    assert {event["root"] for event in done} & {event["root"] for event in founder.named("round.done")}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_join_on_a_terminal_asks_before_the_first_join_of_a_run_and_never_again(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    run = RUN.format(rounds=2, peers=1).replace('"own"', '"text:{stdlib}"\nsequence_length = 32') + '[model]\nsize = "0.2m"\n'
    link = publish(run.replace('"members"', '"keepers"'), "owner")
    home = tmp_path / "volunteer"
    join = ("join", link, "--home", str(home), "--host", "127.0.0.1", "--port", "0", "--threads", "1")

    def on_terminal(*answers: bytes) -> tuple[int, str]:
        """Exit code and output of `join` on a terminal, where the question gets an answer."""
        end, terminal = os.openpty()
        output, waiting = b"", list(answers)
        with Command(*join, stdin=terminal, stdout=terminal, stderr=terminal) as process:
            os.close(terminal)
            with contextlib.suppress(OSError):  # The other end is closed.
                while piece := os.read(end, 4096):
                    output += piece
                    if b"[y/N]" in output and waiting:
                        os.write(end, waiting.pop())
        os.close(end)
        return process.wait(), output.decode()

    code, said = on_terminal(b"\n")
    assert code == 1
    assert "flockstep: not joined" in said
    assert "this run waits for its owner: 0 of 1 votes" in said.partition("which you join")[0]
    assert "joined; the run has" not in said
    assert not list(home.glob("runs/*/ledger"))
    code, said = on_terminal(b"\x04")  # Ctrl-D.
    assert code == 1
    assert "Traceback" not in said
    with kept(link, tmp_path / "owner"):
        code, said = on_terminal(b"y\n")
    assert code == 0, said
    assert "213.0 k parameters" in said
    code, said = on_terminal()
    assert code == 0, said
    assert "[y/N]" not in said
