"""The doctor's checks of versions, folders, and the needs of a run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from flockstep.dht.run.manifest import Data, Inner, Manifest
from flockstep.optim.models import machine
from flockstep.optim.models.gpt import GPT
from flockstep.optim.models.gpt_config import GPT_SIZES
from flockstep.optim.models.needs import (
    BASE_MEMORY,
    Memory,
    ModelSize,
    cannot_fit,
    disk_trouble,
    hours_of,
    memory_trouble,
    needs_of,
)
from flockstep.optim.models.registry import size_of_model
from flockstep.peer.identity import Identity
from flockstep.scripts.doctor.machine import MIN_FREE, folder_trouble, python_trouble
from flockstep.scripts.doctor.sheet import Sheet

OWNER = Identity.from_seed(bytes(32)).peer_id
MANIFEST = Manifest.from_toml('name = "x"\n[data]\nsource = "text:{stdlib}"\n', where="", owner=OWNER)
MILLION = ModelSize(1_000_000, 4_000_000)


@pytest.mark.parametrize(("version", "fits"), [("3.11.0", True), ("3.14.0rc1", True), ("3.10.14", False), ("3.9", False)])
def test_python_must_be_new_enough(version: str, fits: bool) -> None:
    trouble = python_trouble(version)
    assert (trouble is None) == fits
    assert trouble is None or "3.11" in trouble.remedy


def test_a_folder_must_be_writable_and_have_some_room(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert machine.existing(tmp_path / "a" / "b") == tmp_path
    assert folder_trouble(tmp_path / "a", tmp_path, MIN_FREE) is None
    for there, free, words in ((tmp_path, MIN_FREE - 1, "too little disk"), (tmp_path / "file", MIN_FREE, "cannot write")):
        trouble = folder_trouble(tmp_path / "a", there, free)
        assert trouble is not None
        assert trouble.cause.startswith(words)


@pytest.mark.parametrize("size", ["0.2m", "1m"])
def test_the_size_of_a_model_is_known_without_making_it(size: str) -> None:
    model = GPT(GPT_SIZES[size])
    trained, kept = (sum(tensor.numel() for tensor in tensors) for tensors in (model.parameters(), model.buffers()))
    assert size_of_model("gpt", {"size": size}) == ModelSize(trained, 4 * (trained + kept))
    assert size_of_model("hf:org/name", {}) is size_of_model("package.module:function", {}) is None


def test_a_run_needs_what_the_footguns_say_of_the_disk() -> None:
    needs = needs_of(MANIFEST, MILLION)
    # 21.8 bytes a parameter (docs/footguns.md), while a checkpoint is written beside the one before.
    assert needs.disk == 16_000_000 + 11 * 531_250
    for free, present, fits in ((needs.disk, 0, True), (1, needs.disk - 1, True), (0, needs.disk - 1, False)):
        trouble = disk_trouble(needs, free=free, present=present, folder="here")
        assert (trouble is None) == fits


@pytest.mark.parametrize(
    ("mode", "codec", "bytes_each"), [("blocking", "int4", 14.125), ("streaming", "int4", 10.825), ("blocking", "fp32", 32.0)]
)
def test_a_run_needs_memory_for_its_vectors_and_the_bytes_of_a_round(mode: str, codec: str, bytes_each: float) -> None:
    text = f'name = "x"\n[data]\nsource = "text:{{stdlib}}"\n[inner]\nsteps = 100\n[outer]\nmode = "{mode}"\n'
    manifest = Manifest.from_toml(f'{text}[codec]\ncontribution = "{codec}"\nresult = "{codec}"\n', where="", owner=OWNER)
    assert needs_of(manifest, MILLION).memory == BASE_MEMORY + bytes_each * 1_000_000
    parts = needs_of(manifest, ModelSize(10**9, 4 * 10**9)).parts
    assert parts == {"int4": 1_062_500_000, "fp32": 8_000_000_000}[codec] // (5 if mode == "streaming" else 1)


def test_the_hours_of_a_run_follow_from_its_steps_or_from_its_seconds() -> None:
    run = Manifest(owner="", name="run", data=Data("own", sequence_length=10, batch_size=8), inner=Inner(steps=90))
    assert hours_of(run, 5, 10.0) == 5 * 90 * 80 / 10.0 / 3600
    assert hours_of(replace(run, inner=Inner(seconds=600.0)), 6, 10.0) == 1.0


def test_frozen_weights_have_no_gradients_and_no_moments() -> None:
    whole, adapters = ModelSize(1_000_000, 4_000_000), ModelSize(1_000, 4_000_000)
    assert needs_of(MANIFEST, whole).training == 12_000_000
    assert needs_of(MANIFEST, adapters).training == 4_000_000 + 8_000


def test_a_device_with_a_memory_of_its_own_takes_the_training() -> None:
    needs = needs_of(MANIFEST, MILLION)
    whole = needs.memory + needs.training
    plenty = Memory(10 * whole, 10 * whole)
    assert memory_trouble(needs, Memory(2 * whole, whole), None) is None
    assert memory_trouble(needs, Memory(2 * whole, whole - 1), None) is not None
    assert not cannot_fit(needs, Memory(whole, 0), None)
    assert cannot_fit(needs, Memory(whole - 1, 0), None)
    assert memory_trouble(needs, Memory(whole, needs.memory), plenty) is None
    small = Memory(needs.training - 1, needs.training - 1)
    trouble = memory_trouble(needs, plenty, small)
    assert trouble is not None
    assert "the device has" in trouble.cause
    assert cannot_fit(needs, plenty, small)


def test_a_memory_that_nobody_tells_is_no_trouble_and_no_reason_to_refuse() -> None:
    needs, whole = needs_of(MANIFEST, MILLION), Memory(1 << 40, 1 << 40)
    assert memory_trouble(needs, None, None) is memory_trouble(needs, None, whole) is None
    assert not cannot_fit(needs, None, None)
    assert cannot_fit(needs, None, Memory(1, 1))


def test_this_computer_tells_its_memory() -> None:
    memory = machine.memory()
    assert memory is not None
    assert 0 < memory.free <= memory.total


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write files of control groups, of which this process names its own."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")

    def write(own: str, **files: str) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path.joinpath("cgroup", *name.split("__"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name.replace("_", ".", 1)).write_text(text)

    return write


MB = 10**6
STAT = "anon 1\nactive_file 1000000\ninactive_file 4000000\nshmem 7\n"


def test_each_control_group_on_the_way_up_bounds_the_memory_and_the_page_cache_is_free(groups: Callable[..., None]) -> None:
    groups("0::/a/b\n", a__b__memory_max="max", a__b__memory_high="max", a__b__memory_current="8000000")
    total = machine.memory()
    assert total is not None
    assert total.total > 10 * MB
    groups("0::/a/b\n", a__memory_max="10000000\n", a__memory_current="9000000\n", a__memory_stat=STAT)
    assert machine.memory() == Memory(10 * MB, 6 * MB)
    groups("0::/a/b\n", a__b__memory_high="7000000", a__b__memory_current="2000000")
    assert machine.memory() == Memory(7 * MB, 5 * MB)
    groups("0::/elsewhere/c\n", memory_max="5000000", memory_current="9000000")  # As a container without a namespace sees it.
    assert machine.memory() == Memory(5 * MB, 0)
    groups("broken", memory_stat="neither a number\n", memory_current="1000000")
    assert machine.memory() == Memory(5 * MB, 4 * MB)


def test_control_groups_of_version_1_count_the_cache_of_all_below(groups: Callable[..., None]) -> None:
    files = {
        "memory__job__memory_limit_in_bytes": "8000000",
        "memory__job__memory_usage_in_bytes": "8000000",
        "memory__job__memory_stat": "inactive_file 1\ntotal_inactive_file 3000000\n",
    }
    groups("5:cpu,cpuacct:/x\n4:memory:/job\n", **files)
    assert machine.memory() == Memory(8 * MB, 3 * MB)


@pytest.mark.parametrize("error", [PermissionError("closed"), KeyError(b"MemTotal:"), ValueError(), psutil.AccessDenied()])
def test_what_a_system_does_not_tell_is_unknown(
    groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> Any:
        raise error

    for name in ("virtual_memory", "cpu_times", "sensors_battery"):
        monkeypatch.setattr(psutil, name, refuse)
    assert machine.memory() is None
    assert machine.OthersLoad()() == 0.0
    assert machine.on_battery() is False
    groups("0::/\n", memory_max="9000000", memory_current="1000000")
    assert machine.memory() == Memory(9 * MB, 8 * MB)


def test_a_sheet_says_each_check_once_and_fails_what_never_came() -> None:
    lines: list[str] = []
    sheet = Sheet(lines.append, as_json=True)
    sheet.expect("a: one", "a: two", "b", "c")
    sheet.skip_rest("no need", of="a")
    sheet.passed("b", "well")
    assert sheet.healthy
    sheet.close()
    assert not sheet.healthy
    said = [json.loads(line) for line in lines]
    assert [(check["name"], check["ok"]) for check in said] == [("a: one", None), ("a: two", None), ("b", True), ("c", False)]
    assert said[-1]["remedy"]
