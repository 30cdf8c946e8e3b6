"""gramguard: honest peers weigh alike, attackers less, with the same bits on every peer."""

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from flockstep.collectives.robust.gramguard import GramGuard
from flockstep.collectives.robust.rule import Weighting

Floats = npt.NDArray[np.float64]
RULE = GramGuard()
N, LIARS, D, PARTS = 10, 4, 4000, 5
HONEST = slice(0, N - LIARS)


def contributions(round_number: int = 0, n: int = N) -> Floats:
    """What honest peers send: a common direction, a lasting bias of one's own domain, and what is new in each round."""
    lasting = np.random.default_rng(1).standard_normal((n + 1, D))
    fresh = np.random.default_rng(100 + round_number).standard_normal((n + 1, D))
    return np.asarray((lasting[-1] + 0.5 * fresh[-1]) + 0.6 * lasting[:-1] + fresh[:-1])


def grams(x: Floats) -> tuple[Floats, Floats]:
    parts = np.stack([piece @ piece.T for piece in np.array_split(x, PARTS, axis=1)])
    return parts.sum(axis=0), parts


def judge(x: Floats, masses: Floats | None = None) -> Weighting:
    return RULE.weights(*grams(x), np.ones(len(x)) if masses is None else masses)


def share_of_liars(weighting: Weighting) -> float:
    return float(weighting.weights[:, N - LIARS :].sum(axis=1).max())


def test_the_honest_count_nearly_alike() -> None:
    for round_number in range(8):
        weighting = judge(contributions(round_number))
        assert not weighting.flagged
        assert np.abs(weighting.weights * N - 1).max() < 0.1


def test_two_of_one_domain_are_no_colluders_and_who_is_far_away_counts_like_the_others() -> None:
    x = contributions()
    domain = np.random.default_rng(8).standard_normal(D)
    x[:2] += 1.2 * domain  # The deviations of these two have a cosine of 0.5.
    x[2] += 1.2 * np.random.default_rng(9).standard_normal(D)
    weighting = judge(x)
    assert not weighting.flagged
    assert weighting.weights[:, :3].min() * N > 0.7


