"""The rules of the house: floors, purity, one file for each network library, nothing heavy behind the door."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("peer", "dht", "collectives", "optim", "scripts")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).glob("**/*.py"))
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]

PURE = {
    *(
        "peer/errors.py",
        "peer/config.py",
        "peer/wire/messages.py",
        "peer/wire/direct.py",
        "peer/claim.py",
        "peer/node/guard.py",
        "peer/wire/fields.py",
        "peer/wire/framing.py",
        "peer/transport.py",
        "peer/nat/reachability.py",
        "peer/allowance.py",
        "peer/troubles.py",
        "peer/limits.py",
        "peer/quota/origins.py",
    ),
    *("dht/directory/routing.py", "dht/directory/store.py"),
    *(
        "dht/records.py",
        "dht/members/table.py",
        "collectives/codec.py",
        "collectives/partition.py",
        "collectives/robust/sketch.py",
    ),
    *(
        "collectives/robust/rules.py",
        "collectives/round/machine.py",
        "collectives/accountability/evidence.py",
        "collectives/accountability/trust.py",
    ),
    *("collectives/robust/rule.py", "collectives/robust/gramguard.py"),
    *("collectives/chain/chain.py", "collectives/place.py", "collectives/state/schedule.py"),
    *("optim/models/needs.py", "optim/models/gpt_config.py"),
    *("optim/flat.py", "optim/outer.py", "optim/pace.py", "optim/data/leases.py", "optim/data/units.py"),
}
"""Files marked (P) in the map of the house: no clock, no chance, no socket, no trio."""
IMPURE = {"trio", "time", "random", "secrets", "socket", "datetime", "asyncio", "threading", "subprocess"}

ONLY_USERS = {
    "libp2p": ("peer/libp2p/*.py", "peer/nat/*.py", "peer/bootstrap/*.py", "peer/host.py", "dht/directory*.py"),
    "libp2p.kad_dht": ("dht/directory*.py",),
    "multiaddr": ("peer/libp2p/*.py", "peer/nat/*.py", "peer/bootstrap/*.py", "peer/host.py", "dht/directory*.py"),
    "hivemind": ("dht/hivemind/node.py", "scripts/bench/hivemind.py"),
    "miniupnpc": ("peer/nat/upnp.py",),
    "cryptography": ("peer/identity.py",),
    "msgpack": ("peer/wire/schema.py",),
    "blake3": ("peer/digest.py",),
    "typer": ("scripts/cli*.py",),
    "transformers": ("optim/models/hf.py",),
    "peft": ("optim/models/hf.py",),
    "boto3": ("scripts/upload.py",),
    "huggingface_hub": ("scripts/upload.py",),
    "datasets": ("optim/data/streams.py",),
    "tokenizers": ("optim/data/tokenizer.py",),
}
"""Each third-party library that may be swapped one day, and the files that may import it."""

MAX_LINES = 500


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Every module that a file imports, by its absolute name, wherever in the file; `from x import y` gives x.y."""
    package = ["flockstep", *Path(name).parent.parts]
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


@cache
def used(name: str) -> frozenset[str]:
    """Every module that a file imports, and its parents: `a.b.c` gives a, a.b and a.b.c."""
    return frozenset(module.rsplit(".", cut)[0] for module in imports(name) for cut in range(module.count(".") + 1))


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_down_the_floors_only(name: str) -> None:
    above = {f"flockstep.{floor}" for floor in FLOORS[FLOORS.index(name.split("/")[0]) + 1 :]}
    assert not above & used(name)


@pytest.mark.parametrize("name", sorted(PURE & set(NAMES)))
def test_pure_files_know_no_time_no_chance_and_no_network(name: str) -> None:
    assert not IMPURE & used(name)
    calls = {ast.unparse(node.func) for node in ast.walk(parsed(name)) if isinstance(node, ast.Call)}
    assert not {"os.urandom", "open", "np.random.default_rng"} & calls


@pytest.mark.parametrize("library", ONLY_USERS)
def test_one_library_one_file(library: str) -> None:
    users = {name for name in NAMES if library in used(name)}
    allowed = {name for name in NAMES for pattern in ONLY_USERS[library] if fnmatch(name, pattern)}
    assert users <= allowed


@pytest.mark.parametrize("name", NAMES)
def test_nothing_received_can_be_executed(name: str) -> None:
    assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & used(name)
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile")
            assert called != "torch.load" or any(word.arg == "weights_only" for word in node.keywords)


@pytest.mark.parametrize("name", NAMES)
def test_files_stay_short_and_say_what_they_are(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert ast.get_docstring(parsed(name))


def test_every_folder_with_code_is_packaged() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {"flockstep", *("flockstep." + ".".join(path.parent.relative_to(ROOT).parts) for path in FILES)}
    assert set(packages) == folders


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60)


def loaded_after(statement: str) -> set[str]:
    result = run_python("-c", f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_help_loads_neither_torch_nor_the_network() -> None:
    help_text = (
        "from flockstep.scripts.cli import main as cli\ntry: cli.app(['join', '--help'])\nexcept SystemExit: pass"
    )
    assert not {"torch", "libp2p", "trio", "numpy"} & loaded_after(help_text)


def test_the_network_process_needs_no_torch() -> None:
    modules = ["flockstep.optim.participant"]
    modules += [f"flockstep.{path.parent.name}.{path.stem}" for path in FILES if path.parent.name in FLOORS[:3]]
    assert "torch" not in loaded_after("\n".join(f"import {module}" for module in modules))


def test_python_m_flockstep_is_the_command() -> None:
    result = run_python("-m", "flockstep", "--version")
    assert result.stdout.startswith("flockstep ")


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    pytest.importorskip("setuptools", minversion="77", reason="building offline needs a recent setuptools at hand")
    # From a copy, since a build leaves its folder beside the sources.
    for name in (*FLOORS, "__init__.py", "__main__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / "source" / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    built = run_python("-m", "pip", "wheel", *options, "-w", str(tmp_path), str(tmp_path / "source"))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flockstep"}
    assert set(NAMES) <= {name.removeprefix("flockstep/") for name in names}
    assert not [name for name in names if not name.endswith((".py", "/py.typed")) and ".dist-info/" not in name]
