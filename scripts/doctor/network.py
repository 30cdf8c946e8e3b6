"""Checks of the network as `join` uses it: each bootstrap, my reachability, the run.

It uses a fresh identity, so that a peer that runs on this computer is not disturbed.
"""

from contextlib import suppress
from dataclasses import replace

import trio

from ...collectives.chain.fork_choice import is_keeper
from ...collectives.chain.head import validate_run_value
from ...dht.directory.kademlia import KademliaDirectory
from ...dht.members.table import Member
from ...dht.rendezvous import find_members, held_manifest, open_client
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...optim.member.reach import as_revised
from ...peer.address import is_web, split_p2p
from ...peer.base.config import PeerConfig
from ...peer.base.errors import ConnectFailed, LocalError, NetworkError, RemoteError, UsageError
from ...peer.base.transport import Address, Host, PeerId
from ...peer.base.troubles import (
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
from ...peer.identity import Identity
from ...peer.log.telemetry import Event, Telemetry
from ...peer.node.node import Node
from .sheet import Sheet

DOCTOR_DIAL_TIMEOUT = 6.0
"""Seconds for a dial, name resolution included; TCP retransmits a lost SYN after one and after three."""
OTHERS_FIRST_SECONDS = 2.0
"""The head start in seconds of a bootstrap's other addresses before its WebSocket, as `join` gives it."""
STANDING_SECONDS = 4.0
"""Seconds for bootstraps to dial back."""
MEMBERS_SECONDS = 6.0
"""Seconds for a dial to a member that has left and does not answer; all are dialled at once."""
DIAL_STEPS = ("TCP", "Noise", "DHT", "relay")
AFTER_BOOTSTRAPS = ("clock", "reachability", "run", "manifest", "members")


class Ways:
    """The addresses of one bootstrap: HTTPS is what is left."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        """Set once an address other than a WebSocket's has answered, or if the link names none."""
        self.web_tried = trio.Event()
        """Set once all WebSockets were tried."""
        self.num_web = 0


class NetworkVisit:
    """The checks of one network; `signed` is their result so far."""

    def __init__(self, link: JoinLink | None, config: PeerConfig, sheet: Sheet) -> None:
        self.signed: SignedManifest | None = None
        self._link = link
        # Without UPnP: a command that only reads opens no port.
        self._config = replace(config, dial_timeout=min(config.dial_timeout, DOCTOR_DIAL_TIMEOUT), upnp=False)
        self._sheet = sheet
        self._identity = Identity.generate()
        self._telemetry = Telemetry()
        self._telemetry.subscribe(self._on_event)
        self._decided = trio.Event()
        self._reached: dict[PeerId, int] = {}
        """The number of each bootstrap that I am connected to."""
        self._ways: dict[PeerId, Ways] = {}
        self._run_unknown = False
        self._manifest_fault: Trouble | None = None
        """Why a bootstrap's manifest of the run is of no use here."""
        self._silent: list[PeerId] = []

    async def run(self) -> None:
        """Run all checks of the network."""
        self._expect()
        try:
            async with open_client(self._identity, self._config, self._telemetry, validate_run_value) as (host, directory):
                self._check_port(host)
                if self._link is not None:
                    await self._look(host, directory, self._link)
        except UsageError:
            raise
        except LocalError as error:
            self._sheet.failed("listen port", Trouble(str(error), error.remedy))
            via = self._link.via if self._link else ()
            for name in (*(f"bootstrap {number}" for number, _ in enumerate(via, 1)), *AFTER_BOOTSTRAPS):
                self._sheet.skip_rest("needs a port to listen on", of=name)

    def _expect(self) -> None:
        self._sheet.expect("listen port")
        for number, via in enumerate(self._link.via if self._link else (), 1):
            if via.startswith("/dns"):
                self._sheet.expect(f"bootstrap {number}: name")
            self._sheet.expect(*(f"bootstrap {number}: {step}" for step in DIAL_STEPS))
        if self._link:
            self._sheet.expect(*AFTER_BOOTSTRAPS)

    def _on_event(self, event: Event) -> None:
        if event["event"] == "reachability.decided":
            self._decided.set()
        elif event["event"] == "member.unreachable":
            self._silent.append(str(event["peer"]))

    def _check_port(self, host: Host) -> None:
        wished = self._config.port
        taken = f"{wished} is taken, by another peer perhaps; " if wished and host.port != wished else ""
        self._sheet.passed("listen port", f"{taken}{host.port} is free")

    async def _look(self, host: Host, directory: KademliaDirectory, link: JoinLink) -> None:
        self._ways = ways_of(link)
        async with trio.open_nursery() as nursery:  # For the members, meanwhile.
            async with trio.open_nursery() as bootstraps:
                for number, via in enumerate(link.via, 1):
                    bootstraps.start_soon(self._bootstrap, number, via, host, directory, nursery)
            if not self._reached:
                for name in AFTER_BOOTSTRAPS:
                    self._sheet.skip_rest("needs a bootstrap", of=name)
                return
            self._check_clock(host)
            if self.signed is None:
                self._fail_run(link)
            with trio.move_on_after(STANDING_SECONDS):
                await self._decided.wait()
                for peer in self._reached:  # The reservation at a relay comes after the decision.
                    await host.bootstraps.first_check(peer)
            self._check_reachability(host)

    async def _bootstrap(
        self, number: int, via: str, host: Host, directory: KademliaDirectory, nursery: trio.Nursery
    ) -> None:
        sheet, name = self._sheet, f"bootstrap {number}"
        try:
            address, peer = split_p2p(via)
        except UsageError as error:
            sheet.failed(f"{name}: TCP", Trouble(str(error), error.remedy))
            sheet.skip_rest("needs its address", of=name)
            return
        cause = await self._dial(peer, address, host)
        if cause and not is_web(address):
            await self._ways[peer].web_tried.wait()
            if peer in host.bootstraps.over_https:
                sheet.skipped(f"{name}: TCP", f"{address}: {cause}; it is reached over HTTPS")
                sheet.skip_rest("see its HTTPS address", of=name)
                return
        if not self._check_dial(name, peer, address, cause, host.bootstraps.over_https.get(peer, "")):
            return
        self._reached.setdefault(peer, number)
        await directory.add_server(peer)
        await self._ask_directory(name, peer, host, directory, nursery)

    async def _dial(self, peer: PeerId, address: Address, host: Host) -> str:
        """Examine an address and enter there, at a WebSocket only if no other address works; returns why that failed."""
        ways, begin = self._ways[peer], trio.current_time()
        cause = await host.bootstraps.examine(peer, address, self._config.dial_timeout)
        if is_web(address):
            with trio.move_on_at(begin + OTHERS_FIRST_SECONDS):
                await ways.reached.wait()
        if not cause:
            try:
                await host.bootstraps.enter(peer, address)
            except ConnectFailed as error:
                cause = error.attempts[-1].cause
        if is_web(address):
            ways.num_web -= 1
            if not ways.num_web:
                ways.web_tried.set()
        elif not cause:
            ways.reached.set()
        return cause

    def _check_dial(self, name: str, peer: PeerId, address: Address, cause: str, over_https: str) -> bool:
        """Fill in the rows of a dial; return True if it reached the bootstrap."""
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
        sheet.passed(f"{name}: TCP", f"{address} answers" + (f", {over_https}" if is_web(address) and over_https else ""))
        if cause:
            sheet.failed(f"{name}: Noise", trouble)
            sheet.skip_rest("needs Noise", of=name)
            return False
        sheet.passed(f"{name}: Noise", f"it is {peer}")
        return True

    async def _ask_directory(
        self, name: str, peer: PeerId, host: Host, directory: KademliaDirectory, nursery: trio.Nursery
    ) -> None:
        assert self._link is not None
        sheet, run_id = self._sheet, self._link.run_id
        try:
            signed = await held_manifest(directory, peer, run_id)
        except NetworkError as error:
            sheet.failed(f"{name}: DHT", NO_DIRECTORY.with_details(str(error)))
        except RemoteError as error:
            self._manifest_fault = Trouble(str(error), error.remedy)
            sheet.failed(f"{name}: DHT", self._manifest_fault)
        else:
            self._run_unknown |= signed is None
            sheet.passed(f"{name}: DHT", f"answers, and {'does not know' if signed is None else 'knows'} the run")
            if signed is not None and self.signed is None:
                self.signed = signed  # Of several bootstraps one shows it.
                self.signed = signed = await as_revised(directory, signed, self._telemetry)
                sheet.passed("run", f"{signed.manifest.name}, {signed.manifest.num_rounds} rounds")
                sheet.passed("manifest", f"signed by its owner {signed.manifest.owner}")
                if signed.manifest.joining:
                    sheet.skipped("join", signed.manifest.joining)
                nursery.start_soon(self._ask_members, host, directory, signed)

    async def _ask_members(self, host: Host, directory: KademliaDirectory, signed: SignedManifest) -> None:
        members: tuple[Member, ...] = ()
        with trio.move_on_after(MEMBERS_SECONDS) as scope:
            try:
                async with Node(host, self._identity, self._config, self._telemetry) as node:
                    members = await find_members(node, directory, signed.run_id)
            except NetworkError as error:
                self._sheet.failed("members", NO_DIRECTORY.with_details(str(error)))
                return
        if members:
            self._sheet.passed("members", f"{len(members)} there, {sum(map(is_keeper, members))} of them keepers")
        elif scope.cancelled_caught:
            self._sheet.skipped("members", f"none has answered within {MEMBERS_SECONDS:g} s: they may have left")
        elif self._silent:
            self._sheet.skipped("members", f"none of {len(self._silent)} that were announced answers: they may have left")
        else:
            self._sheet.skipped("members", "nobody is in the run now")

    def _check_clock(self, host: Host) -> None:
        offsets = host.bootstraps.clock_offsets
        if trouble := clock_trouble(offsets.values()):
            self._sheet.failed("clock", trouble)
        elif offsets:
            furthest = max(map(abs, offsets.values()))
            self._sheet.passed("clock", f"within {max(1.0, furthest):.0f} s of the bootstraps'")
        else:
            self._sheet.skipped("clock", "no bootstrap sent its time")

    def _fail_run(self, link: JoinLink) -> None:
        sheet = self._sheet
        if self._manifest_fault is not None:
            sheet.skipped("run", "needs its manifest")
            sheet.failed("manifest", self._manifest_fault)
        elif self._run_unknown:
            sheet.failed("run", Trouble(f"{RUN_UNKNOWN.cause} {link.run_id}", RUN_UNKNOWN.remedy))
        for name in ("run", "manifest", "members"):
            sheet.skip_rest("needs the run", of=name)

    def _check_reachability(self, host: Host) -> None:
        sheet, bootstraps, found = self._sheet, host.bootstraps, host.reachability
        if trouble := bootstraps.relay_trouble:
            sheet.failed("reachability", trouble)
        elif found.rung is None:
            sheet.skipped("reachability", found.reason or "no bootstrap has replied")
        elif all(peer in bootstraps.over_https and not self._ways[peer].reached.is_set() for peer in self._reached):
            how = " and ".join(sorted({bootstraps.over_https[peer] for peer in self._reached}))
            relays = ", ".join(f"bootstrap {self._reached[peer]}" for peer in self._reached if peer in bootstraps.reserved)
            words = f"only HTTPS leaves this network, {how}" + (f"; relayed through {relays}" if relays else "")
            sheet.passed("reachability", f"{found.rung}: {words}")
        else:
            sheet.passed("reachability", f"{found.rung}: {found.reason}")
        for peer, number in self._reached.items():
            name = f"bootstrap {number}: relay"
            if peer in bootstraps.reserved:
                sheet.passed(name, "has a place for this peer")
            elif peer in bootstraps.refusals and found.needs_relay:
                sheet.failed(name, Trouble(bootstraps.refusals[peer], NO_RELAY.remedy))
            else:
                sheet.skipped(name, "others reach this peer without it" if found.rung else "not known to be needed")
        sheet.skip_rest("see the other address of this bootstrap", of="bootstrap ")


def ways_of(link: JoinLink) -> dict[PeerId, Ways]:
    """Return the ways to each bootstrap of a link, as far as its addresses are some."""
    ways: dict[PeerId, Ways] = {}
    plain: set[PeerId] = set()
    for via in link.bootstraps:
        with suppress(UsageError):  # Its row says so.
            address, peer = split_p2p(via)
            ways.setdefault(peer, Ways()).num_web += is_web(address)
            plain |= set() if is_web(address) else {peer}
    for peer, way in ways.items():
        if peer not in plain:
            way.reached.set()
        if not way.num_web:
            way.web_tried.set()
    return ways
