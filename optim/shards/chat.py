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

Nothing of a chat is left out in silence: where a rendering would be the same without a key of its messages, or without a
column of its row that says something (`SPOKEN`), it is refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...peer.base.errors import UsageError
from ...peer.process.confined import Confined, Handler
from ..data.controls import MAX_GROWTH, NAMED, Controls, without_noncharacters
from .tokenizer_config import MAX_CONFIG_BYTES, SPECIAL_TOKENS, TEMPLATE, config_beside

ASSISTANT, SYSTEM = "assistant", "system"
ROLES = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT}
"""What some collections call them."""
PAIRS = (("prompt", "completion"), ("instruction", "output"))
"""Columns of rows without a list of messages: a question and its answer, as texts or messages (TRL, Alpaca)."""
MORE, SHARED = "input", "conversations"
"""A column of Alpaca's, what the instruction is about, mostly empty; and the messages of ShareGPT."""
SETTINGS, LISTS = "chat_template_kwargs", ("tools", "documents")
SPOKEN = (*LISTS, SYSTEM, "functions", "history", "image", "images", "audio", "audios", "video", "videos")
"""Columns beside the messages that say something to the model; some write `LISTS` as a text of JSON."""
CHAT_COLUMNS = (SHARED, *(column for pair in PAIRS for column in pair), MORE, SETTINGS, *SPOKEN)
WEIGHTS, LINKS = ("weight", "train"), ("id", "tool_call_id")
"""Keys of a message that say whether it is learned, 0 or false, 1 or true; and those that only say whose result it is."""
THOUGHT, THOUGHT_END, REASONING = "<think>", "</think>", "reasoning_content"
DAY = datetime(2024, 7, 26)
"""Today, for a template that asks: the day that Llama 3's names when it knows none, so that every pack is the same."""
MARK = "\ufdd2"
"""In a rendering: where what the template marks as generated begins, and where it ends."""
FAILED = "\ufdd3"
_HALF_NAME = re.compile("\ufdd0\\d*$")
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
    file: str = ""
    row: int = 0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, between which transformers looks for what the model generates."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See `Extension`."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Output([nodes.TemplateData(MARK)]), *body, nodes.Output([nodes.TemplateData(MARK)])]


