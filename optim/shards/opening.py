"""What a volunteer trains on: packed data by their name, or any other source, and the tokenizer that made them."""

import contextlib
from pathlib import Path

from ...dht.run.manifest import Data
from ...peer.base.config import PeerConfig
from ...peer.base.disk import write_whole
from ...peer.base.errors import UsageError
from ..consent import hide_secrets, trusts_data
from ..data.datasets import SequenceUnits
from ..data.rows import Skips
from ..data.sources import TokenSource, open_data
from ..data.tokenizer import BYTES as BYTE_TOKENIZER
from ..data.tokenizer import FileTokenizer, Tokenizer, files_folder, find_file, find_tokenizer, provided_tokenizer
from .cache import Shards
from .index import INDEX, TOKENIZER
from .members import Absent, Members
from .packed import FromMembers, is_packed, open_index
from .reader import TokenShards
from .tokenizer_config import CONFIG_NAME, END, decode_config, encode_config


def open_corpus(
    data: Data,
    config: PeerConfig,
    *,
    mine: bool = False,
    members: FromMembers | None = None,
    skips: Skips | None = None,
) -> TokenSource | SequenceUnits:
    """What a volunteer trains on: the manifest's data, if they may be opened (`consent`), or their own.

    `mine` is whether this peer has signed the manifest, `members` how the others are asked, if they are, and
    `skips` takes what of the data is skipped. Raises `UsageError`, and `LocalError` for a disk that refuses.
    """
    source = config.data or data.source
    if not is_packed(source):
        _fetch_tokenizer(data, config, members)
        return open_data(data, config, mine=mine, skips=skips)
    trusted = bool(config.data) or trusts_data(source, config, mine=mine)
    if not trusted:
        hide_secrets()
    place, index = open_index(source, trusted=trusted, config=config, members=members)
    awaits = None if members is None else members.awaits
    shards = Shards(place, index.dtype, config.home, int(config.data_cache * 1e9), awaits)
    return TokenShards(index, shards, place, name=source, sequence_length=data.sequence_length)


def _fetch_tokenizer(data: Data, config: PeerConfig, members: FromMembers | None) -> None:
    """Fetch the tokenizer of a run from its members, if they provide it and it is not here. Raises `LocalError`."""
    if (provided := provided_tokenizer(data)) is None or members is None or config.tokenizer:
        return
    with contextlib.suppress(UsageError):
        find_file(data, config)
        return
    place = Members(*provided, config.home, members.bring)
    while True:
        try:
            place.whole(INDEX, provided[1])  # The one file that this place knows.
            return
        except Absent:
            if not members.awaits():
                return


def tokenizer_of(source: TokenSource | SequenceUnits, data: Data, config: PeerConfig) -> Tokenizer:
    """Return the tokenizer of a run: of packed data the one that lies beside them. Raises `UsageError`."""
    if config.tokenizer or not isinstance(source, TokenShards):
        return find_tokenizer(data, config)
    folder, about = files_folder(config.home), source.index.tokenizer_config
    found = source.tokenizer_files(folder).get(TOKENIZER)
    if found is None:
        return BYTE_TOKENIZER
    return FileTokenizer(Path(TOKENIZER), found, decode_config(folder / about[1].hex()).get(END, "") if about else "")


def keep_tokenizer(source: TokenSource | SequenceUnits, data: Data, config: PeerConfig, folder: Path) -> None:
    """Write the files of the tokenizer of a run into a folder, for `flockstep export`. Raises `FlockstepError`."""
    files: dict[str, bytes] = {}
    if isinstance(source, TokenShards):
        files = source.tokenizer_files(files_folder(config.home))
    elif isinstance(tokenizer := find_tokenizer(data, config), FileTokenizer):
        end = {END: tokenizer.end_text} if tokenizer.end_text else {}
        files = {TOKENIZER: find_file(data, config)[1], CONFIG_NAME: encode_config(end)}
    for name, content in files.items():
        write_whole(folder / name, content)
