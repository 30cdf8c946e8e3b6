"""Runs the training of `flockstep join`: model, data and optimizer from the manifest, one loop around `Swarm`."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...dht.run.manifest import SignedManifest
from ...peer.base.config import PeerConfig
from ...peer.base.errors import FlockstepError, LocalError
from ...peer.log.telemetry import Event, Telemetry
from ..models import machine
from ..models.kept import FOLDER, save_tensors
from ..models.needs import (
    Memory,
    cannot_fit,
    check_length,
    check_vocabulary,
    disk_trouble,
    hours_of,
    memory_trouble,
    needs_of,
    num,
)
from ..models.quantized import adamw_8bit, load_bitsandbytes, quantize_base
from ..models.registry import (
    HF,
    build_model,
    check_forward,
    longest_of,
    recompute_activations,
    separates,
    size_of_model,
    training_loss,
    vocabulary_of,
)
from ..shards.opening import keep_tokenizer, open_tokens, tokenizer_of
from ..shards.packed import FromMembers
from ..shards.reader import TokenShards
from ..step.eager import AdamW
from ..step.flat import whole_tensors
from ..step.inner import build_inner
from ..step.micro_batches import MicroBatches, out_of_memory, target_share
from ..step.precision import LossScale, name_of, pass_dtype
from .device import choose_device
from .evaluating import HeldOutResult, HeldOutText, last_logits
from .ranks import ModelFunction, Ranks, launched_ranks
from .swarm import Swarm
from .threads import Threads, all_threads


@dataclass(frozen=True, slots=True)
class Summary:
    """How a membership ended: rounds behind the state, its root in hex, why it ended, and where the model was saved."""

    round: int
    root: str
    reason: str
    saved: Path | None = None


def join_run(
    link: str,
    config: PeerConfig,
    *,
    save: Path | None,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    agree: Callable[[SignedManifest, int], str],
    farewell: Callable[[], str] = lambda: "left",
    rest: Callable[[], str] = lambda: "",
) -> Summary:
    """Train as a member of a run until all of its rounds are done or `stop` is set. Raises `FlockstepError`.

    `agree` is called with another's run, as its owner has revised it, before this peer becomes a member, and with the round
    at which the run is, as far as that is known. It returns how its user agrees, or raises.
    `farewell` gives the word to the others when `stop` was set. `rest` is called before each inner step: it may wait, and
    returns why it did.
    Started by `torchrun`, all processes are one peer, each with a copy of the model (DDP) or, with `config.shard`, with
    a shard of it (FSDP2).
    """
    device = choose_device(config.device)
    if config.load_in_4bit or config.optimizer_8bit:
        load_bitsandbytes()  # Before the run hears of this peer.
    with launched_ranks(device.type) as local_rank:
        if device.type == "cuda" and local_rank is not None:
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        with Swarm(link, config=config, on_event=on_event, stop=stop) as swarm:
            # Data before the model: a wrong path fails before anything takes long. Members may have to bring them, so who
            # has no room does not wait for them.
            ask_user(swarm, agree)
            if swarm.speaks:
                check_room(swarm.signed, device, config, swarm.telemetry)
            source = open_data(swarm)
            model = build(swarm, source, device)
            inner = partial(inner_of, adamw=adamw_8bit) if config.optimizer_8bit else inner_of
            swarm.join(model if local_rank is None else spread(model, device, shard=config.shard), inner)
            if swarm.speaks:
                keep_for_export(swarm, source)
            if config.data:
                reason = "its units are shared only with peers that have the same data"
                swarm.telemetry.emit("data.own", step="share", reason=reason, name=config.data)
            train(swarm, source, device, adaptive=local_rank is None or not config.shard, rest=rest)
            if stop.is_set():
                swarm.reason = farewell()
            if save is not None:
                tensors = whole_tensors(swarm.model)
                if swarm.speaks:
                    save_tensors(tensors, save, round=str(swarm.round), state_root=swarm.root)
        return Summary(swarm.round, swarm.root, swarm.reason, save)


def ask_user(swarm: Swarm, agree: Callable[[SignedManifest, int], str]) -> None:
    """Ask whoever joins a run of somebody else. Raises `FlockstepError` where the user has not agreed."""
    if swarm.signed.manifest.owner != swarm.peer_id:
        how = swarm.from_first(lambda: agree(swarm.signed, swarm.begun))  # No rank opens what its user refuses.
        swarm.telemetry.emit("run.agreed", step="join", reason=how)


def open_data(swarm: Swarm) -> TokenShards:
    """Open the data of a run. Raises `FlockstepError`."""
    members = FromMembers(swarm.fetch_file, swarm.await_file) if swarm.speaks else None
    return swarm.in_turn(lambda: open_tokens(swarm.signed.manifest.data, swarm.config, members))


def build(swarm: Swarm, source: TokenShards, device: torch.device) -> nn.Module:
    """Build the model that a run pins, for the data of `source`, on a device. Raises `FlockstepError`."""
    signed, config = swarm.signed, swarm.config
    spec, mine = signed.manifest.model, signed.manifest.owner == swarm.peer_id
    allowed = spec.name if mine and spec.name.startswith(HF) else config.allow_model
    model = build_model(spec.name, spec.options, seed=signed.manifest.seed, allow_model=allowed)
    check_forward(model)
    check_length(signed.manifest.data.sequence_length, longest_of(model))
    check_tokenizer(model, source)
    if config.checkpoint_activations:
        recompute_activations(model)
    if config.load_in_4bit:
        quantize_base(model, device)
    return model.to(device)


def check_room(signed: SignedManifest, device: torch.device, config: PeerConfig, telemetry: Telemetry) -> None:
    """Warn if memory or disk fall short of what the run needs, as far as that is known before the model is built.

    Raises `LocalError` if the model would not fit even with nothing else in memory.
    """
    manifest, folder = signed.manifest, config.home / "runs" / signed.run_id
    size = size_of_model(manifest.model.name, manifest.model.options)
    if size is None:
        return
    needs = needs_of(manifest, size)
    if config.shard and dist.is_initialized():
        needs = replace(needs, training=needs.training // num_shards())
    try:
        free, present = machine.disk_free(folder), machine.size_on_disk(folder)
    except OSError as error:
        telemetry.emit("disk.unknown", step="join", reason=str(error))
    else:
        if trouble := disk_trouble(needs, free=free, present=present, folder=str(config.home)):
            telemetry.emit("disk.short", step="join", reason=trouble.cause, remedy=trouble.remedy)
    memory, own = machine.memory(), device_memory(device)
    if trouble := memory_trouble(needs, memory, own):
        if cannot_fit(needs, memory, own):
            raise LocalError(trouble.cause, remedy=trouble.remedy)
        telemetry.emit("memory.short", step="join", reason=trouble.cause, remedy=trouble.remedy)


def keep_for_export(swarm: Swarm, source: TokenShards) -> None:
    """Keep the tokenizer of the run's data with the parts of its model, and for other members. A failure is an event."""
    try:
        folder = swarm.config.home / "runs" / swarm.run_id / FOLDER
        keep_tokenizer(source, swarm.config.home, folder)
    except FlockstepError as error:
        swarm.telemetry.emit("model.not_kept", step="keep the tokenizer", reason=str(error))


