"""Every named wait has its reason beside it, and stands in docs/waits.md; `python tests/unit/test_waits.py` writes that.

The constants stay beside their only readers: a room of all waits would be imported by every other one, and would know what
each of them waits for. What such a room would show is this table.
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/waits.md"
WAIT = re.compile("[A-Z_]*(SECONDS|PERIOD|TIMEOUT|PATIENCE)")
HEAD = """\
# Every wait

For whoever changes how long something takes: each named wait outside of tests and the laboratory, with its value in seconds
and its reason. A `_TIMEOUT` ends an answer or a dial that does not come, `_PATIENCE` is how long others are waited for, what
is done each `_PERIOD` waits that long between two times, and `_SECONDS` are all others, bounds of rates among them.
How long a round waits follows from these and from what a run and its members have measured ([round](round.md)).

Written by `python tests/unit/test_waits.py`.
"""


def waits() -> Iterator[tuple[str, str, str, str]]:
    """Yield (file, name, value, reason) of each."""
    for floor in ("peer", "dht", "collectives", "optim", "scripts"):
        for path in sorted((ROOT / floor).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("scripts/lab/"):
                yield from ((name, *found) for found in waits_in(ast.parse(path.read_text(encoding="utf-8"))))


def waits_in(module: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, reason) of each; constants that stand together share the reason below them."""
    for index, node in enumerate(module.body):
        name, _, value = ast.unparse(node).partition(" = ") if is_constant(node) else ("", "", "")
        if WAIT.fullmatch(name := name.partition(":")[0]):
            after = next(it for it in module.body[index:] if not is_constant(it))
            reason = after.value if isinstance(after, ast.Expr) else None
            yield name, value, " ".join(str(reason.value).split()) if isinstance(reason, ast.Constant) else ""


def is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def written() -> str:
    page = HEAD
    for floor, rows in groupby(waits(), lambda row: row[0].split("/")[0]):
        page += f"\n## {floor}\n\n| where | wait | seconds | why |\n|---|---|---|---|\n"
        page += "".join(f"| `{where}` | `{name}` | {value} | {reason} |\n" for where, name, value, reason in rows)
    return page


def test_every_wait_has_a_reason() -> None:
    assert [(where, name) for where, name, _, reason in waits() if not reason] == []


def test_the_page_has_every_wait() -> None:
    assert PAGE.read_text(encoding="utf-8") == written()


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
