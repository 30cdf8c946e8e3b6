"""Streaming mode with real processes: training goes on while a round runs, and nothing of it is lost."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from flockstep import PeerConfig, StepReport, Swarm
from flockstep.collectives.vector.codec import CELL
from flockstep.peer.log.telemetry import Event
from support.trainers import RUN
from torch import nn

STREAMING = RUN.replace("[codec]", 'mode = "streaming"\nfragments = {fragments}\n[codec]')
SIZE = 3 * CELL + 7


class Streamer:
    """One member whose loop the test steps by hand."""

    def __init__(self, link: str, home: Path, seed: int, strike: Callable[[Event], None] | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(SIZE, 1, bias=False)
        self.events: list[Event] = []
        self.reports: list[StepReport] = []
        self._strike = strike or (lambda event: None)
        self._truth = torch.linspace(-1, 1, SIZE).reshape(1, SIZE)
        self._random = torch.Generator().manual_seed(seed)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        config = PeerConfig(home=home, host="127.0.0.1", port=0)
        self.swarm = Swarm(link, self.model, inner, config=config, on_event=self._receive)

    def _receive(self, event: Event) -> None:
        self.events.append(event)
        self._strike(event)

    def step(self) -> StepReport:
        x = torch.randn(16, SIZE, generator=self._random)
        loss = (self.model(x) - x @ self._truth.T).square().mean()
        loss.backward()
        self.reports.append(self.swarm.step(loss))
        return self.reports[-1]

    def stand(self) -> StepReport:
        """Make an inner step that moves nothing."""
        loss: Any = (0 * self.model.weight).sum()
        loss.backward()
        return self.swarm.step(loss)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


@contextlib.contextmanager
def members(*streamers: Streamer) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for streamer in streamers:
            stack.enter_context(streamer.swarm)
        yield


def test_one_thread_steps_two_members_since_neither_waits_for_a_round(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    """In blocking mode the first one to capture would wait for the other, which could not step, for ever."""
    link = publish(STREAMING.format(rounds=3, peers=2, fragments=2), "a")
    a, b = (Streamer(link, tmp_path / name, seed) for seed, name in enumerate("ab"))
    with members(a, b):
        assert torch.equal(a.model.weight, b.model.weight)
        while waiting := [streamer for streamer in (a, b) if not streamer.swarm.finished]:
            # Who has captured for a round that the other has not captured for would wait for it in the end.
            min(waiting, key=lambda streamer: (len(streamer.named("phase.end")), len(streamer.reports))).step()
    for streamer in (a, b):
        assert [event["round"] for event in streamer.named("round.done")] == list(range(1, 7))
        assert sum(report.averaged for report in streamer.reports) == 6
        assert not streamer.named("round.void")
    roots = [[event["root"] for event in streamer.named("round.done")] for streamer in (a, b)]
    assert roots[0] == roots[1]
    # At the end each model is the run's, without the steps that were trained since the last capture.
    assert torch.equal(a.model.weight, b.model.weight)


def test_training_goes_on_without_a_result_until_the_same_fragment_is_due_again(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    link = publish(STREAMING.format(rounds=1, peers=2, fragments=2), "a")
    seen: list[int] = []

    def catch_up(event: Event) -> None:
        """The other one captures its fragment only when the first one waits for it."""
        if event["event"] in ("phase.end", "round.overdue") and len(seen) < 2:
            seen.append(a.swarm._steps)
            while event["event"] == "round.overdue" and not b.named("phase.end"):
                b.step()

    a, b = Streamer(link, tmp_path / "a", 0, catch_up), Streamer(link, tmp_path / "b", 1)
    with members(a, b):
        while not a.named("round.done"):
            a.step()
        assert seen[1] - seen[0] == a.swarm.manifest.inner.steps
        assert a.named("round.done")[0]["round"] == 1
        (thin,) = a.named("line.thin")
        assert "H becomes" in str(thin["reason"])
        assert "[inner] steps = " in str(thin["remedy"])
        assert a.reports[-1].averaged


def test_a_round_leaves_the_other_fragments_and_the_steps_since_the_capture_alone(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    link = publish(STREAMING.format(rounds=2, peers=1, fragments=2))
    alone = Streamer(link, tmp_path, 0)
    with members(alone):
        theta = alone.swarm._first.vectors.theta
        weights = alone.model.weight.detach().reshape(-1)
        while not alone.named("phase.end"):
            alone.step()
        captured, before = weights.clone(), theta.copy()
        while not alone.swarm._first._round_is_over:
            pass
        moved = torch.linspace(0, 1e-3, SIZE)
        weights += moved
        assert alone.stand().averaged
        half = 2 * CELL
        step = torch.from_numpy(theta - before)[:SIZE]
        assert step[:half].abs().max() > 0
        assert not step[half:].any()
        expected = captured + moved
        expected[:half] = torch.from_numpy(theta)[:half] + moved[:half]
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)

