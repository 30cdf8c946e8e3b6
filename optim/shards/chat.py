"""Chats as text, by the template of their tokenizer, and where in it the answers stand.

A template is a program (Jinja) of whoever has made the tokenizer. It runs when data are packed, on the packer's computer, in
the sandbox that transformers uses for it, and never on a volunteer's. An answer is what a turn of the assistant adds to the
chat before it with the prompt for that turn; a template that does not add at the end is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...peer.base.errors import UsageError
from .tokenizer_config import SPECIAL_TOKENS, TEMPLATE, config_beside

ASSISTANT = "assistant"
ROLES = {"human": "user", "gpt": ASSISTANT}
"""What some collections call them."""
PAIRS = (("prompt", "completion"), ("instruction", "output"))
"""Columns of rows without a list of messages: a question and its answer, as texts or messages (TRL, Alpaca)."""
MORE = "input"
"""A column of Alpaca's: what the instruction is about; mostly empty."""
CHAT_COLUMNS = (*(column for pair in PAIRS for column in pair), MORE)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Where in it each answer begins and ends, in characters."""


class ChatTemplate:
    """A Jinja template with the special tokens that it may name. Raises `UsageError` for what is no template."""

    def __init__(self, template: str, tokens: Mapping[str, str]) -> None:
        controls = ["jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=controls)
        environment.globals["raise_exception"] = _refuse
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            what = f"the tokenizer's chat template is no Jinja: {error}"
            raise UsageError(what, remedy="take another tokenizer") from error

    @classmethod
    def beside(cls, tokenizer: Path) -> "ChatTemplate":
        """The template in the `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer's file."""
        tokens = config_beside(tokenizer)
        template = tokens.pop(TEMPLATE, "")
        if not template:
            remedy = "put its tokenizer_config.json or chat_template.jinja there"
            raise UsageError(f"the tokenizer {tokenizer} has no chat template", remedy=remedy)
        return cls(template, dict.fromkeys(SPECIAL_TOKENS, "") | tokens)

    def render(self, chat: object) -> Rendered | None:
        """A chat, a list of messages with a role and a content; None if it has no answer. Raises `UsageError`."""
        messages = _messages(chat)
        text, answers = "", list[tuple[int, int]]()
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._text(messages[:number], prompt=True)
            text = self._text(messages[: number + 1], prompt=False)
            if not text.startswith(before) or (answers and answers[-1][1] > len(before)):
                what = "the tokenizer's chat template does not add an answer behind the chat before it"
                raise UsageError(what, remedy="take a tokenizer whose template does, or pack rendered text")
            answers.append((len(before), len(text)))
        return Rendered(text, tuple(answers)) if answers else None

    def _text(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, tools=None, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UsageError(f"the tokenizer's chat template refuses a chat: {error}", remedy="check its roles") from error


def chat_of(row: object, column: str) -> object:
    """Return the messages of a row: the row itself, those in a column, or a question and its answer."""
    if not isinstance(row, dict) or row.get(column) is not None:
        return row.get(column) if isinstance(row, dict) else row
    for question, answer in PAIRS:
        asked, said, more = row.get(question), row.get(answer), row.get(MORE)
        if isinstance(asked, str) and isinstance(said, str):
            asked = f"{asked}\n\n{more}" if isinstance(more, str) and more else asked
            return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": said}]
        if isinstance(asked, list) and isinstance(said, list):
            return [*asked, *said]
    return None


def _messages(chat: object) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for message in chat if isinstance(chat, list) else ():
        said = message if isinstance(message, dict) else {}
        role, content = said.get("role", said.get("from")), said.get("content", said.get("value"))
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise UsageError("a message of a chat has no role or no content that is text", remedy="check its column")
        found.append({"role": ROLES.get(role, role), "content": content})
    return found


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(str(reason)[:200])
