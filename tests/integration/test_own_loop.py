"""A loop that keeps its own optimizer: its rates, its gradients, its steps, and what `Swarm` says about them."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flockstep import PeerConfig, Swarm
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event
from support.trainers import RUN, TRUTH
from torch import Tensor, nn

RATE = 1e-4
FAR = 1000.0
"""The slope of the loss: every gradient is far above the norm at which the run clips, and none grows."""


class Loop:
    """A plain loop around one weight, and what `Swarm` says."""

    def __init__(self, link: str, home: Path, *, follow_run: bool | None = None) -> None:
        self.model = nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.events: list[Event] = []
        config = PeerConfig(home=home, host="127.0.0.1", port=0)
        self.swarm = Swarm(
            link, self.model, self.optimizer, follow_run=follow_run, config=config, on_event=self.events.append
        )

    def backward(self) -> Tensor:
        """Compute gradients, and return the loss."""
        loss = FAR * (self.model.weight - TRUTH).abs().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        return loss

    def moved(self, step: Callable[[], object]) -> Tensor:
        """How far a step moves the weight."""
        before = self.model.weight.detach().clone()
        step()
        return before - self.model.weight.detach()

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


def test_a_loop_keeps_its_rates_scaler_closure_and_gradients(publish: Callable[..., str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=3, peers=1).replace('"constant"', '"linear"'))
    # With the run's recipe, if it is asked for: the first of ten steps of warm-up, clipped at a norm of 1.
    follower = Loop(link, tmp_path, follow_run=True)
    with follower.swarm as swarm:
        loss = follower.backward()
        moved = float(follower.moved(lambda: swarm.step(loss)).norm())
        assert moved == pytest.approx(0.1 * RATE, rel=1e-2)  # Weights of 0.5 are whole multiples of 6e-8.
        assert "the run schedules its learning rates" in str(follower.named("inner.own_optimizer")[0]["reason"])

    loop = Loop(link, tmp_path)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    with loop.swarm as swarm:
        (told,) = loop.named("inner.own_optimizer")
        assert "with its own learning rates" in str(told["reason"])
        with pytest.raises(UsageError, match="found no gradients"):
            swarm.step()
        for rate in (RATE, RATE / 2):  # Of the caller's scheduler; two backward passes accumulate; nothing is clipped.
            loop.backward()
            loss = loop.backward()
            gradient = loop.model.weight.grad
            assert gradient is not None
            torch.testing.assert_close(loop.moved(lambda: swarm.step(loss)), rate * gradient)  # noqa: B023
            assert loop.model.weight.grad is None
            scheduler.step()

        loss = loop.backward()
        loop.optimizer.step()
        with pytest.raises(UsageError, match="would step it again"):
            swarm.step(loss)
        assert swarm.after_step(loss).step == 3
        assert loop.model.weight.grad is not None  # The caller's to clear.
        loop.optimizer.zero_grad()

        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loop.model(torch.full((1, 3), torch.inf)).sum()).backward()
        assert not loop.moved(lambda: scaler.step(loop.optimizer)).any()
        scaler.update()
        swarm.after_step()  # A step that the scaler has skipped counts as one.
        loop.optimizer.zero_grad()

        swarm.after_step(loop.optimizer.step(loop.backward))
        loop.optimizer.zero_grad()
        while not swarm.finished:
            loop.optimizer.zero_grad()
            loop.backward()
            loop.optimizer.step()
            assert swarm.after_step().loss is None
    assert loop.named("round.done")[-1]["loss"] is None
    assert loop.named("step")[-1]["loss"] is None
    assert not loop.named("inner.own_rates")


def test_what_is_wrong_with_a_step_is_one_line_before_weights_part(publish: Callable[..., str], tmp_path: Path) -> None:
    link = publish(RUN.format(rounds=3, peers=1))
    loop = Loop(link, tmp_path)  # The home of the owner, which decides alone.
    loop.model.register_buffer("graph", torch.eye(2).to_sparse())

    def train(**said: int) -> None:
        while not loop.swarm.finished:
            loop.backward()
            loop.swarm.step(0.5, **said)

    with loop.swarm as swarm:
        (told,) = loop.named("model.not_kept")
        assert "graph, which has the layout sparse_coo" in str(told["reason"])
        loop.backward()
        before = loop.model.weight.detach().clone()
        for loss, tokens in ((torch.zeros(2), None), ("low", None), (0.5, -1), (0.5, 2**70)):
            with pytest.raises(UsageError, match=r"the loss is|tokens"):
                swarm.step(loss, tokens=tokens)
        assert torch.equal(loop.model.weight, before)
        assert swarm.step(0.5, tokens=7).loss == 0.5
        loop.model.bias = nn.Parameter(torch.zeros(1))
        with pytest.raises(UsageError, match="changed since it joined: bias, not trained then, is trained"):
            train()
    assert not loop.named("phase.end")

    loop = Loop(link, tmp_path)  # The home of the owner, which decides alone.
    with loop.swarm, pytest.raises(UsageError, match=r"none of the phase's .* steps had tokens"):
        train(tokens=0)
    assert not loop.named("phase.end")


RAMP = RUN.format(rounds=4, peers=1).replace("steps = 10", "steps = 8\nramp = 8\nclip = 0.0")


class Ramp(Loop):
    """A loop by the run's recipe, which notes each step of its optimizer: the round, the rate and the gradient."""

    def __init__(self, link: str, home: Path) -> None:
        super().__init__(link, home, follow_run=True)
        self.steps: list[tuple[int, float, float]] = []
        self.optimizer.register_step_post_hook(lambda *_: self._note())

    def _note(self) -> None:
        gradient = self.model.weight.grad
        assert gradient is not None
        self.steps.append((self.swarm.round + 1, self.optimizer.param_groups[0]["lr"] / RATE, float(gradient[0, 0])))

    def backward_of(self, slope: float, scale: float = 1.0) -> None:
        """Compute `scale` times a gradient of `slope`."""
        (scale * slope * self.model.weight.sum()).backward()  # type: ignore[no-untyped-call]  # of torch