def free_device() -> None:
    """Give back the memory of a model that is not used any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> Memory | None:
    """The memory of a device that has its own, None for others."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free)


class ForwardPass:
    """The forward pass of a model on a device, in the precision of a setting, and compiled if that is set and works."""

    def __init__(self, model: nn.Module, device: torch.device, config: PeerConfig) -> None:
        self._model = model
        self._loss_of = partial(loss_on, device, config.precision)
        self.separate = False
        """Whether the examples of a sequence are kept apart."""
        # A kernel for each size of micro-batches: there are few, and their first steps are not measured.
        self._compiled = torch.compile(model, dynamic=False) if config.compile_model else None

    def loss(self, _: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a micro-batch."""
        model = self._model if self._compiled is None else self._compiled
        return self._loss_of(separate=self.separate)(model, tokens)  # type: ignore[arg-type]  # compiled modules are typed as callables

    def gives_up_compiling(self, error: RuntimeError, telemetry: Telemetry) -> bool:
        """Return True if `error` is of a compilation, which is not tried again: the step can be repeated."""
        if self._compiled is None:
            return False
        from torch._dynamo.exc import TorchDynamoException

        if not isinstance(error, TorchDynamoException):
            return False
        self._compiled = None
        self._model.zero_grad(set_to_none=True)
        reason = str(error).strip().splitlines()[0]
        telemetry.emit("device.uncompiled", step="compile", reason=reason)
        return True


def train(
    swarm: Swarm,
    source: TokenShards,
    device: torch.device,
    *,
    adaptive: bool,
    rest: Callable[[], str] = lambda: "",
) -> None:
    """Make inner steps and rounds until the run is finished. Raises `FlockstepError`.

    `rest` may wait before a step, and returns why.
    """
    batch_size, config, now = swarm.manifest.data.batch_size, swarm.config, swarm.manifest
    forward = ForwardPass(swarm.model, device, config)
    dtype = pass_dtype(config.precision, device)
    scale = LossScale(swarm.telemetry) if dtype is torch.float16 else None
    num_trained = sum(parameter.numel() for parameter in swarm.model.parameters() if parameter.requires_grad)

    def about(tokens_per_s: float) -> Mapping[str, Any]:
        left = swarm.manifest.num_rounds - swarm.round
        hours = hours_of(swarm.manifest, left, tokens_per_s * swarm.num_ranks)
        precision, model = name_of(dtype), f"{swarm.manifest.model_name} of {num(num_trained)} parameters"
        return {"model": model, "precision": precision, "hours": round(hours, 2)}

    pieces = MicroBatches(
        swarm.model,
        forward.loss,
        swarm.telemetry,
        stopped=lambda: swarm.finished,
        about=about,
        batch_size=batch_size // swarm.num_ranks,
        size=config.micro_batch,
        adaptive=adaptive,
    )
    is_free = adaptive and device.type == "cpu" and swarm.num_ranks == 1 and not config.threads
    threads = Threads(swarm.telemetry, most=all_threads() if is_free else 1)
    forward.separate = can_separate(swarm, source)
    together = None if adaptive else Ranks()
    may_evaluate(swarm, source, device, config, separate=forward.separate, together=together)
    batches = swarm.share_of(source, batch_size=batch_size)
    has_rested = False
    while not swarm.finished:
        if (reason := rest()) and not has_rested:
            swarm.telemetry.emit("device.rests", step="train", reason=reason)
            has_rested = True
        before, now = now, swarm.manifest
        if now.eval != before.eval:
            may_evaluate(swarm, source, device, config, separate=forward.separate, together=together)
        batch = next(batches, None)
        if batch is None:  # A stop while data was waited for.
            return
        tokens = batch.to(device, non_blocking=True)
        measured, began = not pieces.is_measuring, time.perf_counter()
        factor = target_share(batch) * (1.0 if scale is None else scale.value)
        try:
            try:
                loss = pieces.backward(tokens, factor)
            except RuntimeError as error:
                if not forward.gives_up_compiling(error, swarm.telemetry):
                    raise
                loss = pieces.backward(tokens, factor)
            if loss is None:  # Its user is back, who does not wait for a step's end.
                return
            if measured:
                threads.judge(time.perf_counter() - began)
            make_step(swarm, loss, factor, scale)
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                remedy = "free its memory, try --checkpoint-activations, or shard the model over several devices"
                raise LocalError(f"{device} has no memory for {pieces.size} samples at once", remedy=remedy) from error
            raise


def make_step(swarm: Swarm, loss: torch.Tensor, factor: float, scale: LossScale | None) -> None:
    """Make an inner step, or skip it where the gradients of an fp16 loss have overflowed: its tokens count for nothing."""
    if scale is None or scale.is_clean(swarm.model):
        swarm.step(loss, scale=factor)
    else:
        swarm.after_step(loss, tokens=0)


def can_separate(swarm: Swarm, source: TokenShards) -> bool:
    """Return True if the data hold examples that the model can keep apart; one that cannot is an event."""
    if not source.has_examples or separates(swarm.model):
        return source.has_examples
    reason = f"{type(swarm.model).__name__} does not keep them apart: each sees those before it in its sequence"
    swarm.telemetry.emit("data.joined", step="train", reason=reason)
    return False


def loss_on(
    device: torch.device, precision: str = "auto", *, separate: bool = False
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return the function of the training loss on a device, in the precision of a setting (`training_loss`)."""
    dtype = pass_dtype(precision, device)

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype):
            return training_loss(model, tokens, separate=separate)

    return loss_of


