"""The outer step: bit for bit that of eager PyTorch, for any chunking."""

import numpy as np
import pytest
import torch
from flockstep.collectives.vector.arrays import Floats
from flockstep.optim.step import outer
from flockstep.optim.step.outer import OuterSettings, outer_step
from flockstep.peer.base.errors import UsageError

SETTINGS = [OuterSettings(lr=0.7, momentum=0.9), OuterSettings(lr=0.8, momentum=0.5), OuterSettings(lr=1, momentum=0)]


def vectors(size: int, seed: int = 0) -> list[Floats]:
    """θ, m and g of every magnitude that does not overflow, subnormal ones included."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-149, 120, (3, size))
    values: list[Floats] = list((rng.standard_normal((3, size)) * np.exp2(exponents)).astype(np.float32))
    return values


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_bit_is_that_of_eager_torch(settings: OuterSettings) -> None:
    theta, m, g = vectors(1_000_000)
    t_theta, t_m, t_g = (torch.from_numpy(v.copy()) for v in (theta, m, g))
    outer_step(theta, m, g, settings)
    t_m.mul_(settings.momentum)
    t_m.add_(t_g)
    t = t_m.mul(settings.momentum)
    t.add_(t_g)
    t.mul_(settings.lr)
    t_theta.sub_(t)
    assert theta.tobytes() == t_theta.numpy().tobytes()
    assert m.tobytes() == t_m.numpy().tobytes()
    assert g.tobytes() == t_g.numpy().tobytes()


def test_bits_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1, 7, 1000, 1 << 16):
        monkeypatch.setattr(outer, "OUTER_CHUNK", chunk)
        theta, m, g = vectors(1000)
        outer_step(theta, m, g, SETTINGS[0])
        results.append((theta.tobytes(), m.tobytes()))
    assert len(set(results)) == 1


def test_plain_averaging_lands_on_the_mean_of_the_locals() -> None:
    theta, first, second = (np.full(4, value, np.float32) for value in (8, 4, 2))
    deltas = np.empty((2, 4), np.float32)
    np.subtract(theta, first, out=deltas[0])
    np.subtract(theta, second, out=deltas[1])
    outer_step(theta, np.zeros(4, np.float32), deltas.mean(axis=0), OuterSettings(lr=1, momentum=0))
    assert (theta == 3).all()


def test_the_momentum_rises_with_the_rounds_of_each_fragment() -> None:
    settings = OuterSettings(lr=0.7, momentum=0.5, warmup=4, fragments=2)
    momenta = [settings.at(round_).momentum for round_ in range(1, 13)]
    assert momenta == [0, 0, 0.125, 0.125, 0.25, 0.25, 0.375, 0.375, 0.5, 0.5, 0.5, 0.5]
    assert SETTINGS[0].at(1) == SETTINGS[0]


@pytest.mark.parametrize(("lr", "momentum"), [(0, 0.9), (3, 0.9), (float("nan"), 0.9), (0.7, 1), (0.7, -0.1)])
def test_settings_out_of_range_are_refused(lr: float, momentum: float) -> None:
    with pytest.raises(UsageError, match="outer"):
        OuterSettings(lr=lr, momentum=momentum)


def test_a_negative_warm_up_is_refused() -> None:
    with pytest.raises(UsageError, match="warm-up of -1"):
        OuterSettings(lr=0.7, momentum=0.9, warmup=-1)
