"""The files of the page, read once: no request reaches the disk.

They are plain HTML, CSS and JavaScript without a build step. The charts are drawn by uPlot 1.6.32 of Leon Sorokin, whose
licence (MIT) lies beside it.
"""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The media type of each kind of file that is served; others are not."""


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
    return {path.name: _asset(TYPES[path.suffix], path.read_bytes()) for path in files}


def _asset(media_type: str, body: bytes) -> Asset:
    return Asset(media_type, f'"{hashlib.sha256(body).hexdigest()[:16]}"', gzip.compress(body, mtime=0))
