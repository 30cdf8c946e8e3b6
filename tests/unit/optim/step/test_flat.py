"""Parameters to the flat vector and back: order, padding, ties, dtypes, and refusals."""

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flockstep.collectives.vector.codec import CELL, MAX_CONTRIBUTED, FlatSum, FlatVector, codec_named, round_into
from flockstep.dht.run.layout import LayoutPin
from flockstep.dht.run.manifest import CODEC_NAMES
from flockstep.optim.models.kept import load_tensors, save_tensors
from flockstep.optim.step.flat import FlatLayout, frozen_fingerprint, unwrapped, whole_tensors
from flockstep.optim.train.swarm import tokens_in
from flockstep.peer.base.errors import UsageError
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel


class Small(nn.Module):
    """A tied pair, a transposed tie, a frozen weight, an integer buffer, bf16 next to float32, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.arange(300.0))
        self.embed = nn.Parameter(torch.randn(20, 16))
        self.unembed = self.embed
        self.transposed = nn.Parameter(self.embed.data.T)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.low = nn.Parameter(torch.randn(256).to(torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("count", torch.tensor([7]))


def test_names_are_in_order_ties_stand_once_and_tensors_start_at_cells() -> None:
    layout = FlatLayout.of(Small())
    assert [(t.name, t.start) for t in layout.tensors] == [("embed", 0), ("low", 512), ("scalar", 768), ("z", 1024)]
    assert (layout.num_cells, layout.size) == (6, 6 * CELL)


def test_another_model_than_a_manifest_pins_is_one_line_that_says_what_differs() -> None:
    layout = FlatLayout.of(Small())
    pin = layout.pin()
    assert str(pin).endswith(f"/{len(layout.tensors)}/{300 + 320 + 256 + 1}")
    pin.check(LayoutPin.parse(str(pin)))
    pin.check(LayoutPin.parse(""))
    assert layout.num_cells in pin.cells(CELL)
    with pytest.raises(UsageError, match=r"trains 22 tensors with 10,700,000 parameters, this model has 4 with 877$"):
        pin.check(LayoutPin.parse(f"{'0' * 64}/22/10700000"))
    with pytest.raises(UsageError, match="has 4 with 877, under other names or in other shapes"):
        pin.check(LayoutPin.parse(f"{'0' * 64}/4/877"))


def test_gather_writes_the_values_as_float32_and_zeros_between() -> None:
    model = Small()
    layout = FlatLayout.of(model)
    out = np.full(layout.size, np.nan, np.float32)
    layout.gather(model, out)
    assert np.array_equal(out[:320], model.embed.detach().numpy().ravel())
    assert np.array_equal(out[512:768], model.low.detach().float().numpy())
    assert out[768] == 2.5
    assert np.array_equal(out[1024:1324], np.arange(300))
    assert not out[320:512].any()
    assert not out[769:1024].any()
    assert not out[1324:].any()


def test_scatter_writes_in_place_and_leaves_the_rest_alone() -> None:
    model, other = Small(), Small()
    layout = FlatLayout.of(model)
    vector = np.empty(layout.size, np.float32)
    layout.gather(other, vector)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    layout.scatter(vector, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))
        assert parameter.data_ptr() == before[name]
        assert parameter.dtype == other.get_parameter(name).dtype
    assert model.get_buffer("count").item() == 7
    assert all(p.grad_fn is None and p.is_leaf for p in model.parameters())


def test_fingerprint_knows_names_and_shapes_but_not_values() -> None:
    def fingerprint(**sizes: tuple[int, int]) -> bytes:
        return FlatLayout.of(
            nn.ModuleDict({k: nn.Linear(*size, bias=False) for k, size in sizes.items()})
        ).pin().hash

    same = fingerprint(a=(2, 3))
    assert same == fingerprint(a=(2, 3))
    assert len({same, fingerprint(b=(2, 3)), fingerprint(a=(3, 2)), fingerprint(a=(2, 3), b=(2, 3))}) == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e10, -1e10])
def test_the_first_tensor_that_no_codec_can_write_is_named(bad: float) -> None:
    layout = FlatLayout.of(Small())
    vector = np.full(layout.size, MAX_CONTRIBUTED, np.float32)
    for name in CODEC_NAMES:  # Also where error feedback doubles it.
        codec_named(name, contributed=True).encode(2 * vector[:CELL])
    assert layout.diverged(vector) is None
    vector[1024 + 299] = bad
    assert layout.diverged(vector) == "z"
    vector[512] = bad
    assert layout.diverged(vector) == "low"


def test_models_that_cannot_be_averaged_are_refused() -> None:
    with pytest.raises(UsageError, match="no trainable"):
        FlatLayout.of(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UsageError, match="complex"):
        FlatLayout.of(nn.ParameterDict({"c": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}))


def test_steps_below_the_rounding_of_bfloat16_add_up_in_theta() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(256, dtype=torch.bfloat16))})
    layout = FlatLayout.of(model)
    theta, delta = np.full(256, 1.001, np.float32), np.empty(256, np.float32)  # Next after 1 comes 1.0078.
    layout.scatter(theta, model)
    layout.pseudo_gradient(theta, model, delta)
    assert not delta.any()
    with torch.no_grad():
        model["w"] -= 0.25
    layout.pseudo_gradient(theta, model, delta)
    assert (delta == 0.25).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pin_and_state_are_the_same_whatever_dtype_a_peers_parameters_have(dtype: torch.dtype) -> None:
    model, other = nn.Linear(30, 20).to(dtype), nn.Linear(30, 20)
    layout = FlatLayout.of(model)
    assert layout.pin() == FlatLayout.of(other).pin()
    theta, delta = np.zeros(layout.size, np.float32), np.empty(layout.size, np.float32)
    FlatLayout.of(other).gather(other, theta)
    before = theta.copy()
    layout.scatter(theta, model)
    layout.pseudo_gradient(theta, model, delta)
    assert not delta.any()  # What its parameters round is nothing that this peer has trained.
    layout.rebase(theta, model, slice(0, layout.size), layout.capture(model, slice(0, layout.size)))
    assert np.array_equal(theta, before)


class Fabric(nn.Module):
    """Holds a model as Lightning's Fabric does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = self._original_module = model

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.state_dict(*args, **options)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, checkpoint_wrapper, Fabric])
def test_wrapped_models_and_parts_have_layout_state_and_values_of_what_they_wrap(wrap: Callable[[nn.Module], Any]) -> None:
    inner = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    model = nn.Sequential(nn.Linear(3, 2), inner)
    layout, state, frozen = FlatLayout.of(model), whole_tensors(model), frozen_fingerprint(model)
    assert unwrapped(wrap(model)) is model
    part = nn.Sequential(wrap(model[0]), nn.Sequential(wrap(inner[0]), wrap(inner[1])))
    for wrapped in (wrap(model), *((part, wrap(part)) if wrap is not Fabric else ())):
        assert FlatLayout.of(wrapped) == layout
        assert frozen_fingerprint(wrapped) == frozen
        assert {name: value.tolist() for name, value in whole_tensors(wrapped).items()} == {
            name: value.tolist() for name, value in state.items()
        }
        theta = np.empty(layout.size, np.float32)
        layout.gather(wrapped, theta)
        layout.scatter(np.float32(2.0) * theta, wrapped)
        layout.rebase(theta, wrapped, slice(0, layout.size), layout.capture(wrapped, slice(0, layout.size)))
        assert torch.equal(model.get_parameter("0.weight"), state["0.weight"])


