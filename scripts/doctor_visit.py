"""The part of `flockstep doctor` that needs flockstep's packages: the network and torch, side by side, until a deadline."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from ..dht.runs import JoinLink, Manifest, SignedManifest
from ..optim import room
from ..optim.needs import (
    Memory,
    ModelSize,
    Needs,
    disk_trouble,
    gigabytes,
    memory_trouble,
    needs_of,
    round_bytes,
)
from ..peer.background import background
from ..peer.config import PeerConfig
from ..peer.errors import sole_error
from ..peer.troubles import LINE_SLOW, Trouble, duration
from .doctor import Sheet
from .doctor_machine import folder_trouble
from .doctor_network import NetworkVisit, Rates

LAST_SECONDS = 2.0
"""What this computer has, and what the run needs, is told in these even where the network is all silence."""


def visit(link_text: str | None, config: PeerConfig, sheet: Sheet, seconds: float) -> None:
    """Fill the sheet in, within so many seconds. Raises `UsageError` for what is no link."""
    link = JoinLink.parse(link_text) if link_text is not None else None

    async def main() -> None:
        with trio.move_on_after(seconds):
            async with background() as nursery:
                await _Visit(link, config, sheet, nursery).run(seconds)
        sheet.close()

    try:
        trio.run(main)
    except BaseExceptionGroup as error:
        raise sole_error(error) from None


class _Visit:
    """One examination."""

    def __init__(self, link: JoinLink | None, config: PeerConfig, sheet: Sheet, nursery: trio.Nursery) -> None:
        self._link = link
        self._config = config
        self._sheet = sheet
        self._nursery = nursery
        self._torch: trio.Process | None = None

    async def run(self, seconds: float) -> None:
        """Fill the sheet in, the network's part in less than so many seconds."""
        sheet = self._sheet
        if self._link is not None:
            sheet.expect("line and run")
        sheet.expect("torch", "device", "memory", "disk")
        self._torch = await self._start_torch()
        lines = self._lines()
        described: list[dict[str, Any]] = []
        described_now = trio.Event()

        async def describe() -> None:
            described.append(await self._describe_torch(lines))
            described_now.set()

        self._nursery.start_soon(describe)
        if self._link is None:
            self._tell_room(None, None)
        network = NetworkVisit(self._link, self._config, sheet)
        with trio.move_on_after(seconds - LAST_SECONDS):
            await network.run()
        signed = network.signed
        await described_now.wait()
        if self._link is not None:
            size = await self._size(lines, signed) if signed and described[0].get("torch") else None
            needs = needs_of(signed.manifest, size) if signed and size else None
            own = described[0].get("memory")
            self._tell_room(needs, Memory(*own) if own else None)
            self._tell_line(signed.manifest if signed else None, size, network.rates)

    async def _start_torch(self) -> trio.Process:
        command = [sys.executable, "-P", "-m", f"{__package__}.doctor_torch", self._config.device]
        process: trio.Process = await self._nursery.start(
            partial(
                trio.run_process,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
                deliver_cancel=_kill,
            )
        )
        return process

    def _lines(self) -> Callable[[], Awaitable[dict[str, Any] | None]]:
        """What the process says next; None once it has ended."""
        assert self._torch is not None
        out = self._torch.stdout
        assert out is not None
        buffer = bytearray()

        async def next_line() -> dict[str, Any] | None:
            while b"\n" not in buffer:
                if not (data := await out.receive_some()):
                    return None
                buffer.extend(data)
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            words: dict[str, Any] = json.loads(line)
            return words

        return next_line

    async def _describe_torch(self, lines: Callable[[], Awaitable[dict[str, Any] | None]]) -> dict[str, Any]:
        sheet, words = self._sheet, await lines()
        if words is None or not words["torch"]:
            cause = words["cause"] if words else "it crashes when it is loaded"
            remedy = words["remedy"] if words else "install another build of torch: pytorch.org"
            sheet.failed("torch", Trouble(f"torch does not work: {cause}", remedy))
            sheet.skipped("device", "torch would find it")
            return {}
        sheet.passed("torch", words["torch"])
        if words["device"]:
            memory = f", {gigabytes(words['memory'][1])} free" if words["memory"] else ""
            sheet.passed("device", f"{words['device']} ({words['title']}{memory})")
        else:
            sheet.failed("device", Trouble(words["cause"], words["remedy"]))
        return words

    async def _size(
        self, lines: Callable[[], Awaitable[dict[str, Any] | None]], signed: SignedManifest
    ) -> ModelSize | None:
        assert self._torch is not None
        assert self._torch.stdin is not None
        await self._torch.stdin.send_all(signed.publishable.hex().encode() + b"\n")
        words = await lines()
        if words and "trained" in words:
            return ModelSize(words["trained"], words["weights"])
        if words and "cause" in words:
            self._sheet.failed("model", Trouble(words["cause"], words["remedy"]))
        return None

    def _tell_room(self, needs: Needs | None, device: Memory | None) -> None:
        self._tell_memory(needs, device)
        self._tell_disk(needs)

    def _tell_memory(self, needs: Needs | None, device: Memory | None) -> None:
        memory = room.memory()
        if memory is None:
            self._sheet.skipped("memory", "this system does not tell")
            return
        if needs is not None and (trouble := memory_trouble(needs, memory, device)):
            self._sheet.failed("memory", trouble)
            return
        found = f"{gigabytes(memory.free)} of {gigabytes(memory.total)} free"
        if needs is not None:
            needed = needs.memory + (0 if device else needs.training)
            found += f", the run needs {gigabytes(needed)} and what its batches take"
        self._sheet.passed("memory", found)

    def _tell_disk(self, needs: Needs | None) -> None:
        home = self._config.home
        folder = home / "runs" / self._link.run_id if self._link else home
        try:
            there, free, present = room.existing(home), room.disk_free(folder), room.size_on_disk(folder)
        except OSError as error:
            self._sheet.failed("disk", Trouble(f"cannot look at {home}: {error.strerror}", "name another folder with --home"))
            return
        trouble = folder_trouble(home, there, free)
        if trouble is None and needs is not None:
            trouble = disk_trouble(needs, free=free, present=present, folder=str(home))
        if trouble is not None:
            self._sheet.failed("disk", trouble)
        else:
            need = f", the run needs {gigabytes(needs.disk)}" if needs else ""
            self._sheet.passed("disk", f"{gigabytes(free)} free for {home}{need}")

    def _tell_line(self, manifest: Manifest | None, size: ModelSize | None, rates: Rates | None) -> None:
        if manifest is None or size is None or rates is None:
            self._sheet.skipped("line and run", "needs the size of the run's model and a measured line")
            return
        moved, most = round_bytes(manifest, size), manifest.timing.ceiling
        seconds = moved / min(rates.up, rates.down)
        words = f"a round moves {gigabytes(moved)} each way, on this line in {duration(seconds)} of {duration(most)} at most"
        if seconds <= most:
            self._sheet.passed("line and run", words)
        else:
            self._sheet.failed("line and run", LINE_SLOW.with_details(words))


async def _kill(process: trio.Process) -> None:
    process.kill()
