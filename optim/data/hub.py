"""Files of a dataset of the Hugging Face hub: listed at one commit by its API, read by range, over https.

Theory of operation. Whoever publishes a dataset writes its README and may put any file beside it. So nothing of a dataset
is interpreted but the rows of its parquet and JSON files: the hub's API names the files of a commit, a rule on their names
chooses some of them (`chosen`), and each is read from the hub's own address of it. No name of a file is a pattern or an
address, since such names are left out.

A file may be redirected, as large ones are, to where the hub keeps them: to the hub itself, or by https to a host of
Hugging Face (`STORE`), and so never into this computer's own network. The user's token goes to the hub alone. Every answer
is read up to the length that was asked for.
"""

import io
import json
import os
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install
from ..consent import HUB_DATASET

ENDPOINT = "https://huggingface.co"
MAX_LISTING_BYTES = 64 << 20
"""The largest datasets have some 100,000 files, of 200 bytes each."""
MAX_REDIRECTS = 3
STORE = re.compile(r"(?:[a-z0-9-]+\.)*(?:hf\.co|huggingface\.co)", re.ASCII)
"""Where files of the hub may be, besides the hub itself: the whole of an address between `https://` and its path."""
MAX_FILE_BYTES = 1 << 50
"""The largest that a listing may state: a place in a file has 63 bits."""
MAX_READ_BYTES = 64 << 20
"""Of one question; whoever asks for more gets as much, and asks again."""
TIMEOUT = 30.0
"""Seconds without a byte."""
LEAST_RATE = 4e3
"""Bytes/s on average after a minute, as of a state from a peer: a byte now and then must not hold a reader for ever."""
TRIES = 5
"""With 1, 2, 4 and 8 s between them: a short outage of the network ends no training."""
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers that say nothing of the file: the same question may be answered later (RFC 9110, RFC 6585)."""
DENIED = (401, 403)
"""What the hub answers to whoever may not read a repository, or when there is none of that name."""
BUFFER_BYTES = 4 << 20
ENDINGS = {"parquet": (".parquet",), "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")}
"""Of the files that are data, by the reader that they need."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words in the names of files that say which split they are of."""
_PLAIN_NAME = re.compile(r"(?:[\w=+,@-][\w=+,.@ -]*/)*[\w=+,@-][\w=+,.@ -]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset at a commit."""

    hub: "Hub"
    name: str
    url: str
    size: int

    def open(self) -> io.BufferedReader:
        """Open it for reading from any place; reading raises `OSError`."""
        return io.BufferedReader(_Remote(self), BUFFER_BYTES)


class Hub:
    """One hub, at the address that `HF_ENDPOINT` names; `token` is the user's, or empty."""

    def __init__(self, token: str = "") -> None:
        try:
            import httpx
        except ImportError as error:
            raise LocalError(f"data of the hub needs httpx: {error}", remedy=how_to_install("hf")) from error
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT
        self._token = token
        # As the bytes are: an answer is read without unpacking it.
        self._client = httpx.Client(headers={"Accept-Encoding": "identity"}, follow_redirects=False, timeout=TIMEOUT)
        weakref.finalize(self, self._client.close)
        self._error: type[Exception] = httpx.HTTPError

    def commit(self, kind: str, repository: str, revision: str = "main") -> str:
        """Return the commit of a branch or tag of a repository; `kind` is datasets or models. Raises `OSError`."""
        return self._commit_of(self._listing(kind, repository, revision))

    def files(self, repository: str, revision: str, kind: str = "datasets") -> list[HubFile]:
        """Return the files of a repository at a revision, by their names; for `kind` see `commit`. Raises `OSError`."""
        listing = self._listing(kind, repository, revision)
        commit = self._commit_of(listing)
        if _COMMIT.fullmatch(revision) and commit != revision:
            raise OSError(f"the hub answers with commit {commit[:12]} for {revision[:12]}")
        files, entries = [], listing.get("siblings")
        place = f"{self._endpoint}/{'' if kind == 'models' else f'{kind}/'}{repository}/resolve/{commit}"
        for entry in entries if isinstance(entries, list) else ():
            name, size = (entry.get(key) for key in ("rfilename", "size")) if isinstance(entry, dict) else (None, None)
            if isinstance(name, str) and type(size) is int and 0 <= size <= MAX_FILE_BYTES and _PLAIN_NAME.fullmatch(name):
                files.append(HubFile(self, name, f"{place}/{quote(name)}", size))
        return sorted(files, key=lambda file: file.name)

    def read(self, url: str, start: int, length: int) -> bytes:
        """Return so many bytes of a file from `start` on. Raises `OSError`."""
        data = self._get(url, {"Range": f"bytes={start}-{start + length - 1}"}, length, wanted=206)
        if len(data) != length:
            raise ConnectionError(f"{url} ends after {start + len(data)} bytes, before those that the hub lists")
        return data

    def _listing(self, kind: str, repository: str, revision: str) -> dict[str, Any]:
        url = f"{self._endpoint}/api/{kind}/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        data = self._get(url, {}, MAX_LISTING_BYTES + 1, wanted=200)
        try:
            listing = json.loads(data) if len(data) <= MAX_LISTING_BYTES else None
        except (ValueError, RecursionError):
            listing = None
        if not isinstance(listing, dict):
            raise OSError(f"{url} is no listing of files in {MAX_LISTING_BYTES >> 20} MiB")
        return listing

    def _commit_of(self, listing: dict[str, Any]) -> str:
        commit = listing.get("sha")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise OSError("the hub names no commit")
        return commit

    def _get(self, url: str, headers: dict[str, str], most: int, *, wanted: int) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                return self._get_once(url, headers, most, wanted)
            except (self._error, ConnectionError) as error:
                if not left:
                    raise ConnectionError(f"{urlsplit(url).hostname} is not reached: {error}") from error
            except ValueError as error:
                raise OSError(f"the hub leads to no address: {error}") from error
            time.sleep(2.0 ** (TRIES - 2 - left))
        raise AssertionError("unreachable")

    def _get_once(self, url: str, headers: dict[str, str], most: int, wanted: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            own = self._is_own(url)
            sent = headers | ({"Authorization": f"Bearer {self._token}"} if own and self._token else {})
            with self._client.stream("GET", url, headers=sent) as response:
                if response.is_redirect:
                    url = urljoin(url, response.headers.get("location", ""))
                    continue
                if response.status_code in BUSY:
                    raise ConnectionError(f"{response.status_code} {response.reason_phrase}")
                if response.status_code in DENIED:
                    why = "this user's token may not read it" if self._token else "no token was sent: `hf auth login`"
                    raise OSError(f"{url}: {response.status_code}; if it is there, it is gated or private, and {why}")
                if response.status_code != wanted:
                    raise OSError(f"{url}: {response.status_code} {response.reason_phrase}")
                return b"".join(steadily(response.iter_raw(), most, url, 2 * TIMEOUT))
        raise OSError(f"{url}: it is redirected more than {MAX_REDIRECTS} times")

    def _is_own(self, url: str) -> bool:
        """Return True for an address of the hub itself. Raises `OSError` for one that no file of it may be at."""
        parts, own = urlsplit(url), urlsplit(self._endpoint)
        if (parts.scheme, parts.netloc) == (own.scheme, own.netloc):
            return True
        if parts.scheme != "https" or not STORE.fullmatch(parts.netloc):
            raise OSError(f"the hub leads to {url}, where none of its files may be")
        return False


class _Remote(io.RawIOBase):
    """A file that is read by range."""

    def __init__(self, file: HubFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self._file.size)[whence])
        return self._place

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._file.size - self._place, MAX_READ_BYTES)
        if length <= 0:
            return 0
        buffer[:length] = self._file.hub.read(self._file.url, self._place, length)
        self._place += length
        return length


