"""`flockstep bootstrap`: its options; each field of `BootstrapLimits` becomes one."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ...dht.run.link import JoinLink
from ...peer.base.config import DEFAULT_PORT, PeerConfig, default_home
from ...peer.quota.limits import BootstrapLimits, limit_options
from .echo import echo
from .options import Announce, Host, Metrics


def bootstrap(
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of the key, the directory and the event log.  [default: ~/.flockstep/bootstrap]"),
    ] = None,
    host: Host = "0.0.0.0",
    port: Annotated[int, typer.Option(help="TCP port, which links will name; 0: any.")] = DEFAULT_PORT,
    announce: Announce = None,
    via: Annotated[
        list[str] | None, typer.Option(help="Another bootstrap to know, /ip4/…/tcp/…/p2p/12D3…; repeatable.")
    ] = None,
    ws: Annotated[
        str, typer.Option(help="HOST:PORT of WebSockets behind a reverse proxy with HTTPS.  [default: none]")
    ] = "",
    wss: Annotated[str, typer.Option(help="HOST:PORT of WebSockets over TLS.  [default: none]")] = "",
    tls_certificate: Annotated[Path | None, typer.Option(help="The certificate chain for --wss, a PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, a PEM file.")] = None,
    metrics: Metrics = "",
    follow: Annotated[
        list[str] | None, typer.Option(help="A link with &at=: follow that run from this certificate on; repeatable.")
    ] = None,
    exempt: Annotated[
        list[str] | None,
        typer.Option(help="Network without limits per address, such as 127.0.0.0/8; repeatable.  [default: none]"),
    ] = None,
    **limits: float,
) -> None:
    """Run a bootstrap, a daemon through which peers find each other.

    \b
    Examples:
      flockstep bootstrap                           # on port 4001 of every interface
      flockstep bootstrap --host 127.0.0.1 --port 0 # for this computer only, on any free port
      flockstep bootstrap --wss 0.0.0.0:443 --tls-certificate fullchain.pem --tls-key privkey.pem   # through HTTPS, too
      flockstep bootstrap --via /ip4/192.0.2.9/tcp/4001/p2p/12D3KooW… --metrics 127.0.0.1:9401
    """
    from ..peers.bootstrap import BootstrapOptions, run_bootstrap

    given = limits if exempt is None else {**limits, "exempt": tuple(exempt)}
    options = BootstrapOptions(
        via=tuple(via or ()),
        follow=tuple(map(JoinLink.parse, follow or ())),
        ws=ws,
        wss=wss,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        metrics=metrics,
        limits=BootstrapLimits(**given),
    )
    echo("The bootstrap starts; Ctrl-C ends it. Publish a run through any of its addresses as they appear:")
    run_bootstrap(
        PeerConfig(home=home or default_home() / "bootstrap", host=host, port=port, announce=tuple(announce or ())),
        options,
        lambda address: echo(f"    flockstep run create run.toml --via {address}"),
    )


def _with_limits(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    """Yield the parameters of the verb, with an option for each limit in place of `**limits`."""
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield parameter
    for option in limit_options():
        shown = typer.Option(option.default, help=f"{option.meaning}.")
        yield inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=option.kind)


_SIGNATURE = inspect.signature(bootstrap)
bootstrap.__signature__ = _SIGNATURE.replace(parameters=list(_with_limits(_SIGNATURE)))  # type: ignore[attr-defined]
