"""A web server on loopback with the files of a folder, by range, and the faults that servers have."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


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
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

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
            start, status, said = 0, 200, {}
            if web.ranges and (wanted := self.headers.get("Range")):
                start, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
                said = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            body = data[start:]
            length = len(body)
            if web.cuts and self.path.endswith(("u16", "u32")):
                web.cuts -= 1
                body = body[: len(body) // 2]
                self.close_connection = True
            if web.endless:
                body += bytes(1 << 20)
                length = len(body)
            self.answer(status, body, length=length, **said)

        def answer(self, code: int, data: bytes, length: int | None = None, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(data) if length is None else length), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            try:
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # The reader had enough.

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_port}/data"
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        web.url = f"https://localhost:{server.server_port}/data"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
