"""gramguard: honest peers count alike, liars of every kind count less, the same bits for everybody, in time."""

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from flockstep.collectives.gramguard import GramGuard
from flockstep.collectives.repetition import repetition
from flockstep.collectives.verdict import History, Verdict

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


def judge(x: Floats, before: tuple[Floats, Verdict] | None = None, masses: Floats | None = None) -> Verdict:
    history = None
    if before is not None:
        last, verdict = before
        history = History(
            gram=last @ last.T,
            across=x @ last.T,
            weights=verdict.weights.mean(axis=0),
            same=range(len(x)),
            suspicion=verdict.suspicion,
        )
    return RULE.weights(*grams(x), np.ones(len(x)) if masses is None else masses, history)


def share_of_liars(verdict: Verdict) -> float:
    return float(verdict.weights[:, N - LIARS :].sum(axis=1).max())


def test_the_honest_count_nearly_alike_round_after_round() -> None:
    before = None
    for round_number in range(8):
        x = contributions(round_number)
        verdict = judge(x, before)
        assert not verdict.flagged
        assert np.abs(verdict.weights * N - 1).max() < 0.35
        before = x, verdict


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
        verdict = judge(x)
    assert np.isfinite(verdict.weights).all()
    assert np.abs(verdict.weights.sum(axis=1) - 1).max() < 1e-12
    assert share_of_liars(verdict) < 0.1
    assert not set(verdict.flagged) & set(range(N - LIARS))


def test_a_shared_direction_costs_colluders_half_of_their_weight_and_more() -> None:
    x = contributions()
    direction = np.random.default_rng(7).standard_normal(D)
    x[N - LIARS :] += 1.2 * direction
    assert share_of_liars(judge(x)) < 0.2


def test_collusion_in_one_part_weighs_down_everywhere_and_is_vetoed_there() -> None:
    x = contributions()
    x[N - LIARS :, : D // PARTS] = -3 * x[HONEST, : D // PARTS].mean(axis=0)
    verdict = judge(x)
    assert verdict.weights[0, N - LIARS :].sum() < 0.1
    assert verdict.weights[1:, N - LIARS :].min() > 0
    assert verdict.weights[1:, N - LIARS :].sum(axis=1).max() < 0.1


def test_a_veto_holds_for_its_part_only() -> None:
    x = contributions()
    x[-1, : D // PARTS] *= -1
    verdict = judge(x)
    assert verdict.weights[0, -1] == 0
    assert verdict.weights[1:, -1].min() > 0.05
    assert "in part 0" in verdict.flagged[N - 1]


@pytest.mark.parametrize("attack", ["replay", "lasting lie"])
def test_repetition_is_noticed_in_two_rounds_and_forgiven(attack: str) -> None:
    lie = np.random.default_rng(9).standard_normal((LIARS, D))  # Each has its own: nothing in common.
    before = None
    for round_number in range(4):
        x = contributions(round_number)
        if attack == "replay":
            x[N - LIARS :] = contributions(0)[N - LIARS :]
        else:
            mean = x[HONEST].mean(axis=0)
            x[N - LIARS :] = mean + 1.3 * lie + 0.1 * (x[N - LIARS :] - mean)
        verdict = judge(x, before)
        before = x, verdict
    assert share_of_liars(verdict) == 0
    assert set(verdict.flagged) == set(range(N - LIARS, N))
    assert all("round before" in reason for reason in verdict.flagged.values())
    for round_number in range(4, 9):
        x = contributions(round_number)
        verdict = judge(x, before)
        before = x, verdict
    assert share_of_liars(verdict) > 0.2


def test_never_more_than_a_minority_is_dropped() -> None:
    random = np.random.default_rng(0)
    for n in (1, 2, 3, 4, 5, 8):
        for _ in range(4):
            x = random.standard_normal((n, 40)) * np.exp(random.standard_normal((n, 1)))
            verdict = judge(x, (random.standard_normal((n, 40)), judge(x)))
            dropped = sum("part" not in reason and "norm" not in reason for reason in verdict.flagged.values())
            assert dropped <= (n - 1) // 2
            assert np.abs(verdict.weights.sum(axis=1) - 1).max() < 1e-12


def test_who_was_not_there_before_has_no_past() -> None:
    x, last = contributions(1), contributions(0)
    last[N - 1] = x[N - 1]  # As if replayed, if the newcomer stood where that one did.
    first = judge(last)
    everyone = History(
        gram=last @ last.T,
        across=x @ last.T,
        weights=first.weights.mean(axis=0),
        same=range(N),
        suspicion=np.zeros(N),
    )
    gram, centre, alive = x @ x.T, np.full(N, 1 / N), np.ones(N, bool)
    assert repetition(gram, centre, np.ones(N), alive, everyone)[N - 1] == 0.5
    newcomer = History(
        gram=everyone.gram,
        across=everyone.across,
        weights=everyone.weights,
        same=[*range(N - 1), -1],
        suspicion=np.zeros(N),
    )
    assert repetition(gram, centre, np.ones(N), alive, newcomer)[N - 1] == 0


def test_a_part_without_elements_has_weights_too() -> None:
    x = contributions()
    _, parts = grams(x)
    verdict = RULE.weights(x @ x.T, np.concatenate([parts, np.zeros((1, N, N))]), np.ones(N))
    assert not verdict.flagged
    assert np.abs(verdict.weights[-1].sum() - 1) < 1e-12


def test_masses_count() -> None:
    masses = np.ones(N)
    masses[0] = 0.25
    weights = judge(contributions(), masses=masses).weights
    assert 0.2 < weights[:, 0].mean() / weights[:, 1:].mean() < 0.32


def test_the_order_of_the_roster_changes_no_weight() -> None:
    x = contributions()
    x[N - LIARS :] = -x[N - LIARS :]
    order = np.random.default_rng(3).permutation(N)
    assert np.abs(judge(x[order]).weights - judge(x).weights[:, order]).max() < 1e-12


def test_no_sum_is_left_to_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their order of adding is their own, and differs between processors: see `collectives.verdict`.
    x = contributions()
    arguments = (*grams(x), np.ones(N))
    past = History(gram=x @ x.T, across=x @ x.T, weights=np.full(N, 1 / N), same=range(N), suspicion=np.zeros(N))

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
    RULE.weights(*arguments, past)


def test_the_weights_are_those_of_every_other_machine() -> None:
    x = np.random.default_rng(0).integers(-8, 9, (N, 200)).astype(np.float64)  # Exact products and sums.
    x += np.asarray(range(200)) % 7 - 3.0
    x[-1] *= -2
    x[-2] = x[-3]
    first = judge(x)
    second = judge(x + (np.arange(N)[:, None] * np.arange(200) % 5 - 2), (x, first))
    assert second.suspicion.any()
    bits = b"".join(one.astype("<f8").tobytes() for one in (first.weights, second.weights, second.suspicion))
    assert hashlib.sha256(bits).hexdigest() == "09dd8a282d9894b4f40002c7654534c5a92a8a23f3adf8b2976185fa8519ca43"
