"""The table of events, held against everything that emits events and everything that reads them."""

import ast
import re
import string
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from flockstep.peer.log.events import EVENTS, FIELDS
from flockstep.peer.log.telemetry import Telemetry
from flockstep.scripts.peers.join import LINES, describe_event
from support.sources import NAMES, calls, nodes

FILES = [name for name in NAMES if not name.endswith("events.py")]
EMITTERS = ("emit", "note", "Note")
"""Calls whose first argument is the name of an event."""
SUBJECTS = {name.partition(".")[0] for name in EVENTS}
READERS = ("peer/log/metrics.py",)
"""Files below `scripts` that read events and emit none."""
FILE_ENDS = ("html", "log", "json", "safetensors", "toml", "txt")


def texts(parts: Iterable[ast.AST]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@cache
def emits(file: str) -> tuple[tuple[ast.Call, tuple[ast.AST, ...]], ...]:
    """The calls of a file that emit an event, each with all nodes of its first argument."""
    found = (call for function, call in calls(file) if function.rpartition(".")[2] in EMITTERS)
    return tuple((call, tuple(ast.walk(call.args[0])) if call.args else ()) for call in found)


@cache
def names_in(file: str) -> frozenset[str]:
    """The texts of a file that have the form of an event's name."""
    dotted = {text for text in texts(nodes(file)) if re.fullmatch(r"[a-z0-9]+\.[a-z0-9_]+", text)}
    return frozenset(name for name in dotted if name.split(".")[0] in SUBJECTS and name.split(".")[1] not in FILE_ENDS)


def names_emitted(file: str) -> set[str]:
    """The events that a file emits: those in the calls, and where a name is chosen elsewhere all that it names."""
    first = {name for _, parts in emits(file) for name in texts(parts)}
    reads_none = not file.startswith("scripts/") and file not in READERS
    return first | (names_in(file) if reads_none or first else set())


def test_every_event_that_a_file_names_stands_in_the_table() -> None:
    assert [(file, found) for file in FILES if (found := (names_emitted(file) | names_in(file)) - EVENTS.keys())] == []


def test_no_name_of_an_event_is_put_together_from_pieces() -> None:
    # Nobody could find it.
    emitted = [(file, call, parts) for file in FILES for call, parts in emits(file)]
    pieces = [(file, call.lineno) for file, call, parts in emitted if any(isinstance(part, ast.JoinedStr) for part in parts)]
    assert pieces == []


def test_every_field_of_an_emitted_event_stands_in_the_table() -> None:
    emitted = [(file, call, name) for file in FILES for call, parts in emits(file) for name in texts(parts) if name in EVENTS]
    given = [(file, name, {word.arg for word in call.keywords if word.arg}) for file, call, name in emitted]
    assert given
    assert [(file, name, found) for file, name, words in given if (found := words - EVENTS[name].fields.keys())] == []


def test_every_row_of_the_table_is_emitted_somewhere() -> None:
    assert EVENTS.keys() - set[str]().union(*map(names_emitted, FILES)) == set()


def fields_read(file: str) -> Iterator[str]:
    """The fields that a file reads of what it calls `event`."""
    for node in nodes(file):
        match node:
            case ast.Subscript(value=ast.Name(id="event"), slice=ast.Constant(value=str(name))):
                yield name
            case ast.Call(args=[ast.Name(id="event"), ast.Constant(value=str(name))]):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="event")), args=[ast.Constant(value=str(name)), *_]):
                yield name


def test_every_field_that_is_read_of_an_event_stands_in_the_table() -> None:
    known = {"time", "event", *(field for kind in EVENTS.values() for field in kind.fields)}
    read = {file: {*fields_read(file)} for file in FILES if file.startswith("scripts/")}
    assert any(read.values())
    assert [(file, found) for file, names in read.items() if (found := names - known)] == []


def test_join_says_of_an_event_only_what_is_in_it() -> None:
    for name, line in LINES.items():
        words = {field for _, field, _, _ in string.Formatter().parse(line) if field}
        assert words <= EVENTS[name].fields.keys(), name
        assert describe_event({"event": name}), name  # A log is a file: its fields may be missing.


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


def test_a_common_field_is_in_several_events() -> None:
    for name, meaning in FIELDS.items():
        assert sum(kind.fields.get(name) == meaning for kind in EVENTS.values()) > 1, name
