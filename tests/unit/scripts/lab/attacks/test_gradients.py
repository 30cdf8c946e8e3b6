"""Attacks by name: their spelling, their vectors, and custom ones."""

import math
import sys

import numpy as np
import pytest
from flockstep.collectives.vector.arrays import Floats
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.attacks.gradients import ATTACKS, Attackers

HONEST = (np.random.default_rng(0).standard_normal((6, 1000)) + 1).astype(np.float32)
OWN = (np.random.default_rng(1).standard_normal((4, 1000)) + 1).astype(np.float32)
MEAN = HONEST.mean(axis=0)


def sent(text: str, rounds: int = 1) -> Floats:
    attack = Attackers.parse(text).fresh()
    generator = np.random.default_rng(2)
    for number in range(rounds):
        result = attack(HONEST, OWN * np.float32(number + 1), number, generator)
    return result


def everyone_twice(honest: Floats, own: Floats, round_number: int, generator: object, scale: float = 2) -> Floats:
    return np.float32(scale) * own


def test_the_spelling() -> None:
    assert Attackers.parse("alie:4") == Attackers("alie", 4)
    assert Attackers.parse("ipm:2:1.5") == Attackers("ipm", 2, 1.5)
    assert str(Attackers.parse("ipm:2:1.5")) == "ipm:2:1.5"
    assert Attackers.parse("ipm:2:1.5").attack == "ipm:1.5"
    assert Attackers("zero", 0).attack == "none"
    assert Attackers.parse("label_flip:1").poisons_labels
    assert Attackers.parse("math:sqrt:2:0.5") == Attackers("math:sqrt", 2, 0.5)


