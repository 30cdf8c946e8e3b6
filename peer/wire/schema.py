"""Canonical MessagePack encoding of dataclasses; limits are checked before allocation.

Theory of operation. A message class is a frozen dataclass whose annotations are its schema:

    @dataclass(frozen=True, slots=True)
    class Commit:
        round: Annotated[int, Between(0, MAX_ROUND)]
        part_hashes: Annotated[tuple[Hash, ...], Size(64)]

`encode` writes the fields in order as one array; nested dataclasses are nested arrays. `decode` refuses any bytes that
`encode` would not have written (so that a signature covers exactly one encoding), any value of another type, any length
or number outside its `Size` or `Between`, NaN, and trailing bytes. Every `int`, `str`, `bytes` and `tuple` must have a
limit: a class without one cannot be used, so no limit can be forgotten.

How a message grows. A later version may append fields, each `Added()` and with a default. A field is left out where it and
all after it have their defaults, so that an older version reads most messages as its own. A class marked `grows` may have
further fields that this version does not know: at most `MAX_LATER_FIELDS` and `MAX_LATER_BYTES` behind those that the class
began with, in every version alike. They are ignored, and what is signed is passed on as the bytes that were signed. An
added field that breaks its own limit reads as its default, as it does to who does not know it: otherwise a liar could
have older peers pass on what newer ones charge them for. Envelopes (`Signed`, `Record`, `Certificate`) and statements
whose bytes others build again (`Prevote`, `Precommit`) never grow: each has exactly one encoding.

The only user of `msgpack`.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from ..base.errors import LocalError, MalformedMessage, OtherVersion

_T = TypeVar("_T")
Check = Callable[[Any], Any]

MAX_DEPTH_ITEMS = 1 << 16
"""The longest array of any message: it bounds what the parser may allocate before the schema applies."""

MAX_ARRAYS = 1 << 14
"""The arrays of any message: an empty one takes a byte on the wire and 60 in memory, and the parser 0.2 µs. A megabyte of
them, which no schema allows, would hold up the event loop for 0.2 s. Of a class with fewer the parser makes no more."""


MAX_LATER_FIELDS = 16
MAX_LATER_BYTES = 4096
"""The limit of all that later versions append to a message: what they cannot say in it takes a message of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """A field that a later version appended to a class; it has a default."""


_GROWING: set[type] = set()


def grows(cls: type[_T]) -> type[_T]:
    """Mark a message class that may have fields which this version does not know. A decorator, above `dataclass`."""
    _GROWING.add(cls)
    return cls


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """The maximum length of a `str` (in UTF-8 bytes), `bytes` or `tuple`, and the minimum."""

    most: int
    least: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """The inclusive range of a number."""

    low: float
    high: float


class _Misfit(Exception):
    """A value that breaks the schema. Its path is built while the exception propagates, so that valid values cost nothing."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path = ""

    def within(self, step: str) -> "_Misfit":
        """Prepend one step to the path."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}"


def encode(message: object) -> bytes:
    """Encode a message canonically. Raises `LocalError` if a field breaks its own schema."""
    try:
        _convert(type(message), message)
    except MalformedMessage as error:
        raise LocalError(f"refusing to send a message that no peer could accept: {error}") from error
    return bytes(msgpack.packb(message, default=_fields))  # It asks for the fields of dataclasses; tuples are arrays.


