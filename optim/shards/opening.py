"""What a member trains on, and the tokenizer that made it: the one way from a manifest to its data."""

from pathlib import Path

from ...dht.run.manifest import Data
from ...peer.base.config import PeerConfig
from ...peer.base.disk import write_whole
from ..data.tokenizer import BYTES, FileTokenizer, Tokenizer, files_folder
from .cache import Shards
from .index import TOKENIZER
from .packed import FromMembers, open_index
from .reader import TokenShards
from .tokenizer_config import END, decode_config


def open_tokens(data: Data, config: PeerConfig, members: FromMembers | None = None) -> TokenShards:
    """Open the data of a run, or this peer's own (`config.data`); `members` is how the others are asked, if they are.

    Raises `UsageError`, and `LocalError` for a disk that refuses.
    """
    place, index = open_index(data, config, members)
    awaits = None if members is None else members.awaits
    shards = Shards(place, index.dtype, config.home, int(config.data_cache * 1e9), awaits)
    return TokenShards(index, shards, place, name=config.data or data.source, sequence_length=data.sequence_length)


def tokenizer_of(source: TokenShards, home: Path) -> Tokenizer:
    """Return the tokenizer that made the tokens. Raises `UsageError`."""
    folder, about = files_folder(home), source.index.tokenizer_config
    found = source.tokenizer_files(folder).get(TOKENIZER)
    if found is None:
        return BYTES
    return FileTokenizer(Path(TOKENIZER), found, decode_config(folder / about[1].hex()).get(END, "") if about else "")


def keep_tokenizer(source: TokenShards, home: Path, folder: Path) -> None:
    """Write the files of the tokenizer into a folder, for `flockstep export`. Raises `FlockstepError`."""
    for name, content in source.tokenizer_files(files_folder(home)).items():
        write_whole(folder / name, content)
