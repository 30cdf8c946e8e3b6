"""The rules of the house: floors, rooms, purity, single users of libraries, lazy imports."""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from support.commands import PRELOADED
from support.sources import FILES, FLOORS, NAMES, ROOT, calls, nodes, parsed

IMPURE = {"trio", "time", "random", "secrets", "socket", "datetime", "asyncio", "threading", "subprocess"}

ONLY_USERS = {
    "libp2p": (
        *("peer/strangers/*.py", "peer/libp2p/*.py", "peer/yamux/muxer.py", "peer/nat/*.py", "peer/bootstrap/*.py"),
        *("peer/https/*.py", "peer/host.py", "dht/directory/*.py"),
    ),
    "libp2p.kad_dht": ("dht/directory/*.py",),
    "multiaddr": (
        *("peer/libp2p/*.py", "peer/https/dial.py", "peer/yamux/muxer.py", "peer/nat/*.py", "peer/bootstrap/*.py"),
        *("peer/strangers/identify.py", "peer/host.py", "dht/directory/*.py"),
    ),
    "hivemind": ("dht/hivemind/node.py", "scripts/lab/bench/hivemind.py"),
    "cryptography": ("peer/identity.py", "peer/libp2p/packets.py", "peer/https/certificate.py"),
    "wsproto": ("peer/https/websocket.py",),
    "h11": ("peer/https/proxy.py", "peer/nat/gateway.py"),
    "msgpack": ("peer/wire/schema.py",),
    "blake3": ("peer/base/digest.py",),
    "psutil": ("optim/models/machine.py", "peer/libp2p/listen.py", "scripts/lab/bench/group.py", "scripts/demo/processes.py"),
    "bitsandbytes": ("optim/models/quantized.py",),
    "pynvml": ("scripts/volunteer/gpu.py",),
    "prometheus_client": ("peer/log/metrics.py",),
    "typer": ("scripts/cli/*.py", "scripts/lab/verbs.py"),
    "transformers": ("optim/models/hf.py", "scripts/trainers/transformers.py"),
    "lightning": ("scripts/trainers/lightning.py",),
    "peft": ("optim/models/hf.py",),
    "boto3": ("scripts/checkpoints/upload.py",),
    "huggingface_hub": ("scripts/checkpoints/upload.py", "optim/packing/hub.py"),
    "pyarrow": ("optim/packing/sources.py",),
    "tokenizers": ("optim/data/controls.py",),
    "jinja2": ("optim/packing/chat.py",),
}
"""Each third-party library that may be swapped one day, and the files that may import it."""

FOUNDATION = {
    "peer": ("base", "identity", "address", "log"),
    "dht": ("records", "keys"),
    "collectives": ("vector", "spec"),
    "optim": ("consent", "step"),
    "scripts": (),
    "scripts/lab": ("namespaces", "words", "table"),
}
"""The rooms and root files of each floor on which the others stand, lowest first: each may import those before it.

`spec` alone names a rule, too.
"""