def open_template(data: bytes) -> tuple[bytes, Handler]:
    """Open a template in a child: the names that it reads, then for each request, what it is given, a refusal and a text."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": DAY.strftime}
    environment.filters["tojson"] = _to_json
    try:
        template = environment.from_string(data.decode())
        variables = jinja2.meta.find_undeclared_variables(environment.parse(data.decode()))
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"is no Jinja: {error}") from error

    def handle(request: bytes) -> bytes:
        try:
            answer = "", template.render(json.loads(request))
        except REFUSALS as error:
            answer = str(error) or type(error).__name__, ""
        return json.dumps(answer).encode()

    return json.dumps(sorted(variables)).encode(), handle


class ChatTemplate:
    """A Jinja template with the special tokens that it may name. Raises `UsageError` for what is no template.

    `controls` are the control tokens of its tokenizer; without them a text may hold any.
    """

    def __init__(self, template: str, tokens: Mapping[str, str], controls: Controls | None = None) -> None:
        self._tokens, self._controls = dict(tokens), controls or Controls()
        what = "the tokenizer's chat template"
        self._template = Confined(open_template, template.encode(errors="replace"), what, most=MAX_CONFIG_BYTES)
        self.variables = frozenset[str](json.loads(self._template.opened))
        """What it reads: messages, and what stands beside them, as tools."""
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

        `row` is what the messages stand in, of which the template is given the columns that it reads.
        """
        try:
            return self._render([self._message(said) for said in chat] if isinstance(chat, list) else [], self._given(row))
        except REFUSALS as error:
            raise UsageError(f"the tokenizer's chat template refuses a chat: {error}", remedy="check its roles") from error

    def _render(self, messages: list[Message], given: Message) -> Rendered | None:
        if SYSTEM in given and SYSTEM not in self.variables:
            messages = [{"role": SYSTEM, "content": given.pop(SYSTEM)}, *messages]
        wanted = [number for number, message in enumerate(messages) if _is_wanted(message)]
        if not wanted:
            return None
        text, marked = self._text(messages, given)
        self._check_read(messages, given, text)
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
            if number in wanted and text[start:end] == others[start:end] and _is_said(messages[number], text[start:end])
        ]
        if not answers:
            what = "the tokenizer's chat template does not add an answer behind the chat before it"
            raise UsageError(what, remedy=_OTHER)
        return Rendered(text, tuple(answers), len(wanted) - len(answers))

    def _spans(self, messages: list[Message], wanted: list[int], given: Message, text: str) -> dict[int, Span]:
        """Return where in a text those answers stand that a model would generate there."""
        found, least = dict[int, Span](), 0
        for number in wanted:
            prompt, whole = self._try(messages[:number], given, prompt=True), self._try(messages[: number + 1], given)
            same = next((at for at, char in enumerate(prompt) if text[at : at + 1] != char), len(prompt))
            if same < len(prompt):  # It may begin what this answer is without, as a thought.
                begun = _HALF_NAME.sub("", prompt[:same])
                prompt = begun if begun.startswith(self._try(messages[:number], given)) else FAILED
            if text.startswith(prompt) and text.startswith(whole) and least <= len(prompt) < len(whole):
                least = len(whole)
                found[number] = len(prompt), least
        return found

    def _check_read(self, messages: list[Message], given: Message, text: str) -> None:
        """Raise `UsageError` where a rendering would be the same without something that a chat says."""
        keys = {key for said in messages for key in said if (key, said["role"]) != ("name", "tool")}
        for key in sorted((keys | given.keys() & {*SPOKEN}) - {"role", "content", *LINKS, *WEIGHTS}):
            if self._try([_without(key, message) for message in messages], _without(key, given)) == text:
                raise _unread(key)

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

    def _given(self, row: object) -> Message:
        """Return what the template reads of a row beside its messages. Raises `UsageError` for what says more."""
        columns = dict(row) if isinstance(row, dict) else {}
        settings = columns.get(SETTINGS) or {}
        columns |= {key: json.loads(columns[key]) for key in LISTS if isinstance(columns.get(key), str)} | settings
        said = {key: value for key, value in columns.items() if value is not None and value not in ("", [], {})}
        for key in said.keys() & {*SPOKEN, *settings} - self.variables - {SYSTEM}:
            raise _unread(key)
        return {key: said[key] for key in said.keys() & {*self.variables, SYSTEM} - {"messages", "add_generation_prompt"}}

    def _message(self, message: Any) -> Message:
        said = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
        role, content = (said.pop(key, said.pop(other, None)) for key, other in (("role", "from"), ("content", "value")))
        said = {key: value for key, value in said.items() if value not in ("", [], {})}
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part["text"]) for part in content)
        content = "" if content is None and said.keys() - {*WEIGHTS, *LINKS} else content
        if not isinstance(role, str) or not isinstance(content, str):
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
    says = message["content"].strip() or message.keys() - {"role", "content", "name", *WEIGHTS, *LINKS}
    return is_answer and bool(says) and all(weights)


def _is_said(message: Message, text: str) -> bool:
    """Return True if all texts of an answer stand in another one, of its content what is behind a thought."""
    said = [text for key, text in message.items() if key not in ("role", "name", *LINKS) and isinstance(text, str)]
    return all(without_noncharacters(each).rpartition(THOUGHT_END)[2].strip() in text for each in said)


def _changed(message: Message) -> Message:
    """Return a message with another letter in the place of each one of its content."""
    return {**message, "content": "".join("xy"[char == "x"] if char.isalnum() else char for char in message["content"])}


def _without(key: str, message: Message) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does for templates, and not for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _unread(key: str) -> UsageError:
    what = f"a chat has {key!r}, which the tokenizer's chat template does not render"
    return UsageError(what, remedy="leave it out of the data, or take a template that renders it")


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(str(reason)[:200])
