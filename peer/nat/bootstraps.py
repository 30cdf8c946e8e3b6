"""Connections to bootstraps: keep-alive, reachability checks, relay reservations.

Theory of operation. One task per bootstrap connects (from the listen port if it can), asks which address the bootstrap
observes and whether it can dial me back (`dialback`), and asks again every `CHECK_PERIOD`. A timeout means that the
connection is dead; a new address means that the peer's network has changed. Either way the reachability is decided anew,
by what most of them say. A peer that most have not reached holds a reservation at each bootstrap, renewed at half its
lifetime, and asks the router for a port (`upnp`), which the bootstraps then dial instead of the one that it listens on.

A bootstrap may have several addresses. A WebSocket is tried after the others, directly and then through this computer's
proxy. Where it is all that works, the others are tried again every `DIAL_BACK_PERIOD`; one that works takes its place.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import trio

from ..address import is_ipv6, is_loopback, is_socket, is_web, rung_of
from ..base.errors import (
    ConnectFailed,
    DialAttempt,
    MalformedMessage,
    NetworkError,
    RemoteError,
    StreamClosed,
    sole_error,
)
from ..base.transport import Address, Host, PeerId, Reachability, Rung, Stream
from ..base.troubles import MUTE, Trouble, clock_trouble, relay_trouble
from ..libp2p.dial import Dialler
from ..libp2p.stream import CONNECTION_ERRORS
from ..libp2p.tcp import expand, plain_words
from ..log.telemetry import Telemetry
from .diagnose import diagnose
from .dialback import DIALBACK_DIAL_TIMEOUT, DIALBACK_PROTOCOL, ask
from .reachability import Sighting, decide, places_of_most
from .relay import RelayClient, circuit_address
from .upnp import PortMapping

CHECK_PERIOD = 15.0
"""Seconds between checks: a silent cut or a new address is noticed within 20; 200 peers make 13 checks per second."""

DIAL_BACK_PERIOD = 300.0
"""Seconds between dialbacks while nothing changes: a forwarded port may have been opened or closed meanwhile."""

BOOTSTRAP_ANSWER_TIMEOUT = 5.0
SETTLE_TIMEOUT = DIALBACK_DIAL_TIMEOUT + 1.0
"""Seconds that `enter` waits for the first decision, so that a peer's first record holds its reachability."""

RETRY_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
"""The backoff: seconds between attempts to reconnect to a bootstrap; the last one repeats."""

STEADY_SECONDS = 300.0
"""The lifetime in seconds after which a connection that broke starts the backoff anew. So where more peers than it has
places take turns at a bootstrap, each connection lives about as long, instead of as short as they can dial."""

NEXT_AFTER = 2.0
"""The head start of a dial in seconds, before the next one runs beside it: a lost first packet is retransmitted after
one second, and of two dials that both work the better one should win."""

TRANSLATED = "a router translates the address within a private network"

BOOTSTRAP_POLL = 0.5
"""Seconds between checks that the connection is still open."""


Way = Callable[[], Awaitable[bool]]
"""A way to connect; returns whether no other one has to be tried."""


