"""`flockstep service`: the verbs that let this computer start a peer by itself."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from ...peer.base.config import PeerConfig
from .echo import echo
from .options import LinkArgument, config_of

app = typer.Typer(
    help="Let this computer start a peer by itself, as a service.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Option(help="The name of the service, if there are several.")]


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def install(
    context: typer.Context,
    link: LinkArgument,
    name: Name = "flockstep",
    as_root: Annotated[bool, typer.Option("--as-root", help="Install it for root, if you are.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Write the file to stdout, and do nothing.")] = False,
) -> None:
    """Join a run whenever you are logged in.

    All options of `flockstep join` may follow the link.

    The run is shown and asked about now, as `join` would: a service has no terminal.

    \b
    Examples:
      flockstep service install 'flockstep://…?via=…' --hours 22-7 --max-up 10
      flockstep service install 'flockstep://…?via=…' --print
    """
    from ..volunteer.service import install as install_service
    from ..volunteer.service import peer_command, service_of, text_of

    given = check_join(context, [link, *context.args])
    if not (only_print or given["yes"]):
        agree(link, given)
    service = service_of(name, peer_command([link, *context.args]))
    if only_print:
        for line in text_of(service).splitlines():
            echo(line)
    else:
        install_service(service, echo, as_root=as_root)


@app.command()
def remove(name: Name = "flockstep") -> None:
    """Stop the peer, and start it no more."""
    from ..volunteer.service import remove as remove_service
    from ..volunteer.service import service_of

    remove_service(service_of(name), echo)


def agree(link: str, given: dict[str, Any]) -> None:
    """Let the user agree to the run of a link: its service starts where nobody can be asked."""
    from ...dht.run.link import JoinLink
    from ..peers.agree import Agreement, terminal_reader
    from ..runs.listed import manifest_of

    config = config_of(given["home"], host=given["host"], port=0, announce=given["announce"], upnp=given["upnp"])
    config = replace(config, data=given["data"])
    signed = manifest_of(JoinLink.parse(link), config)
    Agreement(config, partial(echo, err=True), terminal_reader(), yes=False).agree(signed)


def check_join(context: typer.Context, arguments: list[str]) -> dict[str, Any]:
    """Raise what `flockstep join` would raise for these arguments before it looks at the network; returns its options."""
    from ...dht.run.link import JoinLink
    from ..volunteer.hours import Hours

    command = context.find_root().command
    join = command.get_command(context.find_root(), "join")  # type: ignore[attr-defined]  # The root is a group.
    given: dict[str, Any] = join.make_context("join", list(arguments), parent=context.find_root()).params
    JoinLink.parse(given["link"])
    PeerConfig(max_up=given["max_up"] or 0.0, max_down=given["max_down"] or 0.0, port=given["port"])
    if given["hours"]:
        Hours.parse(given["hours"])
    return given