def steadily(pieces: Iterator[bytes], most: int, name: str, patience: float) -> Iterator[bytes]:
    """Yield an answer, and no more of it than `most` bytes. Raises `ConnectionError` where it is too slow."""
    deadline, done = time.monotonic() + patience, 0
    for piece in pieces:
        kept = piece[: most - done]
        done += len(kept)
        if time.monotonic() > deadline + done / LEAST_RATE:
            raise ConnectionError(f"{name} sends less than {LEAST_RATE / 1e3:g} kB/s")
        yield kept
        if done == most:
            return


def token_of_user() -> str:
    """Return the user's token of the hub, from the environment or from where `hf auth login` keeps it; empty without."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return os.environ.get("HF_TOKEN", "")
    return get_token() or ""


def hub_files(place: str, split: str, *, trusted: bool) -> tuple[str, list[HubFile]]:
    """Return the reader, parquet or json, and the files of a split of `org/name[@commit][/folder]`. Raises `UsageError`."""
    match = HUB_DATASET.fullmatch(place)
    if match is None:
        raise UsageError(
            f"hf:{place} is neither a folder here nor org/name", remedy="write hf:org/name, hf:org/name@commit or hf:FOLDER"
        )
    files = Hub(token_of_user() if trusted else "").files(match["repository"], match["commit"] or "main")
    kind, names = chosen([file.name for file in files], match["folder"] or "", split, f"hf:{place}")
    wanted = set(names)
    return kind, [file for file in files if file.name in wanted]


def read_hub(repository: str, commit: str, name: str, most: int) -> bytes:
    """Return a file of a model of the hub at a commit, by the user's token. Raises `OSError`."""
    files = Hub(token_of_user()).files(repository, commit, "models")
    file = next((file for file in files if file.name == name), None)
    if file is None or file.size > most:
        raise OSError(f"it has no {name}" if file is None else f"{name} has {file.size:,} bytes, {most:,} at most")
    return file.hub.read(file.url, 0, file.size)


