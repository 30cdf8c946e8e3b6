"""Packed data by their name: where they are, and their index, which a run pins.

    tokens:FOLDER                                     a folder with an `index.json`, on this computer
    tokens:https://host/folder@HASH                   a web server
    tokens:hf://datasets/org/name@commit/folder@HASH  a dataset of the hub
    tokens:swarm:SIZE@HASH                            the members of the run; SIZE is the length of the index in bytes

HASH is that of the index, 64 hex digits; `run create` fills it in. The same data in two places have one hash, so their
readers share the work.

Imports no torch, since `run create` goes on as a keeper.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...dht.run.manifest import Data
from ...peer.base.config import PeerConfig
from ...peer.base.disk import user_path
from ...peer.base.errors import UsageError
from ...peer.base.plain import shortened
from ..consent import FROM_MEMBERS, HUB_DATASETS, PACKED, SWARM
from .index import BYTES, INDEX, MAX_INDEX_BYTES, TOKENIZER, ShardIndex, read_index
from .members import Absent, Bring, Members
from .places import Folder, HubFolder, Place, patiently
from .web import Web


def is_packed(source: str) -> bool:
    """Return True for the name of packed data, False for a single file of tokens and for other kinds."""
    match = PACKED.fullmatch(source)
    return match is not None and (
        match["place"].startswith(SWARM)
        or match["index"] is not None or "://" in match["place"] or (user_path(match["place"]) / INDEX).is_file()
    )


@dataclass(frozen=True, slots=True)
class FromMembers:
    """How a member reads what the others provide."""

    bring: Bring
    awaits: Callable[[], bool]
    """Waits a moment for members that are not here; returns False to give up."""


def open_index(
    source: str, *, trusted: bool, config: PeerConfig | None = None, members: FromMembers | None = None
) -> tuple[Place, ShardIndex]:
    """Return the place of packed data, and their index, whose hash is the one in `source`. Raises `UsageError`."""
    match = PACKED.fullmatch(source)
    assert match is not None
    from_members, place = FROM_MEMBERS.fullmatch(source), _place_of(match["place"], trusted=trusted)
    if from_members is not None and config is not None:
        bring = None if members is None else members.bring
        place = Members(bytes.fromhex(from_members["index"]), int(from_members["size"]), config.home, bring)
    while True:
        try:
            found = patiently(partial(place.whole, INDEX, MAX_INDEX_BYTES))
            break
        except OSError as error:
            if not isinstance(error, Absent) or members is None or not members.awaits():
                raise UsageError(f"cannot open {source}: {error}", remedy="check its address and the network") from error
    index = read_index(found, place.name)
    if match["index"] not in (None, index.hash.hex()):
        raise UsageError(
            f"{place.name} holds other data than the run pins: the hash of its index is {index.hash.hex()[:16]}…, "
            f"not {match['index'][:16]}…",
            remedy="tell the run's owner, or train on a copy of yours with --data tokens:FOLDER",
        )
    if isinstance(place, Members):
        place.learn(index)
    return place, index


def _place_of(place: str, *, trusted: bool) -> Place:
    if place.startswith(HUB_DATASETS):
        return HubFolder(place, trusted=trusted)
    if "://" in place:
        return Web(place, public=not trusted)
    return Folder(user_path(place))


def pinned_packed(source: str) -> tuple[str, ShardIndex]:
    """Return a name of packed data with the hash of their present index, and that index. Raises `UsageError`."""
    match = PACKED.fullmatch(source)
    assert match is not None
    folder = seed_folder(source)
    place, index = open_index(source if folder is None else f"tokens:{folder}", trusted=True)
    if folder is None:
        return f"tokens:{match['place']}@{index.hash.hex()}", index
    return f"tokens:{SWARM}{len(place.whole(INDEX, MAX_INDEX_BYTES))}@{index.hash.hex()}", index


def seed_folder(source: str) -> Path | None:
    """Return the folder of `tokens:swarm:FOLDER` in a `run.toml`, whose data members provide; None for other sources.

    Raises `UsageError` where nothing is packed there.
    """
    match = PACKED.fullmatch(source)
    if match is None or not match["place"].startswith(SWARM):
        return None
    folder = user_path(match["place"].removeprefix(SWARM)).absolute()
    if not (folder / INDEX).is_file():
        what = f"{source}: there are no packed data in {folder}"
        raise UsageError(what, remedy="write tokens:swarm:FOLDER; `flockstep data pack` makes the folder")
    return folder


def pinned_data(data: Data, where: str) -> tuple[Data, int]:
    """Return the settings of packed data with the hashes of their index and of their tokenizer, and the size of that one.

    Raises `UsageError`.
    """
    source, index = pinned_packed(data.source)
    index.check_length(data.sequence_length, f"{where}: {data.source}")
    name, hash_ = (BYTES, "") if index.tokenizer == BYTES else (TOKENIZER, index.tokenizer)
    if data.tokenizer not in (BYTES, name) or data.tokenizer_hash not in ("", hash_):
        what = f"{where}: {data.source} was packed with another tokenizer than {shortened(data.tokenizer, 80)}"
        raise UsageError(what, remedy="leave tokenizer and tokenizer_hash out: they are filled in")
    return replace(data, source=source, tokenizer=name, tokenizer_hash=hash_), index.vocab_size
