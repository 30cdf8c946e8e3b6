"""The door of the command line: every line of a verb leaves through `echo`, so that no text in it acts on a terminal."""

import typer

from ...peer.base.plain import plain_text


def echo(line: str = "", *, err: bool = False) -> None:
    """Write one line. What is not printable in it is escaped, line breaks too, since others may have written it."""
    typer.echo(plain_text(line), err=err)