def decode(cls: type[_T], data: bytes | memoryview, *, max_bytes: int) -> _T:
    """Decode a message of `cls` from its canonical bytes. Raises `MalformedMessage`; `OtherVersion` if it lacks fields."""
    if len(data) > max_bytes:
        raise MalformedMessage(f"{cls.__name__}: {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        raw = _unpacked(data, _num_arrays(cls), max_bytes)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"{cls.__name__}: not MessagePack within its limits: {error}") from error
    least = len(_names(cls)) - len(_defaults_of_added(cls))
    if isinstance(raw, list) and len(raw) < least:
        raise OtherVersion(f"{cls.__name__}: {len(raw)} fields, and not {least} as in this version")
    message: _T = _convert(cls, raw)
    if msgpack.packb(raw) != data:  # No check changes a value, so `raw` is what `encode` would write.
        raise MalformedMessage(f"{cls.__name__}: not the canonical encoding")
    return message


def peek_text(data: bytes | memoryview, place: int) -> str:
    """Return the text at a place of an encoded message that could not be decoded; empty if there is none."""
    try:
        raw = _unpacked(data, MAX_ARRAYS, len(data))
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
        return ""
    text = raw[place] if isinstance(raw, list) and place < len(raw) else ""
    return text if isinstance(text, str) else ""


def _unpacked(data: bytes | memoryview, max_arrays: int, max_bytes: int) -> Any:
    """Parse MessagePack of at most so many arrays, the innermost first. Raises as the library does."""
    left = max_arrays

    def count(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {max_arrays} arrays")
        return items

    return msgpack.unpackb(
        data,
        raw=False,
        list_hook=count,
        max_str_len=max_bytes,
        max_bin_len=max_bytes,
        max_array_len=min(len(data), MAX_DEPTH_ITEMS),  # An item takes a byte: else heads alone would take memory.
        max_map_len=0,
        max_ext_len=0,
    )


_NUM_ARRAYS: dict[type, int] = {}


def _num_arrays(cls: Any) -> int:
    """Return how many arrays a message of a class may consist of, `MAX_ARRAYS` at most; cached."""
    if cls not in _NUM_ARRAYS:
        hints = get_type_hints(cls, include_extras=True)
        later = MAX_LATER_BYTES if cls in _GROWING or _defaults_of_added(cls) else 0
        _NUM_ARRAYS[cls] = min(MAX_ARRAYS, 1 + later + sum(_arrays_in(hints[name]) for name in _names(cls)))
    return _NUM_ARRAYS[cls]


def _arrays_in(annotation: Any, limit: Size | None = None) -> int:
    """Return how many arrays a field of this annotation may consist of; its `Size` stands around it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        return _arrays_in(inner, next((extra for extra in extras if isinstance(extra, Size)), limit))
    if dataclasses.is_dataclass(annotation):
        return _num_arrays(annotation)
    if origin in (Union, types.UnionType):
        return max(_arrays_in(arg, limit) for arg in get_args(annotation))
    if origin is tuple and limit is not None and get_args(annotation)[-1] is Ellipsis:
        return 1 + limit.most * _arrays_in(get_args(annotation)[0])
    return 1 + sum(map(_arrays_in, get_args(annotation))) if origin is tuple else 0


def _fields(message: object) -> list[object]:
    """Return the fields of a message in order, without the added ones at its end that have their defaults."""
    values = [getattr(message, name) for name in _names(type(message))]
    for default in reversed(_defaults_of_added(type(message))):
        if values[-1] != default:
            break
        del values[-1]
    return values


_DEFAULTS: dict[type, tuple[object, ...]] = {}


def _defaults_of_added(cls: Any) -> tuple[object, ...]:
    """Return the defaults of a message class's added fields, cached. Raises `LocalError` if others stand behind them."""
    if cls not in _DEFAULTS:
        hints, fields = get_type_hints(cls, include_extras=True), dataclasses.fields(cls)
        added = [Added() in get_args(hints[field.name]) for field in fields]
        first = added.index(True) if any(added) else len(added)
        if not all(added[first:]) or any(field.default is dataclasses.MISSING for field in fields[first:]):
            raise LocalError(f"the added fields of {cls.__name__} must stand at its end and have defaults")
        _DEFAULTS[cls] = tuple(field.default for field in fields[first:])
    return _DEFAULTS[cls]


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(cls: Any) -> tuple[str, ...]:
    """Return the field names of a message class, cached."""
    if cls not in _NAMES:
        _NAMES[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return _NAMES[cls]


_SCHEMAS: dict[type, Check] = {}
"""The checker of each message class, cached."""


def _convert(cls: type, raw: Any) -> Any:
    """Check a raw value and convert it to a message of `cls`. Raises `MalformedMessage`, which names the field."""
    if cls not in _SCHEMAS:
        _SCHEMAS[cls] = _checker(cls)
    try:
        return _SCHEMAS[cls](raw)
    except _Misfit as misfit:
        raise MalformedMessage(str(misfit.within(cls.__name__))) from None


def _checker(annotation: Any, limit: Size | Between | None = None) -> Check:
    """Compile an annotation to a function that checks a raw value and converts it to its Python type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        limits = [extra for extra in extras if isinstance(extra, (Size, Between))]
        return _checker(inner, limits[0] if limits else limit)
    if dataclasses.is_dataclass(annotation):
        return _dataclass_checker(annotation)
    if origin in (Union, types.UnionType):
        (some,) = [arg for arg in get_args(annotation) if arg is not type(None)]
        check = _checker(some, limit)
        return lambda raw: None if raw is None else check(raw)
    if origin is tuple:
        return _tuple_checker(get_args(annotation), limit)
    if annotation is bool:
        return _exactly(bool)
    if annotation is float:
        return _float_checker(limit)
    if annotation is int and isinstance(limit, Between):
        return _number_checker(limit)
    if annotation in (str, bytes) and isinstance(limit, Size):
        return _sized_checker(annotation, limit)
    raise LocalError(f"a message field of type {annotation!r} needs a limit or is not supported")


def _other_type(kind: type, raw: object) -> _Misfit:
    return _Misfit(f"expected {kind.__name__}, got {type(raw).__name__}")


def _exactly(kind: type) -> Check:
    def check(raw: Any) -> Any:
        if type(raw) is not kind:
            raise _other_type(kind, raw)
        return raw

    return check


def _number_checker(limit: Between) -> Check:
    low, high = limit.low, limit.high

    def check(raw: Any) -> Any:
        if type(raw) is not int:
            raise _other_type(int, raw)
        if not low <= raw <= high:
            raise _Misfit(f"{raw} is not between {low} and {high}")
        return raw

    return check


def _float_checker(limit: Size | Between | None) -> Check:
    low, high = (limit.low, limit.high) if isinstance(limit, Between) else (-math.inf, math.inf)

    def check(raw: Any) -> Any:
        if type(raw) is not float:
            raise _other_type(float, raw)
        if not math.isfinite(raw) or not low <= raw <= high:
            raise _Misfit(f"{raw} is not a finite number between {low:g} and {high:g}")
        return raw

    return check


def _sized_checker(kind: type[Any], limit: Size) -> Check:
    least, most = limit.least, limit.most

    def check(raw: Any) -> Any:
        if type(raw) is not kind:
            raise _other_type(kind, raw)
        length = len(raw) if kind is bytes or raw.isascii() else len(raw.encode(errors="surrogatepass"))
        if not least <= length <= most:
            raise _Misfit(f"{length} bytes long, allowed are {least} to {most}")
        return raw

    return check


def _tuple_checker(args: tuple[Any, ...], limit: Size | Between | None) -> Check:
    if len(args) == 2 and args[1] is Ellipsis:
        if not isinstance(limit, Size):
            raise LocalError(f"a message field of type tuple[{args[0]!r}, ...] needs a Size")
        least, most, item = limit.least, limit.most, _checker(args[0])

        def check_many(raw: Any) -> Any:
            if not isinstance(raw, (list, tuple)) or not least <= len(raw) <= most:
                raise _Misfit(f"expected an array of {least} to {most} items")
            items: list[Any] = []
            try:
                for value in raw:
                    items.append(item(value))
            except _Misfit as misfit:
                raise misfit.within(f"[{len(items)}]") from None
            return tuple(items)

        return check_many

    checks = [_checker(arg) for arg in args]
    if len(checks) == 2:
        return _pair_checker(*checks)

    def check_fixed(raw: Any) -> Any:
        if not isinstance(raw, (list, tuple)) or len(raw) != len(checks):
            raise _Misfit(f"expected an array of {len(checks)} items")
        return tuple([check(value) for check, value in zip(checks, raw, strict=True)])

    return check_fixed


def _pair_checker(first: Check, second: Check) -> Check:
    """Compile a pair, the most frequent nested array: one message holds a thousand of (peer, sequence)."""

    def check_pair(raw: Any) -> Any:
        if not isinstance(raw, (list, tuple)) or len(raw) != 2:
            raise _Misfit("expected an array of 2 items")
        return first(raw[0]), second(raw[1])

    return check_pair


def _dataclass_checker(cls: Any) -> Check:
    hints = get_type_hints(cls, include_extras=True)
    names, defaults, is_growing = _names(cls), _defaults_of_added(cls), cls in _GROWING
    checks = [_checker(hints[name]) for name in names]
    most, least = len(checks), len(checks) - len(defaults)

    def check(raw: Any) -> Any:
        is_mine = type(raw) is cls
        if is_mine:
            raw = _fields(raw)  # A message to be sent is checked in the form that its receiver will decode.
        if not isinstance(raw, (list, tuple)) or len(raw) < least or (len(raw) > most and not is_growing):
            raise _Misfit(f"expected an array of {least} fields" + (f", or up to {most}" if defaults else ""))
        values: list[Any] = []
        try:
            for check, value in zip(checks[:least], raw, strict=False):
                values.append(check(value))
            if len(raw) > least:
                _check_later(raw[least:])
            for check, value, default in zip(checks[least:], raw[least:], defaults, strict=False):
                values.append(_added(check, value, default, is_lenient=is_growing and not is_mine))
        except _Misfit as misfit:
            raise misfit.within(f".{names[len(values)]}" if len(values) < most else "") from None
        if not is_growing and len(raw) > least and values[-1] == defaults[len(values) - least - 1]:
            raise _Misfit(f"its last field, {names[len(values) - 1]}, has its default: it is left out")
        return cls(*values, *defaults[len(values) - least :])

    return check


def _check_later(later: Any) -> None:
    """Check the limits of all fields that were added to a class, known here or not."""
    if len(later) > MAX_LATER_FIELDS:
        raise _Misfit(f"{len(later)} added fields, at most {MAX_LATER_FIELDS} are allowed")
    try:
        size = len(msgpack.packb(later, default=_fields))
    except ValueError as error:  # The parser takes deeper nesting than the packer.
        raise _Misfit(f"added fields that nobody could encode: {error}") from None
    if size > MAX_LATER_BYTES:
        raise _Misfit(f"added fields of {size} bytes, at most {MAX_LATER_BYTES} are allowed")


def _added(check: Check, raw: Any, default: object, *, is_lenient: bool) -> Any:
    """Convert an added field; one that breaks its limit is its default where the class grows and a peer has sent it."""
    try:
        return check(raw)
    except _Misfit:
        if is_lenient:
            return default
        raise
