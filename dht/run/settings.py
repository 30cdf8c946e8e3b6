"""Settings: frozen dataclasses whose annotations are the schema of a TOML file, with clear errors.

Theory of operation. A table of the file is a nested dataclass, a key is a field, and the field's annotation carries its
limits: `Between` and `Size` of `peer.wire.schema`, which hold on the wire as well, and `OneOf`, which only `faults` checks.
`from_table` checks names and `faults` checks values, so that values from a file and from a peer pass the same test and a
limit stands in one place. A field of type `Rest` takes every key that its table has beyond the fields. A `Reserved` field is
of the wire alone: no key sets it.
"""

import difflib
import json
import math
import re
import reprlib
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from ...peer.base.errors import UsageError
from ...peer.wire.schema import Between, Size

_T = TypeVar("_T")
MAX_REST = 64
MAX_REST_BYTES = 1024
"""The limit of a free value: some hundred numbers fit, and its depth stays far below the JSON parser's limit."""
Rest: TypeAlias = Annotated[
    tuple[tuple[Annotated[str, Size(64)], Annotated[str, Size(MAX_REST_BYTES)]], ...], Size(MAX_REST)
]
"""The free keys of a table, sorted: (key, value as JSON)."""

MAX_TOML_BYTES = 1 << 17
"""The limit of a file of settings: twice the largest manifest."""

GONE: Mapping[str, str] = {
    "bootstraps": "`flockstep runs --via ADDRESS` names the bootstraps that it asks",
    "[admission] authority": "the owner decides alone where nobody else keeps the run and votes, which is the default",
    "[admission] stall": "a run whose voters are away waits for them; more keepers let it go on without some of them",
}
"""Keys that earlier versions knew, each with what to do instead."""

_KEY = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class OneOf:
    """The allowed values of a text setting."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """A place in the signed bytes without a meaning yet: this version always writes its default."""


def read_toml(path: Path, remedy: str = "docs/run-toml.md lists its keys") -> str:
    """Read the text of a file of settings. Raises `UsageError`, also for what is no file, and for one that is too long."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # A pipe may never end, or never begin.
            raise UsageError(f"cannot read {path}: it is not a file", remedy=remedy)
        with path.open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
        if len(data) > MAX_TOML_BYTES:
            raise UsageError(f"cannot read {path}: it has more than {MAX_TOML_BYTES >> 10} KiB", remedy=remedy)
        return data.decode("utf-8-sig")  # Some editors begin a file with a byte order mark.
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}", remedy=remedy) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a text of settings. Raises `UsageError`, also where it is nested deeper than `tomllib` reads."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # Of broken syntax, and of absurd numbers.
        raise UsageError(str(error)) from error
    except RecursionError:
        raise UsageError("its values are nested too deeply") from None


def from_table(cls: type[_T], table: Mapping[str, Any], name: str = "") -> _T:
    """Build a dataclass from the TOML table `name`, its values unchecked. Raises `UsageError` for a wrong or missing key."""
    hints = _hints(cls)
    named = [key for key, hint in hints.items() if not (hint == Rest or _is_reserved(hint))]
    rest = sorted(key for key in table if key not in named)
    if rest and Rest not in hints.values():
        if instead := GONE.get(_place(name, rest[0])):
            raise UsageError(f"{_place(name, rest[0])} is gone: remove it: {instead}")
        close = difflib.get_close_matches(rest[0], named, n=1)
        meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(named)}"
        raise UsageError(f"unknown key {_place(name, rest[0])}: {'remove it' if rest[0] in hints else meant}")
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        hint = hints[item.name]
        if hint == Rest:
            values[item.name] = tuple((key, _pack(table[key], _place(name, key))) for key in rest)
        elif is_dataclass(hint):
            if not isinstance(inner := table.get(item.name, {}), dict):
                raise UsageError(f"{item.name} must be a table: write [{item.name}]")
            values[item.name] = from_table(hint, inner, item.name)  # type: ignore[arg-type]
        elif (value := table.get(item.name, item.default)) is MISSING:
            raise UsageError(f"{_place(name, item.name)} is missing")
        elif get_origin(kind := get_args(hint)[0]) is tuple:
            given = isinstance(value, list)
            values[item.name] = tuple(_exact(each, get_args(kind)[0]) for each in value) if given else value
        else:
            values[item.name] = _exact(value, hint)
    return cls(**values)


def _exact(value: Any, hint: Any) -> Any:
    """Return a whole number as a float where its setting is one."""
    return float(value) if float in get_args(hint) and type(value) is int and abs(value) <= 2**53 else value


