"""Attacks by name: their spelling and their vectors."""

import math

import numpy as np
import pytest
from flockstep.collectives.vector.arrays import Floats
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.attacks.gradients import ATTACKS, Attackers

HONEST = (np.random.default_rng(0).standard_normal((6, 1000)) + 1).astype(np.float32)
OWN = (np.random.default_rng(1).standard_normal((4, 1000)) + 1).astype(np.float32)
MEAN = HONEST.mean(axis=0)


def sent(text: str, rounds: int = 1) -> Floats:
    attack = Attackers.parse(text, ATTACKS).fresh()
    generator = np.random.default_rng(2)
    for number in range(rounds):
        result = attack(HONEST, OWN * np.float32(number + 1), number, generator)
    return result


def test_the_spelling() -> None:
    assert Attackers.parse("alie:4", ATTACKS) == Attackers("alie", 4)
    assert Attackers.parse("ipm:2:1.5", ATTACKS) == Attackers("ipm", 2, 1.5)
    assert str(Attackers("ipm", 2, 1.5)) == "ipm:2:1.5"
    assert Attackers("label_flip", 1).poisons_labels


@pytest.mark.parametrize("text", ["alie", "alie:", "alie:x", "alie:-1", "alie:4:nan", "alie:4:1:2", ":4"])
def test_what_cannot_be_read_shows_what_can(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Attackers.parse(text, ATTACKS)
    assert caught.value.remedy


def test_an_unknown_attack_names_a_near_one() -> None:
    with pytest.raises(UsageError, match="sign_flip"):
        Attackers.parse("sing_flip:4", ATTACKS)


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_gives_a_row_for_each_attacker(name: str) -> None:
    assert np.broadcast_to(sent(f"{name}:4"), OWN.shape).dtype == np.float32


def test_what_they_send() -> None:
    assert np.array_equal(sent("sign_flip:4:10"), -10 * OWN)
    assert np.array_equal(sent("ipm:4:1.5"), np.float32(-1.5) * MEAN)
    assert np.array_equal(sent("mimic:4"), HONEST[0])
    assert np.array_equal(sent("label_flip:4"), OWN)
    assert np.isnan(sent("nan:4")).all()
    typical = np.median(np.linalg.norm(HONEST, axis=1))
    assert np.allclose(np.linalg.norm(sent("noise:4:2"), axis=1), 2 * typical, rtol=0.1)


def test_pairs_push_on_coordinates_of_their_own() -> None:
    pushed = sent("pairs:4:3")
    for pair in (0, 1):
        rows, own = pushed[2 * pair : 2 * pair + 2], OWN[2 * pair : 2 * pair + 2]
        assert np.array_equal(rows[:, pair::2], own[:, pair::2] - np.float32(3) * MEAN[pair::2])
        assert np.array_equal(rows[:, 1 - pair :: 2], own[:, 1 - pair :: 2])


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


def test_min_max_goes_as_far_as_the_honest_do() -> None:
    squares = ((HONEST[:, None].astype(np.float64) - HONEST[None]) ** 2).sum(axis=2)
    to_honest = ((HONEST - sent("min_max:4").astype(np.float64)) ** 2).sum(axis=1)
    assert math.isclose(to_honest.max(), squares.max(), rel_tol=1e-4)


def test_stale_ones_say_again_what_they_said() -> None:
    assert np.array_equal(sent("stale:4", rounds=5), OWN)
    first, second = (Attackers("stale", 4).fresh() for _ in range(2))
    first(HONEST, OWN, 0, None)
    assert np.array_equal(second(HONEST, 7 * OWN, 0, None), 7 * OWN)  # A new training remembers nothing.


def test_collusion_is_in_one_part_alone() -> None:
    malicious = sent("one_part:4:3")
    assert np.array_equal(malicious[:, 100:], OWN[:, 100:])
    assert np.array_equal(malicious[:, :100], np.broadcast_to(-3 * MEAN[:100], (4, 100)))
