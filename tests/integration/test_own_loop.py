"""A loop that keeps its own optimizer: its rates, its gradients, its steps, and what `Swarm` says about them."""

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
