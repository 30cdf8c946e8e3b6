"""`flockstep bootstrap`: runs a bootstrap, a directory server and a relay under a lasting identity.

It trains nothing and decides nothing. A peer with a join link asks it where the run's members are, and members that
others cannot dial are reached through it. It follows the heads of its runs by their certificates, and names them to
newcomers. The records that it received are kept in `<home>/directory`, so that it may be killed and restarted at any
time. Several bootstraps know each other by `via`: each stays connected to the others, and names them to peers that
ask.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ...collectives.chain.head import RunValues
from ...collectives.light.follower import Follower
from ...collectives.light.marks import Mark
from ...collectives.light.run_list import RunLists
from ...collectives.spec import charter_of
from ...dht.directory.kademlia import KademliaDirectory
from ...dht.directory.server import DirectoryHost
from ...dht.directory.store import Store
from ...dht.keys import run_key
from ...dht.rendezvous import open_bootstrap_host
from ...dht.run.admission import Charter
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...peer.address import split_p2p
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import ConnectFailed, FlockstepError, LocalError, UsageError, sole_error
from ...peer.base.home_lock import home_lock
from ...peer.base.transport import Address, PeerId
from ...peer.bootstrap.server import BootstrapServer
from ...peer.https.certificate import TlsCertificate
from ...peer.https.serve import WebPlace
from ...peer.identity import Identity, identity_path
from ...peer.log.metrics import EVENT_COUNTS, Figure, show_in_loop, traffic_figures
from ...peer.log.telemetry import Telemetry, log_path
from ...peer.log.web import split_host_port
from ...peer.quota.limits import BootstrapLimits
from .terminal import ending_signals

COMPANY_PERIOD = 30.0
"""Seconds between checks of the connections to other bootstraps; a restarted one knows me after that."""

SPARE_FILES = 100
"""Open files beside connections: the log, the directory, dials, and Python's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """The options of a bootstrap beside a peer's settings."""

    via: tuple[Address, ...] = ()
    """Other bootstraps, with `/p2p/<their id>` behind."""

    follow: tuple[JoinLink, ...] = ()
    """Links with `&at=`: certificates from which it follows runs whose first ones no member has any more."""

    metrics: str = ""
    """HOST:PORT of the page for Prometheus; empty for none."""

    ws: str = ""
    """HOST:PORT of WebSockets from a reverse proxy, which has the certificate; empty for none."""

    wss: str = ""
    """HOST:PORT of WebSockets over TLS; empty for none."""

    tls_certificate: Path | None = None
    """The certificate chain of `wss`, a PEM file."""

    tls_key: Path | None = None
    """Its key, a PEM file."""

    limits: BootstrapLimits = field(default_factory=BootstrapLimits)
    """Its limits, in total, per IP address and per network."""

    def web(self) -> tuple[WebPlace, ...]:
        """Return where it accepts WebSockets. Raises `UsageError`."""
        files = tuple(file for file in (self.tls_certificate, self.tls_key) if file is not None)
        if len(files) != (2 if self.wss else 0):
            remedy = "such as --wss 0.0.0.0:443 --tls-certificate fullchain.pem --tls-key privkey.pem"
            raise UsageError("--wss, --tls-certificate and --tls-key need one another", remedy=remedy)
        plain = (WebPlace(*split_host_port(self.ws, "--ws")),) if self.ws else ()
        secure = (WebPlace(*split_host_port(self.wss, "--wss"), TlsCertificate(*files)),) if self.wss else ()
        return plain + secure


def run_bootstrap(config: PeerConfig, options: BootstrapOptions, say: Callable[[str], object]) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP; `say` my full addresses, one a line, once it accepts connections."""
    _allow_files(options.limits.connections + SPARE_FILES)
    telemetry = Telemetry(log_path(config.home))

    def ready(addresses: Sequence[str]) -> None:
        for address in addresses:
            say(address)

    async def until_signal() -> None:
        with trio.CancelScope() as scope:
            async with background() as nursery:
                await nursery.start(_cancel_on_signal, scope)
                await keep_bootstrap(config, options, telemetry=telemetry, ready=ready)

    try:
        trio.run(until_signal)
    except (FlockstepError, BaseExceptionGroup) as error:
        raise sole_error(error) from None
    finally:
        telemetry.close()


async def keep_bootstrap(
    config: PeerConfig, options: BootstrapOptions, *, telemetry: Telemetry, ready: Callable[[Sequence[str]], None]
) -> None:
    """Serve until cancelled; `ready` is called with my addresses with `/p2p/<my id>` behind. Raises `LocalError`."""
    with home_lock(config.home, pid=os.getpid()):
        await _keep_locked(config, options, telemetry=telemetry, ready=ready)


