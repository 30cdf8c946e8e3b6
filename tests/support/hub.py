"""A stand-in for the Hugging Face hub on loopback: the API's listing of one repository, and its files by range."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from support.answers import Answers, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "evil/ds"


@dataclass
class StandIn:
    """What the hub holds, and what it was asked."""

    files: dict[str, bytes]
    redirects: dict[str, str] = field(default_factory=dict)
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


def entries(files: dict[str, bytes], folder: str) -> Iterator[dict[str, object]]:
    """What lies in a folder of the repository."""
    for name, data in files.items():
        if name.rpartition("/")[0] == folder:
            yield {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def stand_in(hub: StandIn) -> Iterator[StandIn]:
    class Handler(Answers):
        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.asked.append((path, self.headers.get("Authorization")))
            kind = "models" if hub.is_model else "datasets"
            start = f"{'' if hub.is_model else '/datasets'}/{REPOSITORY}/resolve/{COMMIT}/"
            if hub.denies:
                self.answer(401, b"{}", X_Error_Code="GatedRepo")
            elif path.startswith(f"/api/{kind}/{REPOSITORY}/revision/"):
                names = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
                self.answer(200, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": names}).encode())
            elif path.startswith(tree := f"/api/{kind}/{REPOSITORY}/tree/{COMMIT}"):
                self.answer(200, json.dumps(list(entries(hub.files, path.removeprefix(tree).strip("/")))).encode())
            elif path in hub.redirects:
                self.answer(302, b"", Location=hub.redirects[path])
            elif path.startswith(start) and (data := hub.files.get(path.removeprefix(start))) is not None:
                self.file(data)
            else:
                self.answer(404, b"{}", X_Error_Code="EntryNotFound")

        do_HEAD = do_GET

        def file(self, data: bytes) -> None:
            said = {"X_Repo_Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            if (wanted := self.headers.get("Range")) is None:
                self.answer(200, data, **said)
                return
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(data) - 1), len(data) - 1)
            said["Content_Range"] = f"bytes {first}-{end}/{len(data)}"
            self.answer(206, data[int(first) : end + 1], **said)

    with serving(Handler) as port:
        hub.endpoint = f"http://127.0.0.1:{port}"
        yield hub
