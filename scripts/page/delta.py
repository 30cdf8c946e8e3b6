"""The difference between two JSON values, as operations that a browser applies to the old one. Pure.

A run's picture has thousands of numbers, and a round changes a few dozen: viewers are sent what changed. It is not JSON
Patch (RFC 6902), which has one operation for each item of a list, and no shift of a list that keeps its newest items
only.

An operation is one of

    ["set", path, value]                   the value at the path becomes this one
    ["drop", path]                         the key at the end of the path goes
    ["splice", path, at, count, items]     in the list at the path, `count` items from `at` on give way to `items`

and a path is a list of keys and indices from the root.
"""

from collections.abc import Iterator
from typing import Any

JsonValue = Any
"""What `json.loads` returns. A value keeps its type for ever, so that no comparison takes True for 1."""
Operation = list[JsonValue]
Path = tuple[str | int, ...]

MAX_SINGLE_CHANGES = 8
"""Items of a list that are set one by one; beyond, a list of numbers or texts is sent whole."""


def operations_between(old: JsonValue, new: JsonValue, path: Path = ()) -> Iterator[Operation]:
    """Yield the operations that turn `old` into `new`, in their order."""
    if isinstance(old, dict) and isinstance(new, dict):
        yield from (["drop", [*path, key]] for key in old if key not in new)
        for key, value in new.items():
            if key not in old:
                yield ["set", [*path, key], value]
            elif old[key] != value:
                yield from operations_between(old[key], value, (*path, key))
    elif isinstance(old, list) and isinstance(new, list):
        yield from _list_changes(old, new, path)
    elif old != new:
        yield ["set", list(path), new]


def _list_changes(old: list[JsonValue], new: list[JsonValue], path: Path) -> Iterator[Operation]:
    """Align the lists at their beginnings, then compare item by item, then the ends."""
    if old and new and old[0] != new[0]:
        if old[0] in new:  # Newest first: items have come in front.
            at = new.index(old[0])
            yield ["splice", list(path), 0, 0, new[:at]]
            old = new[:at] + old
        elif new[0] in old:  # Newest last: the oldest items have gone.
            at = old.index(new[0])
            yield ["splice", list(path), 0, at, []]
            old = old[at:]
    both = min(len(old), len(new))
    differ = [] if old[:both] == new[:both] else [i for i in range(both) if old[i] != new[i]]
    if len(differ) > MAX_SINGLE_CHANGES and not isinstance(new[differ[0]], dict):
        yield ["splice", list(path), 0, len(old), new]
        return
    for index in differ:
        yield from operations_between(old[index], new[index], (*path, index))
    if len(old) != len(new):
        yield ["splice", list(path), both, len(old) - both, new[both:]]
