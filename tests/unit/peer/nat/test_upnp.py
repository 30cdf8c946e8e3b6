"""UPnP: port mappings and the doctor's check, with fake routers in the place of the library."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import miniupnpc
import pytest
import trio
import trio.testing
from flockstep.peer.config import PeerConfig
from flockstep.peer.nat.upnp import LEASE, NUM_MAPPED_PORTS, PERMANENT, PortMapping
from flockstep.peer.telemetry import Event, Telemetry
from flockstep.scripts.doctor.sheet import Sheet
from flockstep.scripts.doctor.visit import check_upnp

ME, SOMEBODY = "10.0.0.2", "10.0.0.9"
SEEN = "/ip4/44.0.1.1/tcp/40001"


class Router:
    """What miniupnpc shows of a router: the ports that it has opened, and its moods."""

    lanaddr = ME

    def __init__(self) -> None:
        self.ports: dict[int, tuple[str, int, int]] = {}
        self.leases = True
        self.answers = True
        self.odd = False
        self.outside = "44.0.1.1"
        self.discoverdelay = 0

    def discover(self) -> int:
        raise Exception("Success")

    def selectigd(self) -> str:
        if not self.answers:
            raise Exception("No UPnP device discovered")
        return "http://10.0.0.1/control"

    def externalipaddress(self) -> str:
        return self.outside

    def getspecificportmapping(self, outside: int, protocol: str) -> Any:
        if self.odd:
            return b"\xff".decode()
        found = self.ports.get(outside)
        return None if found is None else (found[0], found[1], "", True, 0)

    def addportmapping(self, outside: int, protocol: str, host: str, port: int, *rest: Any) -> bool:
        lease = int(rest[-1])
        if lease and not self.leases:
            raise Exception("OnlyPermanentLeasesSupported")
        self.ports[outside] = (host, port, lease)
        return True

    def deleteportmapping(self, outside: int, protocol: str) -> bool:
        if self.odd:
            raise Exception("Action Not Authorized")
        del self.ports[outside]
        return True


class Asked:
    """A port mapping that is kept, and what became of it."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.opened: list[int] = []
        self.events: list[Event] = []
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        self.mapping = PortMapping(telemetry, self.opened.append)

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await trio.lowlevel.checkpoint()

    def told(self) -> list[tuple[Any, Any]]:
        return [(event["event"], event.get("port", event.get("reason"))) for event in self.events]


def asking(router: Router, monkeypatch: pytest.MonkeyPatch, body: Callable[[Asked], Awaitable[None]]) -> Asked:
    monkeypatch.setattr(miniupnpc, "UPnP", lambda: router)
    asked = Asked(router)

    async def main() -> None:
        with trio.fail_after(30):  # A safety net against a hang.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asked.mapping.keep, 4001)
                await trio.testing.wait_all_tasks_blocked()
                assert not asked.events  # Nobody asks before it is known that strangers do not get through.
                asked.mapping.want(SEEN)
                await body(asked)
                nursery.cancel_scope.cancel()
            await asked.mapping.close()

    trio.run(main)
    return asked


@pytest.mark.parametrize(("leases", "lease"), [(True, LEASE), (False, PERMANENT)])
def test_the_same_port_is_opened_and_given_back(monkeypatch: pytest.MonkeyPatch, leases: bool, lease: int) -> None:
    router = Router()
    router.leases = leases

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)
        assert router.ports == {4001: (ME, 4001, lease)}

    asked = asking(router, monkeypatch, body)
    assert asked.opened == [4001]
    assert asked.told() == [("upnp.opened", 4001), ("upnp.closed", 4001)]
    assert router.ports == {}


def test_a_port_that_somebody_has_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    router.ports = {4001: (SOMEBODY, 4001, 0), 4002: (ME, 22, 0)}

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)

    assert asking(router, monkeypatch, body).opened == [4003]
    assert router.ports == {4001: (SOMEBODY, 4001, 0), 4002: (ME, 22, 0)}


@pytest.mark.parametrize("mood", ["silent", "full", "odd"])
def test_a_router_that_opens_none_is_told_once_for_each_network(monkeypatch: pytest.MonkeyPatch, mood: str) -> None:
    router = Router()
    router.answers, router.odd = mood != "silent", mood == "odd"
    if mood == "full":
        router.ports = {4001 + number: (SOMEBODY, 1, 0) for number in range(NUM_MAPPED_PORTS)}

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.events)
        asked.mapping.want(SEEN)  # The second bootstrap says the same.
        await trio.testing.wait_all_tasks_blocked()
        assert [event["event"] for event in asked.events] == ["upnp.failed"]
        router.answers, router.odd, router.ports = True, False, {}
        asked.mapping.want("/ip4/44.0.77.1/tcp/40001")
        await asked.until(lambda: asked.opened)

    assert asking(router, monkeypatch, body).opened == [4001]


def test_a_router_that_has_forgotten_me_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()

    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)
        router.answers = False
        asked.mapping.want("/ip4/44.0.77.1/tcp/40001")
        await asked.until(lambda: len(asked.opened) == 2)

    asked = asking(router, monkeypatch, body)
    assert asked.opened == [4001, 0]
    assert [event["event"] for event in asked.events] == ["upnp.opened", "upnp.failed"]


def test_a_port_that_cannot_be_given_back_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(asked: Asked) -> None:
        await asked.until(lambda: asked.opened)
        asked.router.odd = True

    assert asking(Router(), monkeypatch, body).told()[-1] == ("upnp.failed", 4001)


def examined(config: PeerConfig) -> dict[str, Any]:
    """The doctor's row."""
    lines: list[str] = []
    trio.run(check_upnp, config, Sheet(lines.append, as_json=True))
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
    monkeypatch.setattr(miniupnpc, "UPnP", lambda: router)
    row = examined(PeerConfig())
    assert (row["ok"], row["cause"].startswith(words)) == (ok, True)
    assert not router.ports


def test_the_doctor_asks_no_router_where_none_will_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miniupnpc, "UPnP", lambda: pytest.fail("a router is asked"))
    assert "--no-upnp" in examined(PeerConfig(upnp=False))["cause"]
    assert "127.0.0.1" in examined(PeerConfig(host="127.0.0.1"))["cause"]