def faults(settings: Any, name: str = "") -> Iterator[str]:
    """Yield a reason for every value of a dataclass that breaks its annotation."""
    for key, hint in _hints(type(settings)).items():
        value = getattr(settings, key)
        if is_dataclass(value):
            yield from faults(value, key)
        elif hint == Rest:
            yield from _rest_faults(value, name)
        elif get_origin(get_args(hint)[0]) is tuple:
            yield from _list_faults(value, hint, _place(name, key))
        elif problem := _problem(value, *get_args(hint)):
            yield f"{_place(name, key)} {problem}"


def to_toml(settings: Any) -> Iterator[str]:
    """Yield the lines of a TOML file: the plain values first, then a table for each nested dataclass."""
    hints = _hints(type(settings))
    for key, hint in hints.items():
        if hint == Rest:
            yield from (f"{free} = {_to_toml(json.loads(text))}" for free, text in getattr(settings, key))
        elif not (is_dataclass(hint) or _is_reserved(hint)):
            yield f"{key} = {_to_toml(getattr(settings, key))}"
    for key, hint in hints.items():
        if is_dataclass(hint):
            yield from ("", f"[{key}]", *to_toml(getattr(settings, key)))


_HINTS: dict[type, dict[str, Any]] = {}
"""What `_hints` has found: a running peer checks its manifest once a second."""


def _hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass; that of a table is its class, whatever else is noted about it."""
    if (found := _HINTS.get(cls)) is None:
        hints = get_type_hints(cls, include_extras=True).items()
        found = {key: table if is_dataclass(table := (get_args(hint) or [None])[0]) else hint for key, hint in hints}
        _HINTS[cls] = found
    return found


def _is_reserved(hint: Any) -> bool:
    return Reserved() in get_args(hint)


def _problem(value: Any, kind: Any, *limits: object) -> str:
    if type(value) is not kind:
        return f"must be {_KIND_NAMES[kind]}, not {reprlib.repr(value)}"
    for limit in limits:
        match limit:
            case OneOf(choices) if value not in choices:
                return f"must be one of {', '.join(choices)}, not {value!r}"
            case Between(low, high) if not low <= value <= high:
                return f"must be between {low:,} and {high:,}, not {value!r}"
            case Size(most, least) if not least <= (size := len(str(value).encode())) <= most:
                return f"must have {least} to {most} bytes of text, not {size}"
    return ""


def _list_faults(values: Any, hint: Any, place: str) -> Iterator[str]:
    """Yield what is wrong with a list of values of one kind, `Annotated[tuple[Annotated[…], ...], Size(most)]`."""
    (item, _), (size,) = get_args(get_args(hint)[0]), [limit for limit in get_args(hint) if isinstance(limit, Size)]
    if not isinstance(values, tuple):
        yield f"{place} must be a list, not {reprlib.repr(values)}"
    elif not size.least <= len(values) <= size.most:
        yield f"{place} must list {f'{size.least} to' if size.least else 'at most'} {size.most}, not {len(values)}"
    else:
        for number, value in enumerate(values, start=1):
            if problem := _problem(value, *get_args(item)):
                yield f"{place}: number {number} {problem}"


def _rest_faults(rest: tuple[tuple[str, str], ...], name: str) -> Iterator[str]:
    keys = [key for key, _ in rest]
    if keys != sorted(set(keys)) or len(keys) > MAX_REST:
        yield f"[{name}] the free keys are not sorted, one stands twice, or they are more than {MAX_REST}"
    for key, text in rest:
        if not _KEY.fullmatch(key):
            yield f"[{name}] {key!r} is not a name of letters, digits and _"
        try:
            canonical = len(text.encode()) <= MAX_REST_BYTES and _pack(json.loads(text), name) == text
        except (UsageError, ValueError, RecursionError):
            canonical = False
        if not canonical:
            yield f"{_place(name, key)} is not the JSON of a plain value in {MAX_REST_BYTES} bytes"


def _pack(value: object, place: str) -> str:
    """Encode a free value as canonical JSON; nested tables are refused, since their TOML differs from their JSON."""
    for item in value if isinstance(value, list) else [value]:
        if not (isinstance(item, (str, int)) or (isinstance(item, float) and math.isfinite(item))):
            raise UsageError(f"{place} must be a number, a text, true, false, or a list of these")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _to_toml(value: object) -> str:
    """Encode a plain value as TOML, which for these is JSON; characters that a terminal would interpret are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def _place(table: str, key: str) -> str:
    return f"[{table}] {key}" if table else key
