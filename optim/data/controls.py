"""Control tokens of a `tokenizer.json` under names that no text contains, so that no text can make one.

Theory of operation. A tokenizer finds its added tokens in any text, and some of its models find them as words: a document
that quotes `<|endoftext|>` would end there, and a user's words could open a turn of their own. So the file is read with
each of them renamed, to its id between two noncharacters of Unicode (U+FDD0, U+FDD1), which mean nothing in interchange:
texts lose them first. Ids, flags and segments stay, and whoever writes a control token on purpose, as the packer does for
those of a chat template, writes its name. An added token of letters, digits and spaces alone is a word, and stays one.

A model without a token for what it does not know gets one beyond its vocabulary: a text that has it cannot be encoded,
while the package would drop those characters (BPE). On a text that it does not take else, the package fails.
"""

import json
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

NAME, HIDDEN, UNKNOWN = "\ufdd0{}\ufdd1", "\ufdd4{}\ufdd5", "\ufdd0\ufdd1"
"""A control token by its id, the same for one that a text only quotes, and what stands for all that a model does not know."""
PROBE = "".join(map(chr, range(32, 0x250))) + " The swarm makes the outer step, not lockstep.\n"
"""A text with all letters of Latin, which a tokenizer reads when it is opened, with the texts of its own patterns."""
MAX_GROWTH = 64
"""Tokens of a character, and characters of a token: NFKD makes 18 of one, and an unknown one is 4 bytes."""
MAX_PATTERNS = 1 << 16
"""Characters of a file's own patterns that are read with it."""
FAILED = SimpleNamespace(ids=[1 << 32], offsets=[(0, 0)])
"""What stands for the tokens of a text on which the package fails: one that no tokenizer has."""
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
        if isinstance(vocab, dict):
            pieces, known = {names.get(piece, piece): number for piece, number in ids.items()}, model.get("unk_token")
            unknown = names.get(known, known) if known in ids else UNKNOWN
            model |= {"vocab": {**pieces, UNKNOWN: self.vocab_size}, "unk_token": unknown}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
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


def open_tokenizer(data: bytes) -> Callable[[bytes], bytes]:
    """Open a tokenizer's file in a child (`peer.process.confined`), behind a line with the name of its end token, if any.

    A request is a line that names what to do, and its argument as JSON: tokens, whose text is the answer, or texts, whose
    answer is their tokens and where each begins (`encode at`), `FAILED` where the package fails. Raises `ValueError` for a
    file that makes too many tokens of a text, or too long a text of its tokens.
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
        except BaseException:  # noqa: BLE001 # The package panics with bare exceptions.
            return [FAILED] if len(texts) == 1 else [one for text in texts for one in encoded(encode, [text])]

    def handle(request: bytes) -> bytes:
        what, _, argument = request.partition(b"\n")
        if what == b"decode":
            return str(tokenizer.decode(json.loads(argument))).encode(errors="replace")
        at = what == b"encode at"
        found = encoded(tokenizer.encode_batch if at else tokenizer.encode_batch_fast, json.loads(argument))
        answer = [(one.ids, [start for start, _ in one.offsets] if at else ()) for one in found]
        return json.dumps(answer, separators=(",", ":")).encode()

    about = json.loads(file)
    patterns = json.dumps([about.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    probe = PROBE + patterns[:MAX_PATTERNS]
    (one,) = encoded(tokenizer.encode_batch, [probe])
    longest = 0 if one is FAILED else max(len(one.ids), len(tokenizer.decode(one.ids)))
    if longest > MAX_GROWTH * len(probe):
        raise ValueError(f"makes {longest:,} tokens or characters of a text of {len(probe)}")
    return handle


def without_noncharacters(text: str) -> str:
    """Return a text in which nothing is a name."""
    return text if text.isascii() else _NONCHARACTERS.sub("\ufffd", text)


def _is_word(token: Any) -> bool:
    return not token["special"] and all(char.isalnum() or char.isspace() for char in token["content"])