def test_later_rounds_make_one_step_of_the_mean_gradient_of_more_batches(publish: Callable[..., str], tmp_path: Path) -> None:
    loop, told = Ramp(publish(RAMP), tmp_path), list[int]()
    with loop.swarm as swarm:
        while not swarm.finished:
            told.append(swarm.accumulate)
            slope, scale = (1.0, 1.0) if len(told) % 2 else (5.0, 3.0)
            loop.backward_of(slope, scale)
            assert swarm.step(scale=scale).step == len(told)
            assert loop.model.weight.grad is None or len(told) % 8
    assert told == [1] * 8 + [2] * 8 + [4] * 8 + [8] * 8
    later = loop.steps[8:]
    assert [round_ for round_, _, _ in loop.steps] == [1] * 8 + [2] * 4 + [3] * 2 + [4]
    # A newcomer's warm-up of ten inner steps ends with the first of these.
    assert [rate for _, rate, _ in later] == pytest.approx([math.sqrt(2)] * 4 + [2.0] * 2 + [math.sqrt(8)])
    assert [gradient for _, _, gradient in later] == pytest.approx([(1 + 3 * 5) / 4] * 7)
    assert not loop.named("inner.cleared")


def test_gradients_that_were_cleared_are_in_no_mean(publish: Callable[..., str], tmp_path: Path) -> None:
    loop = Ramp(publish(RAMP), tmp_path)
    with loop.swarm as swarm:
        while swarm.round < 2:
            loop.backward_of(1.0)
            swarm.step()
        loop.backward_of(7.0)
        swarm.step()
        loop.optimizer.zero_grad()
        swarm.after_step(tokens=0)  # Its gradients have overflowed.
        for slope in (2.0, 4.0):
            loop.backward_of(slope)
            swarm.step()
        assert loop.steps[-1] == pytest.approx((3, 2.0, 3.0))
        assert not loop.named("inner.cleared")
        num_steps = len(loop.steps)
        for _ in range(4):  # A loop that clears its gradients before each batch.
            loop.optimizer.zero_grad()
            loop.backward_of(9.0)
            swarm.step()
        assert len(loop.steps) == num_steps + 2
        assert loop.steps[-2] == loop.steps[-1] == pytest.approx((3, 1.0, 9.0))
        assert len(loop.named("inner.cleared")) == 1


def test_a_phase_by_seconds_ends_with_a_step_of_the_rest(publish: Callable[..., str], tmp_path: Path) -> None:
    toml = RAMP.replace("rounds = 4", "rounds = 2").replace("steps = 8", "steps = 8\nseconds = 1.0")
    loop = Ramp(publish(toml), tmp_path)
    num_batches = {1: 0, 2: 0}
    with loop.swarm as swarm:
        while not swarm.finished:
            num_batches[swarm.round + 1] += 1
            loop.backward_of(3.0)
            if swarm.step().averaged:
                assert loop.model.weight.grad is None
    assert swarm.round == 2
    whole, rest = divmod(num_batches[2], 4)
    rates = [rate for round_, rate, _ in loop.steps if round_ == 2]
    assert rates == pytest.approx([2.0] * whole + [math.sqrt(rest)] * bool(rest))
    assert {gradient for _, _, gradient in loop.steps} == {3.0}


def test_a_loop_that_makes_its_own_steps_says_of_how_many_batches(publish: Callable[..., str], tmp_path: Path) -> None:
    loop, told = Loop(publish(RAMP), tmp_path), list[int]()
    with loop.swarm as swarm:
        (warned,) = loop.named("inner.own_optimizer")
        assert "its ramp (to 8, see swarm.accumulate) do not apply" in str(warned["reason"])
        while not swarm.finished:
            told.append(swarm.accumulate)
            loop.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            report = swarm.after_step(tokens=5 * told[-1], batches=told[-1])
    assert told == [1] * 8 + [2] * 4 + [4] * 2 + [8]
    assert report.step == 32
    assert [(event["steps"], event["tokens"]) for event in loop.named("phase.end")] == [(8, 40)] * 4
