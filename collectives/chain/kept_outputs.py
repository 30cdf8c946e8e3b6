"""A store of the encoded outputs of the last rounds, by hash, for replay.

Theory of operation. The newest round's outputs are served from memory: followers and late members fetch them at once.
Older ones lie on the disk, one file each, named by hash. They are synced, since a voter that accepts a value must not
lose it by a power cut; a file is hashed whenever it is read, so a torn one counts as missing. A round may keep those of
several values until one is decided. As many rounds are kept as lead from the older of two checkpoints to the newest
state. If the disk fails, the last few rounds stay in memory.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ...peer.disk import sync_folder
from ...peer.node.bulk import Blob
from ...peer.node.file_blob import FileBlob
from ...peer.node.node import Node

IN_MEMORY = 4
"""Rounds kept without a disk (DESIGN §8): at int4 that is 2 bytes a parameter, a quarter of the state."""

_NAME = re.compile(r"[0-9a-f]{64}")


class Outputs:
    """The outputs that a node serves: of the last `rounds` from files in `folder`; without one, of a few from memory."""

    def __init__(self, node: Node, folder: Path | None = None, rounds: int = IN_MEMORY) -> None:
        self._node = node
        self._folder = folder
        self._rounds = max(rounds, IN_MEMORY)
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
        first = round_ - self._rounds + 1
        self._in_memory[round_] = {**self._in_memory.get(round_, {}), **outputs}
        self._serve()
        files = await self._node.compute(self._write, round_, first, outputs) if self._folder is not None else {}
        files = {**self._in_files.get(round_, {}), **files}
        self._in_files = {n: kept for n, kept in self._in_files.items() if n >= first} | {round_: files}
        self._in_memory = {
            number: kept
            for number, kept in self._in_memory.items()
            if number == round_ or (round_ - IN_MEMORY < number < round_ and not self._in_files.get(number))
        }
        self._serve()

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
        try:
            for path in sorted(self._folder.glob("*/*")) if self._folder is not None else ():
                if path.parent.name.isdecimal() and _NAME.fullmatch(path.name):
                    blob = FileBlob(path, 0, path.stat().st_size)
                    found.setdefault(int(path.parent.name), {})[bytes.fromhex(path.name)] = blob
        except OSError as error:
            self._node.telemetry.emit("outputs.unreadable", step="load", reason=str(error))
        return found

    def _write(self, round_: int, first: int, outputs: Mapping[bytes, Blob]) -> dict[bytes, FileBlob]:
        """Remove the rounds before `first` and write the missing files; returns no blobs if any cannot be written."""
        assert self._folder is not None
        folder = self._folder / str(round_)
        blobs = {key: FileBlob(folder / key.hex(), 0, len(data)) for key, data in outputs.items() if data}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.iterdir():
                if not (old.name.isdecimal() and int(old.name) >= first):
                    shutil.rmtree(old)
            for key, blob in blobs.items():
                if not blob.is_sound(key):
                    with blob.path.open("wb") as file:
                        file.write(outputs[key])
                        file.flush()
                        os.fsync(file.fileno())
            sync_folder(folder)
        except OSError as error:
            self._node.telemetry.emit("outputs.unwritten", step="keep", reason=str(error), round=round_)
            shutil.rmtree(folder, ignore_errors=True)  # A torn file takes space that others may need.
            return {}
        return blobs
