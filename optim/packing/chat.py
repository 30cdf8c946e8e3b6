"""Chats as text, by the template of their tokenizer, and where in it the answers stand.

A template is a program (Jinja) of whoever has made the tokenizer. It runs when data are packed, on the packer's computer, in
the sandbox that transformers uses for it, in a child with limits (`peer.process.confined`), and never on a volunteer's.

Theory of operation. The whole chat is rendered once, and everything is located in that text. Where the template marks what
its model generates (`{% generation %}`), an answer is what stands between two marks. Elsewhere it stands behind the chat
before it with the prompt for a turn, if that rendering and the one with the answer both begin the text: a template that
renders earlier turns in another way than the last one has fewer such answers, mostly the last alone. Then the chat is
rendered with other words in the place of what others say: whatever changes in a place of an answer, it is none.

A control token is one that the template writes. It sees those in the strings of a chat quoted by noncharacters, and they
stand as plain characters in the text; those that it writes stand there by their names (`data.controls`). Where other words
of the chat would give other control tokens, a text has completed one, and the chat is refused.

Nothing of a chat is left out in silence: a chat is refused if its text lacks a word of its messages, or of a column that
says something (`SPOKEN`). What answers say stands in the places that are learned; elsewhere a template may cut thoughts.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...peer.base.errors import UsageError
from ...peer.process.confined import Confined, Handler
from ..data.controls import MAX_GROWTH, NAMED, Controls, without_noncharacters
from ..shards.tokenizer_config import MAX_CONFIG_BYTES, SPECIAL_TOKENS, TEMPLATE, config_beside

ASSISTANT, SYSTEM = "assistant", "system"
ROLES = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT}
"""What some collections call them."""
PAIRS = (("prompt", "completion"), ("instruction", "output"))
"""Columns of rows without a list of messages: a question and its answer, as texts or messages (TRL, Alpaca)."""
MORE, SHARED = "input", "conversations"
"""A column of Alpaca's, what the instruction is about, mostly empty; and the messages of ShareGPT."""
SETTINGS, LISTS = "chat_template_kwargs", ("tools", "documents")
"""Columns that a template is given, with the names in the first of them; some write the others as a text of JSON."""
SPOKEN = (*LISTS, "functions", "history", "image", "images", "audio", "audios", "video", "videos")
"""Columns beside the messages that say something to the model."""
CHAT_COLUMNS = (SHARED, *(column for pair in PAIRS for column in pair), MORE, SETTINGS, SYSTEM, *SPOKEN)
WEIGHTS, UNSAID = ("weight", "train"), ("role", "type", "id", "tool_call_id")
"""Keys of a message that say whether it is learned, 0 or false, 1 or true; and those, at any depth, that need no words."""
THOUGHT, THOUGHT_END, REASONING = "<think>", "</think>", "reasoning_content"
DAY = datetime(2024, 7, 26)
"""Today, for a template that asks: the day that Llama 3's names when it knows none, so that every pack is the same."""
MARK = "\ufdd2"
"""In a rendering: where what the template marks as generated begins, and where it ends."""
FAILED = "\ufdd3"
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation\b")
"""`{% generation %}`, between which and its end transformers looks for what the model generates."""
_HALF_NAME, _WORD = re.compile("\ufdd0\\d*$"), re.compile(r"(?<!\\)\w+")
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
_OTHER = "take a tokenizer whose template does, or pack rendered text"

