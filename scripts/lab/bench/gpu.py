"""`flockstep bench gpu`, as `scripts/test-gpu` calls it: what runs on one CUDA GPU, in at most ten minutes.

Theory of operation. Each run of `RUNS` is published on loopback, and its peers are `flockstep join` with the options under
test, real processes on one GPU. All figures are from their event logs: the speed before the first round (`device.bench`) and
in the run, the peak memory beside what `flockstep plan` computes, the loss of the later half of the phases, and the state
root after each round, which must be the same on all peers whatever their precision.

`rehearsed` runs have the same commands in a tiny size, for a processor.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ....dht.run.manifest import Manifest
from ....optim.models.needs import needs_of
from ....optim.models.registry import size_of_model
from ....peer.base.disk import write_whole
from ....peer.base.errors import LocalError, UsageError
from ....peer.log.telemetry import Event, log_path, read_events
from ...demo.local_run import HERE, open_run
from ...demo.processes import Processes
from ..table import table_lines, written

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
    result = {
        "device": "cpu" if cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "joins": rows,
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


def _of(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