ROOMS: dict[str, tuple[str, ...]] = {
    "peer/base": (),
    "peer/log": (),
    "peer/wire": (),
    "peer/node": ("wire", "quota"),
    "peer/process": (),
    "peer/memory": (),
    "peer/quota": (),
    "peer/strangers": ("quota",),
    "peer/yamux": ("strangers",),
    "peer/libp2p": ("quota", "strangers", "yamux"),
    "peer/https": ("libp2p", "quota", "strangers"),
    "peer/nat": ("wire", "quota", "libp2p"),
    "peer/bootstrap": ("quota", "libp2p", "nat"),
    "dht/run": (),
    "dht/directory": (),
    "dht/members": ("run", "directory"),
    "dht/hivemind": ("directory", "members", "run"),
    "collectives/vector": (),
    "collectives/agreement": (),
    "collectives/robust": (),
    "collectives/chain": ("agreement",),
    "collectives/light": ("chain", "state"),
    "collectives/evaluation": ("chain",),
    "collectives/accountability": ("robust", "chain"),
    "collectives/picture": ("agreement", "chain", "accountability", "evaluation"),
    "collectives/allreduce": ("robust", "agreement", "chain", "accountability"),
    "collectives/round": ("allreduce", "robust", "agreement", "chain", "accountability"),
    "collectives/state": ("chain", "accountability"),
    "collectives/visit": ("agreement", "chain", "accountability", "light", "evaluation", "picture"),
    "collectives/driver": ("accountability", "agreement", "allreduce", "chain", "robust", "round", "visit"),
    "optim/step": (),
    "optim/models": (),
    "optim/data": (),
    "optim/shards": ("data",),
    "optim/packing": ("data", "shards"),
    "optim/member": ("data", "shards"),
    "optim/keeper": ("member",),
    "optim/train": ("data", "member", "models", "shards"),
    "scripts/demo": ("page", "watch"),
    "scripts/doctor": (),
    "scripts/trainers": ("watch",),
    "scripts/page": ("watch",),
    "scripts/checkpoints": (),
    "scripts/peers": ("checkpoints", "page", "volunteer", "watch"),
    "scripts/runs": ("checkpoints", "peers", "watch"),
    "scripts/volunteer": (),
    "scripts/watch": ("volunteer",),
    "scripts/cli": ("checkpoints", "demo", "doctor", "page", "peers", "runs", "volunteer", "watch"),
    "scripts/lab/attacks": (),
    "scripts/lab/bench": ("attacks", "training"),
    "scripts/lab/simulate": ("attacks",),
    "scripts/lab/training": ("attacks",),
    "scripts/lab/utilization": ("bench",),
}
"""The rooms, and which others of its floor each may import besides itself and the foundation (docs/house.md)."""
MAX_FILES = 12
MAX_STOREYS = 8
"""The longest chain of imports among the rooms and root files of `collectives`."""

