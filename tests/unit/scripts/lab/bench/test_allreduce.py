"""The bench: its options, its arithmetic, and small measurements with real processes."""

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import flockstep
import numpy as np
import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.bench import worker
from flockstep.scripts.lab.bench.allreduce import BASELINE_CODECS, allreduce_cases, tables
from flockstep.scripts.lab.bench.group import PACKAGE
from flockstep.scripts.lab.bench.measure import Case, measure_case, row_of
from flockstep.scripts.lab.bench.worker import FILL_BLOCK, block, compare, exact_mean, fill

BENCH = Path(__file__).parents[5] / "scripts" / "lab" / "bench"
CASE = Case("flockstep", sys.executable, "int4/int8", 4, 70_000)
THREE = replace(CASE, peers=3)
"""What is run: a peer is a process that imports for two seconds."""
FIGURES: dict[str, Any] = {
    "wall_s": 1.0,
    "cpu_s": 2.0,
    "bytes_per_peer": 3e6,
    "rel_l2": 0.5,
    "bit_identical": True,
    "exact": None,
}


def cases(**changes: Any) -> list[Case]:
    words: dict[str, Any] = {
        "peers": ["4"],
        "params": ["25M"],
        "codec": ["int8"],
        "rule": ["mean"],
        "baseline_python": "",
    }
    return allreduce_cases(**{**words, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": ["int8/int9"]}, "no codec 'int9'"),
        ({"rule": ["mean", "luck"]}, "no defence 'luck'"),
        ({"peers": ["1,4"]}, "--peers '1,4'"),
        ({"params": ["much"]}, "--params 'much'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cases(**changes)


def test_every_size_is_measured_on_all_systems_side_by_side() -> None:
    found = cases(peers=["4,8"], codec=["int8,int4"], baseline_python="hm/bin/python")
    systems = [(case.system, case.codec) for case in found]
    theirs = [("hivemind", codec) for codec in BASELINE_CODECS]
    assert systems == 2 * [("flockstep", "int8"), ("flockstep", "int4"), *theirs]
    assert [case.peers for case in found] == [4] * 5 + [8] * 5


def test_an_interpreter_without_the_baseline_is_a_row_that_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # Without site-packages: the standard library alone.
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    row = measure_case(replace(CASE, system="hivemind", python=str(bare), peers=2), 1, tmp_path / "case")
    assert (row["rounds"], "No module named" in row["reason"]) == ([], True)
    row = measure_case(replace(CASE, system="hivemind", python="/no/such/python", peers=2), 1, tmp_path / "none")
    assert "/no/such/python" in row["reason"]


def test_baselines_need_nothing_of_ours_but_numpy() -> None:
    for name in ("worker", "hivemind"):
        nodes = ast.walk(ast.parse((BENCH / f"{name}.py").read_text(encoding="utf-8")))
        ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
        assert {alias.name for node in ours if node.module is None for alias in node.names} <= {"worker"}
        assert {node.module for node in ours} <= {None, "worker", "collectives.vector.arrays"}
    arrays = BENCH.parents[2] / "collectives" / "vector" / "arrays.py"
    floats = ast.walk(ast.parse(arrays.read_text(encoding="utf-8")))
    imported = [alias.name for node in floats if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in imported} <= {"numpy"}


def test_workers_load_this_very_package() -> None:
    assert PACKAGE.resolve() == Path(flockstep.__file__).resolve().parent == Path(worker.__file__).resolve().parents[3]


def test_the_error_is_that_against_the_exact_weighted_mean() -> None:
    size = FILL_BLOCK + 1000
    mean = np.resize(exact_mean(2), size).astype(np.float32)
    right = compare(mean, 2)
    assert right["rel_l2"] < 1e-6
    assert compare(mean, 3)["rel_l2"] > 0.1
    unweighted = np.resize((block(0).astype(np.float64) + block(1)) / 2, size).astype(np.float32)
    assert compare(unweighted, 2)["rel_l2"] > 1e-3
    mean[-1] += 1
    off = compare(mean, 2)
    assert off["rel_l2"] > 1e-4
    assert off["digest"] != right["digest"]


def test_a_vector_is_its_seed_repeated() -> None:
    filled = np.empty(FILL_BLOCK + 7, np.float32)
    fill(filled, 3)
    assert np.array_equal(filled[:FILL_BLOCK], block(3))
    assert np.array_equal(filled[FILL_BLOCK:], block(3)[:7])
    assert not np.array_equal(block(3), block(4))


def test_a_row_gives_medians_and_is_identical_only_if_every_round_was() -> None:
    rounds = [FIGURES | {"wall_s": wall, "bytes_per_peer": None} for wall in (3.0, 1.0, 2.0)]
    rounds[1] |= {"bit_identical": False}
    figures = row_of(CASE, rounds)
    assert (figures["wall_s"], figures["bytes_per_peer"], figures["bit_identical"]) == (2.0, None, False)
    failed = row_of(CASE, (), failure="no luck")
    assert failed.keys() == figures.keys()
    assert (failed["reason"], failed["wall_s"], failed["bit_identical"]) == ("no luck", None, False)


def test_a_table_for_each_size_says_what_failed_and_why() -> None:
    failed = row_of(replace(CASE, system="hivemind", codec="fp16"), (), failure="no luck")
    lines = [*tables([row_of(CASE, [FIGURES]), failed, row_of(replace(CASE, params=1_000_000), [FIGURES])])]
    assert [line for line in lines if "parameters" in line] == ["4 peers × 0.07M parameters", "4 peers × 1M parameters"]
    assert any(line.startswith("flockstep int4/int8") and "1.00" in line for line in lines)
    assert any(line.startswith("hivemind fp16") and line.endswith("no luck") for line in lines)


def test_real_peers_end_with_the_bits_that_the_codecs_make_of_the_mean(tmp_path: Path) -> None:
    row = measure_case(THREE, 2, tmp_path / "case")
    assert row["reason"] == ""
    assert [(figures["bit_identical"], figures["exact"]) for figures in row["rounds"]] == [(True, True)] * 2
    assert 0.01 < row["rel_l2"] < 0.3
    json.dumps(row)


def test_an_error_in_a_worker_is_its_answer() -> None:
    answer = worker.failed(ValueError("of two\n lines"))
    assert answer == {"outcome": "failed", "reason": "ValueError: of two lines"}
