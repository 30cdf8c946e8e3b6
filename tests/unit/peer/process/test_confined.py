"""Parsers in a child with limits: what it makes, refuses, and dies of."""

import gc
from pathlib import Path

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.peer.process.confined import Confined
from support import confined_answers
from support.confined_answers import open_answers

REASONS: dict[bytes, str] = {
    b"memory": r"the file f ends the process .*GiB of memory|the file f cannot be read: MemoryError",
    b"abort": r"the file f ends the process that reads it \(SIGABRT\)",
    b"time": r"the file f ends the process that reads it \(SIGXCPU\)",
    b"long": r"the file f makes 1,000 bytes of 4$",
    b"refuse": r"the file f is none of ours$",
    b"raise": r"the file f cannot be read: 'key'$",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child imports the module of `open_answers`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(confined_answers.__file__).parents[1]), prepend=":")


@pytest.mark.parametrize("what", REASONS)
def test_what_a_file_does_to_its_process_is_one_line_and_the_next_request_is_answered(what: bytes) -> None:
    child = Confined(open_answers, b"data", "the file f", most=4)
    assert child.opened == b"data"
    assert child.ask(b"a" * 100_000, 100_000) == b"a" * 100_000
    with pytest.raises(UsageError, match=REASONS[what]):
        child.ask(what, 999)
    assert child.ask(b"next", 4) == b"next"
    if what != b"long":
        with pytest.raises(UsageError, match=REASONS[what]):
            Confined(open_answers, what, "the file f", most=4)


def test_a_child_ends_with_whoever_asks_it() -> None:
    child = Confined(open_answers, b"data", "the file f", most=4)
    process = child._process
    del child
    gc.collect()
    assert process.returncode is not None