BUDGETS: dict[str, int] = {
    "collectives": 70,
    "collectives/accountability": 990,
    "collectives/agreement": 410,
    "collectives/allreduce": 1910,
    "collectives/chain": 995,
    "collectives/driver": 830,
    "collectives/evaluation": 70,
    "collectives/light": 530,
    "collectives/picture": 430,
    "collectives/robust": 400,
    "collectives/round": 1190,
    "collectives/state": 840,
    "collectives/vector": 520,
    "collectives/visit": 470,
    "dht": 260,
    "dht/directory": 840,
    "dht/hivemind": 260,
    "dht/members": 1400,
    "dht/run": 930,
    "optim": 20,
    "optim/data": 620,
    "optim/keeper": 290,
    "optim/member": 1780,
    "optim/models": 960,
    "optim/packing": 910,
    "optim/shards": 930,
    "optim/step": 630,
    "optim/train": 1080,
    "peer": 500,
    "peer/base": 480,
    "peer/bootstrap": 210,
    "peer/https": 330,
    "peer/libp2p": 1040,
    "peer/log": 510,
    "peer/memory": 460,
    "peer/nat": 990,
    "peer/node": 1100,
    "peer/process": 410,
    "peer/quota": 300,
    "peer/strangers": 220,
    "peer/wire": 540,
    "peer/yamux": 490,
    "scripts": 0,
    "scripts/checkpoints": 390,
    "scripts/cli": 290,
    "scripts/demo": 360,
    "scripts/doctor": 520,
    "scripts/lab": 190,
    "scripts/lab/attacks": 230,
    "scripts/lab/bench": 760,
    "scripts/lab/simulate": 910,
    "scripts/lab/training": 320,
    "scripts/lab/utilization": 220,
    "scripts/page": 220,
    "scripts/peers": 700,
    "scripts/runs": 890,
    "scripts/trainers": 170,
    "scripts/volunteer": 450,
    "scripts/watch": 590,
}
"""The statements of each room, and of the root files of each floor, at most: see "What a room may hold" in docs/house.md.
`PYTHONPATH=tests python tests/unit/test_house.py lower` lowers them to what the working tree has."""
RAISED = re.compile(r"^\| `([\w/]+)` \| \+(\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
"""A row of docs/house.md that raises a budget: room, statements, for whom, what was deleted for it."""

MAX_METHODS, MAX_ATTRIBUTES = 12, 15
"""The public methods and properties of a class, and the attributes that it sets on itself, at most (docs/house.md)."""
WIDE_DOORS: set[str] = {
    "collectives/accountability/conduct.py Conduct",
    "collectives/agreement/machine.py VoterMachine",
    "collectives/allreduce/check.py CheckPhase",
    "collectives/allreduce/collect.py CollectPhase",
    "collectives/allreduce/exchange.py RosterRound",
    "collectives/allreduce/outputs.py ReducePhase",
    "collectives/allreduce/roster.py RosterView",
    "collectives/allreduce/stage.py Stage",
    "collectives/driver/rounds.py Averager",
    "collectives/round/machine.py Round",
    "collectives/round/vote.py Vote",
    "collectives/visit/watcher.py RunWatcher",
    "dht/members/gossip.py Gossip",
    "dht/members/presence.py Presence",
    "dht/members/table.py MemberTable",
    "optim/member/client.py PeerClient",
    "optim/train/swarm.py Swarm",
    "peer/host.py Libp2pHost",
    "peer/memory/network.py MemoryNetwork",
    "peer/memory/peer.py MemoryTransport",
    "peer/nat/bootstraps.py Bootstraps",
    "peer/node/node.py Node",
    "peer/yamux/machine.py Machine",
    "peer/yamux/muxer.py Yamux",
    "scripts/watch/story.py PeerStory",
}
"""The classes that break this rule. The list may only get shorter."""


def imports(name: str) -> Iterator[str]:
    """Every module that a file imports, by its absolute name, wherever in the file; `from x import y` gives x.y."""
    package = ["flockstep", *Path(name).parent.parts]
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


@cache
def used(name: str) -> frozenset[str]:
    """Every module that a file imports, and its parents: `a.b.c` gives a, a.b and a.b.c."""
    return frozenset(module.rsplit(".", cut)[0] for module in imports(name) for cut in range(module.count(".") + 1))


def floor_of(name: str) -> str:
    return max((floor for floor in FLOORS if name.startswith(f"{floor}/")), key=len)


def module_of(path: str) -> str:
    return f"flockstep.{path.replace('/', '.')}"


def floors_above(name: str) -> set[str]:
    return {module_of(floor) for floor in FLOORS[FLOORS.index(floor_of(name)) + 1 :]}


def test_imports_go_down_the_floors_only() -> None:
    strays = [(name, found) for name in NAMES if (found := floors_above(name) & used(name))]
    assert strays == [("scripts/cli/main.py", {module_of("scripts/lab")})]  # Its verbs, where they are.


def box(name: str) -> str:
    """The room or root file that a file belongs to: `peer/wire`, `peer/host`."""
    floor = floor_of(name)
    return "/".join([floor, name.removesuffix(".py").removeprefix(f"{floor}/").split("/")[0]])


def boxes_imported(name: str) -> set[str]:
    """The rooms and root files of its own floor that a file imports, its own left out."""
    floor = floor_of(name)
    inside = f"{module_of(floor)}."
    places = {module.removeprefix(inside).split(".")[0] for module in used(name) if module.startswith(inside)}
    return {f"{floor}/{place}" for place in places} - {box(name)}


def boxes_allowed(name: str) -> set[str] | None:
    """The rooms and root files of its own floor that a file may import; None for a floor's face, which may import all.

    The rules for rooms and foundation keep the face itself out of them.
    """
    floor, place = box(name).rsplit("/", 1)
    foundation = {f"{floor}/{below}" for below in takewhile(lambda below: below != place, FOUNDATION[floor])}
    if box(name) == "collectives/spec":
        return foundation | {"collectives/robust"}
    if place in FOUNDATION[floor]:
        return foundation
    if box(name) in ROOMS and box(name) != "scripts/cli":
        return foundation | {f"{floor}/{room}" for room in ROOMS[box(name)]}
    return None


def test_rooms_import_what_their_row_allows() -> None:
    rules = {name: boxes_allowed(name) for name in NAMES if not name.endswith("__init__.py")}
    found = {name: boxes_imported(name) - allowed for name, allowed in rules.items() if allowed is not None}
    assert {name: imported for name, imported in found.items() if imported} == {}


def test_a_room_is_small_and_has_a_map() -> None:
    for room in ROOMS:
        files = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
        assert 2 <= len(files) <= MAX_FILES, room
        entrance = parsed(f"{room}/__init__.py")
        lines = (ast.get_docstring(entrance, clean=False) or "").splitlines()
        assert {line.split()[0] for line in lines[2:] if line.startswith("    ") and line[4] != " "} == files, room
        assert len(entrance.body) == 1 or room == "peer/wire", room


def test_every_folder_is_a_room() -> None:
    assert {str(path.parent.relative_to(ROOT)) for path in FILES} == {*ROOMS, *FLOORS}


def storeys(room: str) -> int:
    """How many rooms stand on each other from the ground of a floor up to this one."""
    return 1 + max((storeys(f"{room.rsplit('/', 1)[0]}/{below}") for below in ROOMS[room]), default=0)


def drawing() -> Iterator[str]:
    """The lines of the drawing in docs/house.md: the highest floor and room first, and what each room may import."""
    yield "```text"
    for floor in reversed(FLOORS):
        files = {path.stem for path in (ROOT / floor).glob("*.py")} - {"__init__"}
        yield floor
        if face := sorted(files.difference(FOUNDATION[floor])):
            yield from wrapped("face", face)
        rooms = [room for room in ROOMS if str(Path(room).parent) == floor and Path(room).name not in FOUNDATION[floor]]
        for room in sorted(rooms, key=lambda room: (-storeys(room), room)):
            yield from wrapped(room.rsplit("/", 1)[1], ["──►", *sorted(ROOMS[room])] if ROOMS[room] else [])
        if FOUNDATION[floor]:
            yield from wrapped("foundation", FOUNDATION[floor])
    yield from ("```", "", "| room | subject |", "|---|---|")
    for room in ROOMS:
        yield f"| `{room}` | {(ast.get_docstring(parsed(f'{room}/__init__.py')) or '').splitlines()[0].removesuffix('.')} |"


def wrapped(name: str, words: Sequence[str]) -> Iterator[str]:
    yield from textwrap.wrap(" ".join(words), 116, initial_indent=f"  {name:15}", subsequent_indent=" " * 17) or [f"  {name}"]


def redrawn(page: str) -> str:
    """The page docs/house.md with the drawing as it is now."""
    before, mark, rest = page.partition("<!-- drawn -->\n")
    return "\n".join((before + mark.rstrip(), *drawing(), "<!-- end -->")) + rest.partition("<!-- end -->")[2]


def test_the_drawing_of_the_house_is_that_of_its_rooms() -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    assert page == redrawn(page), "PYTHONPATH=tests python tests/unit/test_house.py draws it anew"


def test_the_rooms_of_collectives_have_few_storeys_and_nothing_runs_in_circles() -> None:
    arrows: dict[str, set[str]] = {}
    for name in NAMES:
        arrows.setdefault(box(name), set()).update(boxes_imported(name))

    @cache
    def height(place: str) -> int:
        return 1 + max((height(below) for below in arrows.get(place, ())), default=0)  # A circle never ends.

    heights = {place: height(place) for place in arrows if not place.endswith("/__init__")}
    assert max(found for place, found in heights.items() if place.startswith("collectives/")) <= MAX_STOREYS


def num_statements(name: str) -> int:
    """The statements of a file; docstrings and the texts under fields are none."""

    def is_text(node: ast.AST) -> bool:
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes(name))


