"""The package's own source files, each read and parsed once, for the tests of their form."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("peer", "dht", "collectives", "optim", "scripts", "scripts/lab")
FILES = sorted({path for floor in FLOORS for path in (ROOT / floor).glob("**/*.py")})
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


@cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return tuple(ast.walk(parsed(name)))


@cache
def calls(name: str) -> tuple[tuple[str, ast.Call], ...]:
    """Every call in a file, with what is called as it is written: `self.telemetry.emit`."""
    return tuple((ast.unparse(node.func), node) for node in nodes(name) if isinstance(node, ast.Call))
