"""What stand-ins of web servers on loopback have in common: how they answer, and how long they serve."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answers(BaseHTTPRequestHandler):
    """The requests of a stand-in."""

    protocol_version = "HTTP/1.1"

    def answer(self, code: int, data: bytes = b"{}", **headers: str) -> None:
        """Answer with these headers, `_` for `-` in their names; they may say another length than the data have."""
        self.send_response(code)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        try:
            self.wfile.write(data if self.command != "HEAD" else b"")
        except OSError:
            self.close_connection = True  # The reader had enough.

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(handler: type[Answers], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve until the end; yields the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