async def _keep_locked(
    config: PeerConfig, options: BootstrapOptions, *, telemetry: Telemetry, ready: Callable[[Sequence[str]], None]
) -> None:
    others = [split_p2p(via) for via in options.via]
    starts, web = _starts(options), options.web()
    identity = Identity.load_or_create(identity_path(config.home))
    store, values = config.home / "directory", RunValues()
    async with (
        open_bootstrap_host(identity, config, telemetry, options.limits, values, store, web) as (host, directory),
        background() as nursery,
    ):
        for address, peer in others:
            if peer != host.peer_id:  # So that all bootstraps of a run can have the same options.
                nursery.start_soon(_keep_company, host, directory, peer, address, telemetry)
        assert directory.server is not None
        held, exempt = directory.server.store, options.limits.exempt
        values.charter_of = partial(_known_charter, held)
        follower = Follower(config.home / "heads", host, held, telemetry, exempt=exempt, starts=starts)
        await follower.load()
        lists = RunLists(held, follower.head, exempt)
        directory.server.answer_for = lambda key: lists.answer(key) or follower.answer(key)
        nursery.start_soon(follower.run)
        if options.metrics:
            figures = partial(bootstrap_figures, host, directory, follower, telemetry)
            await nursery.start(show_in_loop, options.metrics, figures, telemetry)
        addresses = [f"{address}/p2p/{identity.peer_id}" for address in host.addresses()]
        telemetry.emit("bootstrap.ready", addresses=addresses)
        ready(addresses)
        try:
            await trio.sleep_forever()
        finally:
            telemetry.emit("bootstrap.left", reason="stopped by its operator")


def _known_charter(store: Store, run: str) -> Charter | None:
    entry = store.value(run_key(run).encode())
    return charter_of(SignedManifest.decode(entry.value, run)) if entry is not None else None


def _starts(options: BootstrapOptions) -> dict[str, Mark]:
    """Return where runs are followed from, as the operator's links say. Raises `UsageError`."""
    for link in options.follow:
        if link.at is None:
            remedy = "take the link with &at= that `flockstep run info` prints"
            raise UsageError(f"--follow {link.run_id}: the link names no certificate", remedy=remedy)
    return {link.run_id: Mark(*link.at) for link in options.follow if link.at is not None}


async def _keep_company(
    host: DirectoryHost, directory: KademliaDirectory, peer: PeerId, address: Address, telemetry: Telemetry
) -> None:
    """Stay connected to another bootstrap; emits an event for each change."""
    assert host.bootstrap_server is not None
    host.bootstrap_server.friends.add(peer)
    was_there: bool | None = None
    while True:
        try:
            await host.connect(peer, [address])
            await directory.add_server(peer)
            if not was_there:
                telemetry.emit("bootstrap.met", peer=peer, step="connect")
            was_there = True
            await directory.look_around()
        except ConnectFailed as error:
            if was_there is not False:
                telemetry.emit("bootstrap.unreachable", peer=peer, step="connect", reason=str(error))
            was_there = False
        await trio.sleep(COMPANY_PERIOD)


def bootstrap_figures(
    host: DirectoryHost, directory: KademliaDirectory, follower: Follower, telemetry: Telemetry
) -> Iterator[Figure]:
    """Yield the figures of the page for Prometheus."""
    assert host.bootstrap_server is not None
    assert directory.server is not None
    yield from _server_figures(host.bootstrap_server)
    yield Figure("flockstep_peers", "Peers that are connected.", len(host.connected()))
    store = directory.server.store
    yield Figure("flockstep_records", "Values and provider records that are kept.", len(store))
    yield Figure("flockstep_record_bytes", "Memory that they take.", store.num_bytes)
    yield Figure("flockstep_heads", "Runs whose heads are followed.", len(follower))
    yield Figure("flockstep_head_bytes", "Disk that they take.", follower.num_bytes)
    yield Figure("flockstep_servers", "Other directory servers that are known.", len(directory.servers))
    yield from traffic_figures(host.traffic())
    for event, count in sorted(telemetry.counts.items()):
        yield Figure(EVENT_COUNTS, "Events in the log.", count, {"event": event})


def _server_figures(server: BootstrapServer) -> Iterator[Figure]:
    yield Figure("flockstep_connections", "Accepted connections that are open.", server.gate.num_sockets)
    yield Figure("flockstep_reservations", "Peers that are reached through this relay.", server.relay.num_reservations)
    yield Figure("flockstep_circuits", "Connections through this relay.", server.relay.num_circuits)
    yield Figure("flockstep_relay_bytes_total", "Bytes passed on.", server.relay.num_bytes)
    for (step, reason), count in sorted(server.refusals.counts.items()):
        labels = {"step": step, "reason": reason}
        yield Figure("flockstep_refusals_total", "What was refused, and why.", count, labels)


def _allow_files(needed: int) -> None:
    """Raise this process's limit of open files to so many. Raises `LocalError` if the system does not allow it."""
    if sys.platform == "win32":
        return  # The system has no such limit for sockets.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LocalError(
            f"the system gives this process {hard} open files, {needed} are needed",
            remedy=f"raise it (`ulimit -n {needed}`, systemd: LimitNOFILE={needed}), or lower --connections",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _cancel_on_signal(scope: trio.CancelScope, *, task_status: Any) -> None:
    with trio.open_signal_receiver(*ending_signals()) as signals:
        task_status.started()
        async for _number in signals:
            scope.cancel()