Message = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text, the control tokens of its template by their names (`Controls`)."""

    text: str
    answers: tuple[Span, ...]
    """Where in it each answer begins and ends, in characters."""
    num_unfound: int = 0
    """Further answers, which are context: they do not stand in the text as they would be generated."""


def open_template(data: bytes) -> Handler:
    """Open a template in a child: for each request, what it is given, it returns a refusal and a text."""
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": DAY.strftime}
    environment.filters |= {"tojson": _to_json, "generation": f"{MARK}{{}}{MARK}".format}
    marks = _GENERATION.sub(lambda tag: tag[1] + ("endfilter" if tag[2] else "filter generation"), data.decode())
    try:
        template = environment.from_string(marks)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"is no Jinja: {error}") from error

    def handle(request: bytes) -> bytes:
        try:
            answer = "", template.render(json.loads(request))
        except REFUSALS as error:
            answer = str(error) or type(error).__name__, ""
        return json.dumps(answer).encode()

    return handle


class ChatTemplate:
    """A Jinja template with the special tokens that it may name. Raises `UsageError` for what is no template.

    `controls` are the control tokens of its tokenizer; without them a text may hold any.
    """

    def __init__(self, template: str, tokens: Mapping[str, str], controls: Controls | None = None) -> None:
        self._tokens, self._controls = dict(tokens), controls or Controls()
        self._template = Confined(open_template, template.encode(errors="replace"), "the tokenizer's chat template")
        self._thinks = REASONING in template and THOUGHT_END in self._controls.names
        self._reads = [name for name, special in self._controls.is_special.items() if not special and name in template]
        """Control tokens that it may look for in an answer."""

    @classmethod
    def beside(cls, tokenizer: Path, controls: Controls | None = None) -> "ChatTemplate":
        """The template in the `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer's file."""
        tokens = config_beside(tokenizer)
        template = tokens.pop(TEMPLATE, "")
        if not template:
            remedy = "put its tokenizer_config.json or chat_template.jinja there"
            raise UsageError(f"the tokenizer {tokenizer} has no chat template", remedy=remedy)
        return cls(template, dict.fromkeys(SPECIAL_TOKENS, "") | tokens, controls)

    def render(self, chat: object, row: object = None) -> Rendered | None:
        """A chat, a list of messages with a role and a content; None if it has no answer to learn. Raises `UsageError`.

        `row` is what the messages stand in, with columns that say more.
        """
        columns = row if isinstance(row, dict) else {}
        try:
            lists = {key: columns[key] for key in LISTS if columns.get(key)}
            given = {key: json.loads(value) if isinstance(value, str) else value for key, value in lists.items()}
            given |= columns.get(SETTINGS) or {}
            system = [{"role": SYSTEM, "content": columns[SYSTEM]}] if columns.get(SYSTEM) else []
            messages = [self._message(said) for said in (*system, *chat)] if isinstance(chat, list) else []
            return self._render(messages, given, {key: columns.get(key) for key in SPOKEN} | given)
        except REFUSALS as error:
            raise UsageError(f"the tokenizer's chat template refuses a chat: {error}", remedy="check its roles") from error

    def _render(self, messages: list[Message], given: Message, spoken: Message) -> Rendered | None:
        wanted = [number for number, message in enumerate(messages) if _is_wanted(message)]
        if not wanted:
            return None
        text, marked = self._text(messages, given)
        for part in (spoken, *messages):  # Of what answers say, a template may cut thoughts.
            for key in sorted(part.keys() - ({"content", REASONING} if part.get("role") == ASSISTANT else set())):
                if not _stands({key: part[key]}, text):
                    what = f"a chat has {key!r}, which the tokenizer's chat template does not render"
                    raise UsageError(what, remedy="leave it out of the data, or take a template that renders it")
        speakers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        found = dict(zip(speakers, marked, strict=False)) if len(marked) == len(speakers) else {}
        found = found or self._spans(messages, wanted, given, text)
        changed = [_changed(message) for message in messages]
        mixed = [messages[number] if number in speakers else message for number, message in enumerate(changed)]
        others, _ = self._text(mixed, given)
        if not NAMED.findall(text) == NAMED.findall(others) == NAMED.findall(self._text(changed, given)[0]):
            raise UsageError("a text of a chat completes a control token of its template", remedy=_OTHER)
        answers = [
            (start, end)
            for number, (start, end) in found.items()
            if number in wanted and text[start:end] == others[start:end] and _stands(messages[number], text[start:end])
        ]
        if not answers:
            what = "the tokenizer's chat template does not add an answer behind the chat before it"
            raise UsageError(what, remedy=_OTHER)
        return Rendered(text, tuple(answers), len(wanted) - len(answers))

    def _spans(self, messages: list[Message], wanted: list[int], given: Message, text: str) -> dict[int, Span]:
        """Return where in a text those answers stand that a model would generate there."""
        found, least = dict[int, Span](), 0
        for number in wanted:
            before, whole = (self._try(messages[:end], given) for end in (number, number + 1))
            # A prompt may begin what this answer is without, as a thought.
            begun = commonprefix([self._try(messages[:number], given, prompt=True), text])  # noqa: RUF071 # Of texts.
            start = len(_HALF_NAME.sub("", begun))
            if text.startswith(before) and text.startswith(whole) and max(least, len(before)) <= start < len(whole):
                least = len(whole)
                found[number] = start, least
        return found

    def _try(self, messages: list[Message], given: Message, *, prompt: bool = False) -> str:
        """Return a rendering, or `FAILED`, with which none begins."""
        try:
            return self._text(messages, given, prompt=prompt)[0]
        except REFUSALS:
            return FAILED

    def _text(self, messages: list[Message], given: Message, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return a rendering, and where in it stands what the template marks as generated."""
        quoted = self._controls.quoted(json.dumps({**given, "messages": messages}, ensure_ascii=False, default=str))
        about = {**dict.fromkeys(LISTS), **json.loads(quoted), **self._tokens, "add_generation_prompt": prompt}
        request = json.dumps(about).encode()
        failed, text = json.loads(self._template.ask(request, MAX_GROWTH * len(request) + MAX_CONFIG_BYTES))
        if failed:
            raise ValueError(failed)
        text = self._controls.written(text)
        if "\ufdd4" in text or "\ufdd5" in text:
            raise ValueError("it cuts a control token of a text in two")
        pieces = text.split(MARK)
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), list(zip(ends[::2], ends[1::2], strict=False))

    def _message(self, message: Any) -> Message:
        parts = message.items() if isinstance(message, dict) else ()
        said = {key: value for key, value in parts if value not in (None, "", [], {})}
        role, content = (said.pop(key, said.pop(other, "")) for key, other in (("role", "from"), ("content", "value")))
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not role or not isinstance(role, str) or not isinstance(content, str):
            raise UsageError("a message of a chat has no role or no content that is text", remedy="check its column")
        role = ROLES.get(role, role)
        thought, ended, answer = content.partition(THOUGHT_END)
        if role == ASSISTANT and ended and self._thinks and REASONING not in said:
            said[REASONING], content = thought.rpartition(THOUGHT)[2].strip("\n"), answer.lstrip("\n")
        if role == ASSISTANT and (read := next((name for name in self._reads if name in content), "")):
            what = f"an answer has {read}, which the tokenizer's chat template may read in texts"
            raise UsageError(what, remedy=f"write a thought as {REASONING}, a call as tool_calls")
        return {"role": role, "content": content, **said}


def chat_of(row: object, column: str) -> object:
    """Return the messages of a row: the row itself, those in a column, or a question and its answer."""
    if not isinstance(row, dict):
        return row
    for name in (column, SHARED):
        if row.get(name) is not None:
            return row[name]
    for question, answer in PAIRS:
        asked, said, more = row.get(question), row.get(answer), row.get(MORE)
        if isinstance(asked, str) and isinstance(said, str):
            asked = f"{asked}\n\n{more}" if isinstance(more, str) and more else asked
            return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": said}]
        if isinstance(asked, list) and isinstance(said, list):
            return [*asked, *said]
    return None


def _is_wanted(message: Message) -> bool:
    """Return True for an answer that says something and is to be learned. Raises `UsageError` for another weight."""
    weights, is_answer = [message[key] for key in WEIGHTS if key in message], message["role"] == ASSISTANT
    if any(weight not in (0, 1)[: 1 + is_answer] for weight in weights):
        raise UsageError(f"a message of the role {message['role']} has the weight {weights}", remedy="an answer has 0 or 1")
    says = message["content"].strip() or message.keys() - {"content", "name", *WEIGHTS, *UNSAID}
    return is_answer and bool(says) and all(weights)


def _stands(said: Any, text: str) -> bool:
    """Return True if a text has all words of a part of a chat, as they are or in JSON."""
    if isinstance(said, dict):
        return all(_stands(value, text) for key, value in said.items() if key not in (*WEIGHTS, *UNSAID))
    if isinstance(said, list):
        return all(_stands(value, text) for value in said)
    plain = without_noncharacters(str(said)).strip()
    return said in (None, True, False) or plain in text or all(word in text for word in _WORD.findall(plain))


def _changed(message: Message) -> Message:
    """Return a message with another letter in the place of each one of its content."""
    return {**message, "content": "".join("xy"[char == "x"] if char.isalnum() else char for char in message["content"])}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does for templates, and not for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(str(reason)[:200])
