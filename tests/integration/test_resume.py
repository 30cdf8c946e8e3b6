"""All processes of a run are killed at once and resume from the last certificate."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.state.checkpoint_file import DESCRIPTION, STATE
from flockstep.dht.run.link import JoinLink
from flockstep.peer.log.telemetry import Telemetry, log_path, read_events
from flockstep.peer.wire.signed import verify_signed
from support.bootstraps import TINY_RUN
from support.commands import Command

RUN = TINY_RUN + "[admission]\nmin_peers = 2\n"
PEERS = ("anna", "bert")
FEW = 3
"""Rounds whose outputs have fewer bytes than the state. Who starts that much later on a busy machine takes the state."""


@pytest.fixture(autouse=True, scope="module")
def network_processes() -> None:
    """Spawned, as a user's are: they are killed as children of their trainers."""


@contextmanager
def joined(link: str, homes: list[Path]) -> Iterator[list[Command]]:
    """A `flockstep join` for each home; killed at the end, with all that belongs to it."""
    common = ["--host", "127.0.0.1", "--port", "0", "--threads", "1", "--json", "--yes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [Command("join", link, "--home", str(home), *common, env=environment) for home in homes]
    try:
        yield processes
    finally:
        victims: list[psutil.Process] = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # It has ended by itself, as a test will have noticed.
                alive = psutil.Process(process.pid)
                victims += [alive, *alive.children(recursive=True)]
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()
            process.stdout.close()


def hear(process: Command, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The next event of a peer that is wanted."""
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if wanted(event):
            return event
    raise AssertionError("the peer has ended")


def ledger_of(home: Path, run: str) -> Ledger:
    return Ledger.open(home / "runs" / run / "ledger", run, verify=verify_signed, telemetry=Telemetry())


def newest_of(shelves: Path) -> Path:
    """Return the newest checkpoint, alone: a kill may leave an older one, whole or in part, beside it."""
    *older, newest = sorted((path for path in shelves.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    for path in older:
        shutil.rmtree(path)
    return newest


def test_all_peers_killed_at_once_go_on_from_the_last_certificate(publish: Callable[..., str], tmp_path: Path) -> None:
    link = publish(RUN, PEERS[0])
    run = JoinLink.parse(link).run_id
    homes = [tmp_path / name for name in PEERS]
    with joined(link, homes) as peers:
        for peer in peers:
            hear(peer, lambda event: event["event"] == "round.done" and event["round"] >= 3)
    before = [ledger_of(home, run) for home in homes]
    last = max(ledger.head.round for ledger in before)
    assert last >= 3
    shelves = homes[0] / "runs" / run / "checkpoints"
    whole = newest_of(shelves)
    # One of them finds its checkpoint damaged: it takes the state from the others, and is none the worse.
    with (whole / STATE).open("r+b") as state:
        state.seek(-4, os.SEEK_END)
        state.write(b"\xff\xff\xff\xff")
    logged = [log_path(home).stat().st_size for home in homes]
    shutil.copytree(homes[1] / "cache", tmp_path / "dora" / "cache")
    with joined(link, [tmp_path / "dora"]) as (newcomer,):
        # She has data alone, and nobody who holds the state is here: she does not begin the run anew.
        assert hear(newcomer, lambda event: event["event"] in ("state.synced", "state.awaited"))["round"] >= 1
        with joined(link, homes) as peers:
            for peer in peers:
                done = hear(peer, lambda event: event["event"] == "round.done")
                assert last < done["round"]
            assert hear(newcomer, lambda event: event["event"] == "state.synced")["round"] >= last
    for home, ledger, offset in zip(homes, before, logged, strict=True):
        after = ledger_of(home, run)
        assert after.first == 1
        assert after.at(ledger.head.round) == ledger.head
        events = [event for _, event in read_events(log_path(home), offset=offset)]
        if home is homes[0]:
            continue
        (restored,) = [event for event in events if event["event"] == "state.restored"]
        assert restored["round"] == ledger.head.round
        assert [event for event in events if event["event"] == "checkpoint.damaged"] == []
        # Nobody has fetched a leaf: what was missing, a few rounds that went on before all were back, was replayed.
        synced = next(event for event in events if event["event"] == "state.synced")
        if int(str(synced["round"])) <= ledger.head.round + FEW:
            assert not [event for event in events if event["event"] == "state.taking"]
    (damaged,) = [
        event for _, event in read_events(log_path(homes[0]), offset=logged[0]) if event["event"] == "checkpoint.damaged"
    ]
    # The latter if it was killed while it moved its checkpoint on.
    assert any(flaw in str(damaged["reason"]) for flaw in ("does not have the root", "does not lead to the state"))
    described = json.loads((newest_of(shelves) / DESCRIPTION).read_text())
    assert described["run"] == run
    assert {tensor["dtype"] for tensor in described["tensors"]} == {"float32"}
