"""Typed values through JSON: what comes out has the types and values of what went in."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.chain import ChainPosition
from flockstep.collectives.state.checkpoint_file import TensorAt
from flockstep.optim.data.leases import Lease, Ranking, Share, View
from flockstep.optim.member.border import (
    AttachVectors,
    JoinRun,
    OpenRun,
    PublishLeases,
    Pulse,
    RoundEnded,
    TelemetryNotice,
)
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.transport import Rung
from flockstep.peer.process.bridge import Command
from flockstep.peer.process.typed_json import from_json, to_json
from flockstep.peer.wire import Certificate, Slot
from flockstep.peer.wire.schema import Size

VIEW = View(2, 1, ((1 << 1024) - 1,), (0,), (5,), ((1, 2, True, False),), ((0, 3, 7),))
CERTIFICATE = Certificate(Slot("run", 3, bytes(32), 2), b"\0value", ("a", "b"), (b"\xff" * 64, bytes(64)))
POSITION = ChainPosition(3, bytes(range(32)), 10**12, CERTIFICATE)


@pytest.mark.parametrize(
    "message",
    [
        OpenRun("flockstep://x", PeerConfig(home=Path("/home/peer"), announce=("/ip4/192.0.2.1/tcp/4001",))),
        AttachVectors(Path("/dev/shm/x"), 7, (TensorAt("weight", (3, 4), "bfloat16", 0), TensorAt("bias", (), "fp32", 64))),
        JoinRun("cuda", "1.0", bytes(32), b"\x80" * 32),
        RoundEnded(POSITION, OutcomeKind.BEHIND, "the others hold another state"),
        PublishLeases(Share(b"data", 4, (b"\x01",), (Lease(4, 1, None), Lease(4, 2, 3))), Ranking(7, 20), 2, True),
        Pulse(4, ("a", "b"), 3, "", False, 1, 2, 10, 20, {"a": Rung.LAN}, VIEW),
        TelemetryNotice({"time": 1.5, "event": "round.done", "cut": ["a"], "loss": None, "step": 3}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_comes_back_equal_and_with_its_types(message: object) -> None:
    line = to_json(message)
    assert b"\n" not in line
    back = from_json(type(message), json.loads(line))
    assert back == message
    assert repr(back) == repr(message)


def test_losses_that_are_no_numbers_cross() -> None:
    assert math.isnan(from_json(float, json.loads(to_json(math.nan))))
    assert from_json(float, json.loads(to_json(-math.inf))) == -math.inf


def test_an_answer_may_be_none_or_a_limited_type() -> None:
    assert PublishLeases.answer == View | None
    assert from_json(PublishLeases.answer, None) is None
    assert from_json(PublishLeases.answer, json.loads(to_json(VIEW))) == VIEW
    assert from_json(Annotated[bytes, Size(3)], json.loads(to_json(b"\xff"))) == b"\xff"


@dataclass(frozen=True, slots=True)
class Loose(Command[None]):
    """It names a type that JSON would change unseen."""

    values: set[int]


@pytest.mark.parametrize("annotation", [set, set[int], list[bytes], dict[int, str], complex, Loose])
def test_a_type_without_a_form_is_refused(annotation: Any) -> None:
    with pytest.raises(TypeError, match="no form in JSON"):
        from_json(annotation, [])
    with pytest.raises(TypeError, match="no form in JSON"):
        to_json({1, 2})
