"""The training of the benches: rounds, streaming, feedback, attackers, and data parallel."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL
from flockstep.optim.models.gpt_config import gpt_config
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.lab.attacks.gradients import Attackers
from flockstep.scripts.lab.bench.robust import oracle_of
from flockstep.scripts.lab.training.batches import SIZES, domains_of, drawn
from flockstep.scripts.lab.training.stack import Stack
from flockstep.scripts.lab.training.swarm import ParallelSwarm, Training, TrainingSwarm, spans_of, train
from support.learner import Learner

SMALLEST = replace(
    SIZES["tiny"], model={"layers": 1, "heads": 1, "width": 16, "context": 16}, length=16, steps=5, rounds=3
)
AVERAGE = OuterSettings(lr=1.0, momentum=0.0)


def training(**changes: Any) -> Training:
    given: dict[str, Any] = {"size": SMALLEST, "peers": 2}
    return Training(**(given | changes))


@pytest.mark.parametrize(("name", "peers", "millions", "tokens"), [("10m", 8, 10.7, 49.2e6), ("51m", 2, 50.5, 98.3e6)])
def test_the_sizes_for_gpus_are_those_of_published_trainings(name: str, peers: int, millions: float, tokens: float) -> None:
    size = SIZES[name]
    assert gpt_config(size.model).num_parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert Training(size=size, peers=peers).tokens == pytest.approx(tokens, rel=0.01)


def trained(case: Training) -> TrainingSwarm:
    swarm = TrainingSwarm(case)
    swarm.run(lambda round_, weights: None)
    return swarm


def each_alone(peers: int, steps: int) -> Floats:
    """What the peers' parameters become without anybody else, each in a model of its own."""
    swarm = TrainingSwarm(training(peers=peers))
    ends: Floats = np.zeros((peers, swarm.layout.size), np.float32)
    for index, end in enumerate(ends):
        peer = Learner(SMALLEST, swarm.domains, index, 0)
        for step in range(steps):
            peer.backward(peer.batches.draw())
            peer.step(step)
        swarm.layout.gather(peer.model, end)
    return ends


