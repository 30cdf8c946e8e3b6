"""The documents that can go stale, held against the code."""

import inspect
import re
import tomllib
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.run.manifest import Manifest
from flockstep.dht.run.settings import Rest
from flockstep.peer.identity import Identity
from flockstep.peer.limits import BootstrapLimits
from flockstep.scripts.cli.bootstrap import bootstrap

ROOT = Path(__file__).parents[2]
OWNER = Identity.from_seed(bytes(32)).peer_id


def documented() -> dict[str, dict[str, str]]:
    """table → key → default as docs/run-toml.md has them; the keys outside of any table under an empty name."""
    tables: dict[str, dict[str, str]] = {}
    table = ""
    for line in (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (?:\[(\w+)\])?", line):
            table = heading[1] or ""
        if row := re.match(r"\| `(\w+)` \| (.+?) \|", line):
            tables.setdefault(table, {})[row[1]] = row[2].strip("`")
    return tables


def in_code(settings: Any) -> dict[str, str]:
    """key → default of a settings class, written as TOML."""
    return {
        item.name: "–" if item.default is MISSING else _toml(item.default)
        for item in fields(settings)
        if item.name != "owner" and item.type is not Rest and not _is_table(item)
    }


def _is_table(item: Any) -> bool:
    return is_dataclass(item.type)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_every_key_of_a_manifest_is_documented_with_its_default() -> None:
    expected = {"": in_code(Manifest)}
    expected |= {item.name: in_code(item.type) for item in fields(Manifest) if _is_table(item)}
    assert documented() == expected


def test_every_limit_of_a_bootstrap_is_documented_and_an_option_with_its_default() -> None:
    expected = {f"--{item.name.replace('_', '-')}": str(item.default) for item in fields(BootstrapLimits)}
    del expected["--exempt"]
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(--[\w-]+)` \| (\S+) \|", page, re.MULTILINE)) == expected
    options = inspect.signature(bootstrap).parameters
    names = {f"--{name.replace('_', '-')}": str(option.default) for name, option in options.items()}
    assert expected.items() <= names.items()


def test_the_shortest_run_toml_of_the_documents_works() -> None:
    text = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert Manifest.from_toml(example, where="docs", owner=OWNER).name == tomllib.loads(example)["name"]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
