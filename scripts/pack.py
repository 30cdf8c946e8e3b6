"""`flockstep data pack`: makes shards of tokens, which volunteers read by a run's link, of text, JSON, parquet or the hub."""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..optim.data.streams import STREAMS, Documents, open_documents
from ..optim.data.text import texts
from ..optim.data.tokenizer import BYTES, FileTokenizer, read_tokenizer
from ..optim.shards.chat import ChatTemplate, Rendered
from ..optim.shards.index import TOKENIZER
from ..optim.shards.pack import pack, pack_chats
from ..optim.shards.tokenizer_config import TEMPLATE, config_beside, encode_config
from ..peer.disk import user_path
from ..peer.errors import LocalError, UsageError
from ..peer.plain import plain_text

KINDS = {".jsonl": "json", ".json": "json", ".gz": "json", ".parquet": "parquet"}
"""Of a path without a kind, by its ending; all others are text."""
SHOWN_PERIOD = 0.2


def pack_data(
    source: str,
    out: Path,
    write_line: Callable[[str], None],
    *,
    tokenizer: str = "bytes",
    shard_tokens: int = 0,
    chat: bool = False,
) -> None:
    """Pack a source with a tokenizer, its file, its folder or `bytes`, into the new folder `out`. Raises `FlockstepError`.

    With `chat` its rows are lists of messages, of which the answers alone have a loss.
    """
    kind, _, place = source.partition(":")
    if kind not in ("text", *STREAMS):
        kind, place = KINDS.get(user_path(source).suffix, "text"), source
    data = b""
    if tokenizer != BYTES.name:
        path = user_path(tokenizer)
        path = path / TOKENIZER if path.is_dir() else path
        data = read_tokenizer(path)
    made_by = FileTokenizer(path, data) if data else BYTES
    config = _config(path, made_by) if isinstance(made_by, FileTokenizer) else b""
    files = {"tokenizer_file": data, "tokenizer_config": config}
    if chat and (not isinstance(made_by, FileTokenizer) or kind not in ("json", "hf")):
        remedy = "give --tokenizer, and a source of JSON"
        raise UsageError("--chat needs a tokenizer with a chat template, and rows of JSON with messages", remedy=remedy)
    skipped = 0
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[done]}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("packing", total=None, done="")
        began = shown_at = time.monotonic()

        def tell(documents: int, tokens: int) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if now - shown_at > SHOWN_PERIOD:
                shown_at = now
                speed = tokens / (now - began) / 1e6
                progress.update(task, done=f"{documents:,} documents, {tokens:,} tokens, {speed:.2f} M a second")

        def at(done: int, total: int) -> None:
            progress.update(task, total=total if total > 1 else None, completed=done)

        if chat and isinstance(made_by, FileTokenizer):
            template = ChatTemplate.beside(path)

            def rendered() -> Iterator[Rendered]:
                nonlocal skipped
                num_rendered = 0
                for row in _rows(kind, place, at):
                    if (found := template.render(row)) is None:
                        skipped += 1
                    else:
                        num_rendered += 1
                        yield found
                if skipped and not num_rendered:
                    remedy = "an answer is a message with the role assistant; ?column=NAME names another column of messages"
                    raise UsageError(f"none of the {skipped:,} chats of {source} has an answer", remedy=remedy)

            index = pack_chats(rendered(), made_by, out, **files, shard_tokens=shard_tokens, tell=tell)
        else:
            documents = _documents(kind, place, at)
            index = pack(documents, made_by, out, **files, shard_tokens=shard_tokens, tell=tell)
    size = sum(shard.num_bytes for shard in index.shards)
    write_line(
        f"Packed {index.num_documents:,} documents into {len(index.shards):,} shards of {out}: {index.num_tokens:,} tokens, "
        f"{size / 1e6:,.1f} MB. Its index is {index.hash.hex()}."
    )
    if skipped:
        write_line(f"{skipped:,} rows without an answer were left out.")
    source = json.dumps(f"tokens:swarm:{plain_text(str(out))}", ensure_ascii=False)
    write_line(f"Train on it, each member with what the others have:  [data] source = {source}")
    write_line("Or put the folder on a web server or into a dataset of the hub: docs/data.md.")


def _config(path: Path, tokenizer: FileTokenizer) -> bytes:
    config = config_beside(path)
    if TEMPLATE not in config and tokenizer.end_text:  # A template has been rendered with what the file says.
        config.setdefault("eos_token", tokenizer.end_text)
    return encode_config(config)


def _documents(kind: str, place: str, at: Callable[[int, int], None]) -> Iterator[str]:
    """Yield the documents of a source; `at` is told how many of its pieces are done. Raises `FlockstepError`."""
    if kind == "text":
        for number, text in enumerate(texts(place)):
            at(number, 0)
            yield text.decode()
        return
    documents, _ = open_documents(kind, place)
    yield from _pieces(documents, documents.read, f"{kind}:{place}", at)


def _rows(kind: str, place: str, at: Callable[[int, int], None]) -> Iterator[Any]:
    """Yield the messages of each row of a source; see `_documents`."""
    documents, _ = open_documents(kind, place, column="messages", is_text=False)
    yield from _pieces(documents, documents.values, f"{kind}:{place}", at)


def _pieces(
    documents: Documents, read: Callable[[int], Iterator[Any]], name: str, at: Callable[[int, int], None]
) -> Iterator[Any]:
    try:
        for piece in range(len(documents.pieces)):
            at(piece, len(documents.pieces))
            yield from read(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise LocalError(f"cannot read {name}: {error}", remedy="check the disk or the network") from error
