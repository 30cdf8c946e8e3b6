"""Packed data of a few documents, and the tokenizer that made them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flockstep.dht.run.manifest import Data
from flockstep.optim.data.tokenizer import FileTokenizer
from flockstep.optim.packing.encode import TokenizerFiles
from flockstep.optim.packing.pack import LEAST_SHARD_TOKENS, pack
from flockstep.optim.packing.sources import open_source
from flockstep.optim.shards.index import ShardIndex
from flockstep.optim.shards.opening import open_tokens
from flockstep.optim.shards.reader import TokenShards
from flockstep.peer.base.config import PeerConfig

STORIES = [f"{number:05d} once upon a time there were {number} peers that flew in step\n" * 20 for number in range(400)]


def train_tokenizer(path: Path, *, vocab_size: int = 300, special_tokens: Sequence[str] = ("<|endoftext|>",)) -> bytes:
    """Train a byte-pair encoding on the stories; returns its file's bytes."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(STORIES, trainer)
    tokenizer.save(str(path))
    return path.read_bytes()


def files_of(content: bytes, config: bytes = b"", end: str = "") -> TokenizerFiles:
    """A tokenizer by the bytes of its file; bytes where there are none."""
    if not content:
        return TokenizerFiles()
    opened = FileTokenizer(Path("tokenizer.json"), content, end)
    sizes = opened.vocab_size, opened.num_in_texts
    return TokenizerFiles(Path("tokenizer.json"), content, config, *sizes, has_end=opened.end is not None)


def packed(
    out: Path, documents: Sequence[str] = STORIES, *, tokenizer: bytes = b"", config: bytes = b"", **options: Any
) -> ShardIndex:
    """Pack documents with the bytes of a tokenizer's file, or as bytes."""
    rows = out.with_name(f"{out.name}.jsonl")
    rows.write_text("".join(f"{json.dumps({'text': text})}\n" for text in documents))
    options = {"shard_tokens": LEAST_SHARD_TOKENS} | options
    index = pack(open_source(f"json:{rows}"), files_of(tokenizer, config), out, **options).index
    rows.unlink()
    return index


def text_tokens(folder: Path, text: str, sequence_length: int) -> TokenShards:
    """The bytes of a text as the data of a peer that has packed it in a folder."""
    folder.mkdir(exist_ok=True)
    packed(folder / "text", [text])
    config = PeerConfig(home=folder, data=str(folder / "text"))
    return open_tokens(Data(source="own", sequence_length=sequence_length), config)
