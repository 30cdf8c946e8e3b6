"""The lists and numbers of the benches' options."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...peer.base.errors import UsageError

_Number = TypeVar("_Number", int, float)


def listed(values: Sequence[str]) -> list[str]:
    """Split `["4,8", "2"]` into `["4", "8", "2"]`: an option may be repeated, or be a list."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def numbers(
    values: Sequence[str], option: str, parse: Callable[[str], _Number], low: float, high: float = math.inf
) -> tuple[_Number, ...]:
    """Parse the numbers of an option, at least one, each from `low` to `high`. Raises `UsageError`."""
    try:
        found = tuple(parse(word) for word in listed(values))
    except (ValueError, OverflowError):
        found = ()
    if not found or not all(low <= number <= high for number in found):
        most = "" if high == math.inf else f" to {high:g}"
        raise UsageError(f"cannot read {option} {','.join(values)!r}", remedy=f"give numbers from {low:g}{most}, such as 4,8")
    return found


def count(text: str) -> int:
    """Parse a whole number: `25M`, `1e6`, `4`. Raises `ValueError`."""
    factors = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
    factor = factors.get(text[-1:].lower(), 1)
    number = float(text[:-1] if factor != 1 else text) * factor
    if number != int(number):
        raise ValueError(text)
    return int(number)
