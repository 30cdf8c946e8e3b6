"""Where a host dials because a member says so, and how often. Over loopback sockets."""

import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from flockstep.dht import rendezvous
from flockstep.peer import host as host_file
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import ConnectFailed
from flockstep.peer.base.transport import Address, PeerId
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat.relay import circuit_address
from flockstep.peer.quota.limits import BootstrapLimits
from support.loopback import LOOPBACK

SOMEBODY = Identity.from_seed(bytes(32)).peer_id


async def reasons(host: Libp2pHost, *addresses: Address) -> list[str]:
    """Why a dial of a peer at these addresses failed."""
    with pytest.raises(ConnectFailed) as caught:
        await host.connect(SOMEBODY, addresses)
    return [attempt.cause for attempt in caught.value.attempts]


async def test_a_member_cannot_have_others_dial_their_own_computer_or_the_clouds_metadata() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port, events, telemetry = listener.getsockname()[1], list[Event](), Telemetry()
    telemetry.subscribe(events.append)
    async with open_host(Identity.generate(), PeerConfig(home=Path("unused"), port=0), telemetry) as host:
        host._interfaces = lambda: ("/ip4/192.168.1.5/tcp/4001",)  # type: ignore[method-assign]
        forbidden = (f"/ip4/127.0.0.1/tcp/{port}", "/ip4/169.254.169.254/tcp/80", f"/dns4/localhost/tcp/{port}")
        causes = await reasons(host, *forbidden)
        loopback = "a loopback address, which is this computer"
        assert causes == [loopback, "an address of no computer that a peer could be on", loopback]
        assert [event["event"] for event in events].count("dial.failed") == 3
        assert "a private address" in (await reasons(host, "/ip4/10.1.2.3/tcp/22"))[0]
        assert (await host._guarded(host._dialler.plainly)(SOMEBODY, forbidden[0])) == loopback
        assert "no place to meet" in await host._guarded(host._dialler.plainly)(SOMEBODY, forbidden[2])
        with pytest.raises(ConnectFailed):
            await host.bootstraps.enter(SOMEBODY, forbidden[0], stated=True)
        with pytest.raises(BlockingIOError):  # Nobody has connected.
            listener.accept()
    listener.close()


async def test_one_address_is_dialled_so_often_and_all_together_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "DIALS_TO_ONE", 2)
    monkeypatch.setattr(host_file, "DIALS_IN_ALL", 3)

    async with open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        other = "/ip4/44.1.1.2/tcp/1"
        victims = [f"/ip6/2a01::{number}/tcp/1" for number in (1, 2, 3)]  # Of one /64.
        assert [host.why_not_dial(victim) for victim in victims[:2]] == ["", ""]
        assert "more than 2 dials to one address (IPv6: one /64) within" in host.why_not_dial(victims[2])
        assert host.why_not_dial(other) == ""
        assert "more than 3 dials within" in host.why_not_dial(other)


async def test_hosts_that_listen_on_loopback_dial_each_other_there() -> None:
    async with (
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as one,
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as other,
    ):
        await one.connect(other.peer_id, other.addresses())
        assert other.peer_id in one.connected()


class Listing:
    """A directory that lists one member, behind relays."""

    def __init__(self, addresses: list[Address]) -> None:
        self._addresses = addresses
        self._num_asked = 0
        self.is_asked_again = trio.Event()

    async def find(self, run_id: str) -> list[PeerId]:
        self._num_asked += 1
        if self._num_asked > 2:
            self.is_asked_again.set()
        return [SOMEBODY]

    def addresses(self, peer: PeerId) -> list[Address]:
        return self._addresses


async def test_of_bootstraps_that_members_name_few_are_entered_and_none_has_the_rights_of_a_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever named many of its own was the majority that says how a peer is reached, and paid for no streams."""
    monkeypatch.setattr(rendezvous, "ENTER_PERIOD", 0.0)
    async with AsyncExitStack() as stack:
        relays = []
        for ip in ("127.0.1.1", "127.0.1.2", "127.0.2.1", "127.0.3.1", "127.0.4.1"):
            config = PeerConfig(home=Path("unused"), host=ip, port=0)
            relay = open_host(Identity.generate(), config, Telemetry(), bootstrap=BootstrapLimits())
            relays.append(await stack.enter_async_context(relay))
        host = await stack.enter_async_context(open_host(Identity.generate(), LOOPBACK, Telemetry()))
        listing = Listing([circuit_address(relay.addresses()[0], relay.peer_id) for relay in relays])
        async with trio.open_nursery() as nursery:
            arguments = host, listing, "run", Telemetry()
            nursery.start_soon(rendezvous._enter_through_members, *arguments)
            await listing.is_asked_again.wait()
            nursery.cancel_scope.cancel()
        assert [relay.peer_id in host.connected() for relay in relays] == [True, False, True, True, False]
        assert not any(host.bootstraps.holds(relay.peer_id) for relay in relays)