def test_an_averaged_model_is_named_since_no_optimizer_trains_it() -> None:
    with pytest.raises(UsageError, match="an AveragedModel holds an average") as refused:
        FlatLayout.of(AveragedModel(nn.Linear(2, 2)))
    assert refused.value.remedy


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]  # of torch


def untied(model: Any) -> None:
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pruned, r"0.weight, trained in shape \(4, 4\) then, is not trained"),
        (untied, r"2.weight, not trained then, is trained in shape \(4, 4\)"),
        (lambda model: model[1].requires_grad_(True), "1.bias, not trained then, is trained in"),
        (lambda model: model[0].requires_grad_(False), r"0.bias, trained in shape \(4,\) then, is not trained"),
        (lambda model: setattr(model[0], "bias", nn.Parameter(torch.zeros(5))), r"0.bias, .* is trained in shape \(5,\)"),
        (lambda model: model.append(nn.Linear(1, 1)), "3.bias, not trained then"),
    ],
)
def test_what_is_trained_otherwise_than_at_the_join_is_named(change: Callable[[nn.Sequential], None], said: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    layout = FlatLayout.of(model)
    model.bfloat16().to(torch.float32)
    layout.check_unchanged(compiled(model))
    change(model)
    with pytest.raises(UsageError, match=f"changed since it joined: {said}") as refused:
        layout.check_unchanged(model)
    assert "join anew" in refused.value.remedy


def test_frozen_fingerprint_is_of_values_whatever_their_dtype_and_of_nothing_that_is_trained() -> None:
    def base(value: float = 1.0, dtype: torch.dtype = torch.float32) -> bytes:
        model = Small()
        model.frozen.data = torch.full((3,), value, dtype=dtype)
        return frozen_fingerprint(model)

    assert base() == base(dtype=torch.bfloat16)
    assert base() != base(2.0)
    assert frozen_fingerprint(nn.Linear(2, 2)) == bytes(32)

    tied = nn.Linear(2, 2, bias=False)
    tied.alias = nn.Parameter(tied.weight.detach(), requires_grad=False)  # Of the same storage, and so trained with it.
    assert frozen_fingerprint(tied) == bytes(32)
    assert [tensor.name for tensor in FlatLayout.of(tied).tensors] == ["weight"]


def test_whole_tensors_are_all_of_a_state_each_with_memory_of_its_own(tmp_path: Path) -> None:
    model = Small()
    tensors = whole_tensors(model)
    assert sorted(tensors) == ["count", "embed", "frozen", "low", "scalar", "transposed", "unembed", "z"]
    save_tensors(tensors, tmp_path / "x.safetensors")
    fresh = Small()
    fresh.load_state_dict(load_tensors(tmp_path / "x.safetensors"))
    assert torch.equal(fresh.unembed, model.embed)
    assert sorted(whole_tensors(model, ["z", "unembed"])) == ["unembed", "z"]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 2), (4, 3, 3, 3)])