def statements_of_rooms() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in NAMES:
        found[box(name) if box(name) in ROOMS else floor_of(name)] += num_statements(name)
    return found


def test_no_room_has_more_statements_than_its_budget() -> None:
    found, budgets = statements_of_rooms(), Counter(BUDGETS)
    for room, more, whom, gone in RAISED.findall((ROOT / "docs/house.md").read_text(encoding="utf-8")):
        assert room in BUDGETS
        assert min(len(whom), len(gone)) > 20, room
        budgets[room] += int(more)
    assert found.keys() == BUDGETS.keys()
    over = {room: (count, budgets[room]) for room, count in found.items() if count > budgets[room]}
    assert over == {}, 'delete, or say for whom in docs/house.md, "What a room may hold"'


def doors() -> dict[str, tuple[int, int]]:
    """The number of public methods and of attributes of each class, by its file and name."""
    found: dict[str, tuple[int, int]] = {}
    for name in NAMES:
        for cls in (node for node in nodes(name) if isinstance(node, ast.ClassDef)):
            methods = [it for it in cls.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)]
            set_ = {
                node.attr
                for node in ast.walk(cls)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            }
            found[f"{name} {cls.name}"] = sum(not it.name.startswith("_") for it in methods), len(set_)
    return found


def wide_doors() -> set[str]:
    return {which for which, (methods, held) in doors().items() if methods > MAX_METHODS or held > MAX_ATTRIBUTES}