def newest_commit(kind: str, repository: str) -> str:
    """Return the present commit of a repository of the hub; `kind` is datasets or models. Raises `UsageError`."""
    try:
        return Hub(token_of_user()).commit(kind, repository)
    except OSError as error:
        remedy = "name a commit yourself, or check the name and the network"
        raise UsageError(f"hf:{repository}: its present commit is not known: {error}", remedy=remedy) from error


def pinned_source(source: str) -> str:
    """Return a source with the present commit of a dataset of the hub that names none. Raises `UsageError`."""
    kind, _, place = source.partition(":")
    path, mark, query = place.partition("?")
    match = HUB_DATASET.fullmatch(path)
    if kind != "hf" or match is None or match["commit"] or user_path(path).is_dir():
        return source
    commit = newest_commit("datasets", match["repository"])
    folder = f"/{match['folder']}" if match["folder"] else ""
    return f"hf:{match['repository']}@{commit}{folder}{mark}{query}"


def chosen(names: Sequence[str], folder: str, split: str, what: str) -> tuple[str, list[str]]:
    """Choose the files of a split by their names alone: return the reader, parquet or json, and the names in order.

    Of all below `folder` those of parquet if there are any, else those of JSON. Of these the ones with a word for the split
    in their path (`SPLITS`); where no name has a word for any split all are of `train`. Raises `UsageError`.
    """
    below = sorted(name for name in names if not folder or name.startswith(f"{folder}/"))
    by_kind = {kind: [name for name in below if name.endswith(endings)] for kind, endings in ENDINGS.items()}
    kind = next((kind for kind, those in by_kind.items() if those), None)
    if kind is None:
        raise UsageError(f"{what} has no parquet or JSON file", remedy="check its name, its folder and the network")
    data = by_kind[kind]
    found = list(filter(partial(_is_of, split=split, below=folder), data))
    if not found and split == "train" and not any(_is_of(name, each, folder) for name in data for each in SPLITS):
        found = data
    if not found:
        shown = ", ".join(data[:3])
        remedy = f"a file's path says its split, as data/{split}-0.parquet does; its files are {shown}"
        raise UsageError(f"{what} has no file of the split {split}", remedy=remedy)
    return kind, found


def _is_of(name: str, split: str, below: str) -> bool:
    words = re.split(r"[^a-z0-9]+", name.removeprefix(f"{below}/").lower())
    return any(word in words for word in SPLITS.get(split, (split.lower(),)))
