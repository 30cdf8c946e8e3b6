"""`flockstep bench gpu`, as `scripts/test-gpu` calls it: what runs on one CUDA GPU, in at most ten minutes.

Theory of operation. Each run of `RUNS` is published on loopback, and its peers are `flockstep join` with the options under
test, real processes on one GPU. All figures are from their event logs: the speed before the first round (`device.bench`) and
in the run, the peak memory beside what `flockstep plan` computes, the loss of the later half of the phases, and the state
root after each round, which must be the same on all peers whatever their precision. What `Swarm.step` adds to an inner step
is measured on a model of its own, and `bench outer` trains eight peers in one process.

`rehearsed` runs have the same commands in a tiny size, for a processor.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ....collectives.vector.arrays import Floats
from ....collectives.vector.codec import codec_named, feedback
from ....dht.run.manifest import Manifest
from ....optim.models.needs import needs_of
from ....optim.models.registry import build_model, size_of_model
from ....optim.step.flat import FlatLayout
from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError, UsageError
from ....peer.log.telemetry import Event, log_path, read_events
from ...demo.local_run import HERE, open_run
from ...demo.processes import Processes
from ..table import table_lines, written
from ..training.batches import SIZES
from ..training.swarm import train
from .outer import baseline_of, outer_trainings

GpuRow: TypeAlias = dict[str, Any]

RUN_SECONDS = 240.0
"""The timeout of one run; all six take seven minutes on a card of 2020."""
APART = 0.005
"""How far the loss of a peer may be from that of the first one of its run, relative to it."""
CARDS = 1e9
"""Bytes of a GB in the table."""

RUN_TOML = """\
name = "test-gpu"
[model]
name = "{model}"
{options}
[data]
source = "text:{{stdlib}}"
sequence_length = {length}
batch_size = {batch}
[inner]
optimizer = "adamw"
steps = {steps}
[outer]
mode = "{mode}"
rounds = {rounds}
[admission]
min_peers = {peers}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """A run, and the options of `flockstep join` of each of its peers by its name in the table."""

    peers: Mapping[str, Sequence[str]]
    options: Mapping[str, int | str]
    """Of the model."""
    model: str = "gpt"
    length: int = 256
    batch: int = 32
    steps: int = 20
    rounds: int = 4
    mode: str = "streaming"
    rehearsal: Mapping[str, int | str] = field(default_factory=lambda: {"layers": 1, "heads": 1, "width": 16})
    """Options of the model that make it tiny."""

    def toml(self) -> str:
        """Return the run's `run.toml`."""
        options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in self.options.items())
        given = {"length": self.length, "batch": self.batch, "steps": self.steps, "mode": self.mode, "rounds": self.rounds}
        return RUN_TOML.format(model=self.model, options=options, peers=len(self.peers), **given)

    def rehearsed(self) -> "GpuRun":
        """Return the run in a tiny size, for a processor."""
        return replace(self, options={**self.options, **self.rehearsal}, length=16, batch=2, steps=4, rounds=2)

    def manifest(self) -> Manifest:
        """Return what the run pins, but for its layout."""
        return Manifest.from_toml(self.toml(), where="the run of the bench", owner="")