def may_evaluate(
    swarm: Swarm,
    source: TokenShards,
    device: torch.device,
    config: PeerConfig,
    *,
    separate: bool,
    together: Ranks | None = None,
) -> None:
    """Have the shared model evaluated whenever this peer is drawn, if its run asks for it and this peer can.

    `together` are the ranks over which the model is sharded, all of which compute; None otherwise.
    """
    settings = swarm.manifest.eval
    swarm.evaluate_with(None)
    functions: list[ModelFunction] = [loss_on(device, separate=separate), last_logits]
    if not settings.every:
        return
    if not swarm.speaks:
        if together is not None:
            swarm.evaluate_with(lambda model, seconds: follow(together, functions, model, device))
        return
    if config.data:
        swarm.telemetry.emit("eval.skipped", step="join", reason="it trains on data of its own")
        return
    loss_of, logits_of = functions if together is None else together.led(functions)
    try:
        tokenizer = tokenizer_of(source, config.home)
        text = HeldOutText(source, tokenizer, settings.prompts, device=device, loss_of=loss_of, logits_of=logits_of)
    except FlockstepError as error:  # Others evaluate; this peer trains on all the same.
        swarm.telemetry.emit("eval.skipped", step="join", reason=str(error))
        return

    def evaluate(model: nn.Module, seconds: float) -> HeldOutResult:
        try:
            return text.evaluate(model, seconds)
        finally:
            if together is not None:
                together.release()

    swarm.evaluate_with(evaluate)


