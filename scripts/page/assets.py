"""The files of the page, read once: no request reaches the disk.

They are plain HTML, CSS and JavaScript without a build step. The charts are drawn by uPlot 1.6.32 of Leon Sorokin, whose
licence (MIT) lies beside it.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ...peer.base.install import CPU_TORCH, WHERE, install_command

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The media type of each kind of file that is served; others are not."""
PLACES = {"{install}": install_command(), "{install gpu}": install_command("gpu"), "{cpu torch}": CPU_TORCH, "{where}": WHERE}
"""What stands in the page for how to install flockstep."""


COMPRESSION = 5
"""zlib's level: 9 takes four times as long for 5 % less."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, ready to be sent."""

    media_type: str
    body: bytes
    """Compressed by gzip."""
    digest: str
    """Of what is in it, in hex."""


@dataclass(frozen=True, slots=True)
class Assets:
    """The files of the page. What its HTML loads lies in a folder named by a hash of all of it."""

    html: Asset
    folder: str
    files: Mapping[str, Asset]


def asset_of(media_type: str, body: bytes) -> Asset:
    """Return the file of these bytes."""
    return Asset(media_type, gzip.compress(body, COMPRESSION, mtime=0), hashlib.sha256(body).hexdigest()[:16])


def load_assets() -> Assets:
    """Read the files beside the code."""
    paths = sorted(path for path in (Path(__file__).parent / "static").iterdir() if path.suffix in TYPES)
    files = {path.name: asset_of(TYPES[path.suffix], path.read_bytes()) for path in paths if path.suffix != ".html"}
    folder = "static-" + hashlib.sha256("".join(each.digest for each in files.values()).encode()).hexdigest()[:16]
    (html,) = (asset_of(TYPES[".html"], _filled(path, folder)) for path in paths if path.suffix == ".html")
    return Assets(html, folder, files)


def _filled(path: Path, folder: str) -> bytes:
    text = path.read_text(encoding="utf-8").replace('"static/', f'"{folder}/')
    for place, known in PLACES.items():
        text = text.replace(place, escape(known))
    return text.encode()
