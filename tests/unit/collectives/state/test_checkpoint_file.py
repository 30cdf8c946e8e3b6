"""A checkpoint on disk: readable by safetensors, atomic, never mistaken for another file."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.chain.chain import ChainPosition, position_after, start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import (
    DESCRIPTION,
    STATE,
    Draft,
    TensorAt,
    describe_checkpoint,
    load_checkpoint,
    read_description,
    read_tensors,
)
from flockstep.collectives.vector.arrays import Floats
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, RemoteError
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.certificates import RUN, grow
from support.full_disk import files_up_to

TESTS = str(Path(__file__).parents[3])
SIZE = 3000
TENSORS = (TensorAt("embed.weight", (25, 40), "float32", 0), TensorAt("head.bias", (7,), "bfloat16", 1024))


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 1024)


def state_of(seed: int = 0) -> tuple[Floats, Floats]:
    chance = np.random.default_rng(seed)
    return chance.normal(size=SIZE).astype(np.float32), chance.normal(size=SIZE).astype(np.float32)


def leaves_of(state: tuple[Floats, Floats]) -> list[bytes]:
    return merkle.leaves(state[0]) + merkle.leaves(state[1])


def pieces_of(state: tuple[Floats, Floats]) -> list[memoryview]:
    return [merkle.leaf_bytes(vector, *span) for vector in state for span in merkle.leaf_spans(SIZE)]


def certified(state: tuple[Floats, Floats]) -> ChainPosition:
    """The third round's place, with this state."""
    return position_after(grow(None, 3, mark=merkle.root(leaves_of(state)))[-1], RUN)


def write(folder: Path, state: tuple[Floats, Floats], place: ChainPosition) -> None:
    draft = Draft(folder, SIZE)
    for index, piece in reversed(list(enumerate(pieces_of(state)))):
        draft.put(index, piece)
    draft.finish(RUN, place, TENSORS, leaves_of(state))


def test_what_is_written_is_what_is_loaded_and_what_safetensors_reads(tmp_path: Path) -> None:
    state = state_of()
    place = certified(state)
    write(tmp_path / "3", state, place)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    loaded = load_checkpoint(tmp_path / "3")
    assert (loaded.run, loaded.place, loaded.tensors, loaded.size) == (RUN, place, TENSORS, SIZE)
    assert loaded.leaves == tuple(leaves_of(state))
    assert np.array_equal(loaded.read_theta(), state[0])
    with safe_open(tmp_path / "3" / STATE, framework="numpy") as file:
        assert sorted(file.keys()) == ["momentum", "theta"]
        assert np.array_equal(file.get_tensor("theta"), state[0])
        assert np.array_equal(file.get_tensor("momentum"), state[1])
    for key, blob in loaded.blobs():
        assert blob.is_sound(key)
    other = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    loaded.copy_to(other)
    assert leaves_of(other) == leaves_of(state)
    (tmp_path / "3" / STATE).write_bytes(b"")
    for read in (partial(loaded.copy_to, other), loaded.read_theta):
        with pytest.raises(LocalError, match="changed while it was read"):
            read()


def test_the_start_of_a_run_needs_no_certificate(tmp_path: Path) -> None:
    state = state_of()
    place = start_of_run(merkle.root(leaves_of(state)))
    write(tmp_path / "0", state, place)
    assert load_checkpoint(tmp_path / "0").place == place