def test_a_class_has_a_small_door() -> None:
    wide = wide_doors()
    assert wide - WIDE_DOORS == set(), "split it, or make private what nobody else calls"
    assert WIDE_DOORS - wide == set(), "these keep the rule now: take them off the list"


def says_pure(name: str) -> bool:
    """Whether a file, or its line in the map of its room, says "Pure."."""
    own = (ast.get_docstring(parsed(name)) or "").split("\n\n")[0]
    room, _, stem = name.removesuffix(".py").rpartition("/")
    map_ = ast.get_docstring(parsed(f"{room}/__init__.py"), clean=False) or ""
    row = re.search(rf"^    {stem}\b.*(?:\n {{5,}}.*)*", map_, re.MULTILINE)
    return re.search(r"\bPure[.:]", own + (row[0] if row else "")) is not None


def test_files_that_say_that_they_are_pure_know_no_time_no_chance_and_no_network() -> None:
    pure = {name for name in NAMES if not name.endswith("__init__.py") and says_pure(name)}
    assert pure > {"collectives/agreement/machine.py", "collectives/round/machine.py", "peer/yamux/machine.py"}
    assert [(name, found) for name in sorted(pure) if (found := IMPURE & used(name))] == []
    called = {name: {function for function, _ in calls(name)} for name in pure}
    effects = {"os.urandom", "open", "np.random.default_rng"}
    assert [(name, found) for name in sorted(pure) if (found := effects & called[name])] == []


def test_one_library_one_file() -> None:
    users = {library: [name for name in NAMES if library in used(name)] for library in ONLY_USERS}
    strays = [
        (name, library)
        for library, patterns in ONLY_USERS.items()
        for name in users[library]
        if not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    assert strays == []


def test_one_file_outside_of_peer_names_the_real_host() -> None:
    users = {name for name in NAMES if "flockstep.peer.host" in used(name)}
    others = {name for name in users if not name.startswith(("peer/", "scripts/lab/"))}
    assert others == {"dht/rendezvous.py"}


def executes(function: str, call: ast.Call) -> bool:
    """Return True if a call runs what its argument says."""
    safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
    return function in ("eval", "exec", "compile") or (function == "torch.load" and not safe)


def test_nothing_received_can_be_executed() -> None:
    executors = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert [(name, found) for name in NAMES if (found := executors & used(name))] == []
    assert [(name, call.lineno) for name in NAMES for function, call in calls(name) if executes(function, call)] == []


def test_files_say_what_they_are() -> None:
    assert [name for name in NAMES if not ast.get_docstring(parsed(name))] == []


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, **options)


