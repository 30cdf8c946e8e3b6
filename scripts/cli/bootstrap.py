"""The verb `flockstep bootstrap`: its options, each limit of `BootstrapLimits` among them."""

from pathlib import Path
from typing import Annotated

import typer

from ...peer.config import DEFAULT_PORT, PeerConfig, default_home
from ...peer.limits import BootstrapLimits
from .options import Announce, Host, Port

DEFAULTS = BootstrapLimits()


def bootstrap(
    home: Annotated[
        Path | None, typer.Option(help="Folder of the key, the directory and the event log.  [default: ~/.flockstep]")
    ] = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    announce: Announce = None,
    via: Annotated[
        list[str] | None, typer.Option(help="Another bootstrap to know, /ip4/…/tcp/…/p2p/12D3…; repeatable.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="HOST:PORT of a page for Prometheus.  [default: none]")] = "",
    connections: Annotated[int, typer.Option(help="Accepted at a time.")] = DEFAULTS.connections,
    connections_per_address: Annotated[
        int, typer.Option(help="From one IP address (IPv6: one /64).")
    ] = DEFAULTS.connections_per_address,
    connections_per_network: Annotated[
        int, typer.Option(help="From one network (IPv4: a /24, IPv6: a /48).")
    ] = DEFAULTS.connections_per_network,
    handshakes: Annotated[
        int, typer.Option(help="Connections that have not shaken hands yet; then the oldest goes.")
    ] = DEFAULTS.handshakes,
    reservations: Annotated[int, typer.Option(help="Peers that are reached through this relay.")] = DEFAULTS.reservations,
    reservations_per_address: Annotated[
        int, typer.Option(help="Of one IP address.")
    ] = DEFAULTS.reservations_per_address,
    reservations_per_network: Annotated[int, typer.Option(help="Of one network.")] = DEFAULTS.reservations_per_network,
    circuits: Annotated[int, typer.Option(help="Relayed connections at a time.")] = DEFAULTS.circuits,
    circuits_per_peer: Annotated[int, typer.Option(help="From or to one peer.")] = DEFAULTS.circuits_per_peer,
    circuits_per_address: Annotated[int, typer.Option(help="From one IP address.")] = DEFAULTS.circuits_per_address,
    circuit_rate: Annotated[float, typer.Option(help="Bytes/s of one circuit, both ways together.")] = DEFAULTS.circuit_rate,
    circuit_bytes: Annotated[int, typer.Option(help="Bytes until a circuit ends.")] = DEFAULTS.circuit_bytes,
    relay_rate: Annotated[float, typer.Option(help="Bytes/s of all circuits together.")] = DEFAULTS.relay_rate,
    store_bytes: Annotated[int, typer.Option(help="Memory of the directory; twice that on disk.")] = DEFAULTS.store_bytes,
    records_per_address: Annotated[
        int, typer.Option(help="Records kept of one IP address; then its oldest goes.")
    ] = DEFAULTS.records_per_address,
    records_per_network: Annotated[
        int, typer.Option(help="Records kept of one network.")
    ] = DEFAULTS.records_per_network,
    providers_per_network: Annotated[
        int, typer.Option(help="Members of one run that are listed from one network.")
    ] = DEFAULTS.providers_per_network,
    record_rate: Annotated[
        float, typer.Option(help="Records a second that one IP address may publish.")
    ] = DEFAULTS.record_rate,
    exempt: Annotated[
        list[str] | None,
        typer.Option(help="Network without limits per address; repeatable.  [default: loopback and private]"),
    ] = None,
) -> None:
    """Keep the door open: a small daemon through which peers find each other.

    \b
    Examples:
      flockstep bootstrap                           # on port 4001 of every interface
      flockstep bootstrap --host 127.0.0.1 --port 0 # for this computer only, on any free port
      flockstep bootstrap --via /ip4/192.0.2.9/tcp/4001/p2p/12D3KooW… --metrics 127.0.0.1:9401
    """
    from ..bootstrap import BootstrapOptions, run_bootstrap

    limits = BootstrapLimits(
        connections=connections,
        connections_per_address=connections_per_address,
        connections_per_network=connections_per_network,
        handshakes=handshakes,
        reservations=reservations,
        reservations_per_address=reservations_per_address,
        reservations_per_network=reservations_per_network,
        circuits=circuits,
        circuits_per_peer=circuits_per_peer,
        circuits_per_address=circuits_per_address,
        circuit_rate=circuit_rate,
        circuit_bytes=circuit_bytes,
        relay_rate=relay_rate,
        store_bytes=store_bytes,
        records_per_address=records_per_address,
        records_per_network=records_per_network,
        providers_per_network=providers_per_network,
        record_rate=record_rate,
        exempt=DEFAULTS.exempt if exempt is None else tuple(exempt),
    )
    options = BootstrapOptions(via=tuple(via or ()), metrics=metrics, limits=limits)
    typer.echo("Opening the door; Ctrl-C closes it. Publish a run through any of its addresses as they appear:")
    run_bootstrap(
        PeerConfig(home=home or default_home(), host=host, port=port, announce=tuple(announce or ())),
        options,
        lambda address: typer.echo(f"    flockstep run create run.toml --via {address}"),
    )
