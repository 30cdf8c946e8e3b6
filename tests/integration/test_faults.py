"""Planted faults: `doctor` and `join` name the same correct cause and remedy, on real hosts.

These are the faults of the connection to a run; `test_doctor` has those of the computer, `natlab/test_faults` of routers.
"""

import json
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from flockstep.collectives.chain.head import validate_run_value
from flockstep.dht import rendezvous
from flockstep.dht.directory import kademlia as directory_of
from flockstep.dht.directory.kademlia import KademliaDirectory, open_directory
from flockstep.dht.keys import run_key
from flockstep.dht.rendezvous import find_manifest, open_bootstraps
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import ConnectFailed, FlockstepError
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p import tcp
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat import bootstraps, diagnose
from flockstep.peer.nat.dialback import DIALBACK_PROTOCOL, Dialback
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.scripts.doctor.network import NetworkVisit
from flockstep.scripts.doctor.sheet import Sheet
from flockstep.scripts.peers.join import describe_event
from support.loopback import LOOPBACK

FOR_EVER = replace(LOOPBACK, dial_timeout=math.inf)
"""A test that waited for the end of a dial would not end."""
OWNER = Identity.from_seed(bytes(32))
TOML = 'name = "faults"\n[model]\nsize = "0.2m"\n[data]\nsource = "text:{stdlib}"\n'
RUN = SignedManifest.sign(Manifest.from_toml(TOML, where="run.toml", owner=OWNER.peer_id), OWNER)


class Door:
    """A bootstrap in this process."""

    def __init__(self, host: Libp2pHost, directory: KademliaDirectory) -> None:
        self.host = host
        self.directory = directory

    @property
    def via(self) -> str:
        return f"{self.host.addresses()[0]}/p2p/{self.host.peer_id}"

    def answer(self, dialback: Dialback) -> None:
        self.host.handle(DIALBACK_PROTOCOL, dialback.serve)


@asynccontextmanager
async def bootstrap(
    config: PeerConfig = LOOPBACK,
    accept: Callable[[str, bytes], int] = validate_run_value,
    *,
    reservations: int = 8,
    identity: Identity | None = None,
) -> AsyncIterator[Door]:
    telemetry, limits = Telemetry(), BootstrapLimits(reservations=reservations)
    async with (
        open_host(identity or Identity.generate(), config, telemetry, bootstrap=limits) as host,
        open_directory(host, server=True, telemetry=telemetry, validate=accept) as directory,
    ):
        yield Door(host, directory)


async def doctor_says(link: JoinLink, config: PeerConfig = LOOPBACK) -> dict[str, dict[str, Any]]:
    """The failed checks by their names."""
    lines: list[str] = []
    sheet = Sheet(lines.append, as_json=True)
    await NetworkVisit(link, config, sheet).run()
    checks = {check["name"]: check for check in map(json.loads, lines)}
    assert len(checks) == len(lines)
    assert sheet.healthy == all(check["ok"] is not False for check in checks.values())
    sheet.expect("everything")
    sheet.close()
    assert json.loads(lines[-1])["name"] == "everything"  # Nothing else was left open.
    return {name: check for name, check in checks.items() if check["ok"] is False}


async def join_says(link: JoinLink, config: PeerConfig = LOOPBACK, until: str = "") -> str:
    """What `join` tells the person in front of the screen on its way to the run, until an event if one is named."""
    telemetry, lines, seen = Telemetry(), list[str](), trio.Event()

    def hear(event: Event) -> None:
        if line := describe_event(event):
            lines.append(line)
        if event["event"] == until:
            seen.set()

    telemetry.subscribe(hear)
    try:
        async with open_bootstraps(Identity.generate(), link, config, telemetry, validate_run_value) as (_, directory):
            if until:
                await seen.wait()
            await find_manifest(directory, link.run_id)
    except FlockstepError as error:
        lines.append(f"{error} — {error.remedy}")
    return "\n".join(lines)


async def both_say(
    link: JoinLink, name: str, cause: str, remedy: str, *, until: str = "", config: PeerConfig = LOOPBACK
) -> dict[str, dict[str, Any]]:
    """Hold both to the cause and the remedy of the one check that must fail; the failed ones."""
    failed = await doctor_says(link, config)
    check = failed[name]
    assert cause in check["cause"]
    assert remedy in check["remedy"]
    assert "\n" not in check["cause"] + check["remedy"]
    said = await join_says(link, config, until)
    (line,) = [line for line in said.splitlines() if cause in line]
    assert check["remedy"] in line
    return failed


def link_to(*via: str) -> JoinLink:
    return JoinLink(RUN.run_id, via)


async def test_nothing_is_wrong_where_nothing_is_planted() -> None:
    async with bootstrap() as open_bootstraps:
        await open_bootstraps.directory.put(run_key(RUN.run_id), RUN.publishable)
        assert await doctor_says(link_to(open_bootstraps.via)) == {}
        assert await join_says(link_to(open_bootstraps.via)) == ""


