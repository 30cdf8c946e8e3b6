"""Relays, dial-back and the upgrade of a relayed connection to a direct one, on loopback."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import ConnectFailed, StreamClosed
from flockstep.peer.base.transport import Rung, Stream
from flockstep.peer.host import Libp2pHost, open_host
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.stream import CONNECTION_ERRORS
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.nat import bootstraps, dialback
from flockstep.peer.nat.relay import circuit_address
from flockstep.peer.nat.upgrade import is_relayed
from flockstep.peer.node.node import Node
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.schema import encode
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
from libp2p.relay.circuit_v2.pb.circuit_pb2 import StopMessage
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from support.loopback import ECHO, LOOPBACK, echo

LAST = 200
"""The number of the last message in the test that sends while the connection changes."""


class Net:
    """A bootstrap, hosts, and the events of all."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.events: list[Event] = []
        self.telemetry.subscribe(self.events.append)
        self.bootstrap: Libp2pHost

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    @asynccontextmanager
    async def host(self, identity: Identity | None = None) -> AsyncIterator[Libp2pHost]:
        async with open_host(identity or Identity.generate(), LOOPBACK, self.telemetry) as host:
            await host.bootstraps.enter(self.bootstrap.peer_id, self.bootstrap.addresses()[0])
            yield host

    def through(self) -> str:
        return circuit_address(self.bootstrap.addresses()[0], self.bootstrap.peer_id)


@asynccontextmanager
async def net() -> AsyncIterator[Net]:
    net = Net()
    with trio.fail_after(120):  # A safety net against a hang.
        async with open_host(
            Identity.generate(), LOOPBACK, net.telemetry, bootstrap=BootstrapLimits()
        ) as net.bootstrap:
            yield net


async def reserve(net: Net, host: Libp2pHost) -> None:
    """What a host does by itself where nobody reaches it."""
    relays: Any = host.bootstraps._relays
    await relays.reserve(net.bootstrap.peer_id)


def forbid_punching(host: Libp2pHost) -> None:
    hidden: Any = host
    hidden._aims = tuple
    hidden._puncher._aims = tuple


async def test_a_bootstrap_tells_how_i_am_reached() -> None:
    async with net() as lab, lab.host() as host:
        assert host.reachability.rung is Rung.LAN
        assert host.reachability.confirmed == host.addresses()[:1] == (f"/ip4/127.0.0.1/tcp/{host.port}",)
        assert [event["step"] for event in lab.named("reachability.decided")] == ["lan"]
        await host.bootstraps.first_check(lab.bootstrap.peer_id)
        assert host.addresses()[1:] == (lab.through(),)  # Nobody has dialled it: a firewall may lie between.


@pytest.mark.usefixtures("open_internet")
async def test_a_port_of_the_router_is_announced_once_a_bootstrap_has_dialled_it() -> None:
    async with net() as lab, lab.host() as host, trio.open_nursery() as nursery:
        outside = await open_forwarded_port(nursery, host.port)
        host.bootstraps._port_changed(outside)
        while host.reachability.confirmed != (f"/ip4/127.0.0.1/tcp/{outside}",):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("open_internet")
async def test_a_port_that_the_router_only_promised_is_told_and_not_announced() -> None:
    async with net() as lab, lab.host() as host:
        with trio.socket.socket() as taken:
            await taken.bind(("127.0.0.1", 0))
            outside = taken.getsockname()[1]
            host.bootstraps._port_changed(outside)
            while not lab.named("upnp.unreached"):
                await trio.lowlevel.checkpoint()
        assert f"/ip4/127.0.0.1/tcp/{outside}" not in host.addresses()


async def open_forwarded_port(nursery: trio.Nursery, port: int) -> int:
    """A port on loopback that leads to `port`, as a router's does."""

    async def carry(source: trio.SocketStream, target: trio.SocketStream) -> None:
        async for data in source:
            await target.send_all(data)

    async def forward(stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as inside, trio.open_nursery() as both:
            both.start_soon(carry, stream, inside)
            await carry(inside, stream)
            both.cancel_scope.cancel()

    listeners = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), forward, 0)
    return int(listeners[0].socket.getsockname()[1])


@pytest.mark.usefixtures("open_internet")
async def test_dials_back_are_limited_and_go_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialback, "DIAL_PERIOD", 1e6)  # Else a slow computer earns another one meanwhile.
    async with net() as lab, open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        await host.connect(lab.bootstrap.peer_id, lab.bootstrap.addresses())
        stream = await host.open_stream(lab.bootstrap.peer_id, dialback.DIALBACK_PROTOCOL)
        answers = [await dialback.ask(stream, host.port) for _ in range(dialback.DIALS_PER_PERIOD + 1)]
        assert {answer.address.rpartition("/tcp/")[0] for answer in answers} == {"/ip4/127.0.0.1"}
        assert [answer.cause for answer in answers] == [""] * len(answers)
        assert [answer.dialled for answer in answers] == [True] * dialback.DIALS_PER_PERIOD + [False]


