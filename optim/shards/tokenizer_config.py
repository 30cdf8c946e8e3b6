"""What a `tokenizer.json` does not say: special tokens by their role, and the template of chats, as texts alone.

Packed data carry them to whoever exports the model, in a file that transformers reads. Of a `tokenizer_config.json` from
elsewhere nothing else is taken: it may name code. Nobody renders the template but the packer, and the user of an export.
"""

import json
from pathlib import Path
from typing import Any

from ...peer.base.errors import UsageError

CONFIG_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
END = "eos_token"
SPECIAL_TOKENS = ("bos_token", END, "unk_token", "pad_token")
TEMPLATE = "chat_template"
MAX_CONFIG_BYTES = 1 << 20
"""The longest templates in use take 20 kB."""
_MAX_SOURCE_BYTES = 16 << 20
"""A `tokenizer_config.json` lists thousands of added tokens beside them."""


def config_beside(tokenizer: Path) -> dict[str, str]:
    """Return what `chat_template.jinja` and `tokenizer_config.json` beside a tokenizer's file say. Raises `UsageError`."""
    file, config = tokenizer.with_name(TEMPLATE_NAME), tokenizer.with_name(CONFIG_NAME)
    about: Any = {}
    try:
        if config.is_file() and config.stat().st_size <= _MAX_SOURCE_BYTES:
            about = json.loads(config.read_bytes())
        template = file.read_text(encoding="utf-8") if file.is_file() else about.get(TEMPLATE)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        what = f"cannot read the chat template beside {tokenizer}: {error}"
        raise UsageError(what, remedy="check the file") from error
    if isinstance(template, list):  # Several by name.
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    found = {TEMPLATE: template}
    for name in SPECIAL_TOKENS:
        value = about.get(name) if isinstance(about, dict) else None
        found[name] = value.get("content") if isinstance(value, dict) else value
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def encode_config(config: dict[str, str]) -> bytes:
    """Return the file of such texts, as transformers reads it. Raises `UsageError`."""
    data = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **dict(sorted(config.items()))}, indent=1).encode()
    if len(data) > MAX_CONFIG_BYTES:
        what = f"the chat template and the special tokens take more than {MAX_CONFIG_BYTES >> 20} MiB"
        raise UsageError(what, remedy="take another tokenizer")
    return data


def decode_config(path: Path) -> dict[str, str]:
    """Return the texts of such a file, and nothing else of it; none if it is not there. Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            about = json.loads(file.read(MAX_CONFIG_BYTES))
        found = {name: about[name] for name in (*SPECIAL_TOKENS, TEMPLATE) if name in about}
        if not isinstance(about, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError("it is no object of texts")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} has another form: {error}", remedy="`flockstep data pack` makes one") from error
    return found
