"""Parsers in a child with limits: what it makes, refuses, and dies of."""

import gc
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.process.confined import Confined
from support import confined_answers
from support.confined_answers import open_answers

ENDS = r"the file f ends the process that reads it \({}\), which has limits"
REASONS: dict[bytes, str] = {
    b"memory": f"{ENDS.format('.*')}|the file f cannot be read: MemoryError",
    b"abort": ENDS.format("SIGABRT"),
    b"time": ENDS.format("SIGXCPU"),
    b"long": ENDS.format("SIGKILL"),
    b"refuse": r"the file f is none of ours$",
    b"raise": r"the file f cannot be read: 'key'$",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child imports the module of `open_answers`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(confined_answers.__file__).parents[1]), prepend=":")


@pytest.mark.parametrize("what", REASONS)
def test_what_a_file_does_to_its_process_is_one_line_and_a_refusal_does_not_end_it(what: bytes) -> None:
    child = Confined(open_answers, b"data", "the file f")
    assert child.ask(b"a" * 100_000, 100_000) == b"a" * 100_000
    with pytest.raises(LocalError, match=REASONS[what]) as first:
        child.ask(what, 999)
    if isinstance(first.value, UsageError):
        assert child.ask(b"next", 4) == b"next"
    else:
        with pytest.raises(LocalError, match=REASONS[what]):
            child.ask(b"next", 4)
    if what != b"long":
        with pytest.raises(LocalError, match=REASONS[what]):
            Confined(open_answers, what, "the file f")


def test_a_child_ends_with_whoever_asks_it() -> None:
    child = Confined(open_answers, b"data", "the file f")
    process = child._process
    del child
    gc.collect()
    assert process.returncode is not None


def test_no_secret_is_in_the_environment_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "db_password", "WANDB_API_KEY", "KEYBOARD"):
        monkeypatch.setenv(name, "1")
    names = Confined(open_answers, b"data", "the file f").ask(b"environment", 1 << 16).decode().split()
    assert {"KEYBOARD", "PYTHONPATH"} <= {*names}
    assert not {"HF_TOKEN", "db_password", "WANDB_API_KEY"} & {*names}
