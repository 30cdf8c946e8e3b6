"""`flockstep run snapshot`: a run at one moment as signed JSON, and the check of one."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ...collectives.picture.picture import Picture, RunState
from ...collectives.picture.snapshot import MAX_SNAPSHOT_BYTES, check_snapshot, encode_snapshot
from ...dht.run.link import JoinLink
from ...peer.base.config import PeerConfig
from ...peer.base.disk import write_whole
from ...peer.base.errors import NetworkError, RemoteError, UsageError
from ...peer.base.plain import plain_text
from ...peer.identity import Identity, identity_path
from .watching import picture_of
from .words import progress_words

WHOLE_HISTORY = 20_000
"""Rounds of the past that are asked for: all that a watcher keeps."""


def take_snapshot(link_text: str, file: Path | None, config: PeerConfig, say: Callable[[str], None]) -> None:
    """Write the signed snapshot of a link's run to a file, or say it. Raises `FlockstepError`."""
    link = JoinLink.parse(link_text)
    if file is not None and not file.absolute().parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.absolute().parent}", remedy="make it first")
    picture = picture_of(link, config, WHOLE_HISTORY)
    data = signed_snapshot(picture, Identity.load_or_create(identity_path(config.home)))
    if file is None:
        say(data.decode())
        return
    write_whole(file, data + b"\n")
    say(f"{file}: {progress_words(picture)}; {len(data):,} bytes, verified: {picture.verified}")


def signed_snapshot(picture: Picture, identity: Identity) -> bytes:
    """Encode and sign a picture. Raises `NetworkError` if it shows nobody and nothing."""
    from ... import __version__

    if picture.progress.state is RunState.EMPTY and not picture.rounds:
        raise NetworkError("nobody is in this run at the moment", remedy="there is nothing to take a snapshot of")
    return encode_snapshot(picture, __version__, identity)


def check_file(file: Path, say: Callable[[str], None]) -> None:
    """Say who has taken a snapshot, and of what. Raises `UsageError` if the file is none, or was changed."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_SNAPSHOT_BYTES + 2)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", remedy="check the path") from error
    try:
        figures = check_snapshot(data)
        progress = figures["progress"]
        say(plain_text(f"run       {figures['run']}"))
        say(plain_text(f"round     {progress['round']} of {progress['rounds']}, {progress['tokens']} tokens"))
        say(plain_text(f"taken by  {figures['taken_by']}, who has signed it"))
        taken_at = datetime.fromtimestamp(figures["taken_at"], UTC)
        say(f"taken at  {taken_at:%Y-%m-%d %H:%M} UTC (by who has taken it)")
        say(plain_text(f"verified  {figures['verified']} (by who has taken it)"))
    except (RemoteError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:  # The last three: of a time.
        remedy = "take it again from where it was published, or make one with `flockstep run snapshot`"
        raise UsageError(f"{file} is not a valid snapshot: {error}", remedy=remedy) from error
