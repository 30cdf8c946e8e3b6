"""Several processes as one peer, by replicas (DDP) and by shards on two nodes (FSDP2, HSDP), with a plain peer."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command

RUN = """
name = "ranks"
[data]
source = "text:{stdlib}"
sequence_length = 16
batch_size = 4
[model]
size = "0.2m"
context = 16
[inner]
steps = 3
ramp = 8
[outer]
rounds = 8
[admission]
min_peers = 3
[timing]
floor = 120.0
[eval]
every = 1
prompts = ["def "]
"""


class Rank:
    """One process of a peer that joins a run; as `torchrun` starts it where there are others."""

    def __init__(
        self, link: str, home: Path, *options: str, ranks: dict[str, str] | None = None, agrees: bool = True
    ) -> None:
        place = ("--home", str(home), "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--threads", "1")
        environment = {**os.environ, **(ranks or {})}
        options = ("--json", *(["--yes"] if agrees else []), *options)
        self.process = Command("join", link, *place, *options, stderr=subprocess.PIPE, env=environment)

    def roots(self, rounds: int) -> dict[int, str]:
        """The state roots of the first rounds, as they come."""
        roots: dict[int, str] = {}
        for line in self.process.stdout:
            event = json.loads(line)
            assert event["event"] != "inner.cleared"
            if event["event"] == "round.done":
                roots[event["round"]] = event["root"]
                assert len(event["cut"]) == 3
            if len(roots) == rounds:
                return roots
        raise AssertionError(f"it ended early: {self.process.communicate()[1]}")

    def until(self, name: str) -> dict[str, Any]:
        """The next event of a name."""
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"it ended early: {self.process.communicate()[1]}")


def ranks_of(link: str, home: Path, *options: str, nodes: int = 1, local: int = 2, agrees: bool = True) -> list[Rank]:
    """The processes of a peer, as `torchrun` starts them on some nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = nodes * local
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    place |= {"GROUP_WORLD_SIZE": str(nodes), "LOCAL_WORLD_SIZE": str(local)}
    return [
        Rank(link, home, *options, ranks={**place, "RANK": str(rank), "LOCAL_RANK": str(rank % local)}, agrees=agrees)
        for rank in range(size)
    ]


@pytest.fixture
def peers(publish: Callable[..., str], tmp_path: Path) -> Iterator[list[list[Rank]]]:
    link = publish(RUN, "plain")
    started = [
        [Rank(link, tmp_path / "plain")],
        ranks_of(link, tmp_path / "copies"),
        ranks_of(link, tmp_path / "shards", "--shard", "--save", str(tmp_path / "model.safetensors"), nodes=2),
    ]
    yield started
    for ranks in started:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()


def test_peers_of_several_ranks_hold_the_states_of_a_plain_one_and_end_when_a_rank_dies(
    peers: list[list[Rank]], tmp_path: Path
) -> None:
    plain, copies, shards = peers
    roots = [ranks[0].roots(3) for ranks in peers]  # In the third round two batches make one step.
    assert roots[0] == roots[1] == roots[2]
    assert len(set(roots[0].values())) == 3
    measured = [ranks[0].until("eval.measured") for ranks in (plain, shards)]
    assert measured[0]["round"] == measured[1]["round"]
    assert measured[1]["loss"] == pytest.approx(measured[0]["loss"], rel=0.02)  # Perhaps of another number of batches.
    shards[0].until("round.done")  # The shards train on from where they were.

    copies[1].process.send_signal(signal.SIGKILL)
    _, said = copies[0].process.communicate(timeout=120)
    assert "another process of this peer has died" in said
    assert copies[0].process.returncode == 1

    for rank in reversed(shards):  # The first one ends all: the others have to have their own signal by then.
        rank.process.send_signal(signal.SIGINT)
    for rank in shards:
        rank.process.communicate(timeout=120)
    assert [rank.process.returncode for rank in shards] == [130] * 4
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * 200_000
    assert plain[0].process.poll() is None


def test_no_rank_opens_what_its_user_has_not_agreed_to(publish: Callable[..., str], tmp_path: Path) -> None:
    first, second = ranks_of(publish(RUN, "owner"), tmp_path / "refused", agrees=False)
    _, said = second.process.communicate(timeout=120)
    first.process.kill()
    first.process.communicate()
    assert "rank 0 of this peer has ended: there is no terminal to ask on" in said
