"""Tokens of the parts of a source, cut into pieces, of which some will be held out.

A long document is cut into pieces, at the ends of lines where it has some; its end token follows its last piece alone. Of
chats the tokens outside of answers are marked as context, and the first one of each as its beginning.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...peer.base.disk import user_path
from ...peer.base.errors import UsageError
from ..data.tokenizer import BYTES, UNTAKEN, FileTokenizer, Tokenizer, read_tokenizer
from ..shards.cache import Tokens
from ..shards.index import TOKENIZER, WIDTHS, dtype_for
from ..shards.tokenizer_config import CONFIG_NAME, END, TEMPLATE, TEMPLATE_NAME, config_beside, encode_config
from .chat import CHAT_COLUMNS, ChatTemplate, Rendered, chat_of
from .hub import tokenizer_folder
from .skips import Flaw, Skips
from .sources import Part, Source, read, text_of

HUB = "hf:"
PIECE = 1 << 16
"""Characters of a document that go through the tokenizer at once."""
TOGETHER = 1 << 20
"""Characters of the pieces that do so in one request."""
CHATS = 64
"""Chats that go through the tokenizer together."""

Tell = Callable[[int, int], None]
"""Is told how many more documents and tokens are done."""


class _Piece(NamedTuple):
    """A text of a document."""

    text: str
    place: tuple[str, int]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer; those of bytes are none."""

    path: Path = Path(BYTES.name)
    content: bytes = b""
    config: bytes = b""
    """What lies beside it in a pack (`shards.tokenizer_config`)."""
    vocab_size: int = BYTES.vocab_size
    num_in_texts: int = BYTES.num_in_texts
    has_end: bool = True
    """Whether a token ends a document."""

    def size_for(self, source: Source) -> int:
        """Return how many tokens a model of a source must know: only chats may have all control tokens."""
        return self.vocab_size if source.is_chat else self.num_in_texts

    def open(self) -> Tokenizer:
        """Return the tokenizer, whose process is its own. Raises `UsageError`."""
        return FileTokenizer(self.path, self.content, config_beside(self.path).get(END, "")) if self.content else BYTES


def take_tokenizer(name: str, folder: Path) -> TokenizerFiles:
    """Return the tokenizer of a name: `bytes`, a file in `folder` or a folder that has one, or `hf:org/name[@commit]`.

    Raises `FlockstepError`.
    """
    if name == BYTES.name:
        return TokenizerFiles()
    if name.startswith(HUB):
        path = tokenizer_folder(name.removeprefix(HUB), (TOKENIZER, CONFIG_NAME, TEMPLATE_NAME))
    else:
        path = folder / user_path(name)
    path = path / TOKENIZER if path.is_dir() else path
    content, beside = read_tokenizer(path), config_beside(path)
    opened = FileTokenizer(path, content, beside.get(END, ""))
    if TEMPLATE not in beside and opened.end_text:  # A template has been rendered with what the file says.
        beside.setdefault(END, opened.end_text)
    sizes = opened.vocab_size, opened.num_in_texts
    return TokenizerFiles(path, content, encode_config(beside), *sizes, has_end=opened.end is not None)


@dataclass(slots=True)
class Found:
    """What was found in some parts of a source, beside their tokens."""

    pieces: list[int] = field(default_factory=list)
    """The tokens of each piece."""
    documents: int = 0
    files: int = 0
    """Files that end in these parts."""
    skips: Skips = field(default_factory=Skips)
    num_unanswered: int = 0
    """Chats without an answer."""
    num_unfound: int = 0
    """Answers that are context."""


