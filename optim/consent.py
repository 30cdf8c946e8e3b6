"""Consent: what a manifest may open on this computer without the word of its user.

A manifest is a stranger's file, and what is trained on ends up in a model that all members hold. So from a manifest alone
only text that every computer has, public datasets and models of the hub at a commit, without this user's token, and packed
data of the public web whose hash the manifest pins, are opened. Everything else (paths, globs, folders, private names) must
be named by the user too, word for word. A manifest that this peer has signed is its user's own word.
"""

import os
import re
import shlex
from pathlib import Path

from ..dht.run.manifest import OWN
from ..peer.base.config import PeerConfig
from ..peer.base.errors import UsageError
from ..peer.base.troubles import NEEDS_PROGRAM

PUBLIC_TEXT = "text:{stdlib}"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
"""The hub's own names have up to 96 characters; a system call fails on far longer ones."""
HUB_DATASET = re.compile(
    rf"(?P<repository>{_HUB_ID.pattern})(?:@(?P<commit>[0-9a-f]{{40}}))?(?:/(?P<folder>\w[\w.+=-]{{0,95}}(?:/\w[\w.+=-]{{0,95}}){{0,7}}))?",
    re.ASCII,
)
"""`org/name[@commit][/folder]`: a dataset of the hub, as it was at a commit, or a folder of it."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
PACKED = re.compile(r"tokens:(?P<place>.+?)(?:@(?P<index>[0-9a-f]{64}))?", re.ASCII)
"""Packed data (`optim.shards`): where they are, and the hash of their index, which a manifest pins."""
HUB_DATASETS = "hf://datasets/"
SWARM = "swarm:"
FROM_MEMBERS = re.compile(rf"tokens:{SWARM}(?P<size>[1-9][0-9]{{0,6}})@(?P<index>[0-9a-f]{{64}})", re.ASCII)
"""Packed data that the members of a run provide: the length and the hash of their index."""
PUBLIC_URL = re.compile(
    r"https://(?P<host>(?=.{4,200}/)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9])"
    r"(?:/(?!\.)[\w.~+=-]{1,100}){1,16}",
    re.ASCII,
)
"""A folder of a web server that a manifest alone may name: by a name, since a number says nothing, and at the usual port."""
_HOST = re.compile(r"https?://(?:[^/@]*@)?(?P<host>[^/?#]+)")
HUB_HOST = "huggingface.co"


def is_hub_id(name: str) -> bool:
    """Return True for `org/name` on the hub: the libraries would read a folder here of that name in its place."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and not Path(name).exists()


def is_public_data(source: str) -> bool:
    """Return True for a source that a manifest alone may open."""
    kind, _, place = source.partition(":")
    if (packed := PACKED.fullmatch(source)) is not None and packed["index"]:
        folder = packed["place"]
        if FROM_MEMBERS.fullmatch(source):
            return True
        on_hub = folder.startswith(HUB_DATASETS) and _is_public_dataset(folder.removeprefix(HUB_DATASETS))
        return on_hub or PUBLIC_URL.fullmatch(folder) is not None
    return source == PUBLIC_TEXT or (kind == "hf" and _is_public_dataset(place.partition("?")[0]))


def _is_public_dataset(place: str) -> bool:
    match = HUB_DATASET.fullmatch(place)
    return match is not None and is_hub_id(match["repository"]) and match["commit"] is not None


def host_of(source: str) -> str:
    """Return the host from which a source is read; empty for one that is on this computer."""
    kind, _, place = source.partition(":")
    if kind == "hf" or place.startswith(HUB_DATASETS):
        return "" if kind == "hf" and not _is_public_dataset(place.partition("?")[0]) else HUB_HOST
    packed = PACKED.fullmatch(source)
    url = _HOST.match(packed["place"]) if packed is not None else None
    return url["host"] if url is not None else ""


def trusts_data(source: str, config: PeerConfig, *, mine: bool) -> bool:
    """Return True if the user agrees to a manifest's source, False if it is public. Raises `UsageError` if neither is so.

    `mine` is whether this peer has signed the manifest.
    """
    if source == OWN:
        raise UsageError(NEEDS_PROGRAM.cause, remedy=NEEDS_PROGRAM.remedy)
    if mine or source == config.allow_data:
        return True
    if not is_public_data(source):
        raise UsageError(
            f"the run would read {source} on this computer, and nobody here has agreed to that",
            remedy=f"if you do, pass --allow-data {shlex.quote(source)}; or train on data of yours with --data",
        )
    return False


def check_public_model(name: str, revision: str | None) -> None:
    """Raise `UsageError` for a pretrained model, named as in `hf:name`, that a manifest alone may not open."""
    if not is_hub_id(name) or revision is None or not _COMMIT.fullmatch(revision):
        raise UsageError(
            f"the run would start from the weights hf:{name} on this computer, and nobody here has agreed to that",
            remedy=f"if you do, pass --allow-model {shlex.quote(f'hf:{name}')}",
        )


_SECRET = re.compile(r"(?:TOKEN|SECRET|PASSW(?:OR)?D|CREDENTIAL|AUTH|(?:\A|_)KEY)(?:S|_\w*)?\Z", re.IGNORECASE)


def hide_secrets() -> None:
    """Take tokens, keys and passwords out of the environment, before a stranger's files are opened in this process.

    Those of wandb stay, which this process logs to.
    """
    for name in [name for name in os.environ if _SECRET.search(name) and not name.startswith("WANDB_")]:
        del os.environ[name]
