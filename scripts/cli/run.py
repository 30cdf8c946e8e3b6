"""`flockstep run`: the verbs that create a run, invite to it and show it."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Home, Json, config_of

app = typer.Typer(help="Make a run, invite to it, look at it.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="The run.toml that describes it; docs/run-toml.md has every key.")],
    via: Annotated[list[str], typer.Option(help="Address of a bootstrap, /ip4/…/tcp/…/p2p/12D3…; repeatable.")],
    home: Home = None,
) -> None:
    """Sign a run with your key, publish it, and print the link to join it.

    \b
    Example:
      flockstep run create run.toml --via /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…
    """
    from ..run import create_run

    create_run(file, via, config_of(home, port=0), typer.echo)


@app.command()
def info(
    target: Annotated[str, typer.Argument(help="A join link, or a .flockstep file.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show what a run pins and who is in it.

    \b
    Examples:
      flockstep run info 'flockstep://…?via=…'
      flockstep run info my-run.flockstep           # without a network
    """
    from ..run import run_info

    run_info(target, config_of(home, port=0), typer.echo, as_json=as_json)


@app.command()
def invite(
    target: Annotated[str, typer.Argument(help="The run's .flockstep file, or its join link.")],
    peer: Annotated[str, typer.Option(help="The only peer that may use it, by its id.")] = "",
    count: Annotated[int, typer.Option(min=1, max=4096, help="How many peers may use it.")] = 1,
    days: Annotated[int, typer.Option(min=1, max=3650, help="After so many days it lets in nobody new.")] = 30,
    home: Home = None,
) -> None:
    """Make an invitation to a run of yours whose admission is "invite".

    \b
    Examples:
      flockstep run invite my-run.flockstep --peer 12D3KooW…
      flockstep run invite my-run.flockstep --count 5
    """
    from ..run import invite as make_invitation

    make_invitation(target, peer, count, days, config_of(home, port=0), typer.echo)
