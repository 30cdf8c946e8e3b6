"""The files of the page, read once: no request reaches the disk.

They are plain HTML, CSS and JavaScript without a build step. The charts are drawn by uPlot 1.6.32 of Leon Sorokin, whose
licence (MIT) lies beside it.
"""

import gzip
import hashlib
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


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, ready to be sent."""

    media_type: str
    etag: str
    body: bytes
    """Compressed by gzip."""


def load_assets() -> dict[str, Asset]:
    """Read the files beside the code, by name."""
    folder = Path(__file__).parent / "static"
    files = sorted(path for path in folder.iterdir() if path.suffix in TYPES)
    return {path.name: _asset(TYPES[path.suffix], _filled(path)) for path in files}


def _filled(path: Path) -> bytes:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        for place, known in PLACES.items():
            text = text.replace(place, escape(known))
    return text.encode()


def _asset(media_type: str, body: bytes) -> Asset:
    return Asset(media_type, f'"{hashlib.sha256(body).hexdigest()[:16]}"', gzip.compress(body, mtime=0))
