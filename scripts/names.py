"""The name that a peer gives itself: its option `--name`, kept in the home folder for the next time."""

from dataclasses import replace
from pathlib import Path

from ..peer.config import MAX_NAME_BYTES, PeerConfig
from ..peer.disk import write_whole
from ..peer.errors import UsageError

NAME_FILE = "name"


def with_name(config: PeerConfig, given: str | None) -> PeerConfig:
    """Return a peer's settings with the name that was given, or else the one that its home folder keeps.

    A given name is kept from now on, and an empty one ends that. Raises `UsageError` for what cannot be a name.
    """
    path = config.home / NAME_FILE
    if given is None:
        return replace(config, name=_kept(path))
    named = replace(config, name=given)
    if given or path.exists():
        write_whole(path, given.encode())
    return named


def _kept(path: Path) -> str:
    try:
        with path.open("rb") as file:
            name = file.read(MAX_NAME_BYTES + 1).decode()
        PeerConfig(name=name)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{path} holds no name: {error}", remedy="give --name once more") from error
    return name
