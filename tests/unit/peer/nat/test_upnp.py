"""UPnP: port mappings and the doctor's check, with a router on loopback, and hostile ones."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat.gateway import MAX_ANSWER_BYTES, find_gateway
from flockstep.peer.nat.upnp import LEASE, NUM_MAPPED_PORTS, PERMANENT, PortMapping, find_router
from flockstep.scripts.doctor import visit
from flockstep.scripts.doctor.sheet import Sheet
from support.router import ME, SOMEBODY, Router

SEEN = "/ip4/44.0.1.1/tcp/40001"


class Asked:
    """A port mapping that is kept, and what became of it."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.opened: list[int] = []
        self.events: list[Event] = []
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        self.mapping = PortMapping(telemetry, self.opened.append, router.group)

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():  # noqa: ASYNC110  In virtual time.
            await trio.sleep(0.1)

    def told(self) -> list[tuple[Any, Any]]:
        return [(event["event"], event.get("port", event.get("reason"))) for event in self.events]


def in_virtual_time(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run over real sockets on loopback, where the time jumps once nothing is on its way."""
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


def asking(router: Router, body: Callable[[Asked], Awaitable[None]]) -> Asked:
    async def main() -> Asked:
        async with router.running():
            asked = Asked(router)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asked.mapping.keep, 4001)
                await trio.sleep(10)
                assert not router.asked  # Nobody asks before it is known that strangers do not get through.
                asked.mapping.want(SEEN)
                with trio.fail_after(3600):
                    await body(asked)
                nursery.cancel_scope.cancel()
            await asked.mapping.close()
            return asked

    found: Asked = in_virtual_time(main)
    return found


@pytest.mark.parametrize(("leases", "lease"), [(True, LEASE), (False, PERMANENT)])
def test_the_same_port_is_opened_and_given_back(leases: bool, lease: int) -> None:
    router = Router()
    router.leases = leases

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)
        assert router.ports == {4001: (ME, 4001, lease)}

    asked = asking(router, body)
    assert asked.opened == [4001]
    assert asked.told() == [("upnp.opened", 4001), ("upnp.closed", 4001)]
    assert router.ports == {}


def test_a_port_that_somebody_has_is_left_to_them() -> None:
    router = Router()
    router.ports = {4001: (SOMEBODY, 4001, 0), 4002: (ME, 22, 0)}

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)

    assert asking(router, body).opened == [4003]
    assert router.ports == {4001: (SOMEBODY, 4001, 0), 4002: (ME, 22, 0)}


@pytest.mark.parametrize("mood", ["silent", "full", "odd"])
def test_a_router_that_opens_none_is_told_once_for_each_network(mood: str) -> None:
    router = Router()
    router.answers, router.odd = mood != "silent", mood == "odd"
    if mood == "full":
        router.ports = {4001 + number: (SOMEBODY, 1, 0) for number in range(NUM_MAPPED_PORTS)}

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.events)
        asked.mapping.want(SEEN)  # The second bootstrap says the same.
        await trio.sleep(60)
        assert [event["event"] for event in asked.events] == ["upnp.failed"]
        router.answers, router.odd, router.ports = True, False, {}
        asked.mapping.want("/ip4/44.0.77.1/tcp/40001")
        await asked.until(lambda: asked.opened)

    assert asking(router, body).opened == [4001]


def test_a_router_that_has_forgotten_me_is_told_of() -> None:
    router = Router()

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)
        router.answers = False
        asked.mapping.want("/ip4/44.0.77.1/tcp/40001")
        await asked.until(lambda: len(asked.opened) == 2)

    asked = asking(router, body)
    assert asked.opened == [4001, 0]
    assert [event["event"] for event in asked.events] == ["upnp.opened", "upnp.failed"]


def test_a_port_that_cannot_be_given_back_is_told_of() -> None:
    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)
        asked.router.odd = True

    assert asking(Router(), body).told()[-1] == ("upnp.failed", 4001)


def examined(router: Router, config: PeerConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The doctor's row."""
    lines: list[str] = []

    async def main() -> None:
        async with router.running():
            monkeypatch.setattr(visit, "find_router", lambda: find_router(router.group))
            await visit.check_upnp(config, Sheet(lines.append, as_json=True))

    in_virtual_time(main)
    (row,) = map(json.loads, lines)
    assert row["name"] == "UPnP"
    return dict(row)


@pytest.mark.parametrize(
    ("outside", "ok", "words"),
    [
        ("44.0.1.1", True, "the router 44.0.1.1 opens a port"),
        ("100.64.3.2", None, "the router's outside address 100.64.3.2 is private"),
        ("", None, "the router's outside address 0.0.0.0 is private"),
        ("<br>", None, "the router answers, but gives no outside address"),
    ],
)
def test_the_doctor_tells_what_a_router_is_good_for_and_opens_no_port(
    monkeypatch: pytest.MonkeyPatch, outside: str, ok: bool | None, words: str
) -> None:
    router = Router()
    router.outside = outside
    row = examined(router, PeerConfig(), monkeypatch)
    assert (row["ok"], row["cause"].startswith(words)) == (ok, True)
    assert not router.ports


def test_the_doctor_asks_no_router_where_none_will_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    assert "--no-upnp" in examined(router, PeerConfig(upnp=False), monkeypatch)["cause"]
    assert "127.0.0.1" in examined(router, PeerConfig(host="127.0.0.1"), monkeypatch)["cause"]
    assert not router.asked


def failed(router: Router) -> str:
    """Why no gateway is found."""

    async def main() -> str:
        async with router.running():
            with pytest.raises(NetworkError) as raised:
                await (await find_gateway(router.group)).outside_ip()
            return str(raised.value)

    return str(in_virtual_time(main))


def test_no_other_computer_is_asked_than_the_one_that_has_answered() -> None:
    bystander = Router()

    async def main() -> None:
        async with bystander.running(), router.running():
            # Its search and its web server have other ports; another host is what matters.
            for router.location in (
                "http://127.0.0.2:1/x",
                "http://metadata.internal/x",
                "https://127.0.0.1/x",
                "http://[::1/",
            ):
                with pytest.raises(NetworkError, match="no router"):
                    await find_gateway(router.group)
            router.location = ""
            for router.control in (
                "http://127.0.0.2:1/x",
                "//127.0.0.2/x",
                "gopher://127.0.0.1/x",
                "/a b",
                "http://[::1/",
            ):
                with pytest.raises(NetworkError, match="no router"):
                    await find_gateway(router.group)
            router.control = "x/control?a=1&amp;b=2"
            assert (await find_gateway(router.group)).place.path == "/x/control?a=1&b=2"

    router = Router()
    in_virtual_time(main)
    assert {line.partition(" ")[0] for line in router.asked[:-1]} == {"GET"}
    assert not bystander.asked


@pytest.mark.parametrize("head", ["", "Content-Length: 99999999999\r\n", "Transfer-Encoding: chunked\r\n"])
def test_an_answer_without_end_is_read_to_its_bound(head: str) -> None:
    router, sent = Router(), 0

    async def endless(stream: trio.SocketStream) -> None:
        nonlocal sent
        await router.read(stream)
        await stream.send_all(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
        piece = b"1000\r\n" + bytes(4096) + b"\r\n" if "chunked" in head else bytes(4096)
        while True:
            await stream.send_all(piece)
            sent += len(piece)

    router.serve = endless
    assert failed(router).startswith("no router")
    assert sent < 1000 * MAX_ANSWER_BYTES  # What the system's own buffers hold.


@pytest.mark.parametrize("drop", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_an_answer_that_drips_costs_five_seconds(drop: bytes) -> None:
    router = Router()

    async def drip(stream: trio.SocketStream) -> None:
        await router.read(stream)
        await stream.send_all(drop)
        while True:
            await trio.sleep(0.5)
            await stream.send_all(drop if drop.endswith(b"\n") else b"a")

    router.serve = drip

    async def main() -> float:
        async with router.running():
            begun = trio.current_time()
            with pytest.raises(NetworkError, match="no router"):
                await find_gateway(router.group)
            return trio.current_time() - begun

    assert in_virtual_time(main) < 10


def test_a_routers_own_words_are_shown_as_plain_text() -> None:
    router = Router()
    router.odd = True
    assert failed(router) == "Action\\x1b Not Authorized 606"
