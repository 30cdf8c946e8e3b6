"""What a manifest may open on this computer: packed data that it pins, and models of the hub at a commit.

A manifest is a stranger's file. Its data are tokens that it pins by the hash of their index, from its members, the public
web or the hub, so nothing of this computer's own files can be meant. A model's folder, or a private one, must be named by the
user, too, word for word. A manifest that this peer has signed is its user's own word.
"""

import os
import re
import shlex
from pathlib import Path

from ..peer.base.errors import UsageError
from ..peer.process.confined import is_secret

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
"""The hub's own names have up to 96 characters; a system call fails on far longer ones."""
HUB_DATASET = re.compile(
    rf"(?P<repository>{_HUB_ID.pattern})(?:@(?P<commit>[0-9a-f]{{40}}))?(?:/(?P<folder>\w[\w.+=-]{{0,95}}(?:/\w[\w.+=-]{{0,95}}){{0,7}}))?",
    re.ASCII,
)
"""`org/name[@commit][/folder]`: a dataset of the hub, as it was at a commit, or a folder of it."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_DATASETS = "hf://datasets/"
PUBLIC_URL = re.compile(
    r"https://(?P<host>(?=.{4,200}/)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9])"
    r"(?:/(?!\.)[\w.~+=-]{1,100}){1,16}",
    re.ASCII,
)
"""A folder of a web server that a manifest may name: by a name, since a number says nothing, and at the usual port."""
HUB_HOST = "huggingface.co"


def is_hub_id(name: str) -> bool:
    """Return True for `org/name` on the hub: the libraries would read a folder here of that name in its place."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and not Path(name).exists()


def check_public_model(name: str, revision: str | None) -> None:
    """Raise `UsageError` for a pretrained model, named as in `hf:name`, that a manifest alone may not open."""
    if not is_hub_id(name) or revision is None or not _COMMIT.fullmatch(revision):
        raise UsageError(
            f"the run would start from the weights hf:{name} on this computer, and nobody here has agreed to that",
            remedy=f"if you do, pass --allow-model {shlex.quote(f'hf:{name}')}",
        )


def hide_secrets() -> None:
    """Take tokens, keys and passwords out of the environment, before a stranger's files are opened in this process."""
    for name in list(filter(is_secret, os.environ)):
        del os.environ[name]
