"""Verification beside the event loop: it goes on meanwhile, members come first, and the queue is short."""

import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import BadSignature
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.node import verification
from flockstep.peer.node.node import FEW_SIGNATURES, Node

MEMBER, STRANGER = "member", "stranger"
MANY = FEW_SIGNATURES + 1


def run_test(body: Callable[[Node, list[Event]], Awaitable[None]]) -> None:
    async def main() -> None:
        events: list[Event] = []
        telemetry, identity, network = Telemetry(), Identity.generate(), MemoryNetwork()
        telemetry.subscribe(events.append)
        with trio.fail_after(30):  # A safety net against a hang.
            async with (
                network.open(),
                Node(network.transport(identity.peer_id, telemetry=telemetry), identity, PeerConfig(), telemetry) as node,
            ):
                node.prefer(frozenset({MEMBER}).__contains__)
                await body(node, events)

    trio.run(main)


async def test_the_event_loop_goes_on_while_something_is_verified(node: Node, events: list[Event], /) -> None:
    open_, done, results = threading.Event(), trio.Event(), list[bool]()

    def then(result: bool) -> None:
        results.append(result)
        done.set()

    node.verify(MEMBER, "test", MANY, partial(open_.wait, 10), then)
    open_.set()  # If the work were done in the event loop, this line would come too late.
    await done.wait()
    assert results == [True]


async def test_members_come_first(node: Node, events: list[Event], /) -> None:
    order: list[str] = []
    done = trio.Event()
    node.verify(STRANGER, "test", MANY, lambda: None, lambda _: order.append("stranger"))
    node.verify(STRANGER, "test", MANY, lambda: None, lambda _: done.set())
    node.verify(MEMBER, "test", MANY, lambda: None, lambda _: order.append("member"))
    await done.wait()
    assert order == ["member", "stranger"]


async def test_what_breaks_a_rule_is_charged_and_the_next_is_verified(node: Node, events: list[Event], /) -> None:
    def wrong() -> None:
        raise BadSignature("it is wrong")

    done = trio.Event()
    node.verify(MEMBER, "test", MANY, wrong, lambda _: None)
    node.verify(MEMBER, "test", MANY, lambda: None, lambda _: done.set())
    await done.wait()
    charged = [event for event in events if event["event"] == "peer.charged"]
    assert [(event["peer"], event["step"], event["reason"]) for event in charged] == [(MEMBER, "test", "it is wrong")]


@pytest.mark.parametrize("limit", ["MAX_CHECKS", "CHECKS_PER_PEER"])
def test_beyond_the_queue_things_are_dropped_with_an_event(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, limit, 2)

    async def body(node: Node, events: list[Event]) -> None:
        count: list[int] = []
        done = trio.Event()
        for number in range(3):
            node.verify(MEMBER, "test", MANY, lambda: None, lambda _, number=number: count.append(number))  # type: ignore[misc]
        if limit == "MAX_CHECKS":
            node.verify(STRANGER, "test", MANY, lambda: None, lambda _: done.set())  # The others have a queue of their own.
            await done.wait()
        else:
            while len(count) < 2:
                await trio.lowlevel.checkpoint()
        assert count == [0, 1]
        assert [event["peer"] for event in events if event["event"] == "message.refused"] == [MEMBER]

    run_test(body)