async def test_a_run_that_takes_a_program_is_no_fault_and_says_so() -> None:
    own = Manifest.from_toml('name = "own"\n[data]\nsource = "own"\n', where="run.toml", owner=OWNER.peer_id)
    signed = SignedManifest.sign(own, OWNER)

    async with bootstrap() as door:
        await door.directory.put(run_key(signed.run_id), signed.publishable)
        lines: list[str] = []
        sheet = Sheet(lines.append, as_json=True)
        await NetworkVisit(JoinLink(signed.run_id, (door.via,)), LOOPBACK, sheet).run()
        assert sheet.healthy
        (check,) = [check for check in map(json.loads, lines) if check["name"] == "join"]
        assert (check["ok"], check["cause"]) == (None, str(NEEDS_PROGRAM))


async def test_members_that_have_left_are_no_fault() -> None:
    async with bootstrap() as open_bootstraps:
        await open_bootstraps.directory.put(run_key(RUN.run_id), RUN.publishable)
        async with (
            open_host(Identity.generate(), LOOPBACK, Telemetry()) as member,
            open_directory(member, server=False, telemetry=Telemetry(), validate=validate_run_value) as directory,
        ):
            await member.connect(open_bootstraps.host.peer_id, open_bootstraps.host.addresses())
            await directory.add_server(open_bootstraps.host.peer_id)
            await directory.provide(RUN.run_id)
        lines: list[str] = []
        await NetworkVisit(link_to(open_bootstraps.via), LOOPBACK, Sheet(lines.append, as_json=False)).run()
        (line,) = [line for line in lines if "members" in line]
        assert line.startswith("–")
        assert "none of 1 that were announced answers" in line


async def test_a_bootstrap_that_is_down() -> None:
    async with bootstrap() as open_bootstraps:
        link = link_to(open_bootstraps.via)
    failed = await both_say(link, "bootstrap 1: TCP", "the bootstrap is down", "restart it")
    assert len(failed) == 1


async def test_a_wrong_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual one is what the bootstrap has got here: any program of this computer may have 4001."""

    async with bootstrap() as open_bootstraps:
        (port,) = re.findall(r"/tcp/(\d+)/", open_bootstraps.via)
        monkeypatch.setattr(diagnose, "DEFAULT_PORT", int(port))
        link = link_to(open_bootstraps.via.replace(f"/tcp/{port}/", "/tcp/1/"))
        words = f"the link has a wrong port: it is 1, the bootstrap listens on {port}"
        await both_say(link, "bootstrap 1: TCP", words, "correct the port")


async def test_a_port_at_which_something_else_listens() -> None:
    async with trio.open_nursery() as nursery:

        async def web(stream: trio.SocketStream) -> None:
            async with stream:
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        listeners = await nursery.start(partial(trio.serve_tcp, web, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        link = link_to(f"/ip4/127.0.0.1/tcp/{port}/p2p/{OWNER.peer_id}")
        words = "something listens there that does not speak libp2p with Noise"
        failed = await both_say(link, "bootstrap 1: Noise", words, "the link has a wrong port")
        assert len(failed) == 1
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def mute() -> AsyncIterator[str]:
    """The address of what takes connections and says nothing."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        yield f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}/p2p/{OWNER.peer_id}"


async def test_a_bootstrap_that_takes_connections_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "FIRST_BYTE", 0.01)

    async with mute() as via:
        words = f"the bootstrap hangs: port {via.split('/')[4]} accepts connections"
        await both_say(link_to(via), "bootstrap 1: TCP", words, "restart it", config=FOR_EVER)


async def test_what_a_dial_has_heard_a_byte_of_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "FIRST_BYTE", 0.01)

    async with trio.open_nursery() as nursery:
        heard = trio.Event()

        async def greet_only(stream: trio.SocketStream) -> None:
            await stream.send_all(b"\x13/multistream/1.0.0\n")
            with suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass
            heard.set()

        listeners = await nursery.start(partial(trio.serve_tcp, greet_only, 0, host="127.0.0.1"))
        via = f"/ip4/127.0.0.1/tcp/{listeners[0].socket.getsockname()[1]}/p2p/{OWNER.peer_id}"
        assert "timed out after 0.5 s" in await dial_says(via, 0.5)
        await heard.wait()
        nursery.cancel_scope.cancel()


async def dial_says(via: str, seconds: float) -> str:
    async with open_host(Identity.generate(), replace(LOOPBACK, dial_timeout=seconds), Telemetry()) as host:
        with pytest.raises(ConnectFailed) as caught:
            await host.connect(OWNER.peer_id, [via.partition("/p2p/")[0]])
        return str(caught.value)


async def test_a_bootstrap_that_hangs_holds_nobody_up_where_another_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "FIRST_BYTE", math.inf)
    monkeypatch.setattr(rendezvous, "OTHERS_SECONDS", 0.0)

    async with bootstrap() as one, mute() as via:
        await one.directory.put(run_key(RUN.run_id), RUN.publishable)
        assert await join_says(link_to(via, one.via), FOR_EVER) == ""