@pytest.mark.parametrize("step", [1, 2])
def test_parameters_with_any_strides_train_and_keep_them(shape: tuple[int, ...], step: int) -> None:
    def strided(requires_grad: bool) -> nn.Parameter:
        whole = torch.randn(*shape[:-1], shape[-1] * step)
        parameter = nn.Parameter(torch.empty(0), requires_grad)
        parameter.data = whole.contiguous(memory_format=torch.channels_last)[..., ::step]
        return parameter

    model = nn.Module()
    model.trained, model.frozen = strided(True), strided(False)
    before, strides, layout = model.trained.detach().clone(), model.trained.stride(), FlatLayout.of(model)
    theta, delta = (np.empty(layout.size, np.float32) for _ in range(2))
    layout.gather(model, theta)
    assert len(frozen_fingerprint(model)) == 32
    with torch.no_grad():
        model.trained.add_(1)
    layout.pseudo_gradient(theta, model, delta)
    torch.testing.assert_close(torch.from_numpy(delta[: before.numel()]), torch.full((before.numel(),), -1.0))
    layout.rebase(theta, model, slice(0, layout.size), None)
    assert torch.equal(model.trained, before)
    assert model.trained.stride() == strides


def test_an_expanded_parameter_is_refused() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.zeros(1).expand(10))
    with pytest.raises(UsageError, match="wide is expanded") as refused:
        FlatLayout.of(model)
    assert refused.value.remedy


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda it: it.to("meta")])
def test_a_frozen_parameter_without_plain_values_is_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Linear(2, 2)
    model.base = nn.Parameter(make(torch.eye(2)), requires_grad=False)
    FlatLayout.of(model)
    with pytest.raises(UsageError, match="frozen parameter base ") as refused:
        frozen_fingerprint(model)
    assert refused.value.remedy