@torch.no_grad()
def follow(ranks: Ranks, functions: Sequence[ModelFunction], model: nn.Module, device: torch.device) -> None:
    """Take part in the evaluation of a sharded model that rank 0 leads."""
    ranks.follow(functions, model, device)


def spread(model: nn.Module, device: torch.device, *, shard: bool) -> nn.Module:
    """Wrap the model for all ranks of this peer: a replica on each (DDP), or a shard of every block (FSDP2).

    On several nodes each has a copy of the model, which its own ranks share (HSDP): the line between nodes is the thinner.
    """
    if not shard:
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size, shards = dist.get_world_size(), num_shards()
    shape, names = ((size // shards, shards), ("nodes", "shards")) if shards < size else ((size,), ("shards",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # Block by block, so that only one of them is gathered at any moment.
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def num_shards() -> int:
    """Return how many ranks share one copy of a sharded model: those of a node, or all where nodes have one or differ."""
    size, nodes, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return local if local > 1 and nodes * local == size else size


def check_tokenizer(model: nn.Module, source: TokenShards) -> None:
    """Raise `UsageError` for data with tokens that the model does not know."""
    check_vocabulary(source.name, source.vocab_size, vocabulary_of(model))


def inner_of(
    model: nn.Module, signed: SignedManifest, adamw: Callable[..., torch.optim.Optimizer] = AdamW
) -> list[torch.optim.Optimizer]:
    """Build the inner optimizer that the manifest pins; `adamw` makes its AdamW."""
    return build_inner(model, signed.manifest.inner, adamw)