LLAMA = {"vocab_size": 256, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
SMALL_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
RUNS = (
    GpuRun(
        peers={
            "fp32": ("--precision", "fp32"),
            "bf16": ("--precision", "bf16"),
            "fp16, scaled loss": ("--precision", "fp16"),
            "a CPU, fp32": ("--device", "cpu", "--precision", "fp32"),
        },
        options={"size": "1m"},
        rounds=16,
        mode="blocking",
    ),
    GpuRun(peers={"25M": ()}, options={"size": "25m"}),
    GpuRun(peers={"25M, 8-bit states": ("--optimizer-8bit",)}, options={"size": "25m"}),
    GpuRun(peers={"25M, compiled": ("--compile",)}, options={"size": "25m"}),
    GpuRun(
        peers={"LoRA": (), "LoRA, base in 4 bits": ("--load-in-4bit",)},
        model="hf:llama",
        options={**LLAMA, "lora_rank": 16},
        rehearsal=SMALL_LLAMA,
        mode="blocking",
    ),
    GpuRun(peers={"150M": ()}, options={"size": "124m", "layers": 12}, length=1024, batch=16, steps=10),
)
STEP_MODEL = RUNS[-1]
"""The run for whose model the cost of `Swarm.step` is measured."""


def run_gpu(write_line: Callable[[str], None], report: Callable[[str], None], *, cpu: bool, as_json: bool) -> bool:
    """Measure everything, and write a table, or one JSON object; return whether all is as it should be.

    `report` gets lines of progress. Raises `UsageError` without a CUDA GPU, unless `cpu` asks for the rehearsal.
    """
    if not cpu and not torch.cuda.is_available():
        raise UsageError(
            "torch finds no CUDA GPU here to try precisions, 8-bit states, a base in 4 bits, --compile and memory on",
            remedy="--cpu tries the same commands on the processor, in a tiny size",
        )
    device, began, rows = "cpu" if cpu else "cuda", time.monotonic(), list[GpuRow]()
    for run in RUNS:
        report(f"{time.monotonic() - began:5.0f} s  join: {', '.join(run.peers)}")
        rows += joined_rows(run.rehearsed() if cpu else run, device)
    report(f"{time.monotonic() - began:5.0f} s  Swarm.step, and bench outer")
    steps = step_costs(STEP_MODEL.rehearsed() if cpu else STEP_MODEL, device)
    outer = outer_losses("tiny" if cpu else "10m", device)
    result = {
        "device": "cpu" if cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "joins": rows,
        "step": steps,
        "outer": outer,
        "seconds": round(time.monotonic() - began),
    }
    for line in [json.dumps(result)] if as_json else gpu_lines(result):
        write_line(line)
    return not any(row["reason"] for row in rows)


def joined_rows(run: GpuRun, device: str) -> list[GpuRow]:
    """Return a row for each peer of a run, also of one that failed."""
    try:
        with tempfile.TemporaryDirectory(prefix="flockstep-gpu-") as folder:
            return rows_of(run, joined(run, device, Path(folder)))
    except LocalError as error:
        return [{**dict.fromkeys(ROW), "peer": name, "reason": str(error)} for name in run.peers]


def arguments(link: str, home: Path, device: str, options: Sequence[str]) -> list[str]:
    """Return the arguments of a peer's `flockstep join`; its options override the device."""
    return ["join", link, "--home", str(home), *HERE, "--yes", "--device", device, *options]


def joined(run: GpuRun, device: str, folder: Path) -> dict[str, list[Event]]:
    """Let all peers train a run to its end, and return the events of each. Raises `LocalError`."""
    toml, events = folder / "run.toml", dict[str, list[Event]]()
    write_whole(toml, run.toml().encode())
    with Processes() as processes:
        _, link = open_run(processes, toml)
        homes = {name: folder / f"peer{number}" for number, name in enumerate(run.peers)}
        started = {
            name: processes.start(name, arguments(link, homes[name], device, options), homes[name] / "log.txt")
            for name, options in run.peers.items()
        }
        deadline = time.monotonic() + RUN_SECONDS
        for name, process in started.items():
            process.stop(deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise LocalError(f"{name}: not all rounds were done after {RUN_SECONDS:g} s")
            if process.code:
                raise process.died()
            events[name] = [event for _, event in read_events(log_path(homes[name]))]
    return events


ROW = ("peer", "rounds", "loss", "apart", "tokens_per_s_alone", "tokens_per_s", "peak_bytes", "planned_bytes", "reason")
"""The fields of a row, None where a run failed: loss in nats, `apart` relative to the run's first peer."""


def rows_of(run: GpuRun, events: Mapping[str, Sequence[Event]]) -> list[GpuRow]:
    """Return the figures of each peer from its events, and what is wrong with it as its reason."""
    size = size_of_model(run.model, run.manifest().model.options)
    roots: dict[int, set[object]] = {}
    for event in (event for those in events.values() for event in those if event["event"] == "round.done"):
        roots.setdefault(int(str(event["round"])), set()).add(event["root"])
    rows: list[GpuRow] = []
    for name, those in events.items():
        phases = [event for event in those if event["event"] == "phase.end"]
        later, benches = phases[len(phases) // 2 :], [event for event in those if event["event"] == "device.bench"]
        if not later or not benches:
            rows.append({**dict.fromkeys(ROW), "peer": name, "reason": "it ended no phase"})
            continue
        weights = [_number(event, "tokens") for event in later]
        loss = float(np.average([_number(event, "loss") for event in later], weights=weights))
        seconds = _number(phases[-1], "time") - _number(phases[0], "time")
        apart = loss / rows[0]["loss"] - 1 if rows and rows[0]["loss"] else 0.0
        failed = [event for event in those if event["event"] == "device.uncompiled"]
        troubles = [
            *(["state roots differ"] if any(len(found) > 1 for found in roots.values()) else []),
            *([f"its loss is {apart:+.2%} apart"] if abs(apart) > APART and run.rounds > 2 else []),
            *(f"not compiled: {event['reason']}" for event in failed),
        ]
        rows.append(
            {
                "peer": name,
                "rounds": len(roots),
                "loss": round(loss, 4),
                "apart": round(apart, 5),
                "tokens_per_s_alone": round(_number(benches[-1], "tokens_per_s")),
                "tokens_per_s": round(sum(_number(event, "tokens") for event in phases[1:]) / seconds) if seconds else None,
                "peak_bytes": round(_number(benches[-1], "memory_used")) or None,
                "planned_bytes": None if size is None else needs_of(run.manifest(), size).training,
                "reason": "; ".join(troubles),
            }
        )
    return rows


def _number(event: Event, name: str) -> float:
    return float(str(event[name]))


def step_costs(run: GpuRun, device: str) -> dict[str, Any]:
    """Return the milliseconds that a fragment costs beside an inner step, and whether each part makes the GPU wait.

    `capture` copies its parameters, `delta` brings Δ to the processor, `rebase` takes a result; all three are in
    `Swarm.step`. `feedback` is Δ's encoding and what it leaves out, in the network process, beside further steps. The GPU
    waits if a call returns only after the kernels that were queued before it.
    """
    manifest = run.manifest()
    model = build_model(run.model, manifest.model.options, seed=0).to(device)
    layout, codec = FlatLayout.of(model), codec_named(manifest.codec.contribution)
    theta: Floats = np.zeros(layout.size, np.float32)
    layout.gather(model, theta)
    span = slice(0, layout.num_cells // manifest.outer.fragments * (layout.size // layout.num_cells))
    x, residual = np.zeros((2, span.stop), np.float32)
    captured = layout.capture(model, span)

    def fed_back() -> None:
        feedback(x, codec, codec.encode(x), residual)

    found: dict[str, Any] = {"params": sum(parameter.numel() for parameter in model.parameters()), "cells": span.stop}
    for name, part in (
        ("capture", lambda: layout.capture(model, span)),
        ("delta", lambda: layout.pseudo_gradient(theta, model, x, span)),
        ("rebase", lambda: layout.rebase(theta, model, span, captured)),
        ("feedback", fed_back),
    ):
        part()  # The first call allocates.
        times = [_milliseconds(part, device) for _ in range(5)]
        found[f"{name}_ms"] = round(statistics.median(times), 2)
        found[f"{name}_waits"] = device != "cpu" and name != "feedback" and _waits(part)
    return found


def _milliseconds(part: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    part()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def _waits(part: Callable[[], object]) -> bool:
    """Return True if a call returns only once what was queued on the GPU before it is done."""
    matrix, queued = torch.randn(4096, 4096, device="cuda"), torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(50):  # 7 · 10¹² operations: a tenth of a second and more.
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    queued.record()
    part()
    is_done: bool = queued.query()  # type: ignore[no-untyped-call]  # of torch, as above
    torch.cuda.synchronize()
    return is_done


def outer_losses(size: str, device: str) -> dict[str, Any]:
    """Return what a short `flockstep bench outer --peers 8` finds, beside data parallel."""
    given = SIZES[size]
    trainings = outer_trainings(
        modes=["blocking"],
        codecs=["int4"],
        delays=["0"],
        fragments=1,
        outer=["0.9/0.8"],
        ramps=["1"],
        peers=["8"],
        seeds=["0"],
        rates=["1"],
        size=size,
        optimizer="",
        steps=min(given.steps, 20),
        rounds=4,
        baseline=True,
        device=device,
    )
    began, results = time.monotonic(), {training: train(training) for training in trainings}
    case = trainings[-1]
    return {
        "size": size,
        "loss": round(results[case].loss, 4),
        "parallel_loss": round(results[baseline_of(case)].loss, 4),
        "tokens_per_s": round(2 * case.tokens / (time.monotonic() - began)),
    }


def gpu_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of all rows, and what follows."""
    rows = [
        [
            *(row["peer"], row["rounds"] or "", written(row["loss"], ".3f"), written(row["apart"], "+.2%")),
            *(written(row["tokens_per_s_alone"], ",.0f"), written(row["tokens_per_s"], ",.0f")),
            *(written(_of(row[name], CARDS), ".2f") for name in ("peak_bytes", "planned_bytes")),
            row["reason"] or "ok",
        ]
        for row in result["joins"]
    ]
    headings = ("join", "rounds", "loss", "apart", "tokens/s", "in the run", "peak GB", "planned", "result")
    yield from table_lines(f"{result['device']}, torch {result['torch']}, {result['seconds']} s", headings, rows)
    yield "tokens/s: before the first round. planned: weights, gradients and moments, as `flockstep plan` has them."
    step = result["step"]
    parts = [
        f"{name} {step[f'{name}_ms']:.2f} ms" + (" (the GPU waits)" if step[f"{name}_waits"] else "")
        for name in ("capture", "delta", "rebase", "feedback")
    ]
    yield f"A fragment of {step['cells'] / 1e6:.1f}M of {step['params'] / 1e6:.0f}M parameters: {', '.join(parts)}"
    outer = result["outer"]
    losses = f"loss {outer['loss']:.3f}, data parallel {outer['parallel_loss']:.3f}"
    yield f"bench outer --size {outer['size']} --peers 8: {losses}, {outer['tokens_per_s']:,} tokens/s"


def _of(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
