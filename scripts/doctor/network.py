"""The network as `join` would use it, looked at one thing after the other: each bootstrap, how others reach me, the run.

Under an identity that nobody has seen before, so that a peer which runs on this computer is not disturbed.
"""

from dataclasses import dataclass, replace

import trio

from ...collectives.published import validate
from ...dht.directory.kademlia import KademliaDirectory, open_directory
from ...dht.members.table import Member
from ...dht.rendezvous import find_members, held_manifest
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...peer.address import split_p2p
from ...peer.config import PeerConfig
from ...peer.errors import ConnectFailed, LocalError, NetworkError, RemoteError, UsageError
from ...peer.host import Libp2pHost, open_host
from ...peer.identity import Identity
from ...peer.nat import speed as libp2p_rate
from ...peer.telemetry import Event, Telemetry
from ...peer.transport import Address, PeerId
from ...peer.troubles import (
    FALSE_MANIFEST,
    LINE_SLOW,
    NO_DIRECTORY,
    NO_NAME,
    NO_RELAY,
    NO_RESOLVER,
    NOT_NOISE,
    RUN_UNKNOWN,
    WRONG_PEER,
    Trouble,
    clock_trouble,
    trouble_of,
)
from .doctor import Sheet

DIAL_TIMEOUT = 6.0
"""Seconds for a dial, the look-up of a name included; a packet that is lost is sent again after one, and after three."""
STANDING_SECONDS = 4.0
"""For bootstraps to have dialled me back."""
MEMBERS_SECONDS = 6.0
"""For a dial to one that has left, which does not answer; all are asked at once."""
MEASURE_SECONDS = 5.0
"""Each way; it takes that long below 0.1 Mbit/s."""
STEPS = ("TCP", "Noise", "DHT", "relay")
AFTER_BOOTSTRAPS = ("clock", "reachability", "upload", "download", "run", "manifest", "members")


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured with a bootstrap, in bytes/s."""

    up: float
    down: float


class NetworkVisit:
    """One look at the network; `signed` and `rates` are what was found so far."""

    def __init__(self, link: JoinLink | None, config: PeerConfig, sheet: Sheet) -> None:
        self.signed: SignedManifest | None = None
        self.rates: Rates | None = None
        self._link = link
        # Without UPnP: whoever only looks opens no port.
        self._config = replace(config, dial_timeout=min(config.dial_timeout, DIAL_TIMEOUT), upnp=False)
        self._sheet = sheet
        self._telemetry = Telemetry()
        self._telemetry.subscribe(self._heard)
        self._decided = trio.Event()
        self._reached: dict[PeerId, int] = {}
        """The bootstraps that I am connected to, and the number of each."""
        self._ignorant = False
        self._false = ""
        """Why what a bootstrap holds for the run's manifest is none."""
        self._silent: list[PeerId] = []
        self._measuring = False

    async def run(self) -> None:
        """Fill the network's part of the sheet in."""
        self._expect()
        try:
            async with open_host(Identity.generate(), self._config, self._telemetry) as host:
                self._tell_port(host)
                if self._link is not None:
                    async with open_directory(
                        host, server=False, telemetry=self._telemetry, validate=validate
                    ) as directory:
                        await self._look(host, directory, self._link)
        except UsageError:
            raise
        except LocalError as error:
            self._sheet.failed("listen port", Trouble(str(error), error.remedy))
            for name in (*(f"bootstrap {number}" for number in range(1, self._num_via + 1)), *AFTER_BOOTSTRAPS):
                self._sheet.skip_rest("needs a port to listen on", of=name)

    @property
    def _num_via(self) -> int:
        return len(self._link.via) if self._link else 0

    def _expect(self) -> None:
        self._sheet.expect("listen port")
        for number, via in enumerate(self._link.via if self._link else (), 1):
            if via.startswith("/dns"):
                self._sheet.expect(f"bootstrap {number}: name")
            self._sheet.expect(*(f"bootstrap {number}: {step}" for step in STEPS))
        if self._link:
            self._sheet.expect(*AFTER_BOOTSTRAPS)

    def _heard(self, event: Event) -> None:
        if event["event"] == "reachability.decided":
            self._decided.set()
        elif event["event"] == "member.unreachable":
            self._silent.append(str(event["peer"]))

    def _tell_port(self, host: Libp2pHost) -> None:
        wished = self._config.port
        taken = f"{wished} is taken, by another peer perhaps; " if wished and host.port != wished else ""
        self._sheet.passed("listen port", f"{taken}{host.port} is free")

    async def _look(self, host: Libp2pHost, directory: KademliaDirectory, link: JoinLink) -> None:
        async with trio.open_nursery() as nursery:  # In which members are asked and the line is measured, meanwhile.
            async with trio.open_nursery() as bootstraps:
                for number, via in enumerate(link.via, 1):
                    bootstraps.start_soon(self._bootstrap, number, via, host, directory, nursery)
            if not self._reached:
                for name in AFTER_BOOTSTRAPS:
                    self._sheet.skip_rest("needs a bootstrap", of=name)
                return
            self._tell_clock(host)
            if self.signed is None:
                self._tell_no_run(link)
            with trio.move_on_after(STANDING_SECONDS):
                await self._decided.wait()
            self._tell_standing(host)

    async def _bootstrap(
        self, number: int, via: str, host: Libp2pHost, directory: KademliaDirectory, nursery: trio.Nursery
    ) -> None:
        sheet, name = self._sheet, f"bootstrap {number}"
        try:
            address, peer = split_p2p(via)
        except UsageError as error:
            sheet.failed(f"{name}: TCP", Trouble(str(error), error.remedy))
            sheet.skip_rest("needs its address", of=name)
            return
        cause = await host.bootstraps.examine(peer, address, self._config.dial_timeout)
        if not cause:
            try:
                await host.bootstraps.enter(peer, address)
            except ConnectFailed as error:
                cause = error.attempts[0].cause
        if not self._tell_dial(name, peer, address, cause):
            return
        self._reached.setdefault(peer, number)
        await directory.add_server(peer)
        if not self._measuring:
            self._measuring = True
            nursery.start_soon(self._measure, host, peer)
        await self._ask_directory(name, peer, host, directory, nursery)

    def _tell_dial(self, name: str, peer: PeerId, address: Address, cause: str) -> bool:
        """Whether the bootstrap was reached; the rows of how far the dial got."""
        sheet, trouble = self._sheet, trouble_of(cause)
        if cause.startswith((NO_NAME.cause, NO_RESOLVER.cause)):
            sheet.failed(f"{name}: name", trouble)
            sheet.skip_rest("needs its IP address", of=name)
            return False
        if address.startswith("/dns"):
            sheet.passed(f"{name}: name", f"{address.split('/')[2]} is known")
        if cause and not cause.startswith((NOT_NOISE.cause, WRONG_PEER.cause)):
            sheet.failed(f"{name}: TCP", replace(trouble, cause=f"{address}: {cause}"))
            sheet.skip_rest("needs TCP", of=name)
            return False
        sheet.passed(f"{name}: TCP", f"{address} answers")
        if cause:
            sheet.failed(f"{name}: Noise", trouble)
            sheet.skip_rest("needs Noise", of=name)
            return False
        sheet.passed(f"{name}: Noise", f"it is {peer}")
        return True

    async def _ask_directory(
        self, name: str, peer: PeerId, host: Libp2pHost, directory: KademliaDirectory, nursery: trio.Nursery
    ) -> None:
        assert self._link is not None
        sheet, run_id = self._sheet, self._link.run_id
        try:
            signed = await held_manifest(directory, peer, run_id)
        except NetworkError as error:
            sheet.failed(f"{name}: DHT", NO_DIRECTORY.with_details(str(error)))
        except RemoteError as error:
            self._false = str(error)
            sheet.failed(f"{name}: DHT", Trouble(str(error), error.remedy))
        else:
            self._ignorant |= signed is None
            sheet.passed(f"{name}: DHT", f"answers, and {'does not know' if signed is None else 'knows'} the run")
            if signed is not None and self.signed is None:
                self.signed = signed
                sheet.passed("run", f"{signed.manifest.name}, {signed.manifest.outer.rounds} rounds")
                sheet.passed("manifest", f"signed by its owner {signed.manifest.owner}")
                nursery.start_soon(self._ask_members, host, directory, run_id)

    async def _ask_members(self, host: Libp2pHost, directory: KademliaDirectory, run_id: str) -> None:
        members: tuple[Member, ...] = ()
        with trio.move_on_after(MEMBERS_SECONDS) as scope:
            try:
                members = await find_members(host, directory, run_id, self._telemetry)
            except NetworkError as error:
                self._sheet.failed("members", NO_DIRECTORY.with_details(str(error)))
                return
        if members:
            self._sheet.passed("members", f"{len(members)} there, the first in state {members[0].body.state}")
        elif scope.cancelled_caught:
            self._sheet.skipped("members", f"none has answered within {MEMBERS_SECONDS:g} s: they may have left")
        elif self._silent:
            self._sheet.skipped("members", f"none of {len(self._silent)} that were announced answers: they may have left")
        else:
            self._sheet.skipped("members", "nobody is in the run now")

    async def _measure(self, host: Libp2pHost, peer: PeerId) -> None:
        rates: list[float] = []
        for name, up in (("upload", True), ("download", False)):
            try:
                with trio.fail_after(MEASURE_SECONDS):
                    stream = await host.open_stream(peer, libp2p_rate.PROTOCOL)
                    try:
                        rates.append(await libp2p_rate.measure(stream, up=up))
                    finally:
                        with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                            await stream.reset()
            except trio.TooSlowError:
                piece = f"{libp2p_rate.FIRST_PIECE // 1024} kB or four times as much"
                self._sheet.failed(name, LINE_SLOW.with_details(f"{piece} took more than {MEASURE_SECONDS:g} s"))
            except (NetworkError, RemoteError) as error:
                self._sheet.skipped(name, f"cannot be measured: {error}")
            else:
                self._sheet.passed(name, f"{rates[-1] * 8 / 1e6:.1f} Mbit/s with bootstrap {self._reached[peer]}")
        if len(rates) == 2:
            self.rates = Rates(*rates)

    def _tell_clock(self, host: Libp2pHost) -> None:
        offsets = host.bootstraps.clock_offsets
        if trouble := clock_trouble(offsets.values()):
            self._sheet.failed("clock", trouble)
        elif offsets:
            furthest = max(map(abs, offsets.values()))
            self._sheet.passed("clock", f"within {max(1.0, furthest):.0f} s of the bootstraps'")
        else:
            self._sheet.skipped("clock", "no bootstrap tells its time")

    def _tell_no_run(self, link: JoinLink) -> None:
        sheet = self._sheet
        if self._false:
            sheet.skipped("run", "needs its manifest")
            sheet.failed("manifest", Trouble(self._false, FALSE_MANIFEST.remedy))
        elif self._ignorant:
            sheet.failed("run", Trouble(f"{RUN_UNKNOWN.cause} {link.run_id}", RUN_UNKNOWN.remedy))
        for name in ("run", "manifest", "members"):
            sheet.skip_rest("needs the run", of=name)

    def _tell_standing(self, host: Libp2pHost) -> None:
        sheet, bootstraps, standing = self._sheet, host.bootstraps, host.standing
        if trouble := bootstraps.relay_trouble:
            sheet.failed("reachability", trouble)
        elif standing.rung is None:
            sheet.skipped("reachability", standing.reason or "no bootstrap tells")
        else:
            sheet.passed("reachability", f"{standing.rung}: {standing.reason}")
        for peer, number in self._reached.items():
            name = f"bootstrap {number}: relay"
            if peer in bootstraps.reserved:
                sheet.passed(name, "has a place for this peer")
            elif peer in bootstraps.refusals and standing.needs_relay:
                sheet.failed(name, Trouble(bootstraps.refusals[peer], NO_RELAY.remedy))
            else:
                sheet.skipped(name, "others reach this peer without it" if standing.rung else "not known to be needed")
        sheet.skip_rest("see the other address of this bootstrap", of="bootstrap ")