ATTACKS: dict[str, Callable[[Floats], Floats]] = {
    "sign flip": lambda x: -x,
    "ten times": lambda x: -10 * x,
    "huge": lambda x: -1e9 * x,
    "noise": lambda x: np.random.default_rng(5).standard_normal(x.shape) * 1.5,
    "inner product": lambda x: np.broadcast_to(-0.1 * x.mean(axis=0), x.shape),
    "zero": lambda x: np.zeros_like(x),
    "nan": lambda x: np.full_like(x, np.nan),
    "inf": lambda x: np.full_like(x, np.inf),
    "copies off the mean": lambda x: np.broadcast_to(x.mean(axis=0) - 1.5 * x.std(axis=0), x.shape),
    "copies of one": lambda x: np.broadcast_to(x[0], x.shape),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_liars_lose_their_weight_in_the_first_round(attack: str) -> None:
    x = contributions()
    x[N - LIARS :] = ATTACKS[attack](x[N - LIARS :])
    with np.errstate(all="ignore"):
        weighting = judge(x)
    assert np.isfinite(weighting.weights).all()
    assert 0.97 < along_the_honest_mean(np.nan_to_num(x, posinf=0), weighting) < 1.02
    assert share_of_liars(weighting) < 0.1
    assert not set(weighting.flagged) & set(range(N - LIARS))


def test_collusion_in_one_part_weighs_down_everywhere_and_is_vetoed_there() -> None:
    x = contributions()
    x[N - LIARS :, : D // PARTS] = -3 * x[HONEST, : D // PARTS].mean(axis=0)
    weighting = judge(x)
    assert weighting.weights[0, N - LIARS :].sum() < 0.1
    assert weighting.weights[1:, N - LIARS :].min() > 0
    assert weighting.weights[1:, N - LIARS :].sum(axis=1).max() < 0.1


def test_a_veto_holds_for_its_part_only() -> None:
    x = contributions()
    x[-1, : D // PARTS] *= -1
    weighting = judge(x)
    assert weighting.weights[0, -1] == 0
    assert weighting.weights[1:, -1].min() > 0.05
    assert "in part 0" in weighting.flagged[N - 1]


@pytest.mark.parametrize("leaning", [0.5, 0.8, 1.2])
def test_who_looks_a_little_like_liars_is_neither_taken_along_nor_left_alone(leaning: float) -> None:
    # Four lies pull the centre, from where all honest peers look alike but the one who stands between.
    lie = np.random.default_rng(9).standard_normal(D)
    for far in (False, True):
        x = contributions()
        mean, away = x[HONEST].mean(axis=0), x[HONEST].std(axis=0)
        x[N - LIARS :] = x[N - LIARS :] + 2 * lie if far else mean - away
        x[0] += leaning * (lie if far else -away)
        weights = judge(x).weights.mean(axis=0) * (N - LIARS)
        assert weights[N - LIARS :].sum() < 0.1
        assert 0.7 < weights[HONEST].min() <= weights[HONEST].max() < 1.2


def along_the_honest_mean(x: Floats, weighting: Weighting) -> float:
    pieces = np.array_split(x, PARTS, axis=1)
    output = np.concatenate([row @ piece for row, piece in zip(weighting.weights, pieces, strict=True)])
    mean = x[HONEST].mean(axis=0)
    return float(output @ mean / (mean @ mean))


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_pull_back_on_coordinates_of_their_own_do_not_shorten_the_output(size: int) -> None:
    x = contributions()
    mean, groups = x[HONEST].mean(axis=0), LIARS // size
    for index in range(LIARS):
        x[N - LIARS + index, index // size :: groups] -= groups / 2 * mean[index // size :: groups]
    assert along_the_honest_mean(x, judge(x)) > 0.88  # Their mean with the honest is at 0.74.


def test_the_longest_along_the_centre_do_not_lengthen_the_others() -> None:
    x = contributions()
    x += 2 * np.random.default_rng(6).standard_normal(x.shape)  # Honest contributions have a cosine of 0.4.
    noise = np.random.default_rng(5).standard_normal((LIARS, D))
    x[N - LIARS :] = 2 * x[HONEST].mean(axis=0) + 0.5 * noise
    assert judge(x).weights.sum(axis=1).max() < 1.12


def test_copies_of_one_do_not_make_the_centre_that_others_are_dropped_for() -> None:
    x = contributions()
    x += 2 * np.random.default_rng(6).standard_normal(x.shape)
    x[N - LIARS :] = x[0]
    weighting = judge(x)
    assert not weighting.flagged
    assert weighting.weights[:, 1 : N - LIARS].min() > 0.15


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_copies_count_no_more_than_one(copies: int) -> None:
    x = contributions()
    x[:copies] = x[0]
    weighting = judge(x)
    assert not weighting.flagged
    assert weighting.weights[:, :copies].sum(axis=1).max() <= weighting.weights[:, copies:].max()


def test_nobody_is_longer_in_a_part_than_most_of_the_honest() -> None:
    x = contributions()
    x[-1, : D // PARTS] *= 50
    reach = judge(x).weights[0] * np.linalg.norm(x[:, : D // PARTS], axis=1)
    assert reach[-1] < 1.3 * np.median(reach)


def test_never_more_than_a_minority_is_dropped() -> None:
    random = np.random.default_rng(0)
    for n in (1, 2, 3, 4, 5, 8):
        for _ in range(4):
            x = random.standard_normal((n, 40)) * np.exp(random.standard_normal((n, 1)))
            weighting = judge(x)
            dropped = sum("part" not in reason for reason in weighting.flagged.values())
            assert dropped <= (n - 1) // 2
            assert weighting.weights.min() >= 0
            assert weighting.weights.sum(axis=1).min() > 0


def test_a_part_without_elements_has_weights_too() -> None:
    x = contributions()
    _, parts = grams(x)
    weighting = RULE.weights(x @ x.T, np.concatenate([parts, np.zeros((1, N, N))]), np.ones(N))
    assert not weighting.flagged
    assert 0.97 < weighting.weights[-1].sum() < 1.02


def test_what_is_short_has_no_weight_shifts_no_other_and_is_not_flagged() -> None:
    x = contributions(n=N + 1)
    x[-1] *= 0.05
    weighting = judge(x)
    assert not weighting.flagged
    assert list(weighting.short) == [N]
    assert 0.04 < weighting.short[N] < 0.06
    assert not weighting.weights[:, N].any()
    assert np.array_equal(weighting.weights[:, :N], judge(x[:N]).weights)


SYBILS = 20
LIGHT = np.asarray([0.8 / N] * N + [0.2 / SYBILS] * SYBILS)
"""The masses of ten honest peers and of 20 young ones, which have 20 % together, as `trust.weigh` caps them."""


def lights(x: Floats) -> dict[str, Floats]:
    random = np.random.default_rng(4)
    mean, lie = x.mean(axis=0), random.standard_normal(D)
    own = mean + random.standard_normal((SYBILS, D))
    pairs = np.repeat(random.standard_normal((SYBILS // 2, D)), 2, axis=0)
    return {
        "short": 0.02 * own,
        "long": 100 * own,
        "turned": -own,
        "half turned": mean * np.where(np.arange(D) % 2, 1.0, -1.0) + random.standard_normal((SYBILS, D)),
        "one direction": own + 2 * lie,
        "pairs": own + 2 * pairs,
        "alike": np.broadcast_to(mean, own.shape),
        "a little like one": own + 0.2 * (x[0] - mean),
        "noise": 3 * random.standard_normal((SYBILS, D)),
    }


@pytest.mark.parametrize("sybils", lights(contributions(n=N)))
def test_light_sybils_shift_no_bound_although_they_are_two_thirds_of_all_heads(sybils: str) -> None:
    x = contributions()
    both = np.concatenate([x, lights(x)[sybils]])
    weighting = judge(both, LIGHT)
    honest = weighting.weights[:, :N]
    assert not set(weighting.flagged) & set(range(N))
    # Those that look like one honest peer take from it what two or three of its mass would, and not all.
    assert honest.min() > (0.5 if sybils == "a little like one" else 0.7) * honest.max()
    assert weighting.weights[:, N:].sum(axis=1).max() < 0.25
    reach = honest * np.linalg.norm(x, axis=1)
    assert reach.sum(axis=1).min() > 0.7 * np.linalg.norm(x, axis=1).mean()


def test_all_light_ones_can_be_dropped_and_half_of_the_mass_never() -> None:
    x = contributions()
    assert set(judge(np.concatenate([x, lights(x)["turned"]]), LIGHT).flagged) == set(range(N, N + SYBILS))
    heavy = np.ones(N)
    heavy[0] = N  # More than all others together: who is to say that they are right?
    x[0] *= -1
    assert 0 not in judge(x, heavy).flagged


@pytest.mark.parametrize("mass", [1e-9, 1e-160, 1e-310])
def test_a_mass_of_next_to_nothing_changes_nothing(mass: float) -> None:
    x = contributions(n=N + 1)
    weights = judge(x, np.asarray([1.0] * N + [mass])).weights
    assert np.abs(weights[:, :N] - judge(x[:N]).weights).max() < 1e-6
    assert weights[:, N:].max() < 1e-6


def test_the_order_of_the_roster_changes_no_weight() -> None:
    x = contributions()
    x[N - LIARS :] = -x[N - LIARS :]
    order = np.random.default_rng(3).permutation(N)
    assert np.abs(judge(x[order]).weights - judge(x).weights[:, order]).max() < 1e-12


def test_no_sum_is_left_to_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their order of adding is their own, and differs between processors: see `collectives.robust.rule`.
    x = contributions()
    arguments = (*grams(x), np.ones(N))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a sum in no stated order")

    for name in (
        "sum",
        "mean",
        "dot",
        "matmul",
        "einsum",
        "inner",
        "vdot",
        "median",
        "quantile",
        "std",
        "exp",
        "power",
    ):
        monkeypatch.setattr(np, name, refuse)
    for name in ("norm", "eigh", "solve", "svd"):
        monkeypatch.setattr(np.linalg, name, refuse)
    RULE.weights(*arguments)


def test_the_weights_are_those_of_every_other_machine() -> None:
    x = np.random.default_rng(0).integers(-8, 9, (N, 200)).astype(np.float64)  # Exact products and sums.
    x += np.asarray(range(200)) % 7 - 3.0
    x[-1] *= -2
    x[-2] = x[-3]
    bits = judge(x).weights.astype("<f8").tobytes()
    assert hashlib.sha256(bits).hexdigest() == "c0bb8661f37594aee272964a0a37eba1a6a1bb58faf3dea357c8f2fde0b9e6ab"
