"""A web server on loopback with the files of a folder, by range, and the faults that servers have."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.answers import Answers, serving


@dataclass
class WebStandIn:
    """What the server holds, how it fails, and what it was asked."""

    folder: Path
    ranges: bool = True
    """Whether it knows ranges."""
    cuts: int = 0
    """So many answers with a shard end in their middle."""
    breaks: int = 0
    """So many questions are answered with 503."""
    redirect: str = ""
    endless: bool = False
    """Whether a body goes on behind the file."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """The name of each file that was asked for, and the range."""
    url: str = ""
    news: threading.Condition = field(default_factory=threading.Condition)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]

    def was_asked(self, name: str) -> bool:
        """Wait until a file was asked for."""
        with self.news:
            return self.news.wait_for(lambda: name in self.names, timeout=120)


@contextmanager
def web_stand_in(web: WebStandIn, tls: ssl.SSLContext | None = None) -> Iterator[WebStandIn]:
    class Handler(Answers):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            with web.news:
                web.asked.append((name, self.headers.get("Range")))
                web.news.notify_all()
            path = web.folder / name
            if web.redirect:
                self.answer(302, b"", Location=web.redirect)
            elif web.breaks:
                web.breaks -= 1
                self.answer(503, b"")
            elif not path.is_file():
                self.answer(404, b"")
            else:
                self.file(path.read_bytes())

        def file(self, data: bytes) -> None:
            start, status, said = 0, 200, dict[str, str]()
            if web.ranges and (wanted := self.headers.get("Range")):
                start, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
                said = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            body = data[start:]
            length = len(body)
            if web.cuts and self.path.endswith(("u8", "u16", "u32")):
                web.cuts -= 1
                body = body[: len(body) // 2]
                self.close_connection = True
            if web.endless:
                body += bytes(1 << 20)
                length = len(body)
            self.answer(status, body, Content_Length=str(length), **said)

    with serving(Handler, tls) as port:
        web.url = f"http://127.0.0.1:{port}/data" if tls is None else f"https://localhost:{port}/data"
        yield web
