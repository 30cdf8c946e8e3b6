"""The rules that a run may name: what each of them promises."""

import numpy as np
import pytest
from flockstep.collectives.robust.rule import Floats64, Weighting
from flockstep.collectives.robust.rules import RULES, rule_named
from flockstep.collectives.vector.codec import CELL, codec_named
from flockstep.dht.run.manifest import RULE_NAMES
from flockstep.peer.base.errors import UsageError


def vectors(n: int, d: int = 400) -> Floats64:
    """Contributions that agree as heterogeneous peers do: a common half, and an own one."""
    random = np.random.default_rng(0)
    return np.asarray(random.standard_normal(d) + random.standard_normal((n, d)))


def judge(name: str, x: Floats64, masses: Floats64, num_parts: int = 4) -> Weighting:
    parts = np.stack([piece @ piece.T for piece in np.array_split(x, num_parts, axis=1)])
    return rule_named(name).weights(parts.sum(axis=0), parts, masses)


def test_the_mean_weighs_by_mass_alone() -> None:
    weighting = judge("mean", vectors(3), np.array([1.0, 2.0, 5.0]))
    assert np.array_equal(weighting.weights, np.tile([0.125, 0.25, 0.625], (4, 1)))
    assert not weighting.flagged


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10])
def test_weights_add_up_to_one_and_nobody_without_a_mass_counts(name: str, n: int) -> None:
    x, masses = vectors(n), np.ones(n)
    masses[0] = float(n == 1)
    x[-1] *= np.nan if n > 2 else 1
    with np.errstate(invalid="ignore"):
        weighting = judge(name, x, masses)
    sums = weighting.weights.sum(axis=1)
    assert np.abs(sums - 1).max() < (0.1 if name == "gramguard" else 1e-12)  # It changes lengths.
    assert (weighting.weights >= 0).all()
    nobody = {0} if n == 2 else {0, n - 1} if n > 2 else set()
    assert set(weighting.flagged) == nobody
    assert not weighting.weights[:, sorted(nobody)].any()


@pytest.mark.parametrize("name", RULES)
def test_nothing_valid_gives_no_weight_and_an_output_of_zeros(name: str) -> None:
    weighting = judge(name, np.zeros((3, 1024)), np.zeros(3))
    assert not weighting.weights.any()
    parts = [codec_named("int8").encode(np.ones(CELL, np.float32))] * 3
    (chunk,) = rule_named(name).chunks(codec_named("int8"), parts, weighting, 0, 1)
    assert not chunk.any()


@pytest.mark.parametrize("name", RULES)
def test_an_owners_output_is_the_weighted_sum(name: str) -> None:
    codec, num_cells = codec_named("int4"), 130  # Not a whole number of chunks.
    encoded = [codec.encode(row) for row in vectors(5, num_cells * CELL).astype(np.float32)]
    x = np.empty((5, num_cells * CELL), np.float32)
    for row, data in zip(x, encoded, strict=True):
        codec.decode(data, row)
    weighting = judge(name, x.astype(np.float64), np.ones(5), num_parts=1)
    output = np.concatenate([chunk.copy() for chunk in rule_named(name).chunks(codec, encoded, weighting, 0, num_cells)])
    assert output.dtype == np.float32
    assert np.abs(output - weighting.weights[0] @ x.astype(np.float64)).max() < 1e-5


def test_there_is_a_rule_of_every_name_that_a_manifest_may_have_and_no_other() -> None:
    assert [rule.name for rule in RULES.values()] == list(RULES) == list(RULE_NAMES)
    with pytest.raises(UsageError, match="krum") as caught:
        rule_named("krum")
    assert caught.value.remedy == f"choose one of {', '.join(RULE_NAMES)}"
