"""Notebooks and recipes for clusters: their commands are accepted by the CLI, and what they do around them works."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from flockstep.peer.identity import Identity, identity_path
from flockstep.scripts.cli.main import app
from typer.main import get_command

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
LINK = f"flockstep://{'a' * 52}?via=/ip4/192.0.2.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer_id}"
SOURCES = "https://example.org/flockstep"
USAGE_ERROR = typer.BadParameter.__mro__[1]
NOTEBOOKS = ("join_colab", "join_kaggle")


def parsed(words: Sequence[str]) -> list[str]:
    """The verb of a command line, which the CLI accepts: it is parsed and checked as always, and nothing is done."""
    arguments = list(words[words.index("flockstep") + 1 :])
    root: Any = get_command(app)
    command, verbs = root, list[str]()
    while hasattr(command, "commands") and len(arguments) > len(verbs):
        verbs.append(arguments[len(verbs)])
        command = command.commands.get(verbs[-1])
    if command is not None:
        command.callback = lambda **_: None
    root.main(arguments, standalone_mode=False)
    return verbs


def cells(name: str) -> list[str]:
    """The code cells of a notebook."""
    notebook = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shell_lines(name: str) -> Iterator[list[str]]:
    """The words of each shell command, with the notebook's variables in their places."""
    for line in "\n".join(cells(name)).splitlines():
        if line.startswith("!"):
            yield shlex.split(line[1:].format(LINK=LINK, HOME="/content/flockstep", SOURCES=SOURCES))


def test_a_parser_that_knows_no_such_option_refuses() -> None:
    assert parsed(["flockstep", "run", "info", LINK]) == ["run", "info"]
    wrongs = ["join", LINK, "--no-such"], ["no-such"], ["join"], ["run", "info"], ["join", LINK, "--threads", "many"]
    for wrong in wrongs:
        with pytest.raises(USAGE_ERROR):
            parsed(["flockstep", *wrong])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_commands_of_a_notebook_are_accepted(name: str) -> None:
    commands = list(shell_lines(name))
    fetch, locked, install, *verbs = commands
    assert [parsed(words) for words in verbs] == [
        ["run", "info"],
        ["doctor"],
        ["join"],
        ["status"],
    ]
    assert SOURCES in fetch
    assert "--require-hashes" in locked
    assert (ROOT / locked[-1].removeprefix("source/")).is_file()
    assert install[-1] == "./source"
    (join,) = (words for words in commands if "join" in words)
    assert (join[0] == "torchrun") == (name == "join_kaggle")
    assert {LINK, "--yes", "/content/flockstep"} <= set(join)


class Session:
    """A session of a notebook: what its cells have set, on a computer whose folders are these."""

    def __init__(self, name: str, kept: Path, home: Path, link: str) -> None:
        self.values: dict[str, Any] = {}
        settings, *cells_ = (
            "\n".join(line for line in cell.splitlines() if not line.startswith("!")) for cell in cells(name)
        )
        settings = settings.replace('SOURCES = ""', f"SOURCES = {SOURCES!r}")
        exec(settings.replace('LINK = ""', f"LINK = {link!r}"), self.values)
        self.values |= {"HOME": home, "KEPT": kept / "drive" / "identity.key", "INPUT": kept}
        self.values["KEPT"].parent.mkdir(parents=True, exist_ok=True)
        for cell in cells_:
            exec(cell, self.values)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_one_peer_in_all_its_sessions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted: list[str] = []
    colab = types.ModuleType("google.colab")
    colab.drive = types.SimpleNamespace(mount=mounted.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    peers = []
    for number in range(2):
        home = tmp_path / str(number)  # A new computer.
        Session(name, tmp_path / "kept", home, LINK)
        peers.append(Identity.load_or_create(identity_path(home)).peer_id)
    assert peers[0] == peers[1]
    assert mounted == (["/content/drive"] * 2 if name == "join_colab" else [])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_without_a_link_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="paste the link"):
        Session(name, tmp_path, tmp_path / "home", "")


STUB = f"""#!/bin/sh
'''exec' '{sys.executable}' "$0" "$@"
' '''
import json, os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
name = pathlib.Path(sys.argv[0]).name
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "scontrol" or os.environ.get("OVER"):
    sys.exit(0)
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(130)
"""


