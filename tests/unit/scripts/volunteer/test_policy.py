"""What a peer does when its user is back, on a battery, or where the GPU gets hot or draws too much."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.scripts.volunteer.availability import WATCH_PERIOD, Availability, shift
from flockstep.scripts.volunteer.gpu import Gpu, GpuReading
from flockstep.scripts.volunteer.idle import CALM_SECONDS
from flockstep.scripts.volunteer.policy import COOLER, MOST_REST_SECONDS, WATTS_SECONDS, Policy, Readings, Verdict


class Clock:
    """A policy, and readings twice a second."""

    def __init__(self, **settings: Any) -> None:
        self.policy = Policy(**settings)
        self.now = 0.0

    def after(self, seconds: float, **readings: Any) -> Verdict:
        verdict = Verdict()
        end = self.now + seconds
        while self.now < end:
            self.now += WATCH_PERIOD
            verdict = self.policy.judge(self.now, Readings(**readings))
        return verdict


def test_a_game_sends_the_peer_away_within_a_second_and_it_comes_back_when_the_game_is_over() -> None:
    clock = Clock(when_idle=True)
    assert clock.after(60, gpu=0.02) == Verdict()
    assert "other programs use the GPU" in clock.after(1.0, gpu=0.9).away
    assert clock.after(CALM_SECONDS - 10, gpu=0.0).away  # A menu, a loading screen.
    assert clock.after(20, gpu=0.02) == Verdict()


def test_a_window_that_is_moved_sends_nobody_away() -> None:
    clock = Clock(when_idle=True)
    clock.after(60, gpu=0.0)
    assert clock.after(WATCH_PERIOD, gpu=0.4) == Verdict()
    assert clock.after(60, gpu=0.0) == Verdict()


def test_what_uses_the_gpu_is_no_matter_without_when_idle() -> None:
    assert Clock().after(60, gpu=1.0, processors=1.0, on_battery=True, celsius=99, watts=999) == Verdict()


def test_a_peer_waits_for_the_mains() -> None:
    clock = Clock(when_idle=True)
    assert "battery" in clock.after(WATCH_PERIOD, on_battery=True).away
    assert clock.after(WATCH_PERIOD) == Verdict()


def test_a_hot_gpu_rests_until_it_is_cooler_and_one_that_stays_hot_leaves() -> None:
    clock = Clock(max_temp=75.0)
    assert clock.after(60, celsius=75) == Verdict()
    verdict = clock.after(WATCH_PERIOD, celsius=76)
    assert verdict == Verdict(rest="the GPU has 76 °C, of 75 at most")
    assert clock.after(10, celsius=75 - COOLER + 1).rest
    assert clock.after(WATCH_PERIOD, celsius=75 - COOLER) == Verdict()
    assert clock.after(MOST_REST_SECONDS, celsius=90).away == ""
    assert "90 °C" in clock.after(WATCH_PERIOD, celsius=90).away
    assert clock.after(WATCH_PERIOD, celsius=60) == Verdict()


def test_rests_keep_the_average_power_at_the_limit() -> None:
    policy, drawn, now = Policy(max_watts=150.0), list[float](), 0.0
    watts = 30.0
    for _ in range(1000):
        now += WATCH_PERIOD
        verdict = policy.judge(now, Readings(watts=watts))
        assert not verdict.away
        watts = 30.0 if verdict.rest else 300.0
        drawn.append(watts)
    settled = drawn[int(10 * WATTS_SECONDS) :]
    assert 130 < sum(settled) / len(settled) <= 155


def test_a_limit_below_what_an_idle_gpu_draws_sends_the_peer_away() -> None:
    clock = Clock(max_watts=20.0)
    assert "draws 30 W, of 20 at most" in clock.after(MOST_REST_SECONDS + 1, watts=30.0).away


def test_a_shift_ends_or_rests_by_what_the_gpu_says(tmp_path: Path) -> None:
    reading, noted, stop = GpuReading(None, 80.0, None), list[tuple[str, str]](), threading.Event()
    policy = Policy(when_idle=True, max_temp=75.0)
    availability = Availability(
        *(tmp_path, None, policy),
        load=lambda: 0.0,
        battery=lambda: False,
        gpu=lambda: reading,
        note=lambda *it: noted.append(it),
    )
    now, times = 0.0, threading.Semaphore(0)

    def clock() -> float:
        nonlocal now
        now += WATCH_PERIOD
        times.release()
        return now

    availability.clock = clock
    with shift(availability, stop) as running:
        assert all(times.acquire(timeout=30) for _ in range(2))
        assert "80 °C" in running.resting
        reading = GpuReading(1.0, 50.0, None)
        assert "80 °C" in running.rest()
        assert running.over.wait(30)
        assert "other programs use the GPU" in running.reason
    assert [event for event, _ in noted] == ["device.unseen"]


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({6: "Not Found", 3: "Not Supported"}.get(value, "Success"))
        self.value = value


class Driver:
    """A driver's library, as nvidia-ml-py has it, with one GPU and the samples of its processes."""

    NVMLError, NVML_TEMPERATURE_GPU, NVML_SUCCESS, NVML_ERROR_NOT_FOUND = NVMLError, 0, 0, 6

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int]] = [(7, 1, 80)]
        """Of each: the process, the time in µs, the share in per cent."""
        self.listed = [1]
        self.fails = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-right":
            raise NVMLError(6)
        return uuid

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise NVMLError(3)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.listed]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:
        new = [SimpleNamespace(pid=pid, timeStamp=at, smUtil=share) for pid, at, share in self.samples if at > since]
        if not new or self.fails:
            raise NVMLError(self.fails or (6 if since else 0))
        return new


def test_the_gpus_reader_leaves_out_what_this_process_uses_and_what_was_before() -> None:
    driver = Driver()
    driver.samples, before = [], driver.samples
    assert Gpu(driver, "right", 1).read(holds_memory=True).others == 0.0
    driver.samples = before
    gpu = Gpu(driver, "right", 1)
    assert gpu.read(holds_memory=True) == GpuReading(0.0, 61, None)
    driver.samples += [(1, 5, 90), (8, 5, 20), (9, 4, 70), (9, 5, 10)]
    assert gpu.read(holds_memory=True).others == 0.3
    assert gpu.read(holds_memory=True).others == 0.0
    driver.listed = [4711]  # As in a container, where the driver's ids are those outside.
    driver.samples += [(4711, 6, 90)]
    assert gpu.read(holds_memory=True).others is None
    assert gpu.read(holds_memory=False).others == 0.9
    driver.samples += [(4711, 7, 90)]
    driver.fails = 3
    assert gpu.read(holds_memory=False).others is None


def test_a_gpu_that_the_driver_does_not_show_is_one_line_with_the_remedy() -> None:
    with pytest.raises(LocalError, match="the driver does not show this GPU: Not Found") as raised:
        Gpu(Driver(), "wrong", 1)
    assert "nvidia-ml-py" in raised.value.remedy


def test_the_drivers_library_has_what_is_asked_of_it_and_says_where_there_is_no_driver() -> None:
    nvml: Any = pytest.importorskip("pynvml")
    assert all(hasattr(nvml, name) for name in vars(Driver) if name.lower().startswith("nvml"))
    with pytest.raises(LocalError, match="the driver does not show this GPU"):
        Gpu(nvml, "no-such-uuid", 1)
