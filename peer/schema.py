"""Frozen dataclasses to MessagePack arrays and back: one canonical encoding, every limit checked before memory is taken.

Theory of operation. A message class is a frozen dataclass whose annotations are its schema:

    @dataclass(frozen=True, slots=True)
    class Commit:
        round: Annotated[int, Between(0, MAX_ROUND)]
        part_hashes: Annotated[tuple[Hash, ...], Size(64)]

`encode` writes its fields in their order as one array; nested dataclasses are nested arrays. `decode` refuses anything
that `encode` would not have written byte for byte (so that a signature covers exactly one spelling), any value of
another type, any length or number outside its `Size` or `Between`, NaN, and trailing bytes. Every `int`, `str`, `bytes`
and `tuple` must carry a limit: a class without one cannot be used, so that a limit can never be forgotten.

The only user of `msgpack`.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from .errors import LocalError, MalformedMessage

T = TypeVar("T")
Check = Callable[[Any, str], Any]

MAX_DEPTH_ITEMS = 1 << 16
"""No array of any message is longer: bounds what the parser may allocate before the schema is consulted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """The greatest length of a `str` (in UTF-8 bytes), `bytes` or `tuple`, and the least."""

    most: int
    least: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """The inclusive range of a number."""

    low: float
    high: float


def encode(message: object) -> bytes:
    """The canonical bytes of a message. Raises `LocalError` where a field breaks its own schema."""
    lowered = _lower(message)
    try:
        _schema(type(message))(lowered, type(message).__name__)
    except MalformedMessage as error:
        raise LocalError(f"refusing to send a message that nobody could accept: {error}") from error
    return bytes(msgpack.packb(lowered))


def decode(cls: type[T], data: bytes | memoryview, *, max_bytes: int) -> T:
    """A message of `cls` from its canonical bytes. Raises `MalformedMessage`."""
    if len(data) > max_bytes:
        raise MalformedMessage(f"{cls.__name__}: {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        raw = msgpack.unpackb(
            data,
            raw=False,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_array_len=min(max_bytes, MAX_DEPTH_ITEMS),
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"{cls.__name__}: not MessagePack within its limits: {error}") from error
    message: T = _schema(cls)(raw, cls.__name__)
    if msgpack.packb(raw) != data:  # No check changes a value, so `raw` is what `encode` would write.
        raise MalformedMessage(f"{cls.__name__}: not the canonical encoding")
    return message


def _lower(value: object) -> object:
    """Dataclasses and tuples to the lists that MessagePack writes."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return [item if type(item) in _PLAIN else _lower(item) for item in cast(Sequence[object], value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_lower(getattr(value, name)) for name in _names(kind)]
    return value


_PLAIN = frozenset((bytes, str, int, float, bool, type(None)))
"""What MessagePack writes as it is: most of every message, so it is looked for first."""


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(cls: Any) -> tuple[str, ...]:
    """The fields of a message class, listed once."""
    if cls not in _NAMES:
        _NAMES[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return _NAMES[cls]


_SCHEMAS: dict[type, Check] = {}


def _schema(cls: type) -> Check:
    """The checker of a message class, made once."""
    if cls not in _SCHEMAS:
        _SCHEMAS[cls] = _checker(cls)
    return _SCHEMAS[cls]


def _checker(annotation: Any, limit: Size | Between | None = None) -> Check:
    """The function that checks a raw value against an annotation and raises it to its Python type."""
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
        return lambda raw, where: None if raw is None else check(raw, where)
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


def _exactly(kind: type) -> Check:
    def check(raw: Any, where: str) -> Any:
        if type(raw) is not kind:
            raise MalformedMessage(f"{where}: expected {kind.__name__}, got {type(raw).__name__}")
        return raw

    return check


def _number_checker(limit: Between) -> Check:
    exact = _exactly(int)

    def check(raw: Any, where: str) -> Any:
        if not limit.low <= exact(raw, where) <= limit.high:
            raise MalformedMessage(f"{where}: {raw} is not between {limit.low} and {limit.high}")
        return raw

    return check


def _float_checker(limit: Size | Between | None) -> Check:
    exact = _exactly(float)
    low, high = (limit.low, limit.high) if isinstance(limit, Between) else (-math.inf, math.inf)

    def check(raw: Any, where: str) -> Any:
        if not math.isfinite(exact(raw, where)) or not low <= raw <= high:
            raise MalformedMessage(f"{where}: {raw} is not a finite number between {low} and {high}")
        return raw

    return check


def _sized_checker(kind: type, limit: Size) -> Check:
    exact = _exactly(kind)

    def check(raw: Any, where: str) -> Any:
        exact(raw, where)
        length = len(raw) if kind is bytes else len(raw.encode(errors="surrogatepass"))
        if not limit.least <= length <= limit.most:
            raise MalformedMessage(f"{where}: {length} bytes long, allowed are {limit.least} to {limit.most}")
        return raw

    return check


def _tuple_checker(args: tuple[Any, ...], limit: Size | Between | None) -> Check:
    if len(args) == 2 and args[1] is Ellipsis:
        if not isinstance(limit, Size):
            raise LocalError(f"a message field of type tuple[{args[0]!r}, ...] needs a Size")
        size, item = limit, _checker(args[0])

        def check_many(raw: Any, where: str) -> Any:
            if not isinstance(raw, (list, tuple)) or not size.least <= len(raw) <= size.most:
                raise MalformedMessage(f"{where}: expected an array of {size.least} to {size.most} items")
            return tuple(item(value, f"{where}[{index}]") for index, value in enumerate(raw))

        return check_many

    items = [_checker(arg) for arg in args]

    def check_fixed(raw: Any, where: str) -> Any:
        if not isinstance(raw, (list, tuple)) or len(raw) != len(items):
            raise MalformedMessage(f"{where}: expected an array of {len(items)} items")
        return tuple(check(value, where) for check, value in zip(items, raw, strict=True))

    return check_fixed


def _dataclass_checker(cls: Any) -> Check:
    hints = get_type_hints(cls, include_extras=True)
    fields = [(field.name, _checker(hints[field.name])) for field in dataclasses.fields(cls)]

    def check(raw: Any, where: str) -> Any:
        if not isinstance(raw, (list, tuple)) or len(raw) != len(fields):
            raise MalformedMessage(f"{where}: expected an array of {len(fields)} fields")
        return cls(*(check(value, f"{where}.{name}") for (name, check), value in zip(fields, raw, strict=True)))

    return check
