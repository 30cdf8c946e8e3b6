"""Who waits for bytes on their way: woken by their end, and only in few places at a time."""

import pytest
import trio
import trio.testing
from flockstep.collectives.driver.incoming import MAX_WAITS, Incoming
from flockstep.peer.base.errors import ProtocolViolation
from flockstep.peer.memory.network import run_virtual

NAME, OTHER = b"name", b"other"


def test_a_reader_waits_until_its_bytes_have_ended_and_no_others_wake_it() -> None:
    incoming, woken = Incoming(), list[str]()

    async def wait(reader: str) -> None:
        with incoming.waiting(reader):
            await incoming.ended(NAME)
            if not woken:
                incoming.begin(NAME)  # The first one tries again, for both.
            woken.append(reader)

    async def body() -> None:
        incoming.begin(NAME)
        incoming.begin(OTHER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "a")
            nursery.start_soon(wait, "b")
            await trio.testing.wait_all_tasks_blocked()
            incoming.end(OTHER)
            await trio.testing.wait_all_tasks_blocked()
            assert not woken
            incoming.end(NAME)
            await trio.testing.wait_all_tasks_blocked()
            assert len(woken) == 1
            incoming.end(NAME)
        assert sorted(woken) == ["a", "b"]
        await incoming.ended(b"what nobody fetches")

    run_virtual(body)


def test_a_reader_waits_in_few_places_at_a_time() -> None:
    incoming = Incoming()
    waits = [incoming.waiting("a") for _ in range(MAX_WAITS)]
    for wait in waits:
        wait.__enter__()
    with pytest.raises(ProtocolViolation, match="for more than"), incoming.waiting("a"):
        pass
    with incoming.waiting("b"):
        pass
    waits[0].__exit__(None, None, None)
    with incoming.waiting("a"):
        pass
