"""Stand-ins for a bucket of S3 and for the Hugging Face hub on loopback, to which models are uploaded, with their faults."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.answers import Answers, serving


@dataclass
class Shelf:
    """What was put there, and how it fails."""

    files: dict[str, bytes] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """Of S3: the `sha256` beside each object."""
    commits: list[dict[str, bytes]] = field(default_factory=list)
    """Of the hub: the files of each commit, and its summary under an empty name."""
    put: list[str] = field(default_factory=list)
    """The names of what was sent, in order."""
    refuses: bool = False
    """Whether whoever writes has no right to."""
    breaks_at: str = ""
    """The end of a name, by which what is sent gets no answer; a commit of any name is refused."""
    tokens: set[str] = field(default_factory=set)
    endpoint: str = ""


class _Handler(Answers):
    shelf: Shelf

    def body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = _unchunked(self.rfile.read)
        if "x-amz-decoded-content-length" in self.headers:  # Chunks once more, with a checksum behind them.
            rest = [data]

            def read(count: int) -> bytes:
                piece, rest[0] = rest[0][:count], rest[0][count:]
                return piece

            data = _unchunked(read)
        return data


def _unchunked(read: Any) -> bytes:
    whole = b""
    while True:
        line = b""
        while not line.endswith(b"\r\n"):
            line += read(1)
        if not (size := int(line.split(b";")[0], 16)):
            return whole
        whole += read(size)
        read(2)


class _Bucket(_Handler):
    """Path-style S3: a bucket named `b`."""

    def do_HEAD(self) -> None:
        key = self.path.partition("?")[0].removeprefix("/b").lstrip("/")
        if self.shelf.refuses:
            self.answer(403)
        elif not key or key in self.shelf.files:
            digest = self.shelf.digests.get(key)
            self.answer(200, b"", **({} if digest is None else {"x_amz_meta_sha256": digest}))
        else:
            self.answer(404)

    def do_PUT(self) -> None:
        key, data = self.path.partition("?")[0].removeprefix("/b/"), self.body()
        self.shelf.put.append(key)
        self.shelf.tokens.add(self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0])
        if self.shelf.breaks_at and key.endswith(self.shelf.breaks_at):
            self.close_connection = True
            return
        self.shelf.files[key] = data
        if digest := self.headers.get("x-amz-meta-sha256"):
            self.shelf.digests[key] = digest
        self.answer(200, b"", ETag=f'"{hashlib.md5(data).hexdigest()}"')


class _Hub(_Handler):
    """The hub's API for one repository, all of whose files are small."""

    def do_GET(self) -> None:
        self.answer(403 if self.shelf.refuses else 200, json.dumps({"sha": "0" * 40, "siblings": []}).encode())

    def do_POST(self) -> None:
        path, data = self.path.partition("?")[0], self.body()
        self.shelf.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if path == "/api/repos/create":
            self.answer(
                409 if self.shelf.refuses else 200, json.dumps({"url": f"{self.shelf.endpoint}/org/name"}).encode()
            )
        elif path == "/api/validate-yaml":
            self.answer(200, b'{"errors": [], "warnings": []}')
        elif "/preupload/" in path:
            self.answer(200, json.dumps({"files": [self.told(file) for file in json.loads(data)["files"]]}).encode())
        elif "/commit/" in path:
            self.commit([json.loads(line) for line in data.splitlines()])
        else:
            self.answer(404)

    def told(self, file: dict[str, Any]) -> dict[str, Any]:
        held = self.shelf.files.get(file["path"])
        oid = None if held is None else hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()
        return {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": oid}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        files = {"": lines[0]["value"]["summary"].encode()}
        files |= {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines[1:]}
        if self.shelf.breaks_at:
            self.answer(422)
            return
        self.shelf.commits.append(files)
        self.shelf.files |= {name: data for name, data in files.items() if name}
        oid = f"{len(self.shelf.commits):040}"
        self.answer(
            200, json.dumps({"commitUrl": f"{self.shelf.endpoint}/org/name/commit/{oid}", "commitOid": oid}).encode()
        )


@contextmanager
def shelf_at(kind: str) -> Iterator[Shelf]:
    """A stand-in for `s3`, the bucket `b`, or for `hf`, the repository `org/name`."""
    shelf = Shelf()
    handler = type("Handler", ({"s3": _Bucket, "hf": _Hub}[kind],), {"shelf": shelf})
    with serving(handler) as port:
        shelf.endpoint = f"http://127.0.0.1:{port}"
        yield shelf
