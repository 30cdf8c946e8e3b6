"""The trainer's end of its network process: what that cannot do stops no training."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.codec import codec_named
from flockstep.optim.data.leases import Ranking, Share
from flockstep.optim.member.border import AverageDelta, vectors_of
from flockstep.optim.member.network import Network
from flockstep.peer.config import PeerConfig
from flockstep.peer.errors import UsageError
from flockstep.peer.process.shared import SharedVectors
from flockstep.peer.telemetry import Event, Telemetry

TESTS = str(Path(__file__).parents[3])
WORK = AverageDelta(tokens=1, steps=1, loss=1.0, grace=1.0, seconds=1.0, ramp=1.0, patience=0.0)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> Iterator[Network]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setattr("flockstep.optim.member.network.ENTRY", "support.failing_network:main")
    telemetry = Telemetry()
    telemetry.subscribe(events.append)
    network = Network("link", PeerConfig(home=tmp_path), telemetry, lambda: False)
    network.open()
    network.attach(SharedVectors.create(vectors_of(1, 1, codec_named("int4"))), ())
    yield network
    network.close("left")


def test_what_the_network_process_cannot_do_raises_nothing_in_a_member(network: Network, events: list[Event]) -> None:
    assert not network.join(device="cpu", version="0", layout=bytes(32), frozen=bytes(32))
    assert not network.sync()
    network.begin_round(WORK)
    ended = network.end_round()
    assert (ended.kind, ended.reason) == (OutcomeKind.VOID, "refusing to send a message that no peer could accept")
    assert network.publish_first(Share(), Ranking(0, 1)) is None
    assert [(event["event"], event["step"]) for event in events] == [
        ("network.failed", "take the run's state"),
        ("network.failed", "average"),
        ("network.failed", "publish leases"),
    ]


def test_a_newcomer_is_told_why_it_cannot_join(network: Network) -> None:
    network.sync()
    with pytest.raises(UsageError, match="not that of the run's members"):
        network.join(device="cpu", version="0", layout=bytes(32), frozen=bytes(32))
