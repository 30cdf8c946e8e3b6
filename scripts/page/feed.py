"""A run's picture for many viewers: the whole for a newcomer, then what changed, a bounded queue for each.

Theory of operation. `Feed.update` takes each new picture, numbers it, and puts the difference to the one before into the
queue of each viewer. A newcomer fetches the whole picture, which is compressed once for many of them and may be older
than the newest, and asks for all differences after its number; the last ones are kept for that, and for those whose
connection broke. One that is too far behind is told to fetch the whole anew. A viewer that takes nothing while its queue
fills is dropped: it costs memory, and it will come back.

Everything here runs in the thread of the server.
"""

import asyncio
import gzip
import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .delta import JsonValue, operations_between

KEPT_FRAMES = 128
"""Differences that are kept: two minutes at one a second, which bridges a break of a mobile connection."""
MAX_CHANGE_BYTES = 128 * 1024
"""A larger difference is not sent: the whole picture, compressed, is smaller."""
MAX_BEHIND_BYTES = 512 * 1024
"""The differences that are kept, in all, and what waits for one viewer; some kB a second is usual. Beyond, the whole picture
is asked for anew. Without a bound a viewer, of which there are hundreds, would take 16 MB."""
QUEUED_FRAMES = 32
"""Differences that wait for one viewer; with the sockets' buffers that is a minute of a slow connection."""
BEAT_SECONDS = 15.0
"""Silence after which a stream carries a comment: proxies cut silent connections after 60 s, nginx's default."""
WHOLE_AGE = 32
WHOLE_SECONDS = 5.0
"""A whole picture serves newcomers until it is so many differences or seconds old: with 64 peers and 5,000 rounds it takes
50 ms to compress one."""
PLACE_LISTS = ("roster", "cut", "flagged", "voters")
"""The lists of a round that name peers by their places."""
MAX_PLACES = 4096
"""Peers beyond which the table begins anew: a run whose members come and go for months."""
COMPRESSION = 5
"""zlib's level: 9 takes four times as long for 5 % less."""


class Viewer:
    """One open stream: the frames that wait to be sent."""

    def __init__(self, drop: Callable[[str], None]) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED_FRAMES)
        self._num_bytes = 0
        """Of what is queued."""
        self._drop = drop
        self._ended = False

    def put(self, frame: bytes) -> bool:
        """Queue a frame; where there is no room, drop the viewer and return False."""
        if self._queue.full() or self._num_bytes + len(frame) > MAX_BEHIND_BYTES:
            self._drop("it takes no updates")
            return False
        self._queue.put_nowait(frame)
        self._num_bytes += len(frame)
        return True

    async def next(self) -> bytes:
        """Return what is to be sent next: all queued frames, a comment after a silence, nothing at the end."""
        if self._ended and self._queue.empty():
            return b""
        try:
            frame = await asyncio.wait_for(self._queue.get(), BEAT_SECONDS)
        except TimeoutError:
            return b":\n\n"
        while not self._queue.empty():
            frame += self._queue.get_nowait()
        self._num_bytes = 0
        return frame

    def end(self) -> None:
        """End the stream after what is queued."""
        self._ended = True
        if self._queue.empty():
            self._queue.put_nowait(b"")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole picture, ready to be sent."""

    number: int
    etag: str
    body: bytes
    """JSON, compressed by gzip."""


@dataclass(slots=True)
class Feed:
    """The pictures of one run, or the list of runs."""

    picture: JsonValue
    number: int = 0
    viewers: set[Viewer] = field(default_factory=set)
    epoch: str = field(default_factory=lambda: secrets.token_hex(4))
    """Distinguishes the numbers of this process from those before a restart."""
    _frames: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_FRAMES))
    """The frames up to `number`, the newest last."""
    clock: Callable[[], float] = time.monotonic
    _whole: Whole | None = None
    _whole_at: float = 0.0

    def update(self, picture: JsonValue) -> None:
        """Take the next picture, and send what changed to all viewers."""
        picture = finite(picture)
        operations = list(operations_between(self.picture, picture))
        if not operations:
            return
        self.picture = picture
        self.number += 1
        body = encoded(operations)
        if len(body) > MAX_CHANGE_BYTES:  # Newcomers must not be led over this difference either.
            body, self._whole = b"", None
            self._frames.clear()
        frame = self._frame(body)
        self._frames.append(frame)
        while sum(map(len, self._frames)) > MAX_BEHIND_BYTES:
            self._frames.popleft()
        self.viewers = {viewer for viewer in self.viewers if viewer.put(frame)}

    def _frame(self, body: bytes) -> bytes:
        """One server-sent event (WHATWG HTML, 9.2); without a body it asks the viewer to fetch the whole."""
        name = b"" if body else b"event: anew\n"
        mark = f"{self.epoch}.{self.number}".encode()
        return b"%sid: %s\ndata: %s\n\n" % (name, mark, body or b"[]")  # An event without data is not dispatched.

    def whole(self) -> Whole:
        """Return a whole picture from which the kept differences lead to the newest one."""
        old = 0 if self._whole is None else self.number - self._whole.number
        if self._whole is None or old >= WHOLE_AGE or (old and self.clock() >= self._whole_at + WHOLE_SECONDS):
            self._whole_at = self.clock()
            mark = f"{self.epoch}.{self.number}"
            body = encoded({"mark": mark, "picture": self.picture})
            self._whole = Whole(self.number, f'"{mark}"', gzip.compress(body, COMPRESSION, mtime=0))
        return self._whole

    def after(self, mark: str) -> list[bytes]:
        """Return the frames after a mark, `epoch.number`; if they are not kept, the one that asks to fetch the whole."""
        epoch, _, text = mark.partition(".")
        number = int(text) if text.isdecimal() and len(text) < 16 else -1
        missing = self.number - number
        if epoch != self.epoch or number < 0 or not 0 <= missing <= len(self._frames):
            return [self._frame(b"")]
        return list(self._frames)[len(self._frames) - missing :]

    def end(self) -> None:
        """End all streams."""
        for viewer in self.viewers:
            viewer.end()
        self.viewers.clear()


def encoded(value: JsonValue) -> bytes:
    """Return compact JSON in UTF-8. A line break can only be escaped in it, so it is one line of an event stream."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def finite(value: JsonValue) -> JsonValue:
    """Return the value as JSON has it: null for a number that is none (peers state their losses themselves), lists."""
    return json.loads(json.dumps(value), parse_constant=lambda _name: None)


class StablePeers:
    """Gives each peer one place in the table of peers for as long as a run is shown.

    In a picture's JSON a peer's place is that of its first mention: one newcomer would change the numbers of all rounds.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def placed(self, picture: JsonValue) -> JsonValue:
        """Return the picture of a run with the places of this table in its last rounds."""
        if len(self._places) > MAX_PLACES:
            self._places.clear()
        places = [self._places.setdefault(peer, len(self._places)) for peer in picture.get("peers", ())]
        recent = [
            row
            | {name: [places[at] for at in row[name]] for name in PLACE_LISTS}
            | {"out": [{**out, "peer": places[out["peer"]]} for out in row["out"]]}
            for row in picture.get("recent", ())
        ]
        return {**picture, "peers": list(self._places), "recent": recent}
