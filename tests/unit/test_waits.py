"""Every named wait has its reason beside it.

The constants stay beside their only readers: a room of all waits would be imported by every other one, and would know what
each of them waits for.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT = re.compile("[A-Z_]*(SECONDS|PERIOD|TIMEOUT|PATIENCE)")


def unexplained(module: ast.Module) -> Iterator[str]:
    """Yield the waits without a reason; constants that stand together share the text below them."""
    for index, node in enumerate(module.body):
        name = ast.unparse(node).partition(" = ")[0].partition(":")[0] if is_constant(node) else ""
        if WAIT.fullmatch(name):
            after = next(it for it in module.body[index:] if not is_constant(it))
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                yield name


def is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def test_every_wait_has_a_reason() -> None:
    paths = (path for floor in ("peer", "dht", "collectives", "optim", "scripts") for path in (ROOT / floor).rglob("*.py"))
    ours = [path for path in paths if "lab" not in path.relative_to(ROOT).parts]
    found = [(path.name, name) for path in ours for name in unexplained(ast.parse(path.read_text(encoding="utf-8")))]
    assert found == []