class Job:
    """A job of SLURM: the script, with programs in the places of ours and of SLURM's that note how they were called."""

    def __init__(self, folder: Path, **environment: str) -> None:
        (folder / "bin").mkdir(parents=True)
        for name in ("flockstep", "torchrun", "scontrol"):
            (folder / "bin" / name).write_text(STUB)
            (folder / "bin" / name).chmod(0o755)
        self._record = folder / "record"
        named = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RECORD": str(self._record), "SLURM_JOB_ID": "77"}
        named |= {"FLOCKSTEP_HOMES": str(folder / "homes"), "SLURM_ARRAY_TASK_ID": "3", **environment}
        self.process = subprocess.Popen(
            ["bash", str(CLUSTER / "slurm.sh"), LINK], env=os.environ | named, stdout=subprocess.PIPE, text=True
        )

    def ended(self, number: int = 0) -> tuple[int, list[list[str]]]:
        """Send it a signal once it trains; its exit code, and the calls."""
        if number:
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "ready\n"
            self.process.send_signal(number)
        self.process.communicate(timeout=120)
        return self.process.returncode, [json.loads(line) for line in self._record.read_text().splitlines()]


def test_a_job_of_slurm_leaves_in_order_and_is_queued_again_before_its_time_is_over(tmp_path: Path) -> None:
    code, (join, requeue) = Job(tmp_path / "usr1").ended(signal.SIGUSR1)
    assert (code, requeue) == (130, ["scontrol", "requeue", "77"])
    home = tmp_path / "usr1" / "homes" / "3"
    assert join == ["flockstep", "join", LINK, "--home", str(home), "--yes"]
    assert home.is_dir()
    code, calls = Job(tmp_path / "term").ended(signal.SIGTERM)  # SLURM queues a preempted job by itself.
    assert (code, len(calls)) == (130, 1)
    code, calls = Job(tmp_path / "over", OVER="1", SLURM_GPUS_ON_NODE="4").ended()
    assert (code, len(calls)) == (0, 1)
    assert calls[0][:5] == ["torchrun", "--standalone", "--nproc-per-node", "4", "-m"]
    assert [parsed(words) for words in (join, calls[0])] == [["join"], ["join"]]


def test_the_options_of_slurm_ask_for_one_node_a_warning_and_no_gang() -> None:
    text = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options.keys() >= {"requeue", "time", "open-mode"}
    assert (options["nodes"], options["signal"]) == ("1", "B:USR1@120")
    assert os.access(CLUSTER / "slurm.sh", os.X_OK)


def test_the_recipe_of_skypilot_is_one_node_whose_commands_are_accepted() -> None:
    recipe = pytest.importorskip("yaml").safe_load((CLUSTER / "skypilot.yaml").read_text(encoding="utf-8"))
    assert recipe.keys() == {"name", "workdir", "resources", "envs", "setup", "run"}  # No `num_nodes`.
    assert recipe["envs"] == {"LINK": ""}
    lines = [line.replace("$LINK", LINK) for line in recipe["run"].splitlines() if "flockstep" in line]
    assert [parsed(shlex.split(line)) for line in lines] == [["join"], ["join"]]
    for gpus, program in (("1", "flockstep"), ("2", "torchrun")):
        script = recipe["run"].replace("torchrun", "echo torchrun").replace("  flockstep", "  echo flockstep")
        environment = {"LINK": LINK, "SKYPILOT_NUM_GPUS_PER_NODE": gpus, "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{program} ")
        assert LINK in done.stdout


def test_the_recipe_of_kubernetes_gives_each_pod_a_volume_and_time_to_leave() -> None:
    yaml = pytest.importorskip("yaml")
    text = (CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8")
    peers, service = yaml.safe_load_all(text)
    assert (peers["kind"], service["kind"]) == ("StatefulSet", "Service")
    assert peers["spec"]["podManagementPolicy"] == "Parallel"  # Else a pod waits for the one before it.
    assert peers["spec"]["serviceName"] == service["metadata"]["name"]
    pod = peers["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert parsed(["flockstep", *(word.replace("$(LINK)", LINK) for word in container["args"])]) == ["join"]
    assert [variable["name"] for variable in container["env"]] == ["LINK"]
    dockerfile = (ROOT / "scripts" / "containers" / "peer.Dockerfile").read_text(encoding="utf-8")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"VOLUME {mounts['home']}\n" in dockerfile
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
    assert mounts["shared"] == "/dev/shm"
    claims = {claim["metadata"]["name"] for claim in peers["spec"]["volumeClaimTemplates"]}
    assert claims | {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert pod["terminationGracePeriodSeconds"] >= 10
    for labels in (peers["spec"]["template"]["metadata"]["labels"], peers["spec"]["selector"]["matchLabels"]):
        assert labels == service["spec"]["selector"]
    commands = re.findall(r"^# +(docker|kubectl|sed) ", text, re.MULTILINE)
    assert commands == ["docker", "kubectl", "sed", "kubectl"]
    assert "--target cuda" in text
    assert " AS cuda\n" in dockerfile
