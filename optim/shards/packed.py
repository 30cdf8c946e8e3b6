"""Packed data by their name, as a manifest pins them:

    tokens:swarm:SIZE@HASH                            the members of the run; SIZE is the length of the index in bytes
    tokens:https://host/folder@HASH                   a web server
    tokens:hf://datasets/org/name@commit/folder@HASH  a dataset of the hub

HASH is that of the index, 64 hex digits. The same data in two places have one hash, so their readers share the work.

Imports no torch, since `run create` goes on as a keeper.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...dht.run.manifest import OWN, Data
from ...peer.base.config import PeerConfig
from ...peer.base.disk import user_path, write_whole
from ...peer.base.errors import UsageError
from ...peer.base.plain import plain_text
from ...peer.base.troubles import NEEDS_PROGRAM
from ..consent import HUB_DATASET, HUB_DATASETS, HUB_HOST, PUBLIC_URL
from .index import BYTES, INDEX, MAX_INDEX_BYTES, TOKENIZER, ShardIndex, read_index
from .members import Absent, Bring, Members
from .places import Folder, Place, patiently
from .web import Web, hub_folder

TOKENS = "tokens:"
_PINNED = re.compile(
    rf"tokens:(?P<place>swarm:(?P<size>[1-9][0-9]{{0,6}})|{HUB_DATASETS}(?P<dataset>.+)|(?P<url>https://.+))@(?P<index>[0-9a-f]{{64}})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class FromMembers:
    """How a member reads what the others provide."""

    bring: Bring
    awaits: Callable[[], bool]
    """Waits a moment for members that are not here; returns False to give up."""


@dataclass(frozen=True, slots=True)
class Pin:
    """What a manifest says of its data."""

    index: bytes
    """The hash of their index."""
    size: int = 0
    """The length of the index, where the members provide the data; else 0."""
    url: str = ""
    dataset: str = ""

    @classmethod
    def of(cls, source: str) -> "Pin | None":
        """The pin in a name of packed data; None for all else."""
        match = _PINNED.fullmatch(source)
        if match is None:
            return None
        found = cls(bytes.fromhex(match["index"]), int(match["size"] or 0), match["url"] or "", match["dataset"] or "")
        return found if found.size or found.host else None

    @property
    def host(self) -> str:
        """The host from which the data are read; empty for one that no manifest may name, and for the members."""
        if self.dataset:
            match = HUB_DATASET.fullmatch(self.dataset)
            return HUB_HOST if match is not None and match["commit"] else ""
        url = PUBLIC_URL.fullmatch(self.url)
        return url["host"] if url is not None else ""


def open_index(data: Data, config: PeerConfig, members: FromMembers | None = None) -> tuple[Place, ShardIndex]:
    """Return the place of the data of a run, or of this peer's own, and their index, whose hash is pinned.

    Raises `UsageError`.
    """
    if config.data:
        place: Place = Folder(user_path(config.data))
        return place, _read_index(place, None)
    if data.source == OWN:
        raise UsageError(NEEDS_PROGRAM.cause, remedy=NEEDS_PROGRAM.remedy)
    if (pin := Pin.of(data.source)) is None:
        what = f"the run names {plain_text(data.source)}, which are no packed data that a manifest may name"
        raise UsageError(what, remedy="tell the run's owner: `flockstep run create` packs the data and pins them")
    if (seed := seed_folder(config.home, pin.index)) is not None:
        place = Folder(seed)
    elif pin.size:
        place = Members(pin.index, pin.size, config.home, None if members is None else members.bring)
    else:
        place = _place_of(pin.dataset, pin.url)
    index = _read_index(place, members)
    if index.hash != pin.index:
        raise UsageError(
            f"{place.name} holds other data than the run pins: the hash of its index is {index.hash.hex()[:16]}…, "
            f"not {pin.index.hex()[:16]}…",
            remedy="tell the run's owner, or train on a copy of yours with --data FOLDER",
        )
    if isinstance(place, Members):
        place.learn(index)
    return place, index


def _read_index(place: Place, members: FromMembers | None) -> ShardIndex:
    while True:
        try:
            return read_index(patiently(partial(place.whole, INDEX, MAX_INDEX_BYTES)), place.name)
        except OSError as error:
            if not isinstance(error, Absent) or members is None or not members.awaits():
                remedy = "check its name and the network; `flockstep data pack SOURCE --to FOLDER` makes one"
                raise UsageError(f"cannot read packed data of {place.name}: {error}", remedy=remedy) from error


def _place_of(dataset: str, url: str) -> Place:
    return hub_folder(dataset) if dataset else Web(url, public=True)


def seed_file(home: Path, index: bytes) -> Path:
    """Return the file that says where packed data of an index lie on this computer, which provides them to members."""
    return home / "seeds" / index.hex()


def seed_folder(home: Path, index: bytes) -> Path | None:
    """Return the folder with packed data of an index on this computer; None if it is not known."""
    file = seed_file(home, index)
    return Path(file.read_text(encoding="utf-8")) if file.is_file() else None


def pinned_data(data: Data, where: str, home: Path) -> tuple[Data, ShardIndex]:
    """Return the data settings of a `run.toml` with packed data as a manifest pins them, and their index.

    Those in a folder of this computer are provided to the members from there by whoever has this `home` folder. Raises
    `UsageError`; `where` names the file.
    """
    name, given = data.source.removeprefix(TOKENS), ""
    if (match := re.fullmatch("(.+)@([0-9a-f]{64})", name)) is not None:
        name, given = match.groups()
    if name.startswith("swarm:"):
        raise UsageError(f"{where}: {data.source} is what a manifest says", remedy="write tokens:FOLDER: members provide it")
    folder, is_here = user_path(name).absolute(), "://" not in name
    pin = Pin.of(f"{TOKENS}{name}@{'0' * 64}")
    if not is_here and pin is None:
        remedy = "write tokens:https://host.example/folder, tokens:hf://datasets/org/name@commit/folder or tokens:FOLDER"
        raise UsageError(f"{where}: a run may not name {data.source}", remedy=remedy)
    index = _read_index(Folder(folder) if pin is None else _place_of(pin.dataset, pin.url), None)
    if given not in ("", index.hash.hex()):
        raise UsageError(f"{where}: {name} holds other data than {given[:16]}…", remedy="leave the hash out: it is filled in")
    if is_here:
        name = f"swarm:{(folder / INDEX).stat().st_size}"
        write_whole(seed_file(home, index.hash), str(folder).encode())
    index.check_length(data.sequence_length, f"{where}: {data.source}")
    made_by = BYTES if index.tokenizer == BYTES else TOKENIZER
    if data.tokenizer not in (BYTES, made_by):
        what = f"{where}: {data.source} are packed, and say themselves what tokenizer made them"
        raise UsageError(what, remedy="leave tokenizer out")
    return replace(data, source=f"{TOKENS}{name}@{index.hash.hex()}", tokenizer=made_by), index