def test_a_new_checkpoint_of_a_round_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for seed in (1, 2):
        write(tmp_path / "3", state_of(seed), certified(state_of(seed)))
    assert np.array_equal(load_checkpoint(tmp_path / "3").read_theta(), state_of(2)[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes that are killed are forked")
def test_a_kill_at_any_write_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "support.killed_writes", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 12


def test_a_draft_keeps_the_leaves_of_a_writer_that_was_killed(tmp_path: Path) -> None:
    state = state_of()
    pieces, leaves = pieces_of(state), leaves_of(state)
    killed = Draft(tmp_path / "3", SIZE)
    killed.put(1, pieces[1])
    killed.put(4, pieces[4][:100])  # Torn in the middle.
    killed.close()
    with pytest.raises(LocalError):
        load_checkpoint(tmp_path / "3")
    draft = Draft(tmp_path / "3", SIZE)
    assert [index for index, key in enumerate(leaves) if digest(draft.leaf(index)) == key] == [1]
    for index in (0, 2, 3, 4, 5):
        draft.put(index, pieces[index])
    draft.finish(RUN, certified(state), TENSORS, leaves)
    assert load_checkpoint(tmp_path / "3").leaves == tuple(leaves)


def damage(folder: Path, how: str) -> None:
    state, description = folder / STATE, folder / DESCRIPTION
    match how:
        case "no state":
            state.unlink()
        case "no description":
            description.unlink()
        case "truncated":
            os.truncate(state, state.stat().st_size - 1)
        case "longer":
            state.write_bytes(state.read_bytes() + bytes(8))
        case "empty":
            state.write_bytes(b"")
        case "another format":
            state.write_bytes(b"PK\3\4" + state.read_bytes()[4:])
        case "one bit":
            data = bytearray(state.read_bytes())
            data[-1000] ^= 1
            state.write_bytes(data)
        case "another round":
            description.write_bytes(description.read_bytes().replace(b'"round": 3', b'"round": 4'))
        case "another root":
            raw = json.loads(description.read_text())
            description.write_text(json.dumps(raw | {"root": "00" * 32}))
        case "beyond":
            raw = json.loads(description.read_text())
            raw["tensors"][0]["shape"] = [SIZE + 1]
            description.write_text(json.dumps(raw))


def test_a_checkpoint_of_another_protocol_number_is_one_line_and_stays(tmp_path: Path) -> None:
    state = state_of()
    write(tmp_path / "3", state, certified(state))
    description = tmp_path / "3" / DESCRIPTION
    raw = json.loads(description.read_text())
    description.write_text(json.dumps(raw | {"protocol": raw["protocol"] + 1}))
    before = description.read_bytes()
    with pytest.raises(LocalError, match=r"^\S+: a checkpoint of protocol \d+: flockstep .* speaks protocol \d+$") as caught:
        load_checkpoint(tmp_path / "3")
    assert "flockstep export" in caught.value.remedy
    assert description.read_bytes() == before
    description.write_text(json.dumps({key: value for key, value in raw.items() if key != "protocol"}))
    with pytest.raises(LocalError, match="is not a whole checkpoint"):
        load_checkpoint(tmp_path / "3")


HOWS = ["no state", "no description", "truncated", "longer", "empty", "another format", "one bit", "another round"]


@pytest.mark.parametrize("how", [*HOWS, "another root", "beyond"])
def test_what_is_damaged_is_not_loaded(tmp_path: Path, how: str) -> None:
    state = state_of()
    write(tmp_path / "3", state, certified(state))
    damage(tmp_path / "3", how)
    with pytest.raises(LocalError, match="is not a whole checkpoint") as caught:
        load_checkpoint(tmp_path / "3")
    assert caught.value.remedy


def test_a_full_disk_is_an_error_and_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    state = state_of()
    for limit in (0, 100, 4096 + 200, SIZE * 8):
        with files_up_to(limit), pytest.raises(LocalError, match="too large"):
            write(tmp_path / "3", state, certified(state))
        assert not (tmp_path / "3").exists()


VALID = describe_checkpoint(RUN, position_after(grow(None, 1)[0], RUN), TENSORS)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_description(data: bytes) -> None:
    with pytest.raises(RemoteError):
        read_description(data)


@given(st.integers(0, len(VALID) - 1), st.integers(1, 255))
def test_a_damaged_description_is_refused_or_says_the_same_of_the_state(position: int, change: int) -> None:
    data = bytearray(VALID)
    data[position] ^= change
    try:
        _, place, _ = read_description(bytes(data))
    except RemoteError:
        return
    assert place == read_description(VALID)[1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(json.loads(VALID))), json_values)
def test_a_field_of_another_kind_is_refused(field: str, value: Any) -> None:
    raw = json.loads(VALID)
    if field in ("run", "tensors") and type(value) is type(raw[field]):
        return
    with pytest.raises(RemoteError):
        read_description(json.dumps(raw | {field: value}).encode())


@given(st.lists(json_values, max_size=3))
def test_tensors_are_what_they_must_be_or_refused(raw: list[Any]) -> None:
    try:
        tensors = read_tensors(raw)
    except RemoteError:
        return
    assert tensors == ()


def test_a_description_that_would_fill_the_memory_or_the_stack_is_refused() -> None:
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b" " * (17 << 20), b"9" * 10_000):
        with pytest.raises(RemoteError):
            read_description(data)
