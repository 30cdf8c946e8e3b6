"""Packed data of a few documents, and the tokenizer that made them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flockstep.optim.data.rows import Document, Skips
from flockstep.optim.data.tokenizer import BYTES, FileTokenizer
from flockstep.optim.shards.index import ShardIndex
from flockstep.optim.shards.pack import LEAST_SHARD_TOKENS, pack

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


def packed(out: Path, documents: list[str] | None = None, *, tokenizer: bytes = b"", **options: Any) -> ShardIndex:
    """Pack documents with the bytes of a tokenizer's file, or as bytes."""
    made_by = FileTokenizer(Path("tokenizer.json"), tokenizer) if tokenizer else BYTES
    options = {"shard_tokens": LEAST_SHARD_TOKENS} | options
    texts = map(Document, STORIES if documents is None else documents)
    return pack(texts, made_by, out, skips=Skips(), tokenizer_file=tokenizer, **options)
