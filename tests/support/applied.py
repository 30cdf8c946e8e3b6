"""Applies the operations of a page to a JSON value, as the browser does."""

import copy
import json
from typing import Any


def applied(value: Any, operations: list[list[Any]]) -> Any:
    """As `patch.js` applies them; tests/integration/test_page.py holds that against these."""
    holder = {"root": copy.deepcopy(value)}
    for name, path, *rest in json.loads(json.dumps(operations)):
        place: Any = holder
        keys = ["root", *path]
        for key in keys if name == "splice" else keys[:-1]:
            place = place[key]
        match name:
            case "splice":
                at, count, items = rest
                assert at + count <= len(place)
                place[at : at + count] = items
            case "drop":
                del place[keys[-1]]
            case _:
                place[keys[-1]] = rest[0]
    return holder["root"]
