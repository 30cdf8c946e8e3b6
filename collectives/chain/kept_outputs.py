"""A store of the encoded outputs of the last rounds, by hash, for replay.

Theory of operation. The newest round's outputs are served from memory: followers and late members fetch them at once.
Older ones lie on the disk, one file for those of a value: an index, then the outputs one after the other. It is synced
before it has its name, since a voter that accepts a value must not lose it by a power cut; one file, since the others wait
for that. What is read is hashed, so a damaged output counts as missing. A round may keep those of several values until
one is decided. The last rounds are kept, and all that lead from the checkpoint to the newest state (`needed`): from these
a restarted peer replays the rounds since. If the disk fails, the last few rounds stay in memory.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.disk import draft_of
from ...peer.base.errors import LocalError, MalformedMessage
from ...peer.node.bulk import Blob
from ...peer.node.file_blob import FileBlob
from ...peer.node.node import Node
from ...peer.wire import MAX_COUNT
from ...peer.wire.schema import Between, Size, decode, encode

IN_MEMORY = 4
"""Rounds kept without a disk: at int4 that is 2 bytes a parameter, a quarter of the state."""

INDEX_LENGTH_BYTES = 4
"""Of the index, before it."""
MAX_INDEX_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class OutputIndex:
    """What a file of outputs begins with."""

    keys: Annotated[tuple[wire.Hash, ...], Size(wire.MAX_PARTS)]
    sizes: Annotated[tuple[Annotated[int, Between(1, 1 << 40)], ...], Size(wire.MAX_PARTS)]
    """In bytes, in the same order."""

    def blobs(self, path: Path) -> dict[bytes, FileBlob]:
        """The outputs in the file at `path` that begins with this index."""
        starts = accumulate(self.sizes, initial=INDEX_LENGTH_BYTES + len(encode(self)))
        return {key: FileBlob(path, start, size) for key, start, size in zip(self.keys, starts, self.sizes, strict=False)}


class Outputs:
    """The outputs that a node serves: of the last `rounds` from files in `folder`; without one, of a few from memory."""

    def __init__(self, node: Node, folder: Path | None = None, rounds: int = IN_MEMORY) -> None:
        self._node = node
        self.folder = folder
        self._rounds = rounds if folder is None else max(rounds, IN_MEMORY)
        self.needed = MAX_COUNT
        """The first round that leads on from my checkpoint: it is kept beyond its time, for twice as long at most."""
        self._in_files: dict[int, dict[bytes, FileBlob]] = {}
        self._in_memory: dict[int, Mapping[bytes, Blob]] = {}
        self._served: dict[bytes, Blob | FileBlob] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._served

    async def load(self) -> None:
        """Serve the files that an earlier process left in the folder."""
        self._in_files = await self._node.compute(self._find)
        self._serve()

    async def keep(self, round_: int, outputs: Mapping[bytes, Blob]) -> None:
        """Serve the outputs of one value of a round as well, and drop those of the oldest rounds."""
        first = max(round_ - 2 * self._rounds, min(round_ - self._rounds, self.needed - 1)) + 1
        self._in_memory[round_] = {**self._in_memory.get(round_, {}), **outputs}
        self._serve()
        files = await self._node.compute(self._write, round_, first, outputs) if self.folder is not None else {}
        files = {**self._in_files.get(round_, {}), **files}
        self._in_files = {n: kept for n, kept in self._in_files.items() if n >= first} | {round_: files}
        self._in_memory = {
            number: kept
            for number, kept in self._in_memory.items()
            if number == round_ or (max(first, round_ - IN_MEMORY + 1) <= number < round_ and not self._is_on_disk(number))
        }
        self._serve()

    def _is_on_disk(self, round_: int) -> bool:
        written = self._in_files.get(round_, {})
        return all(key in written for key, data in self._in_memory[round_].items() if data)

    def _serve(self) -> None:
        everything: dict[bytes, Blob | FileBlob] = {}
        for kept in (*self._in_files.values(), *self._in_memory.values()):
            everything |= kept
        self._node.blobs.drop(key for key in self._served if key not in everything)
        for key, blob in everything.items():
            if self._served.get(key) is not blob:
                self._node.blobs.put(key, blob)
        self._served = everything

    def _find(self) -> dict[int, dict[bytes, FileBlob]]:
        found: dict[int, dict[bytes, FileBlob]] = {}
        faults: list[str] = []
        if self.folder is not None:
            found = outputs_in(self.folder, faults)
        if faults:
            others = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            self._node.telemetry.emit("outputs.unreadable", step="load", reason=f"{faults[0]}{others}")
        return found

    def _write(self, round_: int, first: int, outputs: Mapping[bytes, Blob]) -> dict[bytes, FileBlob]:
        """Remove the rounds before `first` and write the missing outputs; returns no blobs if they cannot be written."""
        assert self.folder is not None
        folder = self.folder / str(round_)
        filled = {key: data for key, data in sorted(outputs.items()) if data}
        index = OutputIndex(tuple(filled), tuple(map(len, filled.values())))
        path = folder / digest(b"".join(filled)).hex()
        blobs = index.blobs(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.iterdir():
                if not (old.name.isdecimal() and int(old.name) >= first):
                    with suppress(FileNotFoundError):  # The write of the next round, in another thread, removes it, too.
                        shutil.rmtree(old)
            if not all(blob.is_sound(key) for key, blob in blobs.items()):
                with draft_of(path) as draft, draft.open("wb") as file:
                    file.writelines(_packed(index, filled))
        except (OSError, LocalError) as error:
            self._node.telemetry.emit("outputs.unwritten", step="keep", reason=str(error), round=round_)
            return {}
        return blobs


def _packed(index: OutputIndex, outputs: Mapping[bytes, Blob]) -> Iterator[Blob]:
    """Yield the contents of a file of outputs."""
    packed = encode(index)
    yield len(packed).to_bytes(INDEX_LENGTH_BYTES) + packed
    yield from outputs.values()


def index_of(path: Path) -> OutputIndex:
    """Read the index of a file of outputs. Raises `OSError`, or `MalformedMessage` if it is no such file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(INDEX_LENGTH_BYTES))
        if length > MAX_INDEX_BYTES:
            raise MalformedMessage("no file of outputs")
        return decode(OutputIndex, file.read(length), max_bytes=MAX_INDEX_BYTES)


def outputs_in(folder: Path, faults: list[str] | None = None) -> dict[int, dict[bytes, FileBlob]]:
    """Return the outputs in files below a folder, by their round and hash; `faults` takes why others are unreadable."""
    found: dict[int, dict[bytes, FileBlob]] = {}
    reasons: list[str] = [] if faults is None else faults
    try:
        for path in sorted(folder.glob("*/[!.]*")):
            try:
                found.setdefault(int(path.parent.name), {}).update(index_of(path).blobs(path))
            except (ValueError, MalformedMessage) as error:
                reasons.append(f"{path}: {error}")
    except OSError as error:
        reasons.append(str(error))
    return found
