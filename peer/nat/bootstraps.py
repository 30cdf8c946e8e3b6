"""Holding on to bootstraps: staying connected to each, learning from it how I am reached, reserving a place at its relay.

Theory of operation. One task per bootstrap connects (from the listen port if it can), asks what the bootstrap sees and
whether it gets through to me (`libp2p_dialback`), and asks again every `CHECK_PERIOD`: an answer that does not come means
that the road is dead though nobody said so, another address than before that my network has changed. Then the reachability
is decided anew. As long as some cannot reach me I hold a reservation at each bootstrap, renewed at half of its time, and the
router is asked to open a port (`upnp`), which the bootstraps then dial instead of the one that I listen on.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from ..address import is_ipv6, rung_of, valid_address
from ..errors import ConnectFailed, DialAttempt, MalformedMessage, NetworkError, RemoteError, StreamClosed, sole_error
from ..libp2p.dial import Dialler
from ..libp2p.stream import ROAD_ERRORS
from ..libp2p.tcp import expand, plain_words
from ..telemetry import Telemetry
from ..transport import Address, PeerId, Stream, Transport
from ..troubles import MUTE, Trouble, clock_trouble, relay_trouble
from .diagnose import second_look
from .dialback import DIAL_TIMEOUT, PROTOCOL, ask
from .reachability import Sighting, Standing, decide
from .relay import RelayClient, circuit_address
from .upnp import PortMapping

CHECK_PERIOD = 15.0
"""Seconds between questions: a silent cut or a new address is noticed within 20; 200 peers ask a bootstrap 13 times a s."""

DIAL_BACK_PERIOD = 300.0
"""Seconds between dials back while nothing changes: a forwarded port may have come, or gone, meanwhile."""

ANSWER_TIMEOUT = 5.0
SETTLE_TIMEOUT = DIAL_TIMEOUT + 1.0
"""Seconds that entering waits for the first decision, so that the first record of a peer says how it is reached."""

RETRY_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to get back to a bootstrap; the last one goes on."""

NEXT_AFTER = 2.0
"""Seconds that one way to a bootstrap has for itself, before the next is tried beside it: a first packet that was lost is
sent again after one, and of two ways that both work the better one is to win."""

POLL = 0.5
"""Seconds between looks whether the connection still stands."""