@pytest.mark.parametrize("whom", ["its own", "somebody's"])
async def test_nothing_is_dialled_back_behind_a_proxy_that_hides_who_asks(whom: str) -> None:
    """Who connects through it comes from loopback, where ports of the bootstrap's computer are."""
    async with net() as lab, open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        await host.connect(lab.bootstrap.peer_id, lab.bootstrap.addresses())
        stream = await host.open_stream(lab.bootstrap.peer_id, dialback.DIALBACK_PROTOCOL)
        with trio.socket.socket() as inner:
            await inner.bind(("127.0.0.1", 0))
            inner.listen()
            answer = await dialback.ask(stream, host.port if whom == "its own" else inner.getsockname()[1])
            assert not answer.dialled
            assert answer.cause == ""
            with trio.move_on_after(0) as scope:
                await inner.accept()
            assert scope.cancelled_caught


async def test_questions_without_a_dial_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialback, "QUESTIONS_PER_PERIOD", 3)

    async with net() as lab, open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        await host.connect(lab.bootstrap.peer_id, lab.bootstrap.addresses())
        stream = await host.open_stream(lab.bootstrap.peer_id, dialback.DIALBACK_PROTOCOL)
        for _ in range(3):
            assert not (await dialback.ask(stream, 0)).dialled
        with pytest.raises(StreamClosed):
            await dialback.ask(stream, 0)


async def test_only_a_relay_of_mine_announces_circuits() -> None:
    """Else a stranger puts connections into its own, each with a budget of its own, to a bootstrap too."""

    async with net() as lab, open_host(Identity.generate(), LOOPBACK, Telemetry()) as stranger:
        await stranger.connect(lab.bootstrap.peer_id, lab.bootstrap.addresses())
        hidden: Any = stranger
        target = ID.from_base58(lab.bootstrap.peer_id)
        stream = await hidden.host.new_stream(target, [STOP])
        somebody = ID.from_base58(Identity.generate().peer_id).to_bytes()
        with suppress(*CONNECTION_ERRORS):
            await write_delimited_msg(stream, StopMessage(type=StopMessage.CONNECT, peer=CircuitPeer(id=somebody)))
            with pytest.raises(CONNECTION_ERRORS):
                await read_delimited_msg(stream, StopMessage)
        while not (refused := lab.named("relay.not_accepted")):
            await trio.lowlevel.checkpoint()
        assert [(event["peer"], event["reason"]) for event in refused] == [
            (stranger.peer_id, "it announces a circuit, and is no relay of mine")
        ]


@pytest.mark.usefixtures("open_internet")
async def test_a_port_where_somebody_else_answers_is_not_mine() -> None:
    async with net() as lab, open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        await host.connect(lab.bootstrap.peer_id, lab.bootstrap.addresses())
        stream = await host.open_stream(lab.bootstrap.peer_id, dialback.DIALBACK_PROTOCOL)
        answer = await dialback.ask(stream, lab.bootstrap.port)
        assert "another peer id" in answer.cause


@pytest.mark.usefixtures("open_internet")
async def test_a_bootstrap_that_falls_silent_in_mid_answer_is_asked_again() -> None:
    questions: list[int] = []

    async with net() as lab, open_host(Identity.generate(), LOOPBACK, lab.telemetry) as host:
        honest = dialback.Dialback(lab.bootstrap._dialler.probe)

        async def serve(stream: Stream) -> None:
            questions.append(len(questions))
            if len(questions) > 1:
                return await honest.serve(stream)
            assert await stream.receive_some(1 << 10)
            seen = dialback.DialbackAnswer(f"/ip4/127.0.0.1/tcp/{host.port}", dialled=False, cause="", time=0.0)
            await stream.send_all(frame(encode(seen)))
            assert await stream.receive_some(1 << 10)  # Would you dial me?
            await stream.reset()

        lab.bootstrap.handle(dialback.DIALBACK_PROTOCOL, serve)
        await host.bootstraps.enter(lab.bootstrap.peer_id, lab.bootstrap.addresses()[0])
        assert host.reachability.rung is Rung.DIRECT
        assert len(questions) == 2
        assert [event["step"] for event in lab.named("bootstrap.lost")] == ["hold"]


async def drops(peer: str, at: str, seconds: float) -> str:
    return "timed out"


