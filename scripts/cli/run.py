"""`flockstep run`: the verbs that create a run, invite to it, show it, and state what its owner decides."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...peer.base.config import DEFAULT_PORT
from .echo import echo
from .options import Announce, Home, Host, Json, LinkArgument, PlanGpu, PlanPeers, PlanRate, Port, Upnp, config_of

app = typer.Typer(
    help="Make a run, invite to it, look at it, decide about its peers.", no_args_is_help=True, rich_markup_mode=None
)


Named = Annotated[str, typer.Argument(help="The id of the peer, 12D3KooW….")]


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="The run.toml that describes it; docs/run-toml.md has every key.")],
    via: Annotated[list[str], typer.Option(help="Address of a bootstrap, /ip4/…/tcp/…/p2p/12D3…; repeatable.")],
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    announce: Announce = None,
    upnp: Upnp = True,
    keeps: Annotated[bool, typer.Option("--keep/--no-keep", help="Go on as its first keeper.")] = True,
    public: Annotated[bool, typer.Option("--public", help="List it: `flockstep runs` shows it to everybody.")] = False,
    model: Annotated[
        str, typer.Option(help='MODULE:FUNCTION that makes the model of a run with source = "own", to pin its layout.')
    ] = "",
    peers: PlanPeers = None,
    gpu: PlanGpu = None,
    rate: PlanRate = None,
) -> None:
    """Sign a run with your key, publish it, and print its link.

    With --peers, --gpu and --rate it prints the plan of the run before that, as `flockstep plan` does.

    It then goes on as the run's first keeper until Ctrl-C, unless all listed peers vote ([admission] kind = "allow").

    \b
    Examples:
      flockstep run create run.toml --via /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…
      flockstep run create run.toml --via /ip4/… --model my_model:MyModel      # source = "own": pins what it trains
    """
    from ..runs.plan import fleet_named
    from ..runs.run import create_run

    fleet = None if (peers, gpu, rate) == (None, None, None) else fleet_named(peers, gpu, rate)
    config = config_of(home, port=0)
    if link := create_run(file, via, config, echo, keeps=keeps, public=public, model=model, fleet=fleet):
        from ..peers.keep import keep
        from ..volunteer.preferences import load_preferences

        config = config_of(home, host=host, port=port, announce=announce, upnp=upnp)
        config = replace(config, name=load_preferences(config.home).name)
        echo("This computer goes on as its keeper; later `flockstep keep` with the same link does.")
        keep(link, config, echo, yes=True)


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
    from ..runs.run import run_info

    run_info(target, config_of(home, port=0), echo, as_json=as_json)


@app.command("list")
def list_(
    link: LinkArgument,
    add: Annotated[bool, typer.Option("--add/--remove", help="List it, or withdraw that.")] = True,
    home: Home = None,
) -> None:
    """List a run of yours at its bootstraps.

    `flockstep runs` then shows it to everybody.

    \b
    Examples:
      flockstep run list 'flockstep://…?via=…' --add
      flockstep run list 'flockstep://…?via=…' --remove
    """
    from ..runs.listed import list_run

    list_run(link, config_of(home, port=0), echo, listed=add)


@app.command()
def credit(
    link: LinkArgument,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show who has contributed how many tokens, by all certificates.

    \b
    Example:
      flockstep run credit 'flockstep://…?via=…'
    """
    from ..watch.credit import show_credit

    show_credit(link, config_of(home, port=0), echo, as_json=as_json)


@app.command()
def invite(
    target: Annotated[str, typer.Argument(help="The run's .flockstep file, or its join link.")],
    peer: Annotated[str, typer.Option(help="The only peer that may use it, by its id.")] = "",
    count: Annotated[int, typer.Option(min=1, max=4096, help="How many peers may use it.")] = 1,
    days: Annotated[int, typer.Option(min=1, max=3650, help="After so many days it lets in nobody new.")] = 30,
    home: Home = None,
) -> None:
    """Make an invitation to a closed run of yours.

    In a run whose admission is "invite" it prints one; to an allow-list it adds a peer.

    \b
    Examples:
      flockstep run invite my-run.flockstep --peer 12D3KooW…
      flockstep run invite my-run.flockstep --count 5
    """
    from ..runs.run import invite as make_invitation

    make_invitation(target, peer, count, days, config_of(home, port=0), echo)


