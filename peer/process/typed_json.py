"""Encodes typed values as JSON and decodes them by their annotations: dataclasses, bytes, tuples, enumerations.

For processes of one peer, which run the same code and trust each other: there are no limits, and a value of another type
is an error of the program, which mypy finds. What arrives from other peers is decoded by `peer.wire.schema` instead.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

PLAIN = (NoneType, bool, int, float, str, object, Any)
"""What JSON gives back as it was."""


def to_json(value: object) -> bytes:
    """Encode a value on one line. Infinite numbers and NaN are kept."""
    return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def from_json(annotation: Any, raw: Any) -> Any:
    """Decode the value of a type from what `json.loads` returned for it."""
    return _decoder(annotation)(raw)


def _plain(value: object) -> object:
    """One level of a value as what `json` knows; it knows tuples, and enumerations of texts."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


@cache
def _decoder(annotation: Any) -> Callable[[Any], Any]:
    """The function that decodes values of a type. Raises `TypeError` for a type that has no form in JSON."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return lambda raw: raw
    if annotation is bytes:
        return b64decode
    if is_dataclass(annotation):
        return _dataclass_decoder(annotation)
    if isinstance(annotation, type) and issubclass(annotation, (StrEnum, Path)):
        return annotation
    if origin is Annotated:
        return _decoder(arguments[0])
    if origin in (Union, UnionType):
        return _union_decoder(arguments)
    if origin is dict and arguments[0] is str:
        value = _decoder(arguments[1])
        return lambda raw: {key: value(item) for key, item in raw.items()}
    if origin is tuple and arguments[1:] == (Ellipsis,):
        item = _decoder(arguments[0])
        return lambda raw: tuple(map(item, raw))
    if origin is tuple:
        items = [_decoder(argument) for argument in arguments]
        return lambda raw: tuple(decode(part) for decode, part in zip(items, raw, strict=True))
    raise TypeError(f"{annotation} has no form in JSON")


def _dataclass_decoder(cls: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(cls, include_extras=True)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields(cls)}
    return lambda raw: cls(**{name: decode(raw[name]) for name, decode in decoders.items()})


def _union_decoder(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Of types that JSON keeps apart by itself, or of one other type and None."""
    if all(argument in PLAIN or (get_origin(argument) is list and get_args(argument)[0] in PLAIN) for argument in arguments):
        return lambda raw: raw
    (some,) = [argument for argument in arguments if argument is not NoneType]
    decode = _decoder(some)
    return lambda raw: None if raw is None else decode(raw)