@pytest.mark.usefixtures("open_internet")
async def test_one_lying_bootstrap_of_three_gives_up_no_relay_and_names_no_address() -> None:
    """Its one word took a peer's relays, and everybody was sent to the address that it named."""
    lie, telemetry = "/ip4/44.0.66.6/tcp/4001", Telemetry()

    async def lies(stream: Stream) -> None:
        while await stream.receive_some(1 << 10):
            await stream.send_all(frame(encode(dialback.DialbackAnswer(lie, dialled=True, cause="", time=time.time()))))

    async with AsyncExitStack() as stack:
        config, limits = LOOPBACK, BootstrapLimits()
        opened = [open_host(Identity.generate(), config, Telemetry(), bootstrap=limits) for _ in range(3)]
        liar, *honest = [await stack.enter_async_context(one) for one in opened]
        host = await stack.enter_async_context(open_host(Identity.generate(), config, telemetry))
        liar.handle(dialback.DIALBACK_PROTOCOL, lies)
        for one in honest:
            one.handle(dialback.DIALBACK_PROTOCOL, dialback.Dialback(drops).serve)
        async with trio.open_nursery() as nursery:
            for one in (liar, *honest):
                nursery.start_soon(host.bootstraps.enter, one.peer_id, one.addresses()[0])
        for one in (liar, *honest):
            await host.bootstraps.first_check(one.peer_id)
        assert host.reachability.needs_relay
        assert host.bootstraps.reserved > {one.peer_id for one in honest}
        assert len([one for one in host.addresses() if one.endswith("/p2p-circuit")]) == 3
        assert not [one for one in (*host.addresses(), *host.bootstraps.seen_at, *host.reachability.aims) if one == lie]
        back: list[bool] = []  # The liar alone is left for the moment that it takes to connect again.
        host.bootstraps.on_return(lambda: back.append(True))
        for one in honest:
            await one.disconnect(host.peer_id)
        while len(back) < len(honest):
            await trio.lowlevel.checkpoint()
            assert host.reachability.needs_relay


@pytest.mark.parametrize("seen", ["/ip4/8.8.8.8/tcp/1/ws", "/dns/a.example/tcp/1"])
async def test_where_a_bootstrap_sees_nobody_is_no_address_of_mine(seen: str) -> None:
    """A peer announced `/ip4/8.8.8.8/tcp/1/4001`, which no other one reads."""

    async with net() as lab, open_host(Identity.generate(), LOOPBACK, lab.telemetry) as host:

        async def serve(stream: Stream) -> None:
            while await stream.receive_some(1 << 10):
                answer = dialback.DialbackAnswer(seen, dialled=True, cause="", time=0.0)
                await stream.send_all(frame(encode(answer)))

        lab.bootstrap.handle(dialback.DIALBACK_PROTOCOL, serve)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.bootstraps.enter, lab.bootstrap.peer_id, lab.bootstrap.addresses()[0])
            while not lab.named("bootstrap.lost"):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert "where nobody is seen" in str(lab.named("bootstrap.lost")[0]["reason"])
        assert host.reachability.confirmed == ()


async def test_a_connection_that_breaks_while_it_is_in_doubt_harms_nobody() -> None:
    async with net() as lab, lab.host() as target, lab.host() as caller:
        target.handle(ECHO, echo)
        await caller.connect(target.peer_id, target.addresses())
        await caller.open_stream(target.peer_id, ECHO)
        hidden: Any = caller
        (connection,) = hidden._connections(target.peer_id)
        connection.muxed_conn.writer.ended = True
        hidden._spawn(hidden._moves._doubt, target.peer_id)
        while caller.rung(target.peer_id) is not None:
            await trio.lowlevel.checkpoint()
        assert [event["peer"] for event in lab.named("connection.dead")] == [target.peer_id]
        await caller.connect(target.peer_id, target.addresses())


async def test_a_task_that_the_network_breaks_does_not_end_the_host() -> None:
    async def lose() -> None:
        raise StreamClosed("the road is gone")

    async def lose_both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            nursery.start_soon(lose)

    async with net() as lab, lab.host() as host:
        hidden: Any = host
        hidden._spawn(lose)
        hidden._spawn(lose_both)
        while len(lab.named("task.broken")) < 2:
            await trio.lowlevel.checkpoint()
        assert {event["step"] for event in lab.named("task.broken")} == {"lose", "lose_both"}
        assert lab.bootstrap.peer_id in host.connected()


@pytest.mark.parametrize("junk", [b"\xff" * 2000, frame(b"\x91\xce\x00\x01\x86\xa0"), frame(b"hello"), frame(b"")])
async def test_what_is_no_question_is_charged(junk: bytes) -> None:
    async with net() as lab, open_host(Identity.generate(), LOOPBACK, Telemetry()) as host:
        await host.connect(lab.bootstrap.peer_id, lab.bootstrap.addresses())
        stream = await host.open_stream(lab.bootstrap.peer_id, dialback.DIALBACK_PROTOCOL)
        await stream.send_all(junk)
        with pytest.raises(StreamClosed):
            await stream.receive_some(1)
        (charged,) = lab.named("peer.charged")
        assert charged["peer"] == host.peer_id


