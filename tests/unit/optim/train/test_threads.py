"""The number of threads: what the first steps try, what is chosen, and when it is tried again."""

from collections.abc import Callable

import pytest
from flockstep.optim.train.threads import SLOW_STEPS, TRIAL_PERIOD, Threads
from flockstep.peer.log.telemetry import Event, Telemetry


class Computer:
    """A computer whose steps take as long as `seconds_of` says of a number of threads."""

    def __init__(self, most: int, seconds_of: Callable[[int], float]) -> None:
        self.seconds_of, self.now, self.used, self.events = seconds_of, 0.0, most, list[Event]()
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        self.threads = Threads(telemetry, most=most, use=self.use, clock=lambda: self.now)

    def use(self, count: int) -> None:
        self.used = count

    def step(self, times: int) -> list[int]:
        """Make so many steps; returns the threads of each."""
        made = []
        for _ in range(times):
            made.append(self.used)
            seconds = self.seconds_of(self.used)
            self.now += seconds
            self.threads.judge(seconds)
        return made


@pytest.mark.parametrize(
    ("seconds_of", "tried", "chosen"),
    [
        (lambda count: 1.0 / count, {8, 4}, 8),  # Nobody else is here: half of them is enough to see it.
        (lambda count: 1.0, {8, 4, 2, 1}, 8),  # A model so small that threads do not matter: no reason for fewer.
        (lambda count: 1.0 if count == 1 else 10.0, {8, 4, 2, 1}, 1),  # Others hold most of the cores.
        (lambda count: 9.0 if count > 2 else 1.0 / count, {8, 4, 2, 1}, 2),
    ],
)
def test_the_threads_that_pay_are_found(seconds_of: Callable[[int], float], tried: set[int], chosen: int) -> None:
    computer = Computer(8, seconds_of)
    assert set(computer.step(16)) == tried
    assert computer.used == chosen
    (event,) = computer.events
    assert (event["event"], event["threads"], event["most"]) == ("device.threads", chosen, 8)
    assert f"s with {chosen}" in str(event["reason"])


def test_steps_that_have_become_slow_are_tried_again_and_a_burst_is_not() -> None:
    computer = Computer(4, lambda count: 1.0 / count)
    computer.step(8)
    assert computer.used == 4
    computer.now += TRIAL_PERIOD
    computer.seconds_of = lambda count: 1.0 if count == 1 else 8.0
    computer.step(SLOW_STEPS - 1)
    computer.seconds_of = lambda count: 1.0 / count
    assert computer.step(SLOW_STEPS) == [4] * SLOW_STEPS
    assert len(computer.events) == 1
    computer.seconds_of = lambda count: 1.0 if count == 1 else 8.0
    computer.step(SLOW_STEPS + 12)
    assert computer.used == 1
    computer.seconds_of = lambda count: 5.0
    assert set(computer.step(SLOW_STEPS + 1)) == {1}  # Not at once again.


def test_a_computer_of_one_thread_tries_nothing() -> None:
    computer = Computer(1, lambda count: 1.0)
    assert set(computer.step(100)) == {1}
    assert not computer.events
