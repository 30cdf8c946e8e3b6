"""Datasets and tokenizers of the Hugging Face hub, read with the token of this computer's user by the hub's own package.

Of a dataset the files of one commit are listed, and a rule on their names chooses some of them (`chosen`).
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install
from ..consent import HUB_DATASET

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ADDRESS = "hf://"
ENDINGS = {"parquet": (".parquet",), "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")}
"""Of the files that are data, by the reader that they need."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words in the names of files that say which split they are of."""
MAX_REASON = 300
BUFFER_BYTES = 1 << 20


def dataset_files(place: str, split: str) -> tuple[str, list[tuple[str, int]]]:
    """Return the reader, parquet or json, and the address and size of each file of a split of `org/name[@commit][/folder]`.

    Raises `FlockstepError`.
    """
    match = HUB_DATASET.fullmatch(place)
    if match is None:
        remedy = "write hf:org/name, hf:org/name@commit or hf:FOLDER"
        raise UsageError(f"hf:{place} is neither a folder here nor org/name", remedy=remedy)
    with _reaching(f"hf:{place}") as api:
        found = api.dataset_info(match["repository"], revision=match["commit"] or "main", files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    kind, names = chosen(list(sizes), match["folder"] or "", split, f"hf:{place}")
    return kind, [(f"{ADDRESS}datasets/{match['repository']}@{found.sha}/{name}", sizes[name]) for name in names]


def opened(address: str) -> BinaryIO:
    """Open a file of `dataset_files`, which is read by range. Raises `FlockstepError`."""
    with _reaching(address, LocalError):
        from huggingface_hub import HfFileSystem

        file = HfFileSystem(endpoint=_endpoint()).open(address.removeprefix(ADDRESS), "rb")
        return io.BufferedReader(cast(io.RawIOBase, file), BUFFER_BYTES)


def newest_commit(kind: str, repository: str) -> str:
    """Return the present commit of a repository of the hub; `kind` is dataset or model. Raises `FlockstepError`."""
    with _reaching(f"hf:{repository}") as api:
        return str(api.repo_info(repository, repo_type=kind, revision="main").sha)


def tokenizer_folder(name: str, files: Sequence[str]) -> Path:
    """Return a folder with those of some files that a model of the hub has: `org/name[@commit][/folder]`.

    Raises `FlockstepError`.
    """
    match = HUB_DATASET.fullmatch(name)  # Names of models have the same form.
    if match is None:
        raise UsageError(f"hf:{name} is no tokenizer of the hub", remedy="write hf:org/name or hf:org/name@commit")
    inside = f"{match['folder']}/" if match["folder"] else ""
    with _reaching(f"hf:{name}") as api:
        wanted = [f"{inside}{file}" for file in files]
        return Path(str(api.snapshot_download(match["repository"], revision=match["commit"], allow_patterns=wanted))) / inside


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


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextlib.contextmanager
def _reaching(what: str, raised: type[LocalError] = UsageError) -> Iterator["HfApi"]:
    """Yield the hub's client; its errors, of which it has dozens, become one line."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise LocalError(f"{what} needs the package huggingface_hub: {error}", remedy=how_to_install("hf")) from error
    try:
        yield HfApi(endpoint=_endpoint())
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        remedy = "check its name and the network; a gated or private one needs `hf auth login`"
        raise raised(f"cannot open {what}: {reason}", remedy=remedy) from error
