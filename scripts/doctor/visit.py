"""The checks that need flockstep's packages: network and torch concurrently, to a deadline."""

import trio

from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...optim.models import machine
from ...optim.models.needs import (
    Memory,
    ModelSize,
    Needs,
    disk_trouble,
    gigabytes,
    memory_trouble,
    needs_of,
    size_of_gpt,
)
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import NetworkError, UsageError, sole_error
from ...peer.base.troubles import Trouble
from ...peer.nat.upnp import find_router
from .machine import folder_trouble
from .network import NetworkVisit
from .process import TorchProcess
from .sheet import Sheet

VISIT_LAST_SECONDS = 2.0
"""Seconds reserved for the checks of memory and disk, even if the network never answers."""


def visit_run(link_text: str | None, config: PeerConfig, sheet: Sheet, seconds: float) -> None:
    """Fill in the sheet within `seconds`. Raises `UsageError` for an invalid link."""
    link = JoinLink.parse(link_text) if link_text is not None else None

    async def main() -> None:
        torch = TorchProcess(config.device, sheet)
        deadline = trio.current_time() + seconds
        with trio.move_on_at(deadline):
            async with background() as nursery, trio.open_nursery() as beside:
                await torch.start(nursery)
                sheet.expect("UPnP")
                beside.start_soon(check_upnp, config, sheet)
                if link is None:
                    check_memory_and_disk(sheet, config, None, None, None)
                network = NetworkVisit(link, config, sheet)
                with trio.move_on_at(deadline - VISIT_LAST_SECONDS):
                    await network.run()
                if link is not None:
                    await _check_run_needs(network, torch, link, config, sheet, deadline)
                await torch.described.wait()
        torch.give_up()
        sheet.skip_rest("no router has answered yet", of="UPnP")
        sheet.close()

    try:
        trio.run(main)
    except BaseExceptionGroup as error:
        raise sole_error(error) from None


async def _check_run_needs(
    network: NetworkVisit, torch: TorchProcess, link: JoinLink, config: PeerConfig, sheet: Sheet, deadline: float
) -> None:
    """Check memory and disk against the run, as far as it and torch are known in time."""
    signed, size = network.signed, None
    with trio.move_on_at(deadline - VISIT_LAST_SECONDS / 2):
        size = await _size(signed, torch, sheet) if signed else None
        await torch.described.wait()
    needs = needs_of(signed.manifest, size) if signed and size else None
    check_memory_and_disk(sheet, config, link, needs, torch.memory if torch.described.is_set() else None)


async def _size(signed: SignedManifest, torch: TorchProcess, sheet: Sheet) -> ModelSize | None:
    model = signed.manifest.model
    if signed.manifest.is_own:
        return None
    if model.name != "gpt":
        return await torch.size(signed)
    try:
        return size_of_gpt(model.options)
    except UsageError as error:
        sheet.failed("model", Trouble(str(error), error.remedy))
        return None


async def check_upnp(config: PeerConfig, sheet: Sheet) -> None:
    """Check whether a router would open a port; none is opened."""
    if not config.upnp:
        sheet.skipped("UPnP", "switched off by --no-upnp")
        return
    if config.host.startswith("127."):
        sheet.skipped("UPnP", f"other computers cannot reach {config.host}")
        return
    try:
        outside = await find_router()
    except NetworkError as error:
        sheet.skipped("UPnP", f"{error}; it matters only where others do not get through")
        return
    if outside.is_global:
        sheet.passed("UPnP", f"the router {outside} opens a port when this peer needs one")
    else:
        sheet.skipped("UPnP", f"the router's outside address {outside} is private: a port that it opens is unreachable")


def check_memory_and_disk(
    sheet: Sheet, config: PeerConfig, link: JoinLink | None, needs: Needs | None, device: Memory | None
) -> None:
    """Check memory and disk; if the needs of the run are not known, only show what is free."""
    memory = machine.memory()
    if needs is not None and (trouble := memory_trouble(needs, memory, device)):
        sheet.failed("memory", trouble)
    elif memory is None:
        sheet.skipped("memory", "this system does not tell how much it has")
    else:
        needed = gigabytes(needs.memory + (0 if device else needs.training)) if needs else ""
        wanted = f", the run needs {needed} and what its batches take" if needs else ""
        wanted += f"; the owner of a part holds {gigabytes(needs.parts)} of it at most" if needs else ""
        sheet.passed("memory", f"{gigabytes(memory.free)} of {gigabytes(memory.total)} free{wanted}")

    home = config.home
    folder = home / "runs" / link.run_id if link else home
    try:
        there, free, present = machine.existing(home), machine.disk_free(folder), machine.size_on_disk(folder)
    except OSError as error:
        sheet.failed("disk", Trouble(f"cannot look at {home}: {error.strerror}", "name another folder with --home"))
        return
    trouble = folder_trouble(home, there, free)
    if trouble is None and needs is not None:
        trouble = disk_trouble(needs, free=free, present=present, folder=str(home))
    if trouble is not None:
        sheet.failed("disk", trouble)
    else:
        wanted = f", the run needs {gigabytes(needs.disk)}" if needs else ""
        sheet.passed("disk", f"{gigabytes(free)} free for {home}{wanted}")
