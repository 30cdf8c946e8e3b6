"""`flockstep data pack`: makes shards of tokens, which volunteers read by a run's link, of text, JSON, parquet or the hub."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...optim.data.rows import Document, Flaw, Skips
from ...optim.data.streams import STREAMS, Documents, open_documents
from ...optim.data.text import named_texts
from ...optim.data.tokenizer import BYTES, FileTokenizer, read_tokenizer
from ...optim.shards.chat import CHAT_COLUMNS, ChatTemplate, Rendered, chat_of
from ...optim.shards.index import TOKENIZER
from ...optim.shards.pack import pack, pack_chats
from ...optim.shards.tokenizer_config import END, TEMPLATE, config_beside, encode_config
from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.plain import plain_text
from ..watch.console import PlainConsole

KINDS = {".jsonl": "json", ".json": "json", ".gz": "json", ".parquet": "parquet"}
"""Of a path without a kind, by its ending; all others are text."""
SHOWN_PERIOD = 0.2
"""Between two lines of progress: to the eye it moves."""
T = TypeVar("T")
Read = TypeVar("Read", Document, Rendered)


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
    beside = config_beside(path) if data else {}
    made_by = FileTokenizer(path, data, beside.get(END, "")) if data else BYTES
    config = _config(beside, made_by) if isinstance(made_by, FileTokenizer) else b""
    files = {"tokenizer_file": data, "tokenizer_config": config}
    if chat and (not isinstance(made_by, FileTokenizer) or kind not in STREAMS):
        remedy = "give --tokenizer, and a source of JSON or parquet"
        raise UsageError("--chat needs a tokenizer with a chat template, and rows with messages", remedy=remedy)
    skips, unanswered, unfound, different = Skips(), 0, 0, set[str]()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[done]}")
    console = PlainConsole(stderr=True)
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

        def seen(texts: Iterator[Read]) -> Iterator[Read]:
            for read in texts:
                different.update([read.text] if len(different) < 2 else [])
                yield read

        if chat and isinstance(made_by, FileTokenizer):
            template = ChatTemplate.beside(path, made_by.controls)

            def render(row: object, column: str) -> Rendered | Flaw | None:
                nonlocal unanswered, unfound
                try:
                    found = template.render(chat_of(row, column), row)
                except UsageError as error:
                    return Flaw(f"is left out: {error}")
                unanswered += found is None
                unfound += 0 if found is None else found.num_unfound
                return found

            def rendered() -> Iterator[Rendered]:
                chats = _chats(kind, place, render, skips, at)
                first = next(chats, None)
                if first is None:
                    why = f": {skips.first}" if skips.first else ""
                    remedy = "an answer is a message with the role assistant; ?column=NAME names another column of messages"
                    raise UsageError(f"no row of {source} is a chat with an answer{why}", remedy=remedy)
                yield first
                yield from chats

            index = pack_chats(seen(rendered()), made_by, out, skips=skips, **files, shard_tokens=shard_tokens, tell=tell)
        else:
            documents = _documents(kind, place, skips, at)
            index = pack(seen(documents), made_by, out, skips=skips, **files, shard_tokens=shard_tokens, tell=tell)
    size = sum(shard.num_bytes for shard in index.shards)
    write_line(
        f"Packed {index.num_documents:,} documents into {len(index.shards):,} shards of {out}: {index.num_tokens:,} tokens, "
        f"{size / 1e6:,.1f} MB. Its index is {index.hash.hex()}."
    )
    if unanswered:
        write_line(f"{unanswered:,} rows without an answer were left out.")
    if unfound:
        write_line(f"{unfound:,} answers are context alone: the template renders them otherwise once another turn follows.")
    if skips.first is not None:
        write_line(f"What could not be read was left out, {skips.count:,} in all, such as {skips.first}")
    if skips.left:
        write_line(f"Files that were left out for what they are, {skips.num_left:,} in all: {'; '.join(skips.left)}")
    if index.held_out is None:
        more = "evaluations need a file of their own: `flockstep eval --data`"
        write_line(f"None of so few documents is held out, so that this run has no held-out loss; {more}.")
    elif len(different) == 1 and index.num_documents > 1:
        write_line("All texts are one, so what is held out is trained on: its loss shows memory alone.")
    if made_by.end is None and not chat:
        remedy = f'name one in a tokenizer_config.json beside it, {{"{END}": "…"}}, and pack again'
        write_line(f"No token ends a document, since none is known of this tokenizer: {remedy}.")
    source = json.dumps(f"tokens:swarm:{plain_text(str(out))}", ensure_ascii=False)
    write_line(f"Train on it, each member with what the others have:  [data] source = {source}")
    write_line("Or put the folder on a web server or into a dataset of the hub: docs/data.md.")


def _config(beside: dict[str, str], tokenizer: FileTokenizer) -> bytes:
    if TEMPLATE not in beside and tokenizer.end_text:  # A template has been rendered with what the file says.
        beside.setdefault(END, tokenizer.end_text)
    return encode_config(beside)


def _documents(kind: str, place: str, skips: Skips, at: Callable[[int, int], None]) -> Iterator[Document]:
    """Yield the documents of a source; `at` is told how many of its pieces are done. Raises `FlockstepError`."""
    if kind == "text":
        number = 0
        for number, (file, text) in enumerate(named_texts(place, skips), 1):
            at(number, 0)
            yield Document(text.decode(), str(file))
        if not number and skips.first is not None:
            raise UsageError(f"text:{place} holds no text: {skips.first}", remedy=skips.first.remedy or "name text in UTF-8")
        return
    documents, _ = open_documents(kind, place, skips=skips)
    for row in _pieces(documents, documents.read, f"{kind}:{place}", at):
        yield Document(row, *documents.place)


def _chats(
    kind: str,
    place: str,
    render: Callable[[object, str], Rendered | Flaw | None],
    skips: Skips,
    at: Callable[[int, int], None],
) -> Iterator[Rendered]:
    """Yield the chats of a source as text; see `_documents`."""
    documents, column = open_documents(kind, place, column="messages", is_text=False, skips=skips)

    def read(piece: int) -> Iterator[Rendered]:
        return documents.made(piece, (column, *CHAT_COLUMNS), lambda row: render(row, column))

    for found in _pieces(documents, read, f"{kind}:{place}", at):
        file, number = documents.place
        yield replace(found, file=file, row=number)


def _pieces(
    documents: Documents, read: Callable[[int], Iterator[T]], name: str, at: Callable[[int, int], None]
) -> Iterator[T]:
    try:
        for piece in range(len(documents.pieces)):
            at(piece, len(documents.pieces))
            yield from read(piece)
    except OSError as error:
        raise LocalError(f"cannot read {name}: {error}", remedy="check the disk or the network") from error
