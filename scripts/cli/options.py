"""The options that several verbs share, and the settings of a peer that they give."""

from pathlib import Path
from typing import Annotated

import typer

from ...peer.base.config import PeerConfig, default_home

Home = Annotated[Path | None, typer.Option(help="Folder of the key and the event log.  [default: ~/.flockstep]")]
Host = Annotated[str, typer.Option(help="IPv4 address to listen on; 127.0.0.1 stays on this computer.")]
Port = Annotated[int, typer.Option(help="TCP port; the next free one if it is taken; 0: any.")]
Announce = Annotated[list[str] | None, typer.Option(help="Address to announce instead of those found; repeatable.")]
Upnp = Annotated[bool, typer.Option("--upnp/--no-upnp", help="Ask the router for a port where others do not get through.")]
MaxUp = Annotated[float | None, typer.Option(help="Send at most so many Mbit/s, of everything; 0: no limit.")]
MaxDown = Annotated[float | None, typer.Option(help="Receive at most so many Mbit/s, of everything; 0: no limit.")]
Metrics = Annotated[str, typer.Option(help="[HOST:]PORT of a page for Prometheus.  [default: none]")]
Json = Annotated[bool, typer.Option("--json", help="For programs: JSON to stdout.")]
Name = Annotated[str | None, typer.Option(help="What others see you as in the list of contributors; else as in config.toml.")]
Via = Annotated[list[str], typer.Option(help="Address of a bootstrap to ask for listed runs; repeatable.")]
PlanPeers = Annotated[int | None, typer.Option(help="Of the plan: how many peers train.")]
PlanGpu = Annotated[str | None, typer.Option(help="Of the plan: their GPU, such as 4090, t4 or a100.")]
PlanRate = Annotated[float | None, typer.Option(help="Of the plan: Mbit/s of a peer's line, each way.")]
LinkArgument = Annotated[str, typer.Argument(help="The join link, flockstep://…, in quotes.")]


def config_of(
    home: Path | None,
    *,
    port: int,
    host: str = "0.0.0.0",
    announce: list[str] | None = None,
    upnp: bool = True,
    device: str = "auto",
) -> PeerConfig:
    """Return a peer's settings from the command line."""
    return PeerConfig(
        home=home or default_home(),
        host=host,
        port=port,
        announce=tuple(announce or ()),
        upnp=upnp,
        device=device,
    )