def loaded_after(statement: str) -> set[str]:
    result = run_python("-c", f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_help_loads_neither_torch_nor_the_network() -> None:
    help_text = "from flockstep.scripts.cli import main\ntry: main.app(['join', '--help'])\nexcept SystemExit: pass"
    assert not {"torch", "libp2p", "trio", "numpy"} & loaded_after(help_text)


def test_the_network_process_needs_no_torch() -> None:
    modules = ["flockstep.optim.member.participant", "flockstep.optim.keeper.keeper", "flockstep.scripts.peers.keep"]
    modules += [f"flockstep.{name[:-3].replace('/', '.')}" for name in NAMES if name.split("/")[0] in FLOORS[:3]]
    assert "torch" not in loaded_after("\n".join(f"import {module}" for module in modules))


WRITERS = {
    "os.replace": {"peer/base/disk.py", "peer/log/telemetry.py"},  # The event log's becoming the old one is no write.
    "os.link": {"peer/base/disk.py"},
    "os.fsync": {"peer/base/disk.py", "peer/log/file.py", "collectives/state/checkpoint_file.py"},
    "tempfile.mkstemp": {"peer/process/shared.py"},  # The vectors that two processes share.
}


DOORS = {
    "scripts/cli/echo.py": "lines",
    "scripts/watch/console.py": "tables and live views",
    "scripts/peers/agree.py": "questions, which it makes plain",
    "optim/train/lines.py": "lines of a `Swarm`, which it makes plain",
    "peer/log/telemetry.py": "an error of the log itself",
    "peer/log/events.py": "the page of events",
    "optim/train/pin.py": "JSON, for the process that started this one",
    "scripts/doctor/torch_child.py": "the same",
}
"""The files that write to a terminal or a standard stream, and what. All others say it through the first two."""


def test_texts_reach_a_terminal_through_few_doors() -> None:
    way_out = re.compile(r"\btyper\.echo\b|(?<![\w.])(?:print|input)\(|\bstd(?:out|err)\.write\(|\bConsole\(|\(Console\)")
    found = {name for name in NAMES if not name.startswith("scripts/lab/") and way_out.search((ROOT / name).read_text())}
    assert found == set(DOORS)


def test_one_file_writes_atomically_and_the_others_use_it() -> None:
    called = {name: {function for function, _ in calls(name)} for name in NAMES}
    assert {call: {name for name in NAMES if call in called[name]} for call in WRITERS} == WRITERS


def test_what_commands_of_the_tests_are_forked_with_exists() -> None:
    ours = [name.removeprefix("flockstep.").replace(".", "/") for name in PRELOADED if name.startswith("flockstep.")]
    assert {f"{name}.py" for name in ours} <= set(NAMES)


def test_python_m_flockstep_is_the_command() -> None:
    result = run_python("-m", "flockstep", "--version")
    assert result.stdout.startswith("flockstep ")


def test_the_wheel_holds_the_package_without_its_laboratory(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    pytest.importorskip("setuptools", minversion="77", reason="building offline needs a recent setuptools at hand")
    # From a copy, since a build leaves its folder beside the sources.
    roots = ("__init__.py", "__main__.py", "setup.py", "pyproject.toml", "py.typed", "README.md", "LICENSE")
    for name in (*{floor.split("/")[0] for floor in FLOORS}, *roots):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / "source" / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    built = run_python("-m", "pip", "wheel", *options, "-w", str(tmp_path), str(tmp_path / "source"))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flockstep"}
    static = {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts/page/static").iterdir()}
    rest = {name for name in NAMES if not name.startswith(("scripts/lab/", "peer/memory/"))}
    assert not {name for name in rest if any(module_of("peer/memory") in module for module in used(name))}
    code = {"__init__.py", "__main__.py", *rest}
    assert {name.removeprefix("flockstep/") for name in names if ".dist-info/" not in name} == {*code, *static, "py.typed"}
    # Python imports from the archive itself.
    for verb in (("bench", "allreduce", "--json"), ("simulate", "--help")):
        result = run_python("-m", "flockstep", *verb, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(wheel)})
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert re.fullmatch("flockstep: the laboratory .* is not part of an installation — .*\n", result.stderr)


def rewritten(table: str, rows: Sequence[str]) -> str:
    """This file with other rows in one of its tables."""
    source = Path(__file__).read_text(encoding="utf-8")
    return re.sub(rf"(?ms)^({table}: .*?= \{{\n).*?^\}}", lambda found: "".join((found[1], *rows, "}")), source)


def lower_budgets() -> None:
    """Lower `BUDGETS` to the next ten above what the working tree has, and take off `WIDE_DOORS` what keeps the rule."""
    least = {room: -(-count // 10) * 10 for room, count in sorted(statements_of_rooms().items())}
    budgets = [f'    "{room}": {min(BUDGETS.get(room, count), count)},\n' for room, count in least.items()]
    Path(__file__).write_text(rewritten("BUDGETS", budgets), encoding="utf-8")
    wide = [f'    "{which}",\n' for which in sorted(WIDE_DOORS & wide_doors())]
    Path(__file__).write_text(rewritten("WIDE_DOORS", wide), encoding="utf-8")


if __name__ == "__main__" and sys.argv[1:] == ["lower"]:
    lower_budgets()
elif __name__ == "__main__":
    house = ROOT / "docs/house.md"
    house.write_text(redrawn(house.read_text(encoding="utf-8")), encoding="utf-8")
