"""The files of a service, as each system reads them, and the verbs that write and remove them."""

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.scripts.cli.main import app
from flockstep.scripts.volunteer.service import install, peer_command, remove, service_of
from flockstep.scripts.volunteer.units import CONFINED, Job, launchd_service, systemd_service, windows_service
from support.sources import ROOT
from typer.testing import CliRunner

LINK = "flockstep://" + "a" * 52 + "?via=/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ODD = ("/usr/bin/python3", "-m", "flockstep", "join", LINK + "&at=1", "--data", 'text:/a b/"$HOME"/100%\\x<&>.txt')
JOB = Job("flockstep", ODD, Path("/home/anna/two words"))


def systemd_words(line: str) -> list[str]:
    """A command line as systemd.service(5) reads it: quotes and backslashes as a shell, then %% and $$."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def test_the_unit_of_systemd_starts_what_was_asked_for_word_by_word(tmp_path: Path) -> None:
    service = systemd_service(JOB, tmp_path)
    lines = service.data.decode().splitlines()
    (command,) = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
    assert systemd_words(command) == list(ODD)
    assert "WorkingDirectory=/home/anna/two words" in lines
    assert "RestartPreventExitStatus=2" in lines
    assert service.path == tmp_path / ".config/systemd/user/flockstep.service"
    with pytest.raises(UsageError, match="a service cannot have"):
        systemd_service(Job("flockstep", ("a\nExecStartPost=b",), Path("/")), tmp_path)


@pytest.mark.parametrize("odd", ["/a\nExecStartPost=b", "/a\x1b[2J", "/a\udcff", "/a\ufffe"])
def test_what_no_file_of_a_service_can_hold_is_refused_for_all_systems(odd: str) -> None:
    with pytest.raises(UsageError, match="cannot start in"):
        Job("flockstep", ("python",), Path(odd))
    with pytest.raises(UsageError, match="among its options"):
        Job("flockstep", ("python", odd), Path("/"))


@pytest.mark.skipif(os.name == "nt", reason="a path there ends in no backslash that is a letter")
@pytest.mark.parametrize("odd", ["/a\\", "/a "])
def test_a_folder_that_joins_two_lines_of_a_unit_is_refused(odd: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start in"):
        systemd_service(Job("flockstep", ("python",), Path(odd)), tmp_path)


def test_a_service_runs_no_file_of_the_folder_that_it_starts_in(tmp_path: Path) -> None:
    (tmp_path / "flockstep.py").write_text("print('not mine')\n")
    command = peer_command([LINK])
    program = command[: command.index("join")]
    done = subprocess.run([*program, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "not mine" not in done.stdout


def bootstrap_unit() -> str:
    """The unit of a bootstrap in docs/deploy.md."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    return page[page.index("[Unit]\nDescription=flockstep bootstrap") :].partition("```")[0]


def settings_of(unit: str) -> list[tuple[str, str]]:
    return [(name, value) for name, is_set, value in (line.partition("=") for line in unit.splitlines()) if is_set]


def test_a_bootstrap_is_confined_as_a_volunteer_is_and_both_are_limited(tmp_path: Path) -> None:
    units = [bootstrap_unit(), systemd_service(JOB, tmp_path).data.decode()]
    for unit in units:
        assert CONFINED in unit
        assert {"MemoryMax", "TasksMax", "ProtectSystem"} <= dict(settings_of(unit)).keys()
        assert [line for line in unit.splitlines() if line and "=" not in line] == ["[Unit]", "[Service]", "[Install]"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_the_exposure_of_both_units_is_what_the_documents_say(tmp_path: Path) -> None:
    units = {"bootstrap": (bootstrap_unit(), 2.5), "peer": (systemd_service(JOB, tmp_path).data.decode(), 4.0)}
    for name, (unit, most) in units.items():
        path = tmp_path / f"{name}.service"
        path.write_text(unit)
        analyze = ["systemd-analyze", "security", "--no-pager", "--offline=true", str(path)]
        done = subprocess.run(analyze, capture_output=True, text=True, check=False)
        assert float(done.stdout.rpartition("service: ")[2].split()[0]) <= most


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    service = systemd_service(Job("flockstep", (sys.executable, "-m", "flockstep"), tmp_path), tmp_path)
    path = tmp_path / "flockstep.service"
    path.write_bytes(service.data)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_agent_of_launchd_starts_what_was_asked_for(tmp_path: Path) -> None:
    service = launchd_service(JOB, tmp_path, 501)
    agent = plistlib.loads(service.data)
    assert agent["ProgramArguments"] == list(ODD)
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["WorkingDirectory"] == str(JOB.folder)
    assert service.start[0] == ("launchctl", "bootstrap", "gui/501", str(service.path))


def test_the_task_of_windows_starts_what_was_asked_for_with_no_more_rights(tmp_path: Path) -> None:
    service = windows_service(JOB, tmp_path)
    space = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
    task = ET.fromstring(service.data)
    texts = {node.tag.removeprefix(space): node.text for node in task.iter()}
    assert texts["Command"] == ODD[0]
    assert texts["Arguments"] == subprocess.list2cmdline(ODD[1:])
    assert texts["RunLevel"] == "LeastPrivilege"
    assert service.data[:2] in (b"\xff\xfe", b"\xfe\xff")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A computer with a systemctl that writes down its arguments; returns where."""
    calls, programs = tmp_path / "calls", tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho "is running"\n')
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return calls



@pytest.mark.skipif(os.name == "nt", reason="a shell script stands for the manager")
def test_a_service_is_written_whole_once_and_removed(manager: Path, tmp_path: Path) -> None:
    service, said = service_of("flockstep", peer_command([LINK, "--hours", "22-7"]), "linux"), list[str]()
    install(service, said.append, as_root=True)
    assert service.path.read_bytes() == service.data
    assert b'"--hours" "22-7" "--yes"' in service.data
    assert service.data.decode() in "\n".join(said) + "\n"
    before = service.path.stat().st_mtime_ns
    install(service, said.append, as_root=True)
    assert service.path.stat().st_mtime_ns == before
    install(service_of("flockstep", peer_command([LINK]), "linux"), said.append, as_root=True)
    assert b"22-7" not in service.path.read_bytes()
    assert "journalctl --user -u flockstep.service" in said[-1]
    remove(service, said.append)
    assert not service.path.exists()
    orders = manager.read_text().splitlines()
    assert orders[:3] == ["--user daemon-reload", "--user enable flockstep.service", "--user restart flockstep.service"]
    assert orders[-2:] == ["--user disable --now flockstep.service", "--user daemon-reload"]
    with pytest.raises(LocalError, match="there is no service") as raised:
        remove(service, said.append)
    assert raised.value.remedy


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands for the manager")
def test_a_manager_that_cannot_be_reached_leaves_no_file(manager: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    service = service_of("flockstep", peer_command([LINK]), "linux")
    with pytest.raises(LocalError, match="Failed to connect to bus"):
        install(service, lambda line: None, as_root=True)
    assert not service.path.exists()
    service.path.write_bytes(b"an earlier one, which may run")
    with pytest.raises(LocalError):
        install(service, lambda line: None, as_root=True)
    assert service.path.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="this test is not run by root")
def test_root_must_say_so(manager: Path) -> None:
    service = service_of("flockstep", peer_command([LINK]), "linux")
    with pytest.raises(UsageError, match="you are root") as raised:
        install(service, lambda line: None, as_root=False)
    assert "--as-root" in raised.value.remedy
    assert not service.path.exists()


def test_without_systemd_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    service = service_of("flockstep", peer_command([LINK]), "linux")
    with pytest.raises(LocalError, match="no systemctl") as raised:
        install(service, lambda line: None, as_root=True)
    assert "--print" in raised.value.remedy
    assert not service.path.exists()


def test_print_writes_the_file_to_stdout_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    printed = CliRunner().invoke(app, ["service", "install", LINK, "--max-up", "10", "--print"])
    assert printed.exit_code == 0
    assert '"--max-up" "10" "--yes"' in printed.stdout or sys.platform != "linux"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([LINK, "--hours", "7-25"], "--hours '7-25'"),
        ([LINK, "--max-up", "0.1"], "--max-up 0.1"),
        (["flockstep://x"], "not a whole join link"),
        ([LINK, "--name", "../x"], "names no service"),
    ],
)
def test_options_that_join_would_refuse_are_refused_at_once(arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, ["service", "install", *arguments, "--print"])
    assert isinstance(refused.exception, UsageError)
    assert message in str(refused.exception)


def test_an_option_that_join_does_not_know_is_refused_at_once() -> None:
    refused = CliRunner().invoke(app, ["service", "install", LINK, "--huors", "22-7", "--print"])
    assert refused.exit_code == 2
    assert "--huors" in refused.output
