"""A stand-in for the Hugging Face hub on loopback: the API's listing of one dataset, and its files by range."""

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.answers import Answers, serving

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
    drips: bool = False
    """Whether the listing comes byte by byte, 20 a second."""
    ended: threading.Event = field(default_factory=threading.Event)
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
    class Handler(Answers):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append((path, self.headers.get("Authorization")))
            start = f"{'' if hub.is_model else '/datasets'}/{REPOSITORY}/resolve/{hub.commit}/"
            if hub.denies:
                self.answer(401, b"{}", **{"X-Error-Code": "GatedRepo"})
            elif path.startswith((f"/api/datasets/{REPOSITORY}/revision/", "/api/models/")):
                names = [{"rfilename": name, "size": hub.sizes.get(name, len(data))} for name, data in hub.files.items()]
                listing = json.dumps({"sha": hub.commit, "siblings": names}).encode()
                if hub.drips:
                    self.drip(listing)
                elif "gzip" in self.headers.get("Accept-Encoding", ""):  # As any server may.
                    self.answer(200, gzip.compress(listing), Content_Encoding="gzip")
                else:
                    self.answer(200, listing)
            elif path in hub.redirects:
                self.answer(302, b"", Location=hub.redirects[path])
            elif path.startswith(start) and (data := hub.files.get(path.removeprefix(start))) is not None:
                self.file(data)
            else:
                self.answer(404, b"{}")

        do_HEAD = do_GET

        def drip(self, data: bytes) -> None:
            self.answer(200, b"", Content_Length=str(len(data)))
            with contextlib.suppress(OSError):  # The reader had enough.
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    if hub.ended.wait(0.05):
                        break

        def file(self, data: bytes) -> None:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            piece = data[int(first) : int(last) + 1]
            if hub.endless:
                piece += bytes(1 << 20)
            # Said, so that nobody asks once more on a connection that is about to end.
            self.answer(206, piece[:-1] if hub.cuts else piece, Connection="close" if hub.endless else "keep-alive")

    with serving(Handler) as port:
        hub.endpoint = f"http://127.0.0.1:{port}"
        yield hub
        hub.ended.set()
