"""Control tokens of a `tokenizer.json` under names that no text contains, so that no text can make one.

Theory of operation. A tokenizer finds its added tokens in any text, and some of its models find them as words: a document
that quotes `<|endoftext|>` would end there, and a user's words could open a turn of their own. So the file is read with
each of them renamed, to its id between two noncharacters of Unicode (U+FDD0, U+FDD1), which mean nothing in interchange:
texts lose them first. Ids, flags and segments stay, and whoever writes a control token on purpose, as the packer does for
those of a chat template, writes its name. An added token of letters, digits and spaces alone is a word, and stays one.

A model without a token for what it does not know gets one beyond its vocabulary: a text that has it cannot be encoded,
while the package would drop those characters (BPE), or fail on the text and on all that are encoded with it (others).
"""

import contextlib
import json
import re
from array import array
from collections.abc import Callable, Iterable
from typing import Any

NAME, HIDDEN, UNKNOWN = "\ufdd0{}\ufdd1", "\ufdd4{}\ufdd5", "\ufdd0\ufdd1"
"""A control token by its id, the same for one that a text only quotes, and what stands for all that a model does not know."""
PROBE = "".join(map(chr, range(32, 0x250))) + " The swarm makes the outer step, not lockstep.\n"
"""A text with all letters of Latin, which a tokenizer reads when it is opened, with the texts of its own patterns."""
MAX_GROWTH = 64
"""Tokens of a character, and characters of a token: NFKD makes 18 of one, and an unknown one is 4 bytes."""
MAX_PATTERN = 256
NAMED = re.compile(NAME.format(r"(\d+)"))
_QUOTED = re.compile(HIDDEN.format(r"(\d+)"))
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")


class Controls:
    """The control tokens of a tokenizer's file, and that file with their names; `ends` are the names of its end token.

    Raises `ValueError`, `LookupError`, `TypeError` and `AttributeError` for what is no such file.
    """

    def __init__(self, data: bytes = b'{"model": {"vocab": {}}}', ends: Iterable[str] = ()) -> None:
        about = json.loads(data)
        model, added = about["model"], about.get("added_tokens") or []
        vocab: Any = model["vocab"]
        ids = {token["content"]: token["id"] for token in added}
        ids |= vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
        self.vocab_size = max(ids.values(), default=-1) + 1
        """Ids of the tokens of the file; the one for what it does not know is the next."""
        self.end = next((name for name in ends if name in ids), "")
        """The token that ends a document; empty if it has none."""
        self.end_id: int | None = ids.get(self.end)
        self.is_special = {token["content"]: bool(token["special"]) for token in added if not _is_word(token)}
        """Each control token by its text, and whether the file calls it special."""
        self.is_special |= {self.end: True} if self.end else {}
        made = self.end, model.get("unk_token"), model.get("unk_id")
        kept = (number for name, number in ids.items() if name not in self.is_special or name in made or number in made)
        self.num_in_texts = max(kept, default=-1) + 1
        """Ids up to the last one that a text, its end or what a model does not know of it can be."""
        self.names = names = {control: NAME.format(ids[control]) for control in self.is_special}
        """What stands for each of them in a text."""
        self._texts = {str(ids[control]): control for control in names}
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        for token in added:
            content = token["content"]
            token |= {"content": names.get(content, content), "normalized": token["normalized"] and content not in names}
        if "merges" in model:
            split = ((pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])
            model["merges"] = [pair for pair, parts in split if names.keys().isdisjoint([*parts, "".join(parts)])]
        pieces = {names.get(piece, piece): number for piece, number in ids.items()} | {UNKNOWN: self.vocab_size}
        if isinstance(vocab, dict):
            known = model.get("unk_token")
            model |= {"vocab": pieces, "unk_token": names.get(known, known) if known in ids else UNKNOWN}
        else:
            beyond, least = {number: piece for piece, number in pieces.items()}, min(score for _, score in vocab)
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
            model["vocab"] += [[beyond[number], least] for number in range(len(vocab), self.vocab_size + 1)]
            model["unk_id"] = self.vocab_size if model.get("unk_id") is None else model["unk_id"]
        self.file = json.dumps(about).encode()

    def written(self, text: str) -> str:
        """Return a text with the names of the control tokens that it has, and those that it quotes as they are."""
        named = self._pattern.sub(lambda control: self.names[control[0]], text)
        return _QUOTED.sub(lambda quoted: self._texts.get(quoted[1], ""), named)

    def quoted(self, text: str) -> str:
        """Return a text that only quotes the control tokens that it has, without noncharacters else."""
        plain = without_noncharacters(text)
        return self._pattern.sub(lambda control: HIDDEN.format(self.names[control[0]][1:-1]), plain)

    def read(self, text: str) -> str:
        """Return a text with the control tokens in the place of their names."""
        return NAMED.sub(lambda name: self._texts.get(name[1], ""), text)