@pytest.mark.parametrize("model", [nn.Linear(2, 2, bias=False, device="meta"), nn.LazyLinear(2, bias=False)])
def test_values_that_are_not_there_yet_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="weight has no values yet") as refused:
        FlatLayout.of(model)
    assert refused.value.remedy


def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(UsageError, match="a scripted model") as refused:
        FlatLayout.of(torch.jit.script(nn.Linear(2, 2)))
    assert refused.value.remedy


@pytest.mark.parametrize("span", [slice(0, 2 * CELL), slice(CELL, 5 * CELL), slice(2 * CELL, 6 * CELL), slice(0, 6 * CELL)])
def test_a_rebase_keeps_what_was_trained_since_the_capture(span: slice) -> None:
    torch.manual_seed(1)
    model = Small()
    layout = FlatLayout.of(model)
    start, before, after = (np.zeros(layout.size, np.float32) for _ in range(3))
    layout.gather(model, start)
    captured = layout.capture(model, span)
    with torch.no_grad():
        for parameter in (model.embed, model.low, model.scalar, model.z):
            parameter.add_(0.25)
    layout.gather(model, before)
    theta = start + np.float32(2.0)
    layout.rebase(theta, model, span, captured)
    layout.gather(model, after)
    inside = np.zeros(layout.size, bool)
    for tensor in layout.tensors:
        inside[tensor.start : tensor.stop] = True
    inside[: span.start] = inside[span.stop :] = False
    np.testing.assert_array_equal(after[~inside], before[~inside])
    np.testing.assert_allclose(after[inside], (before + 2)[inside], rtol=2**-7)  # bfloat16 has 8 bits.
    layout.rebase(theta, model, span, None)
    layout.gather(model, after)
    np.testing.assert_allclose(after[inside], theta[inside], rtol=2**-8)


@pytest.mark.parametrize("kept", [np.float32, np.uint16])
def test_the_pseudo_gradient_of_a_fragment_begins_with_its_first_element(kept: type) -> None:
    model, span = Small(), slice(CELL, 5 * CELL)
    layout = FlatLayout.of(model)
    start, whole = np.ones(layout.size, np.float32), np.empty(layout.size, np.float32)
    part: FlatVector = np.full(4 * CELL + 1, 7, kept)
    layout.pseudo_gradient(start, model, whole)
    layout.pseudo_gradient(start, model, part, span)
    wide = FlatSum([part[:-1]], 1).whole()
    rounded = whole[span] if kept is np.float32 else torch.from_numpy(whole[span]).bfloat16().float().numpy()
    np.testing.assert_array_equal(wide, rounded)
    assert part[-1] == 7
    assert layout.diverged(part[:-1], span) is None
    round_into(np.full(1, np.nan, np.float32), part[2 * CELL : 2 * CELL + 1])
    assert layout.diverged(part[:-1], span) == "scalar"
    assert layout.diverged(part[3 * CELL : -1], slice(4 * CELL, 5 * CELL)) is None


def test_the_tokens_of_any_batch_are_counted() -> None:
    tokens = torch.zeros(4, 9, dtype=torch.int64)
    for batch in (tokens, [tokens, None], {"input_ids": tokens}, UserDict(input_ids=tokens), (([tokens],),)):
        assert tokens_in(batch) == 32
    others: list[Any] = [[], {}, (), None, "text", [{}], torch.tensor(3)]
    for empty in others:
        assert tokens_in(empty) == 1
