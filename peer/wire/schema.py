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

A message has exactly the fields of its class: more, fewer or others are refused. Peers of another protocol number are
refused before they exchange any (`dht.run.protocol`).

The only user of `msgpack`.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from ..base.errors import LocalError, MalformedMessage

_T = TypeVar("_T")
Check = Callable[[Any], Any]

MAX_DEPTH_ITEMS = 1 << 16
"""The longest array of any message: it bounds what the parser may allocate before the schema applies."""

MAX_ARRAYS = 1 << 14
"""The arrays of any message: an empty one takes a byte on the wire and 60 in memory, and the parser 0.2 µs. A megabyte of
them, which no schema allows, would hold up the event loop for 0.2 s. Of a class with fewer the parser makes no more."""


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
    """Decode a message of `cls` from its canonical bytes. Raises `MalformedMessage`."""
    if len(data) > max_bytes:
        raise MalformedMessage(f"{cls.__name__}: {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        raw = _unpacked(data, _num_arrays(cls), max_bytes)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"{cls.__name__}: not MessagePack within its limits: {error}") from error
    message: _T = _convert(cls, raw)
    if msgpack.packb(raw) != data:  # No check changes a value, so `raw` is what `encode` would write.
        raise MalformedMessage(f"{cls.__name__}: not the canonical encoding")
    return message


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
        _NUM_ARRAYS[cls] = min(MAX_ARRAYS, 1 + sum(_arrays_in(hints[name]) for name in _names(cls)))
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
    """Return the fields of a message in order."""
    return [getattr(message, name) for name in _names(type(message))]


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
    hints, names = get_type_hints(cls, include_extras=True), _names(cls)
    checks = [_checker(hints[name]) for name in names]

    def check(raw: Any) -> Any:
        if type(raw) is cls:
            raw = _fields(raw)  # A message to be sent is checked in the form that its receiver will decode.
        if not isinstance(raw, (list, tuple)) or len(raw) != len(checks):
            raise _Misfit(f"expected an array of {len(checks)} fields")
        values: list[Any] = []
        try:
            for check, value in zip(checks, raw, strict=True):
                values.append(check(value))
        except _Misfit as misfit:
            raise misfit.within(f".{names[len(values)]}") from None
        return cls(*values)

    return check
