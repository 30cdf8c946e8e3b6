"""Plain text: what others wrote, made harmless before it becomes an event or is shown. Pure.

A terminal acts on control characters: escape sequences clear the screen, set the clipboard, or hide a line. Bidirectional
overrides and characters of no width let a text read otherwise than it is. Markup (`[red]`, `<b>`) is none of these: whoever
shows a text shows it as text.
"""


SHORT_ID = 8
"""Characters from the end of a peer id that name it in a table: the beginning is the same in all of them."""


def plain_text(text: str) -> str:
    """Escape all characters that are not printable, line breaks too: `\\x1b`, `\\u202e`. What is plain stays as it is."""
    if text.isprintable():  # Nearly always.
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shortened(text: str, size: int) -> str:
    """Return a plain text of at most so many characters; one that is longer ends in `…`."""
    plain = plain_text(text[:size])  # Before it is escaped: an escape may take ten characters.
    return plain if len(text) <= size and len(plain) <= size else plain[: size - 1] + "…"


def plain_lines(text: str) -> str:
    """Return a plain text that keeps its line breaks, with four spaces for each tab."""
    return "\n".join(map(plain_text, text.replace("\t", "    ").split("\n")))