def test_adamw_has_the_rate_of_a_run_with_the_same_optimizer() -> None:
    assert [replace(SMALLEST, optimizer=it, rate=2.0).inner().adamw_lr for it in ("muon", "adamw")] == [0.012, 0.006]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stack_trains_each_model_as_if_it_were_alone(optimizer: str) -> None:
    size = replace(SMALLEST, optimizer=optimizer, rate=4.0)
    swarm = TrainingSwarm(training(peers=3))
    stack = Stack(size, 3, 0, "cpu")
    for step in range(7):
        stack.step(drawn(swarm.batches), step)
    for index, weights in enumerate(stack.weights):
        peer = Learner(size, swarm.domains, index, 0)
        for step in range(7):
            peer.backward(peer.batches.draw())
            peer.step(step)
        alone: Floats = np.zeros(swarm.layout.size, np.float32)
        swarm.layout.gather(peer.model, alone)
        np.testing.assert_allclose(weights.numpy(force=True), alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_no_work_is_lost_whatever_the_fragments(fragments: int) -> None:
    # Plain averaging with nobody else changes nothing: all of a lonely peer's work is in θ, and twice nowhere.
    swarm = trained(training(peers=1, mode="streaming", fragments=fragments, outer=AVERAGE))
    alone = each_alone(1, SMALLEST.rounds * SMALLEST.steps)[0]
    np.testing.assert_allclose(swarm.theta, alone, rtol=0, atol=1e-5)
    assert np.array_equal(swarm.weights[0].numpy(), swarm.theta)


def test_one_fragment_is_blocking() -> None:
    outer = OuterSettings(lr=0.9, momentum=0.8)
    blocking = trained(training(outer=outer))
    assert np.array_equal(trained(training(mode="streaming", outer=outer)).theta, blocking.theta)


def test_a_blocking_round_is_the_mean_of_the_peers_and_a_nesterov_step() -> None:
    one_round = replace(SMALLEST, rounds=1)
    start = TrainingSwarm(training(size=one_round)).theta
    mean = trained(training(size=one_round, outer=AVERAGE)).theta
    stepped = trained(training(size=one_round, outer=OuterSettings(lr=0.5, momentum=0.8))).theta
    np.testing.assert_allclose(stepped - start, 0.5 * 1.8 * (mean - start), rtol=1e-4, atol=1e-7)
    ends = each_alone(2, one_round.steps)
    np.testing.assert_allclose(mean, np.mean(ends, axis=0), rtol=0, atol=1e-6)


def test_each_fragment_has_its_turn_once_in_a_round() -> None:
    swarm = TrainingSwarm(training(mode="streaming", fragments=3))
    turns = {step: list(swarm.due(step)) for step in range(1, 11)}
    assert {step: turn for step, turn in turns.items() if turn} == {1: [1], 3: [2], 5: [0], 6: [1], 8: [2], 10: [0]}


def test_fragments_are_equal_runs_of_cells() -> None:
    spans = spans_of(10, 3)
    assert [(span.start // CELL, span.stop // CELL) for span in spans] == [(0, 3), (3, 6), (6, 10)]


def test_feedback_keeps_what_the_bytes_do_not_carry() -> None:
    swarm = trained(training(contribution="lloyd2", result="lloyd2"))
    assert swarm.residuals.any(axis=1).all()


def test_data_parallel_steps_with_the_mean_of_all_gradients() -> None:
    case = training(mode="parallel", size=replace(SMALLEST, rounds=1, steps=1))
    swarm = ParallelSwarm(case)
    together = Learner(case.size, swarm.domains, 0, 0)
    together.backward(torch.cat([one.draw() for one in TrainingSwarm(training(size=case.size)).batches]))
    together.step(0)
    swarm.run(lambda round_, weights: None)
    expected: Floats = np.zeros(swarm.stack.layout.size, np.float32)
    swarm.stack.layout.gather(together.model, expected)
    np.testing.assert_allclose(swarm.stack.weights[0].numpy(force=True), expected, rtol=0, atol=1e-5)


def test_a_training_learns_and_is_the_same_twice() -> None:
    case = training(mode="streaming", fragments=2, contribution="int4", result="int4")
    result = train(case)
    assert result == train(case)
    assert result.params == TrainingSwarm(case).layout.size
    untrained = math.log(256)
    assert result.loss < untrained
    assert train(training(mode="parallel")).loss < untrained
    assert case.tokens == 2 * 3 * 5 * 4 * 16
    assert len(domains_of(case.peers)) == 2
    assert [round_ for round_, _ in result.curve] == [1, 2, 3]
    assert result.curve[0][1] > result.loss


def test_what_has_diverged_has_a_loss_that_is_no_number() -> None:
    swarm = TrainingSwarm(training(contribution="int4"))
    swarm.weights[1].fill_(math.nan)
    ends: list[Floats] = []
    swarm.run(lambda round_, weights: ends.append(weights.copy()))
    assert swarm.exchange.failed
    assert np.isnan(ends[-1]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"mode": "eager"}, {"contribution": "int3"}, {"result": "int3"}, {"peers": 0}),
        *({"peers": 65}, {"fragments": 2}, {"mode": "streaming", "fragments": 6}, {"mode": "streaming", "fragments": 0}),
        *({"size": replace(SMALLEST, rounds=0)}, {"size": replace(SMALLEST, steps=0)}),
        *({"rule": "gramgard"}, {"attackers": Attackers("alie", 2)}),
    ],
)
def test_what_cannot_be_trained_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        training(**wrong)
    assert caught.value.remedy


def attacked(attack: str, rule: str = "gramguard", count: int = 1, scale: float | None = None) -> Training:
    given = {"peers": 5, "contribution": "int4", "result": "int4", "rule": rule, "outer": OuterSettings(lr=0.8, momentum=0.5)}
    return training(**given, attackers=Attackers(attack, count, scale))


def test_a_training_under_attack_is_the_same_twice_and_its_liars_are_found() -> None:
    case = attacked("sign_flip", scale=10.0)
    weightings = trained(case).exchange.weightings
    assert len(weightings) == SMALLEST.rounds
    assert all({4} <= set(weighting.flagged) and not weighting.weights[:, 4:].any() for weighting in weightings)
    loss = train(case).loss
    assert train(case).loss == loss
    assert abs(train(oracle_of(case)).loss / loss - 1) < 0.02


@pytest.mark.parametrize("rule", ["gramguard", "mean"])
def test_an_attacker_that_cannot_be_encoded_counts_nothing_and_breaks_nothing(rule: str) -> None:
    assert math.isfinite(train(attacked("nan", rule)).loss)


def test_without_a_defence_one_peer_ruins_a_training() -> None:
    # No better than chance among 256 bytes, or not finite at all.
    assert train(attacked("sign_flip", "mean", scale=1e12)).loss > math.log(256) - 0.01


def test_attackers_with_flipped_labels_learn_other_targets_than_the_honest() -> None:
    ends = [trained(training(peers=3, attackers=Attackers(name, 1))).residuals for name in ("label_flip", "sign_flip")]
    assert np.array_equal(ends[0][:2], ends[1][:2])
    stacks = [Stack(SMALLEST, 3, 0, "cpu") for _ in range(2)]
    for stack, flipped in zip(stacks, (0, 1), strict=True):
        stack.step(drawn(TrainingSwarm(training(peers=3)).batches), 0, flipped=flipped)
    same = [bool(torch.equal(one, other)) for one, other in zip(stacks[0].weights, stacks[1].weights, strict=True)]
    assert same == [True, True, False]