class Encoder:
    """Makes tokens of the parts of a source, one at a time: each thread has one, with a tokenizer of its own."""

    def __init__(self, source: Source, files: TokenizerFiles) -> None:
        self._source, self._tokenizer = source, files.open()
        self._dtype = dtype_for(files.size_for(source), masked=source.is_chat)
        self._template: ChatTemplate | None = None
        if source.is_chat:
            assert isinstance(self._tokenizer, FileTokenizer)
            self._template = ChatTemplate.beside(files.path, self._tokenizer.controls)

    def encode(self, parts: Sequence[Part], tell: Tell) -> tuple[Tokens, dict[str, Any]]:
        """Return the tokens of some parts, and what was found as `Found` (`dataclasses.asdict`). Raises `FlockstepError`."""
        found, made = Found(files=sum(part.is_last for part in parts)), list[Tokens]()
        for tokens, ends_document in self._pieces(parts, found):
            made.append(tokens.astype(np.dtype(self._dtype).newbyteorder("<")))
            found.pieces.append(len(tokens))
            found.documents += ends_document
            tell(ends_document, len(tokens))
        return np.concatenate([np.empty(0, self._dtype), *made]), asdict(found)

    def _pieces(self, parts: Sequence[Part], found: Found) -> Iterator[tuple[Tokens, bool]]:
        if self._template is not None and isinstance(self._tokenizer, FileTokenizer):
            chats = self._chats(parts, self._template, found)
            return _encoded_chats(chats, self._tokenizer, self._dtype, found.skips)
        return _encoded(self._texts(parts, found), self._tokenizer, found.skips)

    def _texts(self, parts: Sequence[Part], found: Found) -> Iterator[_Piece]:
        for part in parts:
            for number, row in read(part, [self._source.column], found.skips):
                text = row if part.kind == "text" else text_of(row, self._source.column)
                if isinstance(text, Flaw):
                    found.skips.add(part.file, number, text)
                    continue
                is_rest, ends = part.kind == "text" and part.start > 0, part.kind != "text" or part.is_last
                for place, start, end in _cuts(text):
                    is_last = ends and end >= len(text)
                    yield _Piece(text[start:end], (part.file, number), not (place or is_rest), is_last)

    def _chats(self, parts: Sequence[Part], template: ChatTemplate, found: Found) -> Iterator[tuple[Rendered, str, int]]:
        for part in parts:
            for number, row in read(part, [self._source.column, *CHAT_COLUMNS], found.skips):
                try:
                    chat = template.render(chat_of(row, self._source.column), row)
                except UsageError as error:
                    found.skips.add(part.file, number, Flaw(f"is left out: {error}"))
                    continue
                found.num_unanswered += chat is None
                if chat is not None:
                    found.num_unfound += chat.num_unfound
                    yield chat, part.file, number


def _cuts(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the beginning and the end of each piece of a text, which ends with a line where it can."""
    start = number = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield number, start, end
        start, number = end, number + 1


def _encoded(pieces: Iterable[_Piece], tokenizer: Tokenizer, skips: Skips) -> Iterator[tuple[Tokens, bool]]:
    """Yield the tokens of every piece in order, and whether a document ends with it; `skips` takes those without tokens."""
    ends = np.array([] if tokenizer.end is None else [tokenizer.end], np.uint32)
    is_open = True
    for some in _together(pieces):
        for tokens, piece in zip(tokenizer.encode([piece.text for piece in some]), some, strict=True):
            is_open = is_open and not piece.is_first
            if not len(tokens):
                skips.add(*piece.place, Flaw(UNTAKEN))
                tokens = ends if is_open and piece.is_last else ends[:0]
            elif not piece.is_last:
                tokens = tokens[: len(tokens) - len(ends)]
            if len(tokens):
                yield tokens, piece.is_last
            is_open = not piece.is_last and (is_open or len(tokens) > 0)


def _together(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    some, size = list[_Piece](), 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.text)
        if size >= TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def _encoded_chats(
    chats: Iterable[tuple[Rendered, str, int]], tokenizer: FileTokenizer, dtype: str, skips: Skips
) -> Iterator[tuple[Tokens, bool]]:
    """Yield the tokens of every chat with the bits of masked data: what is outside of answers, its end too, is context."""
    context = np.uint32(1 << (8 * WIDTHS[dtype] - 1))
    chats = iter(chats)
    while some := list(islice(chats, CHATS)):
        encoded = tokenizer.encode_at([chat.text for chat, _, _ in some])
        for (tokens, begins), (chat, file, row) in zip(encoded, some, strict=True):
            if not len(tokens):
                skips.add(file, row, Flaw(UNTAKEN))
                continue
            is_answer = np.zeros(len(tokens), np.bool_)
            for start, stop in chat.answers:
                is_answer |= (begins >= start) & (begins < stop)
            masked = np.where(is_answer, tokens, tokens | context)
            if tokenizer.end is not None and int(tokens[-1]) != tokenizer.end:
                masked = np.append(masked, np.uint32(tokenizer.end) | context)
            masked[:1] |= context | context >> np.uint32(1)  # Nothing comes before it that could predict it.
            yield masked, True