async def test_a_pair_that_cannot_punch_talks_through_the_relay() -> None:
    async with net() as lab, lab.host() as target, lab.host() as caller:
        forbid_punching(target)
        forbid_punching(caller)
        target.handle(ECHO, echo)
        await reserve(lab, target)
        await caller.connect(target.peer_id, [lab.through()])
        assert caller.rung(target.peer_id) is target.rung(caller.peer_id) is Rung.RELAYED
        stream = await caller.open_stream(target.peer_id, ECHO)
        received = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(1 << 20))  # The echo waits for its reader.
            while received < 1 << 20:
                received += len(await stream.receive_some(1 << 20))
        await lab.bootstrap.stop()
        with pytest.raises(StreamClosed):
            await stream.receive_some(1)
        while target.peer_id in caller.connected():
            await trio.lowlevel.checkpoint()


async def test_without_a_reservation_the_rung_and_the_cause_are_named() -> None:
    target = Identity.generate().peer_id
    async with net() as lab, lab.host() as caller:
        with pytest.raises(ConnectFailed, match=r"\(relayed\): the peer holds no reservation at this relay"):
            await caller.connect(target, [lab.through()])
        (failed,) = lab.named("dial.failed")
        assert (failed["peer"], failed["step"]) == (target, "relayed")


async def test_words_and_bytes_move_to_the_better_connection_and_none_is_lost() -> None:
    one, other = Identity.generate(), Identity.generate()
    blob = bytes(range(256)) * 4096
    async with (
        net() as lab,
        lab.host(one) as target,
        lab.host(other) as caller,
        Node(target, one, LOOPBACK, lab.telemetry) as serving,
        Node(caller, other, LOOPBACK, lab.telemetry) as asking,
    ):
        heard: list[int] = []
        arrived, climbed = trio.Event(), trio.Event()

        def hear(peer: str, message: wire.Goodbye) -> None:
            heard.append(int(message.reason))
            if message.reason == str(LAST):
                arrived.set()

        def watch(event: Event) -> None:
            if event["event"] == "connection.climbed" and event["peer"] == target.peer_id:
                climbed.set()

        serving.on_message(wire.Goodbye, hear)
        lab.telemetry.subscribe(watch)
        key = digest(blob)
        serving.blobs.put(key, blob)
        await reserve(lab, target)
        await caller.connect(target.peer_id, [lab.through()])
        swarm: Any = caller.host.get_network()
        relayed = [connection for connection in swarm.get_connections() if is_relayed(connection)]
        assert relayed
        for node, far in ((asking, target), (serving, caller)):  # Each answers the other's heartbeats.
            node.learn(far.peer_id, [lab.through()])
            node.watch([far.peer_id])
        for number in range(LAST + 1):
            asking.send(target.peer_id, wire.Goodbye(str(number)))
            if number % 50 == 0:
                assert await asking.fetch(target.peer_id, key, len(blob)) == blob
            if number == LAST // 2:
                await climbed.wait()
        for connection in relayed:
            await connection.event_closed.wait()
        await arrived.wait()
        assert heard == list(range(LAST + 1))
        assert caller.rung(target.peer_id) is not Rung.RELAYED
        assert not lab.named("peer.lost")
        assert {event["peer"] for event in lab.named("connection.climbed")} == {one.peer_id, other.peer_id}


@pytest.mark.parametrize(("steady", "pauses"), [(1e6, [0, 1, 2]), (0.0, [0, 0, 0])])
async def test_a_peer_whose_connection_to_a_bootstrap_soon_ends_again_waits_longer(
    monkeypatch: pytest.MonkeyPatch, steady: float, pauses: list[int]
) -> None:
    """More peers than places took each other's as fast as they could dial."""
    chosen: list[int] = []

    class Pauses(tuple[float, ...]):
        def __getitem__(self, number: Any) -> Any:
            chosen.append(number)
            return 0.0

    monkeypatch.setattr(bootstraps, "RETRY_PAUSES", Pauses((0.0,) * 5))
    monkeypatch.setattr(bootstraps, "STEADY_SECONDS", steady, raising=False)
    async with net() as lab, lab.host() as host:
        for number in range(3):
            while host.peer_id not in lab.bootstrap.connected() or len(chosen) < number:
                await trio.lowlevel.checkpoint()
            await host.bootstraps.first_check(lab.bootstrap.peer_id)
            await lab.bootstrap.disconnect(host.peer_id)
            while len(chosen) == number:
                await trio.lowlevel.checkpoint()
        assert chosen[:3] == pauses
