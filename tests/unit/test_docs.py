"""Documents that can go stale, checked against the code."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.run.manifest import CODEC_NAMES, RULE_NAMES, Manifest
from flockstep.dht.run.settings import OneOf, Reserved, Rest
from flockstep.optim.models.registry import build_model, training_loss
from flockstep.optim.packing.sources import TABLES
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.log.metrics import EVENT_COUNTS, TRAFFIC_BYTES
from flockstep.peer.quota.limits import BootstrapLimits, limit_options, option_of
from flockstep.peer.wire.schema import Size
from flockstep.scripts.cli.main import app
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
SHARED_TYPES = (wire.Hash, wire.Peer, wire.RunId, wire.Reason, wire.Count, wire.Index, wire.Bytes)
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
        if item.name != "owner" and item.type is not Rest and not (_table_of(item) or Reserved() in get_args(item.type))
    }


def _table_of(item: Any) -> Any:
    """The dataclass of a table; None for a plain key."""
    return next((kind for kind in (item.type, *get_args(item.type)) if isinstance(kind, type) and is_dataclass(kind)), None)


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_every_key_of_a_manifest_is_documented_with_its_default() -> None:
    expected = {"": in_code(Manifest)}
    expected |= {item.name: in_code(table) for item in fields(Manifest) if (table := _table_of(item)) is not None}
    assert documented() == expected


def choices() -> Iterator[tuple[str, str]]:
    """(table, choice) of every setting that is one of a few texts."""
    for item in fields(Manifest):
        if (table := _table_of(item)) is not None:
            for hint in get_type_hints(table, include_extras=True).values():
                for note in get_args(hint) if Reserved() not in get_args(hint) else ():
                    yield from ((item.name, choice) for choice in note.choices) if isinstance(note, OneOf) else ()


def test_every_choice_of_a_setting_is_documented_in_its_section() -> None:
    text = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## \[(\w+)\]$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    found = sorted(set(choices()))
    assert found
    assert [(table, choice) for table, choice in found if not re.search(rf'`"?{choice}"?`', sections[table])] == []


def test_the_bits_of_every_codec_are_documented() -> None:
    page = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")
    bits = {name: str(8 * codec_named(name).cell_bytes / CELL) for name in CODEC_NAMES}
    assert dict(re.findall(r'^\| `"(\w+)"` \| ([\d.]+) \|$', page, re.MULTILINE)) == bits


def test_every_rule_is_in_the_table_of_the_defence() -> None:
    page = (ROOT / "docs" / "defence.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert [rule for rule in RULE_NAMES if not any(f"`{rule}`" in row for row in rows)] == []


def test_every_limit_of_a_bootstrap_is_documented_and_an_option_with_its_default() -> None:
    expected = [(option_of(limit.name), str(limit.default), limit.meaning) for limit in limit_options()]
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(--[\w-]+)` \| (\S+) \| (.+) \|$", page, re.MULTILINE) == expected
    fields_of_limits = {option_of(item.name) for item in fields(BootstrapLimits)}
    assert {option for option, _, _ in expected} == fields_of_limits - {"--exempt"}
    help_text = " ".join(CliRunner().invoke(app, ["bootstrap", "--help"]).output.split())
    for option, default, meaning in expected:
        assert re.search(rf"{option} <\w+> {re.escape(meaning)}\. \[default: {re.escape(default)}\]", help_text), option


def test_the_shortest_run_toml_of_the_documents_works() -> None:
    text = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")
    example = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0]
    assert Manifest.from_toml(example, where="docs", owner=OWNER).name == tomllib.loads(example)["name"]


def test_every_message_is_documented_with_its_number_its_fields_and_its_limits() -> None:
    page = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    found = re.findall(r"### (\d+) `(\w+)`\n(.*?)(?=\n##|\Z)", page, re.DOTALL)
    sections = {number: (name, text) for number, name, text in found}
    assert {int(number): name for number, (name, _) in sections.items()} == {
        number: message.__name__ for number, message in wire.CODES.items()
    }
    for number, message in wire.CODES.items():
        text = sections[str(number)][1]
        named = re.findall(r"(?:^|· )`(\w+)` ", text.replace("\n", " "))
        assert named == [item.name for item in fields(message)], message
        for item in fields(message):
            for limit in _limits(get_type_hints(message, include_extras=True)[item.name]):
                assert f"{limit:,}" in text, (message, item.name, limit)


def _limits(annotation: Any) -> Iterator[int]:
    """The lengths that a field's own annotation states; shared types state theirs once, at the top of the page."""
    if annotation in SHARED_TYPES:
        return
    for part in get_args(annotation):
        if isinstance(part, Size):
            yield part.most
        elif get_origin(part) is not None:
            yield from _limits(part)


