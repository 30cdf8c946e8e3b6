"""The bridge between two processes: typed answers and notices, errors, deaths."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from flockstep.peer.base.errors import ConnectFailed, DeadlineExceeded, UsageError
from flockstep.peer.process.bridge import Cancelled, NetworkDied, NetworkProcess
from support.echo_process import Collects, Die, Echo, Echoed, Fail, Wait

TESTS = str(Path(__file__).parents[3])


@pytest.fixture(autouse=True, scope="module")
def network_processes() -> None:
    """Spawned, as a user's are: that is what is tested here."""


@pytest.fixture(scope="module")
def child() -> Iterator[NetworkProcess]:
    """One that all tests share but those that end it."""
    process = spawn()
    yield process
    assert process.stop(60.0) == 0


def spawn() -> NetworkProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", ""))))
        return NetworkProcess("support.echo_process:main", (Echoed,))


def test_bytes_cross_as_they_are_and_a_notice_arrives_before_the_answer(child: NetworkProcess) -> None:
    data = bytes(range(256))
    assert child.call(Echo(data)) == data
    assert child.notices.get_nowait()[1] == Echoed(data)
    child.post(Echo(b"posted"))
    assert child.notices.get()[1] == Echoed(b"posted")
    assert child.call(Echo(b"called")) == b"called"  # What was posted has had no answer.
    assert child.notices.get()[1] == Echoed(b"called")


def test_the_child_has_one_arena_of_memory(child: NetworkProcess) -> None:
    assert psutil.Process(child.pid).environ()["MALLOC_ARENA_MAX"] == "1"


def test_the_child_collects_garbage_once_it_is_loaded(child: NetworkProcess) -> None:
    assert child.call(Collects()) == "False, True"


def test_errors_cross_with_their_kind_and_remedy(child: NetworkProcess) -> None:
    with pytest.raises(UsageError, match="no such file") as raised:
        child.call(Fail(in_nursery=False))
    assert (type(raised.value), raised.value.remedy) == (UsageError, "name another one")
    with pytest.raises(ConnectFailed, match="cannot reach Q") as refused:
        child.call(Fail(in_nursery=True))
    assert refused.value.remedy == "ask Q"


def test_a_call_ends_when_it_is_cancelled_or_late(child: NetworkProcess) -> None:
    with pytest.raises(Cancelled, match="Wait"):
        child.call(Wait(), cancel=lambda: True)
    with pytest.raises(DeadlineExceeded, match="did not answer Wait"):
        child.call(Wait(), timeout=0.0)


def test_a_child_that_dies_fails_the_open_call_and_all_later_ones() -> None:
    child = spawn()
    with pytest.raises(NetworkDied):
        child.call(Die())
    with pytest.raises(NetworkDied):
        child.call(Echo(b""))
    child.post(Echo(b""))
    assert child.died
    assert child.stop(60.0) != 0


def test_the_child_ends_with_the_pipe_of_its_trainer() -> None:
    child = spawn()
    assert child.call(Echo(b"here")) == b"here"
    child.post(Wait())
    assert child.stop(60.0) == 0