@app.command()
def vouch(link: LinkArgument, peer: Named, home: Home = None) -> None:
    """Vouch for a peer: it may become one of those who decide.

    \b
    Example:
      flockstep run vouch 'flockstep://…?via=…' 12D3KooW…
    """
    _state("vouch", link, peer, "", None, home)


@app.command()
def revoke(
    link: LinkArgument,
    peer: Annotated[str, typer.Argument(help="The id of the peer, or an invitation as `run invite` has printed it.")],
    home: Home = None,
) -> None:
    """Withdraw an admission, an invitation, or what you vouched for.

    \b
    Example:
      flockstep run revoke 'flockstep://…?via=…' 12D3KooW…
    """
    _state("revoke", link, peer, "", None, home)


@app.command()
def ban(
    link: LinkArgument,
    peer: Named,
    reason: Annotated[str, typer.Option(help="Why; all members can read it.")] = "",
    home: Home = None,
) -> None:
    """Ban a peer from a run of yours.

    No member exchanges anything with it any more.

    \b
    Example:
      flockstep run ban 'flockstep://…?via=…' 12D3KooW… --reason 'sends noise'
    """
    _state("ban", link, peer, reason, None, home)


@app.command()
def pardon(
    link: LinkArgument,
    peer: Named,
    until: Annotated[
        int | None, typer.Option("--round", min=0, help="The last round whose evidence is void.  [default: the present one]")
    ] = None,
    home: Home = None,
) -> None:
    """Lift the ban of a peer from a run of yours, whoever imposed it.

    \b
    Example:
      flockstep run pardon 'flockstep://…?via=…' 12D3KooW…
    """
    _state("pardon", link, peer, "", until, home)


@app.command()
def revise(
    link: LinkArgument,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting and its new value, outer.rounds=60; repeatable.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Settings by section, as in a run.toml; --set comes before it.")] = None,
    home: Home = None,
) -> None:
    """Change settings of a run of yours while it trains.

    These are its rounds, and the inner optimizer's rates and schedule.

    All members take them over after the same round, whenever they hear of them.

    \b
    Examples:
      flockstep run revise 'flockstep://…?via=…' --set rounds=60 --set inner.lr=0.01
      flockstep run revise 'flockstep://…?via=…' --file revise.toml
    """
    from ..runs.owner import revise_run

    echo(revise_run(link, settings or (), file, config_of(home, port=0)).describe())


@app.command()
def succeed(
    link: LinkArgument,
    keepers: Annotated[
        str, typer.Option(help="Ids, separated by commas: who votes first beside you.  [default: the keepers that are here]")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting and its new value, rounds=60; repeatable.")
    ] = None,
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    announce: Announce = None,
    upnp: Upnp = True,
    keeps: Annotated[bool, typer.Option("--keep/--no-keep", help="Go on as a keeper of the new run.")] = True,
) -> None:
    """End a run of yours, and have it go on as another one.

    That one begins with the last certified state.

    It works where voters are gone for good. All members follow by themselves, and old links lead to the new run.

    \b
    Examples:
      flockstep run succeed 'flockstep://…?via=…'
      flockstep run succeed 'flockstep://…?via=…' --keepers 12D3KooW…,12D3KooW… --set rounds=60
    """
    from ..runs.succeed import succeed_run

    ids = [peer for peer in keepers.replace(",", " ").split() if peer]
    following, is_to_keep = succeed_run(link, ids, settings or (), config_of(home, port=0), echo)
    for line in ("Old links lead to it. Its own is", "", f"    {following}", ""):
        echo(line)
    if keeps and is_to_keep:
        from ..peers.keep import keep
        from ..volunteer.preferences import load_preferences

        config = config_of(home, host=host, port=port, announce=announce, upnp=upnp)
        echo("This computer goes on as its keeper; later `flockstep keep` with the same link does.")
        keep(following, replace(config, name=load_preferences(config.home).name), echo, yes=True)


def _state(verb: str, link: str, peer: str, reason: str, until: int | None, home: Path | None) -> None:
    from ..runs.owner import state_as_owner

    echo(state_as_owner(verb, link, peer, reason, until, config_of(home, port=0)).describe())
