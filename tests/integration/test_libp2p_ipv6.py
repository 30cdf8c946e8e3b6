"""IPv6 beside IPv4, over loopback sockets."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.transport import Rung
from flockstep.peer.host import open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.listen import interfaces
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from multiaddr import Multiaddr
from support.loopback import LOOPBACK
from support.recorded import recorded

EVERYWHERE = PeerConfig(home=Path("unused"), port=0, upnp=False)


@pytest.fixture
def ip6() -> None:
    """A computer without IPv6 has none of these tests."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


class Resolver(trio.abc.HostnameResolver):
    """Every name stands for these addresses."""

    def __init__(self, *ips: str) -> None:
        self._ips = ips

    async def getaddrinfo(self, host: Any, port: Any, *_: Any) -> Any:
        families = [socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in self._ips]
        return [(family, socket.SOCK_STREAM, 6, "", (ip, 0)) for family, ip in zip(families, self._ips, strict=True)]

    async def getnameinfo(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.usefixtures("ip6")
async def test_one_port_on_both_versions_of_ip() -> None:
    telemetry, events = recorded()
    async with (
        open_host(Identity.generate(), EVERYWHERE, telemetry, bootstrap=BootstrapLimits()) as bootstrap,
        open_host(Identity.generate(), EVERYWHERE, telemetry) as host,
        open_host(Identity.generate(), EVERYWHERE, telemetry) as other,
    ):
        await host.bootstraps.enter(bootstrap.peer_id, f"/ip6/::1/tcp/{bootstrap.port}")
        assert host.rung(bootstrap.peer_id) is Rung.LAN
        # The dial left from the port that is listened on, and the dial back came to it.
        while host.reachability.confirmed != (f"/ip6/::1/tcp/{host.port}",):
            await trio.lowlevel.checkpoint()
        assert await other.probe(host.peer_id, f"/ip4/127.0.0.1/tcp/{host.port}", 10) == ""
    assert not [event for event in events if event["event"] in ("host.ipv4_only", "bootstrap.other_port")]


async def test_a_bootstrap_whose_name_also_leads_nowhere_is_reached() -> None:
    trio.socket.set_custom_hostname_resolver(Resolver("100::1", "127.0.0.1"))  # The first is RFC 6666's black hole.
    async with (
        open_host(Identity.generate(), LOOPBACK, Telemetry(), bootstrap=BootstrapLimits()) as bootstrap,
        open_host(Identity.generate(), LOOPBACK, Telemetry()) as host,
    ):
        await host.bootstraps.enter(bootstrap.peer_id, f"/dns/boot.example/tcp/{bootstrap.port}")
        assert bootstrap.peer_id in host.connected()


def test_of_each_network_one_address_is_told_and_public_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["ip4/10.0.0.2", "ip4/10.0.0.3", "ip6/fd00::2", "ip6/2a00::1:1", "ip6/2a00::1:2", "ip6/fe80::1", "ip6/::1"]
    machine = [Multiaddr(f"/{address}/tcp/4001") for address in found]
    monkeypatch.setattr("flockstep.peer.libp2p.listen.get_available_interfaces", lambda port: machine)
    told = ["/ip6/2a00::1:1", "/ip4/10.0.0.2", "/ip4/10.0.0.3", "/ip6/fd00::2"]
    assert interfaces("0.0.0.0", 4001) == tuple(f"{address}/tcp/4001" for address in told)
    assert interfaces("::", 4001) == ("/ip6/2a00::1:1/tcp/4001", "/ip6/fd00::2/tcp/4001")
    assert interfaces("10.0.0.3", 4001) == ("/ip4/10.0.0.3/tcp/4001",)


def test_addresses_of_bridges_to_containers_are_told_last(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"docker0": "172.17.0.1", "br-1f": "172.18.0.1", "virbr0": "192.168.122.1"}
    held |= {"wlan0": "192.168.1.5", "br0": "10.0.0.2"}
    machine = [Multiaddr(f"/ip4/{address}/tcp/4001") for address in held.values()]
    monkeypatch.setattr("flockstep.peer.libp2p.listen.get_available_interfaces", lambda port: machine)
    known = {name: [SimpleNamespace(address=address)] for name, address in held.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: known)
    told = ["192.168.1.5", "10.0.0.2", "172.17.0.1", "172.18.0.1", "192.168.122.1"]
    assert interfaces("0.0.0.0", 4001) == tuple(f"/ip4/{address}/tcp/4001" for address in told)