@pytest.mark.parametrize("text", ["alie", "alie:", "alie:x", "alie:-1", "alie:4:nan", "alie:4:1:2", ":4"])
def test_what_cannot_be_read_shows_what_can(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Attackers.parse(text)
    assert caught.value.remedy


def test_an_unknown_attack_names_a_near_one() -> None:
    with pytest.raises(UsageError, match="sign_flip"):
        Attackers.parse("sing_flip:4")
    with pytest.raises(UsageError, match=r"no\.such"):
        Attackers.parse("no.such:attack:4")


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_gives_a_row_for_each_attacker(name: str) -> None:
    assert np.broadcast_to(sent(f"{name}:4"), OWN.shape).dtype == np.float32


def test_what_they_send() -> None:
    assert np.array_equal(sent("sign_flip:4:10"), -10 * OWN)
    assert np.array_equal(sent("scaled:4:3"), 3 * OWN)
    assert np.array_equal(sent("ipm:4:1.5"), np.float32(-1.5) * MEAN)
    assert np.array_equal(sent("mimic:4"), HONEST[0])
    assert np.array_equal(sent("label_flip:4"), OWN)
    assert not sent("zero:4").any()
    assert np.isnan(sent("nan:4")).all()
    assert np.isinf(sent("inf:4")).all()
    typical = np.median(np.linalg.norm(HONEST, axis=1))
    assert np.allclose(np.linalg.norm(sent("noise:4:2"), axis=1), 2 * typical, rtol=0.1)
    off = sent("hidden:4:0.5", rounds=2) - 2 * OWN
    assert np.allclose(off[0], off[3], atol=1e-5)
    assert math.isclose(np.linalg.norm(off[0]), 0.5 * typical, rel_tol=1e-4)


def test_groups_push_on_coordinates_of_their_own() -> None:
    typical = np.median(np.linalg.norm(HONEST[:, ::2], axis=1))
    even = sent("groups2_against:4:3")
    for group in (0, 1):
        rows, own = even[2 * group : 2 * group + 2], OWN[2 * group : 2 * group + 2]
        assert np.array_equal(rows[:, group::2], own[:, group::2] - np.float32(3) * MEAN[group::2])
        assert np.array_equal(rows[:, 1 - group :: 2], own[:, 1 - group :: 2])
    part = sent("parts1_hidden:4")
    assert np.array_equal(part[1, :250], OWN[1, :250])
    assert np.array_equal(part[1, 500:], OWN[1, 500:])
    pushed = part[1, 250:500]
    assert math.isclose(np.linalg.norm(pushed), np.median(np.linalg.norm(HONEST[:, 250:500], axis=1)), rel_tol=1e-4)
    assert math.isclose(pushed @ MEAN[250:500], -np.linalg.norm(pushed) * np.linalg.norm(MEAN[250:500]), rel_tol=1e-4)
    lasting = [sent("groups2_constant:4:0.5", rounds) - rounds * OWN for rounds in (1, 2)]
    assert np.allclose(lasting[0], lasting[1], atol=1e-5)
    assert np.allclose(lasting[0][0], lasting[0][1], atol=1e-5)
    assert math.isclose(np.linalg.norm(lasting[0][0]), 0.5 * typical, rel_tol=1e-4)
    assert not np.abs(lasting[0][0] * lasting[0][2]).any()


def test_freeloaders_send_the_last_output_and_noise_of_their_own() -> None:
    assert np.array_equal(sent("freeload:4"), OWN)
    typical = np.median(np.linalg.norm(HONEST, axis=1))
    later = sent("freeload:4:0.75", rounds=2)
    assert np.allclose(np.linalg.norm(later, axis=1), typical, rtol=1e-4)
    cosines = later @ MEAN / np.linalg.norm(later, axis=1) / np.linalg.norm(MEAN)
    assert np.allclose(cosines, 0.8, atol=0.05)  # 1 / √(1 + 0.75²)
    assert np.allclose(later[0] @ later[1] / typical**2, 0.64, atol=0.08)


def test_alie_hides_as_its_paper_says() -> None:
    # n = 10, 4 attackers: s = 2 of 6 honest must be farther off, Φ(z) = 4/6, z = 0.43.
    assert np.allclose(sent("alie:4"), MEAN - np.float32(0.4307) * HONEST.std(axis=0), atol=1e-4)
    assert np.allclose(sent("alie:4:1.5"), MEAN - np.float32(1.5) * HONEST.std(axis=0), atol=1e-5)


def test_min_max_and_min_sum_go_as_far_as_the_honest_do() -> None:
    squares = ((HONEST[:, None].astype(np.float64) - HONEST[None]) ** 2).sum(axis=2)
    to_honest = ((HONEST - sent("min_max:4").astype(np.float64)) ** 2).sum(axis=1)
    assert math.isclose(to_honest.max(), squares.max(), rel_tol=1e-4)
    to_honest = ((HONEST - sent("min_sum:4").astype(np.float64)) ** 2).sum(axis=1)
    assert math.isclose(to_honest.sum(), squares.sum(axis=1).max(), rel_tol=1e-4)


def test_stale_ones_say_again_what_they_said() -> None:
    assert np.array_equal(sent("stale:4", rounds=5), OWN)
    assert np.array_equal(sent("stale:4:2", rounds=5), 3 * OWN)
    attackers = Attackers.parse("stale:4")
    first, second = attackers.fresh(), attackers.fresh()
    first(HONEST, OWN, 0, None)
    assert np.array_equal(second(HONEST, 7 * OWN, 0, None), 7 * OWN)  # A new training remembers nothing.


def test_collusion_is_in_one_part_alone() -> None:
    malicious = sent("one_part:4:3")
    assert np.array_equal(malicious[:, 100:], OWN[:, 100:])
    assert np.array_equal(malicious[:, :100], np.broadcast_to(-3 * MEAN[:100], (4, 100)))


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my.attacks", sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "my", sys.modules[__name__])
    attackers = Attackers.parse("my.attacks:everyone_twice:3")
    assert (attackers.count, attackers.attack) == (3, "my.attacks:everyone_twice")
    assert np.array_equal(sent("my.attacks:everyone_twice:4"), 2 * OWN)
    assert np.array_equal(sent("my.attacks:everyone_twice:4:5"), 5 * OWN)
