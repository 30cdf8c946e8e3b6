"""`flockstep data pack`, and the packing of `run create`: shards of tokens, which members read by a run's link."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ...dht.run.manifest import Data
from ...optim.consent import HUB_DATASETS
from ...optim.models.needs import check_vocabulary
from ...optim.packing.encode import TokenizerFiles, take_tokenizer
from ...optim.packing.pack import Packed, Progress, pack, recipe_of
from ...optim.packing.sources import Source, open_source
from ...optim.shards.index import BYTES, INDEX, read_index
from ...optim.shards.tokenizer_config import END
from ...peer.base.digest import digest
from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.plain import plain_text
from ..checkpoints.upload import check_target, open_target
from ..watch.console import PlainConsole

PACKS = "packs"
"""The folder of packed data in a home folder, each named by what decides about it."""
NAME_DIGITS = 16
Say = Callable[[str], None]


def pack_data(
    source: str, to: str, say: Say, *, home: Path, tokenizer: str = "bytes", shard_tokens: int = 0, chat: bool = False
) -> None:
    """Pack a source with a tokenizer, its file, its folder, `hf:org/name` or `bytes`. Raises `FlockstepError`.

    `to` is a new folder, or `hf://datasets/…` or `s3://…`, to which the pack is uploaded from the `home` folder. With `chat`
    its rows are lists of messages, of which the answers alone have a loss.
    """
    is_far = "://" in to
    if is_far:
        if not to.startswith((HUB_DATASETS, "s3://")):
            remedy = "write hf://datasets/org/name, s3://bucket/folder or FOLDER"
            raise UsageError(f"cannot put packed data to {to}", remedy=remedy)
        check_target(to)
        open_target(to).check()
    elif user_path(to).exists():
        raise UsageError(f"{to} exists", remedy="name a new folder")
    found, files = open_source(source, chat=chat), take_tokenizer(tokenizer, Path())
    out = _place_of(found, files, home, shard_tokens) if is_far else user_path(to)
    if not out.exists():
        _pack(found, files, out, say, shard_tokens)
    if not is_far:
        line = json.dumps(f"tokens:{plain_text(str(out))}", ensure_ascii=False)
        say(f"Train on it, each member with what the others have:  [data] source = {line}")
        say("Or put it on a web server or a hub: docs/data.md.")
        return
    say(f"The pack lies in {out}; it is uploaded to {to}.")
    readable = open_target(to).put(out)
    if readable:
        say(f'Train on it:  [data] source = "tokens:{readable}"')
    else:
        say(f'Train on it, where {to} is public:  [data] source = "tokens:https://…", its address on the web')


def pack_for_run(data: Data, folder: Path, home: Path, known: int | None, say: Say) -> Data:
    """Pack what a `run.toml` in `folder` names, in the `home` folder, unless it is there; return the settings with the pack.

    `known` is how many tokens the model knows. Raises `FlockstepError`.
    """
    source, files = open_source(data.source), take_tokenizer(data.tokenizer, folder)
    check_vocabulary(data.source, files.size_for(source), known)
    out = _place_of(source, files, home, 0)
    if out.exists():
        say("The data were packed before, and are unchanged.")
    else:
        _pack(source, files, out, say, 0)
    index = read_index((out / INDEX).read_bytes(), str(out))
    size = sum(num_bytes for _, _, num_bytes in index.files)
    say(f"The packed data are in {out}: {len(index.shards):,} shards, {index.num_tokens:,} tokens, {size / 1e6:,.1f} MB.")
    return replace(data, source=f"tokens:{out}", tokenizer=BYTES)


def _place_of(source: Source, files: TokenizerFiles, home: Path, shard_tokens: int) -> Path:
    return home / PACKS / digest(recipe_of(source, files, shard_tokens)).hex()[:NAME_DIGITS]


def _pack(source: Source, files: TokenizerFiles, out: Path, say: Say, shard_tokens: int) -> None:
    """Pack a source into a new folder, and say what is in it and what is not."""
    console, made = PlainConsole(stderr=True), Progress()
    bars = TextColumn("packing"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.fields[done]}")
    with Bar(*bars, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, done="")

        def show() -> None:
            seconds = bar.tasks[0].elapsed or 0.0
            speed = f", {made.new_tokens / seconds / 1e6:.2f} M tokens/s" if seconds else ""
            done = f"{made.files:,} of {made.num_files:,} files, {made.documents:,} documents, {made.tokens:,} tokens{speed}"
            bar.update(task, total=made.num_bytes, completed=made.bytes, done=done)

        made.changed = show
        try:
            packed = pack(source, files, out, shard_tokens=shard_tokens, progress=made)
        except KeyboardInterrupt:
            raise LocalError("the packing was interrupted", remedy="the same command goes on where it was") from None
    _describe(packed, source, files, out, say)


def _describe(packed: Packed, source: Source, files: TokenizerFiles, out: Path, say: Say) -> None:
    index, found = packed.index, packed.found
    size = sum(shard.num_bytes for shard in index.shards)
    say(
        f"Packed {index.num_documents:,} documents of {found.files:,} files into {len(index.shards):,} shards of {out}: "
        f"{index.num_tokens:,} tokens, {size / 1e6:,.1f} MB. Its index is {index.hash.hex()}."
    )
    if found.num_unanswered:
        say(f"{found.num_unanswered:,} rows without an answer were left out.")
    if found.num_unfound:
        why = "the template renders them otherwise once another turn follows"
        say(f"{found.num_unfound:,} answers are context alone: {why}.")
    skips = found.skips
    if skips.first is not None:
        say(f"What could not be read was left out, {skips.count:,} in all, such as {skips.first}")
    if skips.left:
        say(f"Files that were left out for what they are, {skips.num_left:,} in all: {'; '.join(skips.left)}")
    if index.held_out is None:
        more = "evaluations need a pack of their own: `flockstep eval --data`"
        say(f"None of so few documents is held out, so that this run has no held-out loss; {more}.")
    if not files.has_end and not source.is_chat:
        remedy = f'name one in a tokenizer_config.json beside it, {{"{END}": "…"}}, and pack again'
        say(f"No token ends a document, since none is known of this tokenizer: {remedy}.")
