"""A WebSocket as the socket of a connection: bytes in binary messages.

Theory of operation. It is libp2p's WebSocket transport, which js-libp2p and go-libp2p speak too: each write is one binary
message, and the messages that arrive are one sequence of bytes, in which the handshake of Noise begins. So TLS proves the
name of a host alone; the peer proves its id inside, and a proxy that opens TLS reads ciphertext.

wsproto parses. A message is handed on in the pieces in which it arrives, whatever length it announces, so a stranger's
takes no memory; the head of an HTTP request has h11's 16 KiB at most. The library's own transport keeps messages of up to
32 MiB whole, before any handshake.

Nothing is compressed, since ciphertext does not shrink. The end of the socket is the end of the stream: no close frame is
sent, since Yamux says goodbye itself.

A frame is metered here as Yamux meters its own (`strangers.frames`), a read that completes no frame like one: after a turn of
them other tasks run, and what exceeds the budget of the connection's address waits in the socket.
"""

import ipaddress
from itertools import islice
from typing import Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from wsproto import ConnectionType as Role
from wsproto import WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from ..base.errors import NetworkError
from ..base.troubles import NO_WEBSOCKET
from ..libp2p.tcp import TunedStream
from ..strangers.frames import TURN, FrameMeter

READ_BYTES = 1 << 18
"""Read from the socket at a time, as `libp2p.packets` does."""


class WebStream(TunedStream):
    """One WebSocket; `carrier` is the TLS or the plain TCP below it."""

    kind = ConnectionType.UNKNOWN
    """Worse than a direct connection: streams are opened on one of these where there is one (`nat.upgrade`)."""

    def __init__(self, below: trio.SocketStream, carrier: trio.abc.Stream, *, is_client: bool) -> None:
        super().__init__(below)
        stream: Any = carrier
        self.stream = stream
        self._machine = WSConnection(Role.CLIENT if is_client else Role.SERVER)
        self._frames = FrameMeter()
        self._arrived = bytearray()
        self._greeting: Event | None = None
        """The request, or the answer to one."""
        self._has_ended = False
        self._writing = trio.Lock()
        self._pong = b""
        """The answer to the latest ping, until it is written."""

    async def ask(self, host: str) -> None:
        """Ask a server for a WebSocket. Raises `NetworkError` if it refuses, or as the socket does."""
        await super().write(self._machine.send(Request(host=host, target="/")))
        event = await self._first_event()
        if isinstance(event, RejectConnection):
            raise NetworkError(NO_WEBSOCKET.with_details(f"HTTP {event.status_code}").cause)

    async def answer(self, *, from_proxy: bool = False) -> None:
        """Accept a client's request. Raises `ConnectionClosedError` for anything else.

        `from_proxy`: if a reverse proxy of this computer has sent it, the client is the last of its X-Forwarded-For.
        """
        try:
            event = await self._first_event()
        except ConnectionClosedError as error:
            hint = getattr(error.__cause__, "event_hint", None)
            if isinstance(hint, RejectConnection):  # A browser, or a scanner: it asks for no WebSocket.
                await super().write(self._machine.send(hint))
            raise
        assert isinstance(event, Request)
        if from_proxy and (client := _forwarded_for(event)):
            self._cached_remote_address = (client, 0)
        await super().write(self._machine.send(AcceptConnection()))

    async def write(self, data: bytes) -> None:
        """Send all of `data` as one message."""
        async with self._writing:
            pong, self._pong = self._pong, b""
            await super().write(pong + self._machine.send(BytesMessage(data)))

    async def read(self, n: int | None = None) -> bytes:
        """Read at most `n` bytes, `b""` at the end. Raises as `TunedStream` does."""
        while not self._arrived and not self._has_ended:
            await self._advance()
            if self._pong and not self._writing.locked():  # Else the writing task sends it.
                async with self._writing:
                    pong, self._pong = self._pong, b""
                    await super().write(pong)
        taken = bytes(self._arrived[:n])
        del self._arrived[: len(taken)]
        return taken

    async def receive_into(self, room: memoryview) -> int:
        """Receive at most `len(room)` bytes there; 0 at the end. Raises as `read` does."""
        data = await self.read(len(room))
        room[: len(data)] = data
        return len(data)

    async def _first_event(self) -> Event:
        """Return the answer of the handshake; what came behind it is kept. Raises `ConnectionClosedError`."""
        while self._greeting is None:
            if self._has_ended:
                raise ConnectionClosedError("the connection was closed", transport="ws")
            await self._advance()
        return self._greeting

    async def _advance(self) -> None:
        """Take a turn of the frames that have arrived, or read on if there are none. Raises `ConnectionClosedError`."""
        is_out = True
        try:
            for event in islice(self._machine.events(), TURN):
                is_out = False
                self._take(event)
            if is_out:
                data = await super().read(READ_BYTES)
                self._has_ended = not data
                self._frames.count(0)
                self._machine.receive_data(data or None)
        except (RemoteProtocolError, LocalProtocolError, ValueError) as error:  # A ValueError of a name.
            raise ConnectionClosedError(f"not a WebSocket: {error}", transport="ws") from error
        if self._frames.is_due:
            await trio.sleep(self.spend_frames(self.peer, self._frames.bill()))

    def _take(self, event: Event) -> None:
        self._frames.count(len(getattr(event, "data", b"")))
        match event:
            case BytesMessage():
                self._arrived += event.data
            case Ping():
                self._pong = self._machine.send(event.response())
            case CloseConnection():
                self._has_ended = True
            case TextMessage():
                raise ConnectionClosedError("a text in a WebSocket of bytes", transport="ws")
            case _:
                self._greeting = self._greeting or event


def _forwarded_for(request: Request) -> str:
    """Return the IP address of a proxy's client, as the proxy itself has appended it; empty if it has not."""
    stated = [value for name, value in request.extra_headers if name.lower() == b"x-forwarded-for"]
    last = stated[-1].decode("ascii", "replace").rpartition(",")[2].strip() if stated else ""
    try:
        return str(ipaddress.ip_address(last))
    except ValueError:
        return ""