class Bootstraps:
    """One host's connections to its bootstraps."""

    def __init__(
        self,
        host: Host,
        dialler: Dialler,
        relays: RelayClient,
        telemetry: Telemetry,
        spawn: Callable[..., None],
        interfaces: Callable[[], tuple[Address, ...]],
    ) -> None:
        self.reachability = Reachability(None)
        self.clock_offsets: dict[PeerId, float] = {}
        """The seconds by which each bootstrap's clock is ahead of mine."""
        self.refusals: dict[PeerId, str] = {}
        """Why relays that I need refused me a reservation."""
        self._troubles: dict[str, Trouble] = {}
        self._host = host
        self._dialler = dialler
        self._relays = relays
        self._telemetry = telemetry
        self._spawn = spawn
        self._interfaces = interfaces
        self._addresses: dict[PeerId, Address] = {}
        """Where each bootstrap that I hold is."""
        self._known: dict[PeerId, list[Address]] = {}
        """All addresses at which each was to be entered, those of WebSockets last."""
        self.over_https: dict[PeerId, str] = {}
        """The bootstraps that are held over a WebSocket, and how: "directly", or through which proxy."""
        self._climb_at: dict[PeerId, float] = {}
        """When to try the other addresses of those again."""
        self._stated: set[PeerId] = set()
        """Those of them that members have named."""
        self._from_listen_port: dict[PeerId, bool] = {}
        """Whether I reached each from the port that I listen on. One that had connected here first is not among them."""
        self._sightings: dict[PeerId, Sighting] = {}
        self._awaited: set[PeerId] = set()
        """Bootstraps that are dialled, also again, and have not said yet where they see this peer: the first is not alone."""
        self._dial_back_at: dict[PeerId, float] = {}
        self._reserved: dict[PeerId, float] = {}
        """When to renew the reservation at each relay that granted me one."""
        self._settled = trio.Event()
        self._checked: dict[PeerId, trio.Event] = {}
        """Set once the first check with that bootstrap has ended."""
        self.mapping = PortMapping(telemetry, self._port_changed)
        self._outside_port = 0
        self._on_return: list[Callable[[], None]] = []

    def on_return(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when a lost bootstrap is back: it may have lost what was published to it."""
        self._on_return.append(handler)

    @property
    def entered(self) -> tuple[Address, ...]:
        """Where the bootstraps of my link are."""
        return tuple(address for peer, address in self._addresses.items() if peer not in self._stated)

    @property
    def seen_at(self) -> tuple[Address, ...]:
        """Where most of them see this peer."""
        return places_of_most(tuple(self._sightings.values()))

    def holds(self, peer: PeerId) -> bool:
        """Return True for a bootstrap of my link: one that members have named is a stranger that relays."""
        return peer in self._addresses and peer not in self._stated

    async def enter(self, peer: PeerId, *addresses: Address, stated: bool = False) -> None:
        """Connect to a bootstrap and keep the connection alive. Raises `ConnectFailed`, with a diagnosis of each attempt.

        `stated`: a member has named it, not my link. Then it is dialled where a member's own address would be.
        """
        if stated:
            self._stated.add(peer)
        if peer not in self._known:
            self._awaited.add(peer)
        known = self._known[peer] = sorted(dict.fromkeys((*self._known.get(peer, ()), *addresses)), key=is_web)
        try:
            reached = await self._connect(peer, known)
        except ConnectFailed as error:
            self._await_no_more(peer)
            if stated:  # A diagnosis dials once more.
                raise
            raise ConnectFailed(peer, await self._diagnose(peer, error.attempts)) from error
        if peer not in self._addresses:
            self._addresses[peer], self._checked[peer] = reached or known[0], trio.Event()
            self._spawn(self._keep_alive, peer)
        with trio.move_on_after(SETTLE_TIMEOUT) as scope:
            await self._settled.wait()
        if scope.cancelled_caught:
            self._await_no_more(*self._awaited)

    async def _diagnose(self, peer: PeerId, attempts: Sequence[DialAttempt]) -> list[DialAttempt]:
        found = list(attempts)

        async def look(number: int, one: DialAttempt) -> None:
            found[number] = replace(one, cause=await diagnose(peer, one.address, one.cause, self._dialler.probe))

        async with trio.open_nursery() as nursery:
            for number, one in enumerate(attempts):
                nursery.start_soon(look, number, one)
        return found

    async def examine(self, peer: PeerId, address: Address, seconds: float) -> str:
        """Diagnose a bootstrap at one address; returns why it does not answer, or "". No connection is kept."""
        probe, causes = self._dialler.probe, dict[bool, str]()

        async def try_it(by_proxy: bool) -> bool:
            causes[by_proxy] = await probe(peer, address, seconds, by_proxy=by_proxy)
            return not causes[by_proxy]

        ways = (False, True) if self._dialler.proxy_of(address) else (False,)
        if await _first_of([partial(try_it, by_proxy) for by_proxy in ways]):
            return ""
        cause = causes[ways[-1]]  # Where there is a proxy, it is what leads out.
        return await diagnose(peer, address, cause, probe)

    async def first_check(self, peer: PeerId) -> None:
        """Wait until an entered bootstrap has answered all: my address, the dialback, a reservation or its refusal."""
        await self._checked[peer].wait()

    def circuits(self) -> tuple[Address, ...]:
        """Return my circuit addresses at relays that hold a reservation of mine; none if most bootstraps have reached me."""
        if self.reachability.rung is Rung.DIRECT and not self.reachability.needs_relay:
            return ()
        return tuple(circuit_address(self._addresses[relay], relay) for relay in sorted(self._reserved))

    @property
    def reserved(self) -> frozenset[PeerId]:
        """The relays that hold a reservation of mine."""
        return frozenset(self._reserved)

    @property
    def relay_trouble(self) -> Trouble | None:
        """The trouble if I need a relay and all refused a reservation; else None."""
        if self._reserved or not self.refusals or not self.reachability.needs_relay:
            return None
        return relay_trouble(self.refusals, self.reachability.reason)

    async def _connect(self, peer: PeerId, addresses: Sequence[Address]) -> Address:
        """Ensure that a connection is open; returns the first address that works, "" if it is. Raises `ConnectFailed`."""
        if peer in self._host.connected():
            return ""
        failed: dict[Address, list[DialAttempt]] = {}

        async def reach(address: Address) -> bool:
            failed[address] = await self._reach(peer, address)
            return not failed[address]

        if not await _first_of([partial(reach, address) for address in addresses]):
            raise ConnectFailed(peer, [attempt for address in addresses for attempt in failed[address]])
        return next(address for address in addresses if failed.get(address) == [])

    async def _reach(self, peer: PeerId, address: Address) -> list[DialAttempt]:
        """Dial an address, where its name stands for and through the proxy; returns the failures, none once one worked."""
        failures: list[DialAttempt] = []

        def fail(one: Address, cause: str) -> bool:
            if cause:
                failures.append(DialAttempt(one, rung_of(one), cause))
            return not cause

        async def dial(one: Address) -> bool:
            why_not = self._host.why_not_dial(one) if peer in self._stated else ""
            return fail(one, why_not or await self._dial(peer, address, one))

        async def dial_through_proxy() -> bool:
            cause = await self._dialler.through_proxy(peer, address)
            return fail(address, cause) and self._take_websocket(peer, f"through the proxy {proxy}")

        try:
            found = await expand(address)
        except (OSError, NetworkError) as error:
            found = ()
            fail(address, str(error) if isinstance(error, NetworkError) else plain_words(error))
        # Of a name's several addresses one may be a black hole (IPv6 without a route).
        ways: list[Way] = [partial(dial, one) for one in found]
        proxy = self._dialler.proxy_of(address)
        if proxy and peer not in self._stated:  # A proxy may reach what a member must not have me dial, by a name.
            ways.append(dial_through_proxy)
        return [] if await _first_of(ways) else failures

    async def _dial(self, peer: PeerId, address: Address, at: Address) -> str:
        """Dial one of the addresses that `address` stands for; returns why that failed, or "".

        From the listen port, and if that does not work at once, also from another; to a WebSocket from another alone.
        """
        causes: dict[bool, str] = {}

        async def dial(from_listen_port: bool) -> bool:
            if from_listen_port:
                cause = await self._dialler.from_listen_port(peer, at)
            else:
                cause = await self._dialler.plainly(peer, address, rung_of(at), at=at)
            causes[from_listen_port] = cause
            return not cause or cause.startswith(MUTE.cause)  # A host that accepts connections does so from any source port.

        await _first_of([partial(dial, port) for port in ((False,) if is_web(address) else (True, False))])
        if "" not in causes.values():
            return causes.get(False) or causes[True]
        if is_web(address):
            self._take_websocket(peer, "directly")
            return ""
        self.over_https.pop(peer, None)
        first = causes.get(True, f"no answer within {NEXT_AFTER:g} s")
        self._from_listen_port[peer] = not first
        if first:
            self._telemetry.emit("bootstrap.other_port", peer=peer, step="connect", reason=first)
        return ""

    def _take_websocket(self, peer: PeerId, how: str) -> bool:
        self._from_listen_port[peer] = False
        self.over_https[peer] = how
        self._climb_at[peer] = trio.current_time() + DIAL_BACK_PERIOD
        self._telemetry.emit("bootstrap.over_https", peer=peer, step="connect", reason=how)
        return True

    async def _leave_websocket(self, peer: PeerId) -> bool:
        """Try the other addresses of a bootstrap that is held over a WebSocket; returns True if one works now."""
        others = [address for address in self._known[peer] if not is_web(address)]
        if peer not in self.over_https or trio.current_time() < self._climb_at[peer]:
            return False
        self._climb_at[peer] = trio.current_time() + DIAL_BACK_PERIOD
        for address in others:
            if not await self._reach(peer, address):
                self._addresses[peer] = address
                return True
        return False

    async def _keep_alive(self, peer: PeerId) -> None:
        failures, is_lost = 0, False
        while True:
            began = trio.current_time()
            try:
                self._addresses[peer] = await self._connect(peer, self._known[peer]) or self._addresses[peer]
                for handler in self._on_return if is_lost else ():
                    handler()
                async with self._dialback_stream(peer) as stream:
                    while not await self._leave_websocket(peer):
                        await self._check(peer, stream)
                        self._checked[peer].set()
                        await self._wait(peer)
                continue
            except* (NetworkError, RemoteError, trio.TooSlowError, *CONNECTION_ERRORS) as group:
                reason = str(sole_error(group)) or f"no answer within {BOOTSTRAP_ANSWER_TIMEOUT:g} s"
                self._telemetry.emit("bootstrap.lost", peer=peer, step="hold", reason=reason)
            if self._sightings.pop(peer, None) is None:
                self._await_no_more(peer)
            else:  # Until a dial fails: else those that are not lost, or are back first, decide alone.
                self._awaited.add(peer)
            for known in (self._reserved, self.clock_offsets, self.refusals, self.over_https):
                known.pop(peer, None)
            is_lost = True
            if trio.current_time() >= began + STEADY_SECONDS:
                failures = 0
            await self._dialler.drop(peer)
            await trio.sleep(RETRY_PAUSES[min(failures, len(RETRY_PAUSES) - 1)])
            failures += 1

    @asynccontextmanager
    async def _dialback_stream(self, peer: PeerId) -> AsyncIterator[Stream | None]:
        """Open the dialback stream to a bootstrap; None if it does not serve that protocol, as other programs' do not."""
        try:
            stream = await self._host.open_stream(peer, DIALBACK_PROTOCOL)
        except StreamClosed as error:
            if peer not in self._host.connected():
                raise
            self._telemetry.emit("bootstrap.mute", peer=peer, step="dial back", reason=str(error))
            yield None
            return
        try:
            yield stream
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await stream.reset()

    async def _check(self, peer: PeerId, stream: Stream | None) -> None:
        """Ask a bootstrap for my observed address, dial back if it is time, and renew the reservation."""
        if stream is None:
            self._await_no_more(peer)
            await self._reserve(peer)
            return
        with trio.fail_after(BOOTSTRAP_ANSWER_TIMEOUT):
            answer = await ask(stream, 0)
        address = answer.address
        self.clock_offsets[peer] = answer.time - time.time()
        self._report("clock.off", clock_trouble(self.clock_offsets.values()))
        if not is_socket(address):
            raise MalformedMessage(f"{peer} sees me at {address!r}, where nobody is seen")
        old = self._sightings.get(peer)
        if old is None or old.address != address:
            self._sightings[peer] = self._sighting(peer, address)
            self._dial_back_at[peer] = trio.current_time()
            self._await_no_more(peer)
        is_private = rung_of(address) is Rung.LAN
        # Behind a router strangers most likely cannot reach me, and the dialback takes seconds to prove it.
        early = self.reachability.needs_relay or is_private or not self._sightings[peer].is_own
        if early:
            await self._reserve(peer)
        if trio.current_time() >= self._dial_back_at[peer] and not is_private:
            await self._dial_back(peer, stream)
        if not early and (self.reachability.needs_relay or not self._sightings[peer].reached):
            await self._reserve(peer)
        self._report("relay.none", self.relay_trouble)

    async def _dial_back(self, peer: PeerId, stream: Stream) -> None:
        with trio.fail_after(BOOTSTRAP_ANSWER_TIMEOUT + DIALBACK_DIAL_TIMEOUT):
            port = self._outside_port or self._dialler.port
            answer = await ask(stream, port)
        if not answer.dialled:
            return  # It was rate limited: the next check asks again.
        self._dial_back_at[peer] = trio.current_time() + DIAL_BACK_PERIOD
        sighting = self._sightings[peer]
        if sighting.address != answer.address:
            return  # The network has changed meanwhile: the next check starts over.
        reached = "" if answer.cause else f"{answer.address.rpartition('/')[0]}/{port}"
        self._sightings[peer] = replace(sighting, reached=reached, cause=answer.cause)
        self._decide()
        if answer.cause and port == self._outside_port:
            self._telemetry.emit("upnp.unreached", peer=peer, step="dial back", reason=answer.cause, port=port)

    def _sighting(self, peer: PeerId, address: Address) -> Sighting:
        """Return what a bootstrap has observed; of a private address, which none dials back, it says all there is."""
        from_listen_port, is_own = self._from_listen_port.get(peer, False), not self._is_translated(address)
        if rung_of(address) is not Rung.LAN:
            return Sighting(address, from_listen_port, is_own=is_own)
        reached = f"{address.rpartition('/')[0]}/{self._dialler.port}" if is_own else ""
        return Sighting(address, from_listen_port, reached, "" if is_own else TRANSLATED, is_own)

    def _port_changed(self, port: int) -> None:
        """Take the router's mapped `port`, 0 for none, and dial back anew: reachability may have changed."""
        self._outside_port = port
        self._dial_back_at = dict.fromkeys(self._dial_back_at, trio.current_time())

    async def _reserve(self, peer: PeerId) -> None:
        if trio.current_time() < self._reserved.get(peer, 0.0):
            return
        try:
            with trio.fail_after(BOOTSTRAP_ANSWER_TIMEOUT):
                seconds = await self._relays.reserve(peer)
        except (NetworkError, trio.TooSlowError) as error:
            self._reserved.pop(peer, None)
            self.refusals[peer] = reason = str(error) or f"no answer within {BOOTSTRAP_ANSWER_TIMEOUT:g} s"
            self._telemetry.emit("relay.refused", peer=peer, step="reserve", reason=reason)
        else:
            self._reserved[peer] = trio.current_time() + seconds / 2
            self.refusals.pop(peer, None)
            self._settled.set()

    async def _wait(self, peer: PeerId) -> None:
        """Wait until the next check. Raises `StreamClosed` as soon as the connection is found closed."""
        until, port = trio.current_time() + CHECK_PERIOD, self._outside_port
        while trio.current_time() < until and port == self._outside_port:
            await trio.sleep(BOOTSTRAP_POLL)
            if peer not in self._host.connected():
                raise StreamClosed("the connection broke")

    def _report(self, event: str, trouble: Trouble | None) -> None:
        """Emit a trouble once, until it changes or is gone."""
        if trouble is None:
            self._troubles.pop(event, None)
        elif self._troubles.get(event) != trouble:
            self._troubles[event] = trouble
            self._telemetry.emit(event, reason=trouble.cause, remedy=trouble.remedy)

    def _await_no_more(self, *peers: PeerId) -> None:
        """Decide without these, unless they have said where they see this peer."""
        self._awaited.difference_update(peers)
        self._decide()

    def _decide(self) -> None:
        """Decide the reachability anew; without any sighting it stays as it was, since nothing shows a change."""
        found = decide(self._sightings, len(self._awaited))
        if not self._sightings or found == self.reachability:
            return
        self.reachability = found
        if found.rung is not None:
            self._telemetry.emit("reachability.decided", step=found.rung, reason=found.reason)
            self._settled.set()
        for address in self.seen_at[:1] if found.needs_relay else ():
            if not is_ipv6(address) and self._is_translated(address):
                self.mapping.want(address)

    def _is_translated(self, address: Address) -> bool:
        """Return True if an observed address is not one of this peer's own: a router translates it (NAT).

        Loopback is listed only where the peer listens nowhere else.
        """
        own = {one.split("/")[2] for one in self._interfaces()}
        ip = address.split("/")[2]
        return ip not in own and not (is_loopback(ip) and not any(map(is_loopback, own)))


async def _first_of(ways: Sequence[Way]) -> bool:
    """Start each way `NEXT_AFTER` behind the one before it, or once that has failed; the first success ends the others."""
    has_succeeded = False
    async with trio.open_nursery() as nursery:

        async def go(way: Way, ended: trio.Event) -> None:
            nonlocal has_succeeded
            if await way():
                has_succeeded = True
                nursery.cancel_scope.cancel()
            ended.set()

        for way in ways:
            ended = trio.Event()
            nursery.start_soon(go, way, ended)
            with trio.move_on_after(NEXT_AFTER):
                await ended.wait()
    return has_succeeded
