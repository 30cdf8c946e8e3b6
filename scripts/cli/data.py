"""`flockstep data`: the verb that makes the data of a run ready for its volunteers."""

from typing import Annotated

import typer

from .echo import echo
from .options import Home, config_of

app = typer.Typer(help="Make the data of a run ready for its volunteers.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Make the data of a run ready for its volunteers."""


@app.command()
def pack(
    source: Annotated[str, typer.Argument(help="text:, json:, parquet: or hf: and a place, as in a run.toml; or a path.")],
    to: Annotated[str, typer.Option(help="A new folder, hf://datasets/org/name[/folder], or s3://bucket/folder.")],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, a folder that has one, or hf:org/name.")] = "bytes",
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.  [default: 8 Mi, or less for 64 shards]")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Rows are lists of messages; answers alone are learned.")] = False,
    home: Home = None,
) -> None:
    """Pack documents into shards of tokens for a run.

    `flockstep run create` does so by itself; this is for data that members read from elsewhere than its keeper.

    The same input gives the same bytes. Interrupted, the same command goes on where it was.

    \b
    Examples:
      flockstep data pack ~/books --to packed
      flockstep data pack 'json:chats/*.jsonl?column=answer' --to packed --tokenizer tokenizer.json
      flockstep data pack hf:org/name/sample --to hf://datasets/me/packed --tokenizer my-model
      flockstep data pack 'json:chats.jsonl?column=messages' --to s3://bucket/folder --tokenizer my-model --chat
    """
    from ..runs.pack import pack_data

    home_folder = config_of(home, port=0).home
    pack_data(source, to, echo, home=home_folder, tokenizer=tokenizer, shard_tokens=shard_tokens, chat=chat)