class Bootstraps:
    """One host's bootstraps."""

    def __init__(
        self,
        host: Transport,
        dialler: Dialler,
        relays: RelayClient,
        telemetry: Telemetry,
        spawn: Callable[..., None],
        interfaces: Callable[[], tuple[Address, ...]],
    ) -> None:
        self.standing = Standing(None)
        self.clock_offsets: dict[PeerId, float] = {}
        """Seconds that the clock of each bootstrap is ahead of mine."""
        self.refusals: dict[PeerId, str] = {}
        """Why relays that I need gave me no place."""
        self._troubles: dict[str, Trouble] = {}
        self._host = host
        self._dialler = dialler
        self._relays = relays
        self._telemetry = telemetry
        self._spawn = spawn
        self._interfaces = interfaces
        self._addresses: dict[PeerId, Address] = {}
        self._from_listen_port: dict[PeerId, bool] = {}
        self._sightings: dict[PeerId, Sighting] = {}
        self._dial_back_at: dict[PeerId, float] = {}
        self._reserved: dict[PeerId, float] = {}
        """When to renew the reservation at each relay that has given me one."""
        self._settled = trio.Event()
        self.mapping = PortMapping(telemetry, self._port_changed)
        self._outside_port = 0
        self._on_return: list[Callable[[], None]] = []

    def on_return(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when a bootstrap that was lost is back: it may have forgotten what it was told."""
        self._on_return.append(handler)

    async def enter(self, peer: PeerId, address: Address) -> None:
        """Connect to a bootstrap and hold on to it. Raises `ConnectFailed`, with what a second look has found."""
        try:
            await self._connect(peer, address)
        except ConnectFailed as error:
            raise ConnectFailed(peer, await self._look_again(peer, error.attempts)) from error
        if peer not in self._addresses:
            self._addresses[peer] = address
            self._spawn(self._hold, peer)
        with trio.move_on_after(SETTLE_TIMEOUT):
            await self._settled.wait()

    async def _look_again(self, peer: PeerId, attempts: Sequence[DialAttempt]) -> list[DialAttempt]:
        found = list(attempts)

        async def look(number: int, one: DialAttempt) -> None:
            found[number] = replace(one, cause=await second_look(peer, one.address, one.cause, self._dialler.probe))

        async with trio.open_nursery() as nursery:
            for number, one in enumerate(attempts):
                nursery.start_soon(look, number, one)
        return found

    async def examine(self, peer: PeerId, address: Address, seconds: float) -> str:
        """Why a bootstrap does not answer at this very address, after a second look, or nothing; none stays connected."""
        probe = self._dialler.probe
        cause = await probe(peer, address, seconds)
        return await second_look(peer, address, cause, probe) if cause else ""

    def circuits(self) -> tuple[Address, ...]:
        """Where I am reached through the relays that hold a place for me; none where strangers reach me without."""
        if self.standing.rung is not None and not self.standing.needs_relay:
            return ()
        return tuple(circuit_address(self._addresses[relay], relay) for relay in sorted(self._reserved))

    @property
    def reserved(self) -> frozenset[PeerId]:
        """The relays that hold a place for me."""
        return frozenset(self._reserved)

    @property
    def relay_trouble(self) -> Trouble | None:
        """What is wrong where I need a relay and none has a place for me."""
        if self._reserved or not self.refusals or not self.standing.needs_relay:
            return None
        return relay_trouble(self.refusals, self.standing.reason)

    async def _connect(self, peer: PeerId, address: Address) -> None:
        if peer in self._host.connected():
            return
        try:
            found = await expand(address)
        except (OSError, NetworkError) as error:
            cause = str(error) if isinstance(error, NetworkError) else plain_words(error)
            raise ConnectFailed(peer, [DialAttempt(address, rung_of(address), cause)]) from error
        causes: dict[Address, str] = {}
        async with trio.open_nursery() as nursery:

            async def dial(one: Address, ended: trio.Event) -> None:
                if cause := await self._dial(peer, one):
                    causes[one] = cause
                else:
                    nursery.cancel_scope.cancel()
                ended.set()

            for one in found:  # Where a name stands for several, one may lead into a hole (an IPv6 that goes nowhere).
                ended = trio.Event()
                nursery.start_soon(dial, one, ended)
                with trio.move_on_after(NEXT_AFTER):
                    await ended.wait()
        if len(causes) == len(found):
            raise ConnectFailed(peer, [DialAttempt(one, rung_of(one), causes[one]) for one in found])

    async def _dial(self, peer: PeerId, address: Address) -> str:
        """Dial from the listen port, and if that does not work at once from any other, too; why neither did."""
        causes: dict[bool, str] = {}
        async with trio.open_nursery() as nursery:

            async def dial(from_listen_port: bool, ended: trio.Event) -> None:
                if from_listen_port:
                    cause = await self._dialler.from_listen_port(peer, address)
                else:
                    cause = await self._dialler.plainly(peer, address, rung_of(address))
                causes[from_listen_port] = cause
                if not cause or cause.startswith(MUTE.cause):  # Who takes connections takes them from any port.
                    nursery.cancel_scope.cancel()
                ended.set()

            for from_listen_port in (True, False):
                ended = trio.Event()
                nursery.start_soon(dial, from_listen_port, ended)
                with trio.move_on_after(NEXT_AFTER):
                    await ended.wait()
        if "" not in causes.values():
            return causes.get(False) or causes[True]
        first = causes.get(True, f"no answer within {NEXT_AFTER:g} s")
        self._from_listen_port[peer] = not first
        if first:
            self._telemetry.emit("bootstrap.other_port", peer=peer, step="connect", reason=first)
        return ""

    async def _hold(self, peer: PeerId) -> None:
        failures, is_lost = 0, False
        while True:
            try:
                await self._connect(peer, self._addresses[peer])
                for handler in self._on_return if is_lost else ():
                    handler()
                async with self._questions(peer) as stream:
                    while True:
                        await self._check(peer, stream)
                        failures = 0
                        await self._wait(peer)
            except* (NetworkError, RemoteError, trio.TooSlowError, *ROAD_ERRORS) as group:
                reason = str(sole_error(group)) or f"no answer within {ANSWER_TIMEOUT:g} s"
                self._telemetry.emit("bootstrap.lost", peer=peer, step="hold", reason=reason)
            for known in (self._sightings, self._reserved, self.clock_offsets, self.refusals):
                known.pop(peer, None)
            is_lost = True
            self._decide()
            await self._dialler.drop(peer)
            await trio.sleep(RETRY_PAUSES[min(failures, len(RETRY_PAUSES) - 1)])
            failures += 1

    @asynccontextmanager
    async def _questions(self, peer: PeerId) -> AsyncIterator[Stream | None]:
        """The stream for questions to a bootstrap; None where it answers none, as those of other programs do not."""
        try:
            stream = await self._host.open_stream(peer, PROTOCOL)
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
        """Learn what has changed, and renew what runs out."""
        if stream is None:
            await self._reserve(peer)
            return
        with trio.fail_after(ANSWER_TIMEOUT):
            answer = await ask(stream, 0)
        address = answer.address
        self.clock_offsets[peer] = answer.time - time.time()
        self._tell("clock.off", clock_trouble(self.clock_offsets.values()))
        if not valid_address(address):
            raise MalformedMessage(f"{peer} sees me at {address!r}, which is no address")
        old = self._sightings.get(peer)
        if old is None or old.address != address:
            self._sightings[peer] = Sighting(address, self._from_listen_port[peer])
            self._dial_back_at[peer] = trio.current_time()
            self._decide()
        # Behind a router strangers most likely cannot reach me, and the dial back takes seconds to say so.
        early = self.standing.needs_relay or self._is_translated(address)
        if early:
            await self._reserve(peer)
        if trio.current_time() >= self._dial_back_at[peer]:
            await self._be_dialled(peer, stream)
        if self.standing.needs_relay and not early:
            await self._reserve(peer)
        self._tell("relay.none", self.relay_trouble)

    async def _be_dialled(self, peer: PeerId, stream: Stream) -> None:
        with trio.fail_after(ANSWER_TIMEOUT + DIAL_TIMEOUT):
            port = self._outside_port or self._dialler.port
            answer = await ask(stream, port)
        if not answer.dialled:
            return  # It has too many to dial: the next check asks again.
        self._dial_back_at[peer] = trio.current_time() + DIAL_BACK_PERIOD
        sighting = self._sightings[peer]
        if sighting.address != answer.address:
            return  # The network has changed in between: the next check begins anew.
        reached = "" if answer.cause else f"{answer.address.rpartition('/')[0]}/{port}"
        self._sightings[peer] = replace(sighting, reached=reached, cause=answer.cause)
        self._decide()
        if answer.cause and port == self._outside_port:
            self._telemetry.emit("upnp.unreached", peer=peer, step="dial back", reason=answer.cause, port=port)
        if answer.cause and not is_ipv6(answer.address) and self._is_translated(answer.address):
            self.mapping.want(answer.address)

    def _port_changed(self, port: int) -> None:
        """The router passes its `port` on to mine, or none any more if it is 0: who gets through must be found out anew."""
        self._outside_port = port
        self._dial_back_at = dict.fromkeys(self._dial_back_at, trio.current_time())

    async def _reserve(self, peer: PeerId) -> None:
        if trio.current_time() < self._reserved.get(peer, 0.0):
            return
        try:
            with trio.fail_after(ANSWER_TIMEOUT):
                seconds = await self._relays.reserve(peer)
        except (NetworkError, trio.TooSlowError) as error:
            self._reserved.pop(peer, None)
            self.refusals[peer] = reason = str(error) or f"no answer within {ANSWER_TIMEOUT:g} s"
            self._telemetry.emit("relay.refused", peer=peer, step="reserve", reason=reason)
        else:
            self._reserved[peer] = trio.current_time() + seconds / 2
            self.refusals.pop(peer, None)
            self._settled.set()

    async def _wait(self, peer: PeerId) -> None:
        """Until the next check. Raises `StreamClosed` as soon as the connection is seen to be gone."""
        until, port = trio.current_time() + CHECK_PERIOD, self._outside_port
        while trio.current_time() < until and port == self._outside_port:
            await trio.sleep(POLL)
            if peer not in self._host.connected():
                raise StreamClosed("the connection broke")

    def _tell(self, event: str, trouble: Trouble | None) -> None:
        """Tell a trouble once, until it is another one or gone."""
        if trouble is None:
            self._troubles.pop(event, None)
        elif self._troubles.get(event) != trouble:
            self._troubles[event] = trouble
            self._telemetry.emit(event, reason=trouble.cause, remedy=trouble.remedy)

    def _decide(self) -> None:
        """Without any bootstrap I stand where I stood: that nobody tells does not mean that it has changed."""
        standing = decide(self._sightings)
        if not self._sightings or standing == self.standing:
            return
        self.standing = standing
        if standing.rung is not None:
            self._telemetry.emit("reachability.decided", step=standing.rung, reason=standing.reason)
            self._settled.set()

    def _is_translated(self, address: Address) -> bool:
        """Whether a router stands between me and who sees me."""
        mine = {own.split("/")[2] for own in self._interfaces()}
        return address.split("/")[2] not in mine
