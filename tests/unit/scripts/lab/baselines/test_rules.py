"""All rules, those of a run and the baselines, against direct computation, and against ByzFL if installed."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flockstep.collectives.robust import rules
from flockstep.collectives.robust.rule import Weighting
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.run.manifest import RULE_NAMES
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.baselines.gram import CLIPPING_STEPS
from flockstep.scripts.lab.baselines.median import Median
from flockstep.scripts.lab.baselines.rules import RULES, rule_named
from flockstep.scripts.lab.baselines.trimmed import Mixed, mixed

Floats = npt.NDArray[np.float64]


def vectors(n: int = 10, d: int = 400, seed: int = 0) -> Floats:
    """Contributions that agree as heterogeneous peers do: a common half, and an own one."""
    random = np.random.default_rng(seed)
    return random.standard_normal(d) + random.standard_normal((n, d))


def judge(name: str, x: Floats, masses: Floats | None = None, num_parts: int = 4) -> Weighting:
    parts = np.stack([piece @ piece.T for piece in np.array_split(x, num_parts, axis=1)])
    return rule_named(name).weights(parts.sum(axis=0), parts, np.ones(len(x)) if masses is None else masses)


def result(name: str, x: Floats) -> Floats:
    """What a rule makes of vectors, in float64: every part has the same weights."""
    weighting = judge(name, x)
    rule = rule_named(name)
    if isinstance(rule, Median):
        return rule.combine(mixed(x, weighting.mixing) if isinstance(weighting, Mixed) else x)
    assert (weighting.weights == weighting.weights[0]).all()
    return np.asarray(weighting.weights[0] @ x)


def nearest(x: Floats, count: int) -> npt.NDArray[np.int64]:
    return np.argsort(((x[:, None] - x[None]) ** 2).sum(axis=2), axis=1, kind="stable")[:, :count]


def direct_krum_scores(x: Floats, f: int) -> Floats:
    squares = np.sort(((x[:, None] - x[None]) ** 2).sum(axis=2), axis=1)
    return np.asarray(squares[:, 1 : len(x) - f].sum(axis=1))


def direct(name: str, x: Floats) -> Floats:
    """The rules as their papers write them, on the vectors themselves."""
    n, f = len(x), (len(x) - 1) // 2
    if name == "mean":
        return np.asarray(x.mean(axis=0))
    if name == "median":
        return np.asarray(np.sort(x, axis=0)[f : n - f].mean(axis=0))
    if name == "nnm_trimmed_mean":
        neighbours = np.stack([x[row].mean(axis=0) for row in nearest(x, n - f)])
        return np.asarray(np.sort(neighbours, axis=0)[f : n - f].mean(axis=0))
    if name in ("krum", "multikrum"):
        chosen = np.argsort(direct_krum_scores(x, f), kind="stable")[: 1 if name == "krum" else n - f]
        return np.asarray(x[chosen].mean(axis=0))
    if name == "flag":
        scales = 1 / np.linalg.norm(x, axis=1)
        for _ in range(4):
            basis = np.linalg.svd((x * scales[:, None]).T, full_matrices=False)[0][:, : n // 2 + 1]
            outside = np.maximum(1 - np.linalg.norm(x @ basis, axis=1) ** 2 / np.linalg.norm(x, axis=1) ** 2, 1e-12)
            scales = 1 / (np.linalg.norm(x, axis=1) * outside**0.25)
        return np.asarray(basis @ (basis.T @ x.mean(axis=0)))
    centre = x.mean(axis=0)
    for _ in range(60):
        shares = 1 / np.linalg.norm(x - centre, axis=1)
        centre = shares @ x / shares.sum()
    if name == "geometric_median":
        return np.asarray(centre)
    radius = np.median(np.linalg.norm(x - centre, axis=1))
    for _ in range(CLIPPING_STEPS):
        centre = centre + np.mean([(row - centre) * min(1, radius / np.linalg.norm(row - centre)) for row in x], axis=0)
    return np.asarray(centre)


@pytest.mark.parametrize("n", [4, 9, 10])
@pytest.mark.parametrize("name", [name for name in RULES if name != "gramguard"])
def test_weights_from_inner_products_give_what_the_vectors_give(name: str, n: int) -> None:
    x = vectors(n)
    x[-1] *= -3
    assert np.abs(result(name, x) - direct(name, x)).max() < 1e-10


def byzfl_rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ByzFL's aggregation rules without the rest of it, which wants a torchvision that fits torch."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("an independent reference, not installed: scripts/test-references runs this")
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "byzfl", package)
    return importlib.import_module("byzfl.aggregators")


def test_byzfl_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    byzfl = byzfl_rules(monkeypatch)
    x = vectors(9)
    x[-1] *= -3
    references = {
        "mean": byzfl.Average(),
        "median": byzfl.Median(),
        "krum": byzfl.Krum(4),
        "multikrum": byzfl.MultiKrum(4),
        "geometric_median": byzfl.GeometricMedian(nu=1e-9, T=200),
        "nnm_trimmed_mean": lambda rows: byzfl.TrMean(4)(byzfl.NNM(4)(rows)),
    }
    for name, reference in references.items():
        assert np.abs(result(name, x) - reference(x)).max() < 1e-10, name
    centre = result("geometric_median", x)
    clipping = byzfl.CenteredClipping(L=CLIPPING_STEPS, tau=float(np.median(np.linalg.norm(x - centre, axis=1))))
    clipping.m = centre
    assert np.abs(result("centered_clip", x) - clipping(x)).max() < 1e-10


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10])
def test_weights_add_up_to_one_and_nobody_without_a_mass_counts(name: str, n: int) -> None:
    x, masses = vectors(n), np.ones(n)
    masses[0] = float(n == 1)
    x[-1] *= np.nan if n > 2 else 1
    with np.errstate(invalid="ignore"):
        weighting = judge(name, x, masses)
    assert np.isfinite(weighting.weights).all()
    if name != "flag":
        sums = weighting.weights.sum(axis=1)
        assert np.abs(sums - 1).max() < (0.1 if name == "gramguard" else 1e-12)  # It changes lengths.
        assert (weighting.weights >= 0).all()
    if n > 1:
        assert (weighting.weights[:, 0] == 0).all()
        assert 0 in weighting.flagged
    if n > 2:
        assert (weighting.weights[:, -1] == 0).all()
        assert n - 1 in weighting.flagged


@pytest.mark.parametrize("name", RULES)
def test_nothing_valid_gives_no_weight_and_an_output_of_zeros(name: str) -> None:
    weighting = judge(name, np.zeros((3, 1024)), np.zeros(3))
    assert not weighting.weights.any()
    codec = codec_named("int8")
    parts = [codec.encode(np.ones(CELL, np.float32))] * 3
    (chunk,) = rule_named(name).chunks(codec, parts, weighting, 0, 1)
    assert not chunk.any()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("codec_name", ["int4", "int8"])
def test_an_owners_output_is_the_rules_result(name: str, codec_name: str) -> None:
    codec, rule = codec_named(codec_name), rule_named(name)
    num_cells = 130  # Not a whole number of anybody's chunks.
    x = vectors(5, num_cells * CELL).astype(np.float32)
    encoded = [codec.encode(row) for row in x]
    for row, data in zip(x, encoded, strict=True):
        codec.decode(data, row)
    wide = x.astype(np.float64)
    weighting = judge(name, wide, num_parts=1)
    output = np.concatenate([chunk.copy() for chunk in rule.chunks(codec, encoded, weighting, 0, num_cells)])
    expected = weighting.weights[0] @ wide if not isinstance(rule, Median) else result(name, wide)
    assert output.dtype == np.float32
    assert np.abs(output - expected).max() < 1e-5


def test_a_median_is_that_of_each_element() -> None:
    for n in (1, 2, 5, 6):
        x = vectors(n)
        assert np.abs(Median().combine(x) - np.median(x, axis=0)).max() < 1e-15


def test_an_unknown_rule_says_which_there_are() -> None:
    with pytest.raises(UsageError, match="medain") as caught:
        rule_named("medain")
    assert caught.value.remedy == f"choose one of {', '.join(RULES)}"
    with pytest.raises(UsageError, match="flag") as caught:
        rules.rule_named("flag")
    assert caught.value.remedy == f"choose one of {', '.join(RULE_NAMES)}"


def test_there_is_a_rule_of_every_name_that_a_manifest_may_have_and_a_baseline_has_none_of_them() -> None:
    assert [(name, rules.rule_named(name).name) for name in RULE_NAMES] == [(name, name) for name in rules.RULES]
    assert {name: rule for name, rule in RULES.items() if name in RULE_NAMES} == rules.RULES
    assert all(rule.name == name for name, rule in RULES.items())
