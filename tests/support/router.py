"""A router that speaks UPnP over real sockets, on loopback or in a namespace: what it opens, its moods, what it was asked."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio

ME, SOMEBODY = "127.0.0.1", "10.0.0.9"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
Answer = tuple[int, str]


class Router:
    """Internet Gateway Device v1 with WANIPConnection, as far as peers use it."""

    def __init__(self, here: str = ME) -> None:
        self.here = here
        self.ports: dict[int, tuple[str, int, int]] = {}
        self.leases = True
        self.answers = True
        self.odd = False
        """Answers every action with what is none."""
        self.outside = "44.0.1.1"
        self.control = "/control"
        self.location = ""
        """Where it says that its description is; empty for where it is."""
        self.serve: Callable[[trio.SocketStream], Awaitable[None]] = self._serve
        self.asked: list[str] = []
        """First lines of the requests."""
        self.group = ("", 0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Router"]:
        """Answer until the end."""
        with await self.bound() as searches:
            self.group = searches.getsockname()
            listeners = await trio.open_tcp_listeners(0, host=self.here)
            port = listeners[0].socket.getsockname()[1]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, self._one, listeners)
                nursery.start_soon(self._answer_searches, searches, port)
                yield self
                nursery.cancel_scope.cancel()

    async def bound(self) -> trio.socket.SocketType:
        """Return a socket that hears searches."""
        searches = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
        await searches.bind((self.here, 0))
        return searches

    async def _answer_searches(self, searches: trio.socket.SocketType, port: int) -> None:
        while True:
            _, sender = await searches.recvfrom(2048)
            if self.answers:
                location = self.location or f"http://{self.here}:{port}/root.xml"
                await searches.sendto(f"HTTP/1.1 200 OK\r\nST: x\r\nLOCATION: {location}\r\n\r\n".encode(), sender)

    async def _one(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # The peer has given up, as it should.
            await self.serve(stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        head, body = await self.read(stream)
        if head.startswith("GET"):
            service = f"<serviceType>{SERVICE}</serviceType><controlURL>{self.control}</controlURL>"
            status, text = 200, f"<service>{service}</service>"
        else:
            status, text = self.act(
                head.partition("#")[2].partition('"')[0], dict(re.findall(r"<(New\w+)>(.*?)</", body))
            )
        await stream.send_all(f"HTTP/1.1 {status} x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    async def read(self, stream: trio.SocketStream) -> tuple[str, str]:
        """Read a request: its head and its body."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some()
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        while len(body) < int(found[1] if found else 0):
            body += await stream.receive_some()
        self.asked.append(head.decode().partition("\r\n")[0])
        return head.decode(), body.decode()

    def act(self, action: str, stated: dict[str, str]) -> Answer:
        """Return status and text of an answer."""
        if self.odd:
            return (
                500,
                "\x1b]0;<errorCode>606</errorCode><errorDescription>Action\x1b Not Authorized</errorDescription>",
            )
        port = int(stated.get("NewExternalPort", 0))
        if action == "GetExternalIPAddress":
            return 200, f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>"
        if action == "AddPortMapping":
            lease = int(stated["NewLeaseDuration"])
            if lease and not self.leases:
                return (
                    500,
                    "<errorCode>725</errorCode><errorDescription>OnlyPermanentLeasesSupported</errorDescription>",
                )
            self.ports[port] = (stated["NewInternalClient"], int(stated["NewInternalPort"]), lease)
        elif port not in self.ports:
            return 500, "<errorCode>714</errorCode><errorDescription>NoSuchEntryInArray</errorDescription>"
        elif action == "DeletePortMapping":
            del self.ports[port]
        else:
            host, to, _ = self.ports[port]
            return 200, f"<NewInternalPort>{to}</NewInternalPort><NewInternalClient>{host}</NewInternalClient>"
        return 200, "<ok/>"
