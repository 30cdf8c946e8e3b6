"""`flockstep data`: the verb that makes the data of a run ready for its volunteers."""

from pathlib import Path
from typing import Annotated

import typer

from .echo import echo

app = typer.Typer(help="Make the data of a run ready for its volunteers.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Make the data of a run ready for its volunteers."""


@app.command()
def pack(
    source: Annotated[str, typer.Argument(help="text:, json:, parquet: or hf: and a place, as in a run.toml; or a path.")],
    out: Annotated[Path, typer.Argument(help="The new folder of the shards.")],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, or a folder that has one.")] = "bytes",
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.  [default: 8 Mi, or less for 64 shards]")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Rows are lists of messages; answers alone are learned.")] = False,
) -> None:
    """Pack documents into shards of tokens for a run.

    Volunteers read them by the run's link, by range and verified by hash.

    The same input gives the same bytes. The folder is there when it is whole, and not before.

    \b
    Examples:
      flockstep data pack ~/books packed
      flockstep data pack 'json:chats/*.jsonl?column=answer' packed --tokenizer tokenizer.json
      flockstep data pack hf:org/name/sample packed --tokenizer my-model
      flockstep data pack 'json:chats.jsonl?column=messages' packed --tokenizer my-model --chat
    """
    from ..runs.pack import pack_data

    pack_data(source, out, echo, tokenizer=tokenizer, shard_tokens=shard_tokens, chat=chat)