async def test_a_bootstrap_that_was_down_is_entered_and_told_once_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ENTER_PERIOD", 0.01)
    monkeypatch.setattr(directory_of, "AGAIN_SECONDS", 0.01)

    identity = Identity.generate()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    via = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    async with (
        bootstrap() as one,
        open_bootstraps(Identity.generate(), link_to(via, one.via), LOOPBACK, Telemetry()) as (host, directory),
    ):
        await directory.put(run_key(RUN.run_id), RUN.publishable)
        await directory.provide(RUN.run_id)
        async with bootstrap(replace(LOOPBACK, port=port), identity=identity) as late:
            assert late.directory.server is not None
            while len(late.directory.server.store) < 2:
                await trio.lowlevel.checkpoint()
            assert late.host.peer_id in host.connected()


async def test_a_bootstrap_that_comes_back_without_its_disk_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstraps, "BOOTSTRAP_POLL", 0.01)
    monkeypatch.setattr(bootstraps, "RETRY_PAUSES", (0.01,))

    identity = Identity.generate()
    async with (
        bootstrap(identity=identity) as one,
        open_bootstraps(Identity.generate(), link_to(one.via), LOOPBACK, Telemetry()) as (_, directory),
    ):
        port = one.host.port
        await directory.put(run_key(RUN.run_id), RUN.publishable)
        await directory.provide(RUN.run_id)
        await one.host.stop()
        async with bootstrap(replace(LOOPBACK, port=port), identity=identity) as again:
            assert again.host.port == port
            assert again.directory.server is not None
            while len(again.directory.server.store) < 2:
                await trio.lowlevel.checkpoint()


async def test_a_wrong_peer_id_in_the_link() -> None:
    async with bootstrap() as open_bootstraps:
        link = link_to(f"{open_bootstraps.host.addresses()[0]}/p2p/{OWNER.peer_id}")
        words = f"another peer id answered: {open_bootstraps.host.peer_id}"
        await both_say(link, "bootstrap 1: Noise", words, "the link is old or mistyped")


async def test_a_name_that_cannot_be_looked_up() -> None:
    link = link_to(f"/dns/nowhere.invalid/tcp/4001/p2p/{OWNER.peer_id}")
    failed = await doctor_says(link)
    check = failed["bootstrap 1: name"]
    # The name server says so, or there is none: that depends on where this test runs.
    assert check["cause"].startswith(("no such host name", "no name server answers"))
    assert check["remedy"] in await join_says(link)


async def test_a_clock_ten_minutes_off() -> None:
    async with bootstrap() as open_bootstraps:
        await open_bootstraps.directory.put(run_key(RUN.run_id), RUN.publishable)
        open_bootstraps.answer(Dialback(open_bootstraps.host._dialler.probe, lambda: time.time() + 600))
        words = "this computer's clock is 10 minutes behind that of the bootstraps"
        failed = await both_say(link_to(open_bootstraps.via), "clock", words, "set its time", until="clock.off")
        assert set(failed) == {"clock"}  # And the way to the run is open.


@pytest.mark.usefixtures("open_internet")
async def test_a_relay_that_is_full() -> None:
    async with bootstrap(reservations=0) as open_bootstraps:
        await open_bootstraps.directory.put(run_key(RUN.run_id), RUN.publishable)

        async def miss(peer: str, address: str, seconds: float) -> str:
            """As a router would have it: what comes from outside does not find the port that is listened on."""
            return await open_bootstraps.host._dialler.probe(peer, f"{address.rpartition('/')[0]}/1", seconds)

        open_bootstraps.answer(Dialback(miss))
        words = "no relay has a place for this peer: the relay is full"
        failed = await both_say(
            link_to(open_bootstraps.via), "reachability", words, "forward the listen port", until="relay.none"
        )
        assert set(failed) == {"reachability", "bootstrap 1: relay"}


async def test_a_run_that_is_not_known() -> None:
    async with bootstrap() as open_bootstraps:
        words = f"the bootstraps know no run {RUN.run_id}"
        failed = await both_say(link_to(open_bootstraps.via), "run", words, "ask the run's owner to publish it")
        assert len(failed) == 1


async def test_a_manifest_with_a_wrong_signature() -> None:
    # Only a bootstrap that does not look at what it keeps has such a thing; the link is to these very bytes.
    forged = SignedManifest(RUN.manifest, RUN.publishable[:-1] + bytes([RUN.publishable[-1] ^ 1]))
    async with bootstrap(accept=lambda key, value: 0) as open_bootstraps:
        await open_bootstraps.directory.put(run_key(forged.run_id), forged.publishable)
        link = JoinLink(forged.run_id, (open_bootstraps.via,))
        words = "the bootstraps hold a false manifest of the run"
        failed = await both_say(link, "manifest", words, "do not join it")
        assert "is not signed by that peer" in failed["manifest"]["cause"]
