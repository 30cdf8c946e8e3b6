"""The door of tables and live views: what they show, which others may have written, does nothing to a terminal."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ...peer.base.plain import plain_lines, plain_text


class PlainConsole(Console):
    """rich's console, which escapes all that is not printable in what it renders; only its own codes reach the terminal."""

    def say(self, line: str, style: str | None = None) -> None:
        """Write one line, whatever its width: a line break in it is escaped, too."""
        self.print(plain_text(line), style=style, markup=False, highlight=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of what is shown, each with a plain text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain_lines(text), style, control)
