"""A home's router, asked by UPnP (IGD v1 and v2) for its outside address and for ports.

Theory of operation. A search goes to a multicast group, so any computer of the network may answer it. Whoever does is a
stranger: only the address that the answer came from is asked, whatever it names (else it could make this computer send
requests to any other one, SSRF), and only a private one. An answer has `MAX_ANSWER_BYTES`, a question `ANSWER_SECONDS` from
its dial to its last byte, and nothing is redirected. Of a description a few tags are read as text; no XML is parsed.
"""

import ipaddress
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import h11
import trio

from ..base.errors import NetworkError
from ..base.plain import shortened

GROUP = ("239.255.255.250", 1900)
"""Where routers are searched (UPnP Device Architecture 1.1, section 1.3.2)."""

SEARCH_SECONDS = 2.0
"""The time to answer a search; a router is told that it has one second (MX)."""

ANSWER_SECONDS = 5.0
"""The time for one question; routers take some tens of milliseconds."""

MAX_ANSWER_BYTES = 64 << 10
"""The largest descriptions of routers have some 20 kB."""

MAX_FOUND = 8
"""Computers that are asked for a description, and services of one of them."""

MAX_TEXT = 60
"""Characters of a router's own words that are shown."""

_IGD, _SERVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice", "urn:schemas-upnp-org:service"
_SEARCHED = (f"{_IGD}:1", f"{_IGD}:2", f"{_SERVICE}:WANIPConnection:1", f"{_SERVICE}:WANPPPConnection:1")
_CONNECTS = re.compile(rf"{_SERVICE}:WAN(?:IP|PPP)Connection:[12]")
_LOCATION = re.compile(r"^location:[ \t]*(\S+)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_PATH = re.compile(r"/[!-~]{0,500}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A resource of a router's web server."""

    ip: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str, ip: str) -> "_Place":
        """Parse a URL of the computer at `ip`. Raises `NetworkError` for one of any other."""
        with suppress(ValueError):
            parts = urlsplit(url)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            if parts.scheme == "http" and parts.hostname == ip and _PATH.fullmatch(path):
                return cls(ip, parts.port or 80, path)
        raise NetworkError(f"the router at {ip} names {shortened(url, MAX_TEXT)}, no address of its own")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A router that connects this network with the internet. Every question raises `NetworkError`."""

    place: _Place
    service: str
    here: str
    """The address of this computer toward the router."""

    async def outside_ip(self) -> str:
        """Return its outside address as it states it."""
        return _inside(await self._act("GetExternalIPAddress"), "NewExternalIPAddress").strip()

    async def mapped(self, port: int) -> tuple[str, str] | None:
        """Return the computer and the port to which an outside port leads; None if it leads nowhere."""
        try:
            answer = await self._act(
                "GetSpecificPortMappingEntry", NewRemoteHost="", NewExternalPort=port, NewProtocol="TCP"
            )
        except _Refused:
            return None
        return _inside(answer, "NewInternalClient"), _inside(answer, "NewInternalPort")

    async def map(self, outside: int, port: int, description: str, lease: int) -> None:
        """Let an outside port lead to a port of this computer for `lease` seconds; 0 is for good."""
        await self._act(
            "AddPortMapping",
            NewRemoteHost="",
            NewExternalPort=outside,
            NewProtocol="TCP",
            NewInternalPort=port,
            NewInternalClient=self.here,
            NewEnabled=1,
            NewPortMappingDescription=description,
            NewLeaseDuration=lease,
        )

    async def unmap(self, outside: int) -> None:
        """Let an outside port lead nowhere."""
        await self._act("DeletePortMapping", NewRemoteHost="", NewExternalPort=outside, NewProtocol="TCP")

    async def _act(self, action: str, **arguments: str | int) -> str:
        stated = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
        body = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
            ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{self.service}">{stated}</u:{action}></s:Body></s:Envelope>'
        )
        headers = [("SOAPAction", f'"{self.service}#{action}"'), ("Content-Type", 'text/xml; charset="utf-8"')]
        status, answer, _ = await _ask(self.place, headers, body.encode())
        if status != 200:
            number, words = (_inside(answer, tag) for tag in ("errorCode", "errorDescription"))
            raise _Refused(shortened(f"{words or f'HTTP {status}'} {number}".strip(), MAX_TEXT))
        return answer


class _Refused(NetworkError):
    """The router's answer is that it does not do that."""


