"""The table of events, held against everything that emits events, everything that reads them, and docs/events.md."""

import ast
import re
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from flockstep.peer.events import EVENTS, FIELDS, page
from flockstep.peer.telemetry import Telemetry
from flockstep.scripts.join import LINES, describe_event

ROOT = Path(__file__).parents[2]
FLOORS = ("peer", "dht", "collectives", "optim", "scripts")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).glob("**/*.py") if path.name != "events.py")
EMITTERS = ("emit", "note", "Note")
"""Calls whose first argument is the name of an event."""
SUBJECTS = {name.partition(".")[0] for name in EVENTS}
READERS = ("peer/metrics.py",)
"""Files below `scripts` that read events and emit none."""
FILE_ENDS = ("html", "log", "json", "safetensors", "toml", "txt")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            yield node


def texts(node: ast.AST) -> Iterator[str]:
    for leaf in ast.walk(node):
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
            yield leaf.value


def names_in(path: Path) -> set[str]:
    """The texts of a file that have the form of an event's name."""
    dotted = {text for text in texts(parsed(path)) if re.fullmatch(r"[a-z0-9]+\.[a-z0-9_]+", text)}
    return {name for name in dotted if name.split(".")[0] in SUBJECTS and name.split(".")[1] not in FILE_ENDS}


def names_emitted(path: Path) -> set[str]:
    """The events that a file emits: those in the calls, and where a name is chosen elsewhere all that it names."""
    first = {name for call in calls(path, *EMITTERS) if call.args for name in texts(call.args[0])}
    name = path.relative_to(ROOT)
    reads_none = name.parts[0] != "scripts" and name.as_posix() not in READERS
    return first | (names_in(path) if reads_none or first else set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_event_that_a_file_names_stands_in_the_table(path: Path) -> None:
    assert names_emitted(path) | names_in(path) <= EVENTS.keys()
    for call in calls(path, *EMITTERS):
        # A name that is put together from pieces could be found by nobody.
        assert not any(isinstance(part, ast.JoinedStr) for part in ast.walk(call.args[0]) if call.args)
        for name in [text for text in texts(call.args[0]) if text in EVENTS]:
            given = {word.arg for word in call.keywords if word.arg}
            assert given <= EVENTS[name].fields.keys(), name


def test_every_row_of_the_table_is_emitted_somewhere() -> None:
    assert EVENTS.keys() - set[str]().union(*map(names_emitted, FILES)) == set()


@pytest.mark.parametrize("path", [path for path in FILES if "scripts" in path.parts], ids=lambda path: path.stem)
def test_every_field_that_is_read_of_an_event_stands_in_the_table(path: Path) -> None:
    read = set[str]()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Subscript(value=ast.Name(id="event"), slice=ast.Constant(value=str(name))):
                read.add(name)
            case ast.Call(args=[ast.Name(id="event"), ast.Constant(value=str(name))]):
                read.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="event")), args=[ast.Constant(value=str(name)), *_]):
                read.add(name)
    assert read <= {"time", "event", *(field for kind in EVENTS.values() for field in kind.fields)}


@pytest.mark.parametrize("name", LINES)
def test_join_says_of_an_event_only_what_is_in_it(name: str) -> None:
    words = {field for _, field, _, _ in string.Formatter().parse(LINES[name]) if field}
    assert words <= EVENTS[name].fields.keys()
    assert describe_event({"event": name})  # One that lacks its fields, as another version may write it.


def test_an_event_outside_of_the_table_is_an_error_here_and_none_in_a_running_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telemetry = Telemetry()
    with pytest.raises(AssertionError, match=r"no event 'weather\.fine'"):
        telemetry.emit("weather.fine")
    with pytest.raises(AssertionError, match=r"peer\.lost has no field seconds"):
        telemetry.emit("peer.lost", peer="P", seconds=3)
    with pytest.raises(AssertionError, match="no event None"):
        telemetry.take({"event": None})
    assert not telemetry.counts
    monkeypatch.setattr(Telemetry, "strict", False)
    telemetry.emit("weather.fine", degrees=20)
    assert telemetry.counts["weather.fine"] == 1


def test_the_page_of_events_is_the_table() -> None:
    written = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    assert written.splitlines() == list(page()), "write it with: python -m flockstep.peer.events > docs/events.md"


def test_a_common_field_is_in_several_events() -> None:
    for name, meaning in FIELDS.items():
        assert sum(kind.fields.get(name) == meaning for kind in EVENTS.values()) > 1, name
