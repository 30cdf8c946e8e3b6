"""What fits a device, by measurement: more samples at once as long as they are faster, in a time that ends."""

from dataclasses import replace

import pytest
import torch
from flockstep import PeerConfig
from flockstep.dht.run.manifest import Inner, Manifest
from flockstep.optim.models.needs import ModelSize, hours_of
from flockstep.optim.train.trainer import ForwardPass
from flockstep.scripts.doctor import fit
from flockstep.scripts.doctor.fit import Fit, fits
from flockstep.scripts.doctor.sheet import Sheet
from flockstep.scripts.doctor.visit import check_fit
from torch import Tensor, nn

CPU = torch.device("cpu")
TINY = Manifest.from_toml(
    """
    name = "tiny"
    [model]
    layers = 1
    heads = 1
    width = 8
    vocab_size = 16
    context = 16
    [data]
    source = "text:{stdlib}"
    sequence_length = 10
    batch_size = 8
    """,
    where="run.toml",
    owner="12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
)


class Device:
    """A device on which passes take what a table says, and whose clock stands still between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.now, self.seconds, self.passes = 0.0, seconds, list[int]()

        class Timed(ForwardPass):
            def loss(_, model: nn.Module, tokens: Tensor) -> Tensor:
                if len(tokens) not in self.seconds:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self.now += self.seconds[len(tokens)]
                self.passes.append(len(tokens))
                return ForwardPass.loss(_, model, tokens)

        monkeypatch.setattr(fit, "ForwardPass", Timed)

    def fits(self, seconds: float = 1000.0) -> list[Fit]:
        return list(fits(TINY, CPU, PeerConfig(), seconds, lambda: self.now))


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, [Fit(1, 10.0), Fit(2, 20.0), Fit(4, 40.0), Fit(8, 80.0)]),
        ({1: 1.0, 2: 1.0, 4: 2.0}, [Fit(1, 10.0), Fit(2, 20.0)]),  # Four take as long as two by two.
        ({1: 1.0, 2: 1.0}, [Fit(1, 10.0), Fit(2, 20.0)]),  # No memory for four.
        ({}, []),
    ],
)
def test_the_most_samples_that_are_faster_and_have_room(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], found: list[Fit]
) -> None:
    device = Device(monkeypatch, seconds)
    assert device.fits() == found
    assert all(device.passes.count(size) == 2 for size in seconds)


def test_a_slow_device_is_measured_by_one_pass_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, dict.fromkeys((1, 2, 4, 8), 60.0))
    assert device.fits(3.0) == [Fit(1, 80 / (8 * 60))]
    assert device.passes == [1]


def test_the_hours_of_a_run_follow_from_its_steps_or_from_its_seconds() -> None:
    by_steps = replace(TINY, inner=Inner(steps=90))
    assert hours_of(by_steps, 5, 10.0) == 5 * 90 * 80 / 10.0 / 3600
    assert hours_of(replace(TINY, inner=Inner(seconds=600.0)), 6, 10.0) == 1.0


def test_the_doctor_says_in_one_line_what_fits() -> None:
    lines: list[str] = []
    sheet = Sheet(lines.append, as_json=False)
    check_fit(
        sheet, TINY, ModelSize(25_000_000, 100_000_000), {"samples": 4, "precision": "fp16", "tokens_per_s": 1234.5}
    )
    check_fit(sheet, TINY, ModelSize(25_000_000, 100_000_000), {})
    hours = hours_of(TINY, TINY.num_rounds, 1234.5)
    assert "gpt of 25.0 M parameters, 4 of 8 samples at once in fp16: 1,234 tokens/s" in lines[0]
    assert f"take {hours:,.1f} h here, beside the programs that run now" in lines[0]
    assert "– fits" in lines[1]
    assert sheet.healthy
