"""The container files and their locks: a linter finds nothing, and the locks name the versions that the tests ran with."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "scripts" / "containers"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def versions(path: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
@pytest.mark.parametrize("path", sorted(CONTAINERS.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_a_linter_finds_nothing_in_a_container_file(path: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("name", "extras"), [("peer.lock", ["hf", "s3", "gpu"]), ("cpu.lock", ["hf", "s3"]), ("bootstrap.lock", [])]
)
def test_a_lock_names_every_dependency_in_its_tested_version_with_hashes(name: str, extras: list[str]) -> None:
    locked, tested = versions(CONTAINERS / name), versions(ROOT / "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = project["dependencies"] + [each for extra in extras for each in project["optional-dependencies"][extra]]
    needed = {re.split(r"[=><]", each)[0].replace("_", "-") for each in asked}
    assert needed - locked.keys() == ({"torch"} if name != "peer.lock" else set()), "start scripts/containers/lock"
    assert {package: locked[package] for package in locked.keys() & tested.keys()} == {
        package: tested[package] for package in locked.keys() & tested.keys()
    }
    text = (CONTAINERS / name).read_text(encoding="utf-8")
    assert all("--hash=sha256:" in entry for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:])


def test_the_container_of_a_peer_has_the_torch_that_was_tested() -> None:
    torch = versions(ROOT / "constraints.txt")["torch"]
    assert f"torch=={torch}\n" in (CONTAINERS / "peer.Dockerfile").read_text(encoding="utf-8")
