"""A stand-in for the Hugging Face hub on loopback: the API's listing of one dataset, and its files by range."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "evil/ds"


@dataclass
class StandIn:
    """What the hub holds, how it lies, and what it was asked."""

    files: dict[str, bytes]
    sizes: dict[str, int] = field(default_factory=dict)
    """Other sizes than the files have, in the listing."""
    redirects: dict[str, str] = field(default_factory=dict)
    commit: str = COMMIT
    endless: bool = False
    """Whether a body goes on behind what was asked for."""
    cuts: bool = False
    """Whether it ends before that."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """The path and the Authorization of each question."""
    endpoint: str = ""
    denies: bool = False
    """Whether nobody may read it, as of a gated repository whose terms the user has not accepted."""
    is_model: bool = False
    """Whether it holds a model, and no dataset."""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@contextmanager
def stand_in(hub: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append((path, self.headers.get("Authorization")))
            start = f"{'' if hub.is_model else '/datasets'}/{REPOSITORY}/resolve/{hub.commit}/"
            if hub.denies:
                self.answer(401, b"{}", **{"X-Error-Code": "GatedRepo"})
            elif path.startswith((f"/api/datasets/{REPOSITORY}/revision/", "/api/models/")):
                names = [{"rfilename": name, "size": hub.sizes.get(name, len(data))} for name, data in hub.files.items()]
                self.answer(200, json.dumps({"sha": hub.commit, "siblings": names}).encode())
            elif path in hub.redirects:
                self.answer(302, b"", Location=hub.redirects[path])
            elif path.startswith(start) and (data := hub.files.get(path.removeprefix(start))) is not None:
                self.file(data)
            else:
                self.answer(404, b"{}")

        do_HEAD = do_GET

        def file(self, data: bytes) -> None:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            piece = data[int(first) : int(last) + 1]
            if hub.endless:
                piece += bytes(1 << 20)
            self.answer(206, piece[:-1] if hub.cuts else piece)

        def answer(self, code: int, data: bytes, **headers: str) -> None:
            self.send_response(code)
            if hub.endless:  # Said, so that nobody asks once more on a connection that is about to end.
                headers["Connection"] = "close"
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = hub.endless
            try:
                self.wfile.write(b"" if self.command == "HEAD" else data)
            except OSError:
                self.close_connection = True  # The reader had enough.

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