def open_tokenizer(data: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Open a tokenizer's file in a child (`peer.process.confined`), behind a line with the name of its end token, if any.

    A request is a line that names what to do, and its argument as JSON. Raises `ValueError` for a file that makes too many
    tokens of a text, or too long a text of its tokens.
    """
    import tokenizers

    end, _, file = data.partition(b"\n")
    tokenizer = tokenizers.Tokenizer.from_buffer(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if end:  # It may be a word of the file's model alone.
        tokenizer.add_special_tokens([tokenizers.AddedToken(end.decode(), normalized=False)])

    def encoded(encode: Callable[..., Any], texts: list[str]) -> list[Any]:
        try:
            return list(encode(texts, add_special_tokens=False))
        except BaseException as error:
            if not is_of_package(error):
                raise
            return [None] if len(texts) == 1 else [one for text in texts for one in encoded(encode, [text])]

    def handle(request: bytes) -> bytes:
        what, _, about = request.partition(b"\n")
        argument = json.loads(about)
        if what == b"decode":
            try:
                return str(tokenizer.decode(argument)).encode(errors="replace")
            except BaseException as error:
                raise ValueError(f"cannot read its own tokens: {error}") from error
        if what == b"flaw":
            one = tokenizer.encode(argument, add_special_tokens=False)
            return json.dumps([one.ids, one.offsets]).encode()
        found = encoded(tokenizer.encode_batch if what == b"encode at" else tokenizer.encode_batch_fast, argument)
        numbers = array("I", [0xFFFFFFFF if one is None else len(one.ids) for one in found])
        for one in filter(None, found):
            numbers.extend(one.ids)
            if what == b"encode at":
                numbers.extend(at for at, _ in one.offsets)
        return numbers.tobytes()

    about, longest = json.loads(file), 0
    probe = PROBE + "".join(_texts_in([about.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]))
    for one in filter(None, encoded(tokenizer.encode_batch, [probe])):
        longest = len(one.ids)
        with contextlib.suppress(Exception):  # Which a decoder that fails on some tokens raises again where it is asked.
            longest = max(longest, len(handle(b"decode\n" + json.dumps(one.ids).encode())))
    if longest > MAX_GROWTH * len(probe):
        raise ValueError(f"makes {longest:,} tokens or characters of a text of {len(probe)}")
    return b"", handle


def _texts_in(part: Any) -> list[str]:
    """Return the texts in a part of a file, as far as each is one of a pattern."""
    if isinstance(part, dict | list):
        return [text for each in (part.values() if isinstance(part, dict) else part) for text in _texts_in(each)]
    return [part[:MAX_PATTERN]] if isinstance(part, str) else []


def is_of_package(error: BaseException) -> bool:
    """Return True for an error of a text or a file: the package panics on some with bare exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def without_noncharacters(text: str) -> str:
    """Return a text in which nothing is a name."""
    return text if text.isascii() else _NONCHARACTERS.sub("\ufffd", text)


def _is_word(token: Any) -> bool:
    return not token["special"] and all(char.isalnum() or char.isspace() for char in token["content"])
