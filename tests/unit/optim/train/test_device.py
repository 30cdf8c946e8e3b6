"""Which CUDA devices a build of torch has kernels for."""

import pytest
import torch
from flockstep.optim.train.device import choose_device, kernels_remedy, lacks_kernels
from flockstep.peer.base.errors import UsageError

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize(
    ("capability", "built_for", "lacks"),
    [
        ((7, 5), CUDA_13, False),  # T4
        ((8, 9), CUDA_13, False),  # RTX 4090: by the code for 8.6
        ((7, 0), CUDA_13, True),  # V100
        ((6, 1), CUDA_13, True),  # GTX 1080
        ((6, 1), CUDA_12_6, False),
        ((12, 0), CUDA_12_6, True),  # RTX 5090: no code of its major version, and none to compile
        ((12, 0), [*CUDA_12_6, "compute_90"], False),
        ((6, 1), [*CUDA_13, "compute_75"], True),
        ((9, 0), ["sm_90a"], False),
        ((10, 3), ["sm_100a"], True),
        ((9, 4), ["gfx90a"], False),  # AMD
        ((8, 0), [], False),
    ],
)
def test_kernels_run_on_their_major_version_and_what_is_compiled_on_all_later_ones(
    capability: tuple[int, int], built_for: list[str], lacks: bool
) -> None:
    assert lacks_kernels(capability, built_for) is lacks


def test_an_older_gpu_needs_the_wheels_for_cuda_12_6_and_a_newer_one_a_newer_torch() -> None:
    assert "whl/cu126" in kernels_remedy((7, 0))
    assert "whl/cu126" not in kernels_remedy((12, 0))


def test_a_gpu_without_kernels_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)  # Memory it would have.
    for name, value in (("capability", (7, 0)), ("name", "Tesla V100")):
        monkeypatch.setattr(torch.cuda, f"get_device_{name}", lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13)
    with pytest.raises(UsageError, match=r"no kernels for Tesla V100 \(compute capability 7.0\)") as raised:
        choose_device("cuda")
    assert "whl/cu126" in raised.value.remedy
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_12_6)
    assert choose_device("cuda").type == "cuda"


def test_a_device_that_is_not_there_is_one_line_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="cannot train on cuda:7") as raised:
        choose_device("cuda:7")
    assert raised.value.remedy