def links(page: str) -> Iterator[str]:
    """The files that a page links to."""
    found = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8"))
    yield from (target for target in found if "://" not in target)


def test_links_between_pages_lead_somewhere() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    found = [(page, target) for page in pages for target in links(page)]
    assert [(page, target) for page, target in found if not ((ROOT / page).parent / target).exists()] == []
    # The web site has the pages of docs/ alone: to a page beside them, its builder finds no way.
    inside = [(page, (ROOT / page).parent.joinpath(target).resolve()) for page, target in found if page.startswith("docs/")]
    assert [(page, path) for page, path in inside if path.suffix == ".md" and path.parent == ROOT] == []


def test_links_to_a_heading_name_one() -> None:
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = {path.name: path.read_text(encoding="utf-8") for path in paths}
    headings = {
        name: {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.+)$", page)}
        for name, page in pages.items()
    }
    linked = r"\]\((?:docs/|log/|\.\./)*([\w-]*(?:\.md)?)#([^)\s]+)\)"
    named = [(name, to or name, at) for name, page in pages.items() for to, at in re.findall(linked, page)]
    assert [each for each in named if each[2] not in headings[each[1]]] == []
    assert len(named) > 30


def test_every_metric_of_a_bootstrap_is_documented() -> None:
    source = (ROOT / "scripts" / "peers" / "bootstrap.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    made = {*re.findall(r'Figure\("(flockstep_\w+)"', source), TRAFFIC_BYTES, EVENT_COUNTS}
    assert made == set(re.findall(r"`(flockstep_\w+)(?:\{[\w,]+\})?`", page))


def test_every_kind_of_data_source_is_documented() -> None:
    page = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    kinds = ["text", "tokens", *TABLES]
    assert [kind for kind in kinds if not any(f"`{kind}:" in row for row in rows)] == []


def test_every_verb_is_documented() -> None:
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
    texts = [page.read_text(encoding="utf-8").replace("\nflockstep", "`flockstep") for page in pages]
    verbs = sorted(command.name or "" for command in get_command(app).commands.values())  # type: ignore[attr-defined]
    assert "join" in verbs
    assert [verb for verb in verbs if not any(f"`flockstep {verb}" in text for text in texts)] == []


@pytest.mark.parametrize("kind", ["gpt", "hf", "lora", "model", "loop"])
def test_the_page_of_a_kind_of_run_has_a_run_and_commands_that_exist(kind: str) -> None:
    page = (ROOT / "docs" / f"run-{kind}.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    manifest = Manifest.from_toml(text, where=kind, owner=OWNER)
    programs = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.DOTALL)
    modules: dict[str, dict[str, Any]] = {name: {} for name, _ in programs}
    for name, source in programs:
        exec(source, modules[name])
    if kind == "hf":
        pytest.importorskip("transformers")
    if kind in ("gpt", "hf"):
        assert build_model(manifest.model.name, manifest.model.options, seed=0) is not None
    if kind == "model":
        module, function = manifest.model.name.split(":")
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        assert training_loss(modules[module][function](**manifest.model.options), tokens).shape == ()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if not re.match("[A-Z_]+=", word)]
        if words[0] == "flockstep":
            _parse(words[1:])
        elif words[0] != "hf":  # The hub's own command, which the extra `hf` brings.
            assert words[-2] in {f"{name}.py" for name in modules}, line
        if "--model" in words:
            module, function = words[words.index("--model") + 1].split(":")
            assert callable(modules[module][function])


def _parse(words: list[str]) -> None:
    """Parse a command without running it. Raises `click.UsageError`."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words).close()


def test_every_test_that_a_page_names_exists() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"}
    found = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in (path.stem, *re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    }
    named = {page: set(re.findall(r"\b(test_\w+)", text)) for page, text in pages.items()}
    assert {page: names - found for page, names in named.items() if names - found} == {}
    assert len(named["defence.md"]) > 20
    files = {page: set(re.findall(r"\btests/[\w/]+(?:\.py)?", text)) for page, text in pages.items()}
    assert [(page, path) for page, paths in files.items() for path in paths if not (ROOT / path).exists()] == []
