"""The doctor's end of `doctor_torch`: the process that loads torch, and what it says."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

import trio

from ...dht.run.manifest import SignedManifest
from ...optim.models.needs import Memory, ModelSize, gigabytes
from ...peer.troubles import Trouble
from .doctor import Sheet


class TorchProcess:
    """Torch in a process of its own, which ends with `nursery`. What it says of itself is in `found` once `said` is set."""

    def __init__(self, device: str, sheet: Sheet) -> None:
        self.said = trio.Event()
        self.found: dict[str, Any] = {}
        self._device = device
        self._sheet = sheet
        self._buffer = bytearray()

    async def start(self, nursery: trio.Nursery) -> None:
        """Start it, and tell of torch and the device as soon as it does."""
        self._sheet.expect("torch", "device")
        command = [sys.executable, "-P", "-m", f"{__package__}.doctor_torch", self._device]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        start = partial(trio.run_process, command, check=False, deliver_cancel=_kill, **pipes)
        self._process: trio.Process = await nursery.start(start)
        nursery.start_soon(self._describe)

    @property
    def memory(self) -> Memory | None:
        """The memory of the device, if it is known to have one of its own."""
        own = self.found.get("memory")
        return Memory(*own) if own else None

    async def size(self, signed: SignedManifest) -> ModelSize | None:
        """The size of a run's model, None where its weights or its own code alone would tell."""
        await self.said.wait()
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(signed.publishable.hex().encode() + b"\n")
            words = await self._line()
        except trio.BrokenResourceError:
            return None  # It has crashed, which `_describe` has told.
        if "cause" in words:
            self._sheet.failed("model", Trouble(words["cause"], words["remedy"]))
        return ModelSize(words["trained"], words["weights"]) if "trained" in words else None

    def give_up(self) -> None:
        """Say that it takes too long, which is no fault of anything that could be named."""
        for name in () if self.said.is_set() else ("torch", "device"):
            self._sheet.skipped(name, "torch is not loaded yet: a slow disk, or a busy computer")

    async def _describe(self) -> None:
        sheet, words = self._sheet, await self._line()
        self.found = words
        self.said.set()
        if not words.get("torch"):
            cause = words.get("cause", "its process died when it loaded torch")
            remedy = words.get("remedy", "install another build of torch: pytorch.org names the command for your device")
            sheet.failed("torch", Trouble(f"torch does not work: {cause}", remedy))
            sheet.skipped("device", "torch would find it")
            return
        sheet.passed("torch", words["torch"])
        if words["device"]:
            memory = f", {gigabytes(self.memory.free)} free" if self.memory else ""
            sheet.passed("device", f"{words['device']} ({words['title']}{memory})")
        else:
            sheet.failed("device", Trouble(words["cause"], words["remedy"]))

    async def _line(self) -> dict[str, Any]:
        """What it says next; nothing once it has ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not (data := await self._process.stdout.receive_some()):
                return {}
            self._buffer += data
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        words: dict[str, Any] = json.loads(line)
        return words


async def _kill(process: trio.Process) -> None:
    process.kill()