async def find_gateway(group: tuple[str, int] = GROUP) -> Gateway:
    """Find the router: the first that states an outside address, else the first. Raises `NetworkError`."""
    found: list[Gateway] = []
    for place in await _search(group):
        with suppress(NetworkError):
            for gateway in await _described(place):
                found.append(gateway)
                if await gateway.outside_ip() not in ("", "0.0.0.0"):
                    return gateway
    if not found:
        raise NetworkError("no router that speaks UPnP answers in this network")
    return found[0]


async def _search(group: tuple[str, int]) -> list[_Place]:
    """Return where the computers that answer a search have their descriptions, one of each."""
    places: dict[str, _Place] = {}
    with trio.move_on_after(SEARCH_SECONDS), suppress(OSError), trio.socket.socket(type=socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        for kind in _SEARCHED:
            lines = [
                "M-SEARCH * HTTP/1.1",
                f"HOST: {group[0]}:{group[1]}",
                'MAN: "ssdp:discover"',
                "MX: 1",
                f"ST: {kind}",
            ]
            await asking.sendto("\r\n".join([*lines, "", ""]).encode(), group)
        while len(places) < MAX_FOUND:
            answer, (ip, *_) = await asking.recvfrom(2048)
            location = _LOCATION.search(answer.decode("ascii", "replace"))
            known = ipaddress.ip_address(ip)
            if location is not None and known.is_private and not known.is_link_local and ip not in places:
                with suppress(NetworkError):
                    places[ip] = _Place.of(location[1], ip)
    return list(places.values())


async def _described(place: _Place) -> Iterator[Gateway]:
    """Return the services of a router by which ports are opened."""
    status, text, here = await _ask(place, [], b"")
    if status != 200:
        return iter(())
    base = _inside(text, "URLBase").strip() or f"http://{place.ip}:{place.port}{place.path}"
    blocks = [block.partition("</service>")[0] for block in text.split("<service>")[1:]]
    services = {_inside(block, "serviceType").strip(): _inside(block, "controlURL").strip() for block in blocks}
    named = [(kind, url) for kind, url in services.items() if _CONNECTS.fullmatch(kind)]
    return (Gateway(_Place.of(_joined(base, url), place.ip), kind, here) for kind, url in named[:MAX_FOUND])


def _joined(base: str, url: str) -> str:
    try:
        return urljoin(base, url.replace("&amp;", "&"))
    except ValueError as error:
        raise NetworkError(f"the router names no address: {error}") from error


def _inside(text: str, tag: str) -> str:
    """Return what is between the first such tag and its end; empty without it."""
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]


async def _ask(place: _Place, headers: list[tuple[str, str]], body: bytes) -> tuple[int, str, str]:
    """Return status and text of an answer, and my address toward the router. Raises `NetworkError`."""
    machine = h11.Connection(h11.CLIENT)
    host = [("Host", f"{place.ip}:{place.port}"), ("Connection", "close"), ("Content-Length", str(len(body)))]
    request = h11.Request(method="POST" if body else "GET", target=place.path, headers=[*host, *headers])
    status, text = 0, bytearray()
    try:
        with trio.fail_after(ANSWER_SECONDS):
            async with await trio.open_tcp_stream(place.ip, place.port) as stream:
                here = str(stream.socket.getsockname()[0])
                asked = (request, h11.Data(body), h11.EndOfMessage())
                await stream.send_all(b"".join(machine.send(part) or b"" for part in asked))
                while not isinstance(event := machine.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        machine.receive_data(await stream.receive_some())
                    elif isinstance(event, h11.Response):
                        status = event.status_code
                    elif isinstance(event, h11.Data):
                        text += event.data
                    if len(text) > MAX_ANSWER_BYTES:
                        raise NetworkError(f"the router's answer has more than {MAX_ANSWER_BYTES >> 10} KiB")
    except trio.TooSlowError:
        raise NetworkError(f"the router has not answered within {ANSWER_SECONDS:g} s") from None
    except (OSError, h11.RemoteProtocolError, trio.BrokenResourceError) as error:
        raise NetworkError(f"the router does not answer: {shortened(str(error), MAX_TEXT)}") from error
    return status, text.decode("utf-8", "replace"), here
