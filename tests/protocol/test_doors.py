"""A run with two directories: one is the other's fallback, and both receive all records."""

import importlib.util
from collections.abc import Awaitable, Callable

import pytest
import trio
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.hivemind.directory import JoinedDirectories, all_directories
from flockstep.dht.run.link import JoinLink
from flockstep.peer.base.errors import NetworkError, UsageError
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import run_virtual

HERE = ("/memory/me",)


def any_number(_key: str, value: bytes) -> int:
    return int(value)


class Pair:
    """Two boards, a directory over both, and its events."""

    def __init__(self) -> None:
        self.boards = MemoryBoard(), MemoryBoard()
        self.first, self.second = (MemoryDirectory(board, "other", HERE, any_number) for board in self.boards)
        mine = [MemoryDirectory(board, "me", (), any_number) for board in self.boards]
        telemetry = Telemetry()
        self.events: list[Event] = []
        telemetry.subscribe(self.events.append)
        self.joined = JoinedDirectories(mine[0], mine[1], telemetry)


def run_test(body: Callable[[Pair], Awaitable[None]]) -> None:
    run_virtual(lambda: body(Pair()))


async def test_both_receive_what_is_published(pair: Pair, /) -> None:
    await pair.joined.put("key", b"1")
    await pair.joined.provide("run")
    assert all(board.values == {"key": b"1"} and "me" in board.providers["run"] for board in pair.boards)


async def test_what_the_first_does_not_know_the_second_may(pair: Pair, /) -> None:
    await pair.second.put("key", b"2")
    await pair.second.provide("run")
    assert await pair.joined.get("key") == b"2"
    assert await pair.joined.find("run") == ("other",)
    assert pair.joined.addresses("other") == HERE
    await pair.first.put("key", b"1")
    assert await pair.joined.get("key") == b"1"
    assert await pair.joined.get("nothing") is None


@pytest.mark.parametrize("down", [0, 1])
async def test_one_of_them_may_be_down_and_that_is_told(pair: Pair, /, down: int) -> None:
    pair.boards[down].up = False
    await pair.joined.put("key", b"3")
    assert await pair.joined.get("key") == b"3"
    assert {event["event"] for event in pair.events} == {"directory.failed"}
    pair.boards[1 - down].up = False
    with pytest.raises(NetworkError):
        await pair.joined.get("key")
    with pytest.raises(NetworkError):
        await pair.joined.put("key", b"4")


@pytest.mark.skipif(importlib.util.find_spec("hivemind") is not None, reason="flockstep[hivemind] is installed")
def test_a_link_that_needs_hivemind_says_how_to_get_it() -> None:
    link = JoinLink("a" * 52, ("hivemind:/ip4/1.2.3.4/tcp/31337/p2p/Qm",))

    async def body() -> None:
        async with all_directories(Pair().first, link, Telemetry(), any_number):
            pytest.fail("it goes on")

    with pytest.raises(UsageError) as caught:
        trio.run(body)
    assert ".[hivemind]" in caught.value.remedy
