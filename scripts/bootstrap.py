"""`flockstep bootstrap`: keeps the door open. A directory server and a relay under an identity that stays.

It trains nothing and decides nothing: who has a join link asks it where the run's members are, and members that no
one can dial are reached through it.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Any

import trio

from ..collectives.published import validate
from ..dht.directory import open_directory
from ..peer.background import background
from ..peer.config import PeerConfig
from ..peer.identity import Identity
from ..peer.libp2p_host import open_host
from ..peer.limits import BootstrapLimits
from ..peer.telemetry import Telemetry, log_path


def run_bootstrap(config: PeerConfig, say: Callable[[str], object]) -> None:
    """Serve until Ctrl-C or SIGTERM; `say` my full addresses, one a line, once the door is open."""
    telemetry = Telemetry(log_path(config.home))

    def ready(addresses: Sequence[str]) -> None:
        for address in addresses:
            say(address)

    async def until_told() -> None:
        with trio.CancelScope() as scope:
            async with background() as nursery:
                await nursery.start(_cancel_on_signal, scope)
                await keep_door(config, telemetry=telemetry, ready=ready)

    try:
        trio.run(until_told)
    finally:
        telemetry.close()


async def keep_door(config: PeerConfig, *, telemetry: Telemetry, ready: Callable[[Sequence[str]], None]) -> None:
    """Serve until cancelled; `ready` is told my addresses with `/p2p/<my id>` behind. Raises `LocalError`."""
    identity = Identity.load_or_create(config.home / "identity.key")
    async with (
        open_host(identity, config, telemetry, bootstrap=BootstrapLimits()) as host,
        open_directory(host, server=True, telemetry=telemetry, validate=validate),
    ):
        addresses = [f"{address}/p2p/{identity.peer_id}" for address in host.addresses()]
        telemetry.emit("bootstrap.ready", addresses=addresses)
        ready(addresses)
        try:
            await trio.sleep_forever()
        finally:
            telemetry.emit("bootstrap.left", reason="told to end")


async def _cancel_on_signal(scope: trio.CancelScope, *, task_status: Any) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _number in signals:
            scope.cancel()
