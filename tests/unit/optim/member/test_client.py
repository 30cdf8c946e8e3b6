"""The trainer's end of its network process: what that cannot do stops no training."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from flockstep.optim.data.leases import Ranking, Share
from flockstep.optim.member.client import PeerClient, PhaseEnd
from flockstep.optim.step.flat import FlatLayout
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event, Telemetry
from torch import nn

TESTS = str(Path(__file__).parents[3])
Open: TypeAlias = Callable[[str], PeerClient]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def open_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> Iterator[Open]:
    """Return a client whose network process has this entry point of `support.failing_network`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", ""))))
    opened: list[PeerClient] = []

    def start(entry: str) -> PeerClient:
        monkeypatch.setattr("flockstep.optim.member.client.ENTRY", f"support.failing_network:{entry}")
        telemetry = Telemetry()
        telemetry.subscribe(events.append)
        client = PeerClient("link", PeerConfig(home=tmp_path), telemetry, threading.Event())
        opened.append(client)
        client.open()
        client.attach(FlatLayout.of(nn.Linear(2, 2)), 1 << 30)
        return client

    yield start
    for client in opened:
        client.close("left")


def test_what_the_network_process_cannot_do_raises_nothing_in_a_member(open_client: Open, events: list[Event]) -> None:
    client = open_client("fail_later")
    client.join(device="cpu", version="0", frozen=bytes(32))
    assert not client.catch_up("others are further", np.zeros(1, np.float32)).changed
    assert client.begin_round("a full phase", slice(0, 6)).end is PhaseEnd.BEGUN
    ended = client.settle()
    assert (ended.end, ended.reason) == (PhaseEnd.VOID, "refusing to send a message that no peer could accept")
    assert client.publish_first(Share(), Ranking(0, 1)) is None
    assert [event["step"] for event in events if event["event"] == "network.failed"] == [
        "take the run's state",
        "average",
        "publish leases",
    ]


def test_a_newcomer_is_told_why_it_cannot_join(open_client: Open) -> None:
    client = open_client("refuse")
    with pytest.raises(UsageError, match="not that of the run's members"):
        client.join(device="cpu", version="0", frozen=bytes(32))
