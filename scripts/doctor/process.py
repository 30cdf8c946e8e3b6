"""The parent's end of `torch_child`: starts the process that loads torch, reads its results."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

import trio

from ...dht.run.manifest import SignedManifest
from ...optim.models.needs import Memory, ModelSize, gigabytes
from ...peer.base.troubles import Trouble
from .sheet import Sheet


class TorchProcess:
    """Torch in a child process, which ends with `nursery`; `found` is its result once `described` is set."""

    def __init__(self, device: str, sheet: Sheet) -> None:
        self.described = trio.Event()
        self.found: dict[str, Any] = {}
        self._device = device
        self._sheet = sheet
        self._buffer = bytearray()

    async def start(self, nursery: trio.Nursery) -> None:
        """Start the process; fill in the rows of torch and device as soon as it has described them."""
        self._sheet.expect("torch", "device")
        command = [sys.executable, "-P", "-m", f"{__package__}.torch_child", self._device]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        start = partial(trio.run_process, command, check=False, deliver_cancel=_kill, **pipes)
        self._process: trio.Process = await nursery.start(start)
        nursery.start_soon(self._describe)

    @property
    def memory(self) -> Memory | None:
        """The device's own memory, if it has one and is known."""
        own = self.found.get("memory")
        return Memory(*own) if own else None

    async def size(self, signed: SignedManifest) -> ModelSize | None:
        """Return the size of a run's model; None for custom code and pretrained weights."""
        await self.described.wait()
        answer = await self._ask(signed)
        if "cause" in answer:
            self._sheet.failed("model", Trouble(answer["cause"], answer["remedy"]))
        return ModelSize(answer["trained"], answer["weights"]) if "trained" in answer else None

    async def _ask(self, signed: SignedManifest) -> dict[str, Any]:
        """Return the answer; empty if the process has crashed, which `_describe` has reported."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(signed.publishable.hex().encode() + b"\n")
        except trio.BrokenResourceError:
            return {}
        return await self._line()

    def give_up(self) -> None:
        """Skip the rows that have no result at the deadline, since a slow start has no certain cause."""
        for name in () if self.described.is_set() else ("torch", "device"):
            self._sheet.skipped(name, "torch is not loaded yet: a slow disk, or a busy computer")

    async def _describe(self) -> None:
        sheet, answer = self._sheet, await self._line()
        self.found = answer
        self.described.set()
        if not answer.get("torch"):
            cause = answer.get("cause", "its process died when it loaded torch")
            remedy = answer.get("remedy", "install another build of torch: pytorch.org names the command for your device")
            sheet.failed("torch", Trouble(f"torch does not work: {cause}", remedy))
            sheet.skipped("device", "needs torch")
            return
        sheet.passed("torch", answer["torch"])
        if answer["device"]:
            memory = f", {gigabytes(self.memory.free)} free" if self.memory else ""
            sheet.passed("device", f"{answer['device']} ({answer['title']}{memory})")
        else:
            sheet.failed("device", Trouble(answer["cause"], answer["remedy"]))

    async def _line(self) -> dict[str, Any]:
        """Read the next JSON object; empty once the process has ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not (data := await self._process.stdout.receive_some()):
                return {}
            self._buffer += data
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _kill(process: trio.Process) -> None:
    process.kill()
